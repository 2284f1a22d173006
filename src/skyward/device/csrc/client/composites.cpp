#include "composites.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_batch_norm_impl_index_native.h>
#include <ATen/ops/_cudnn_ctc_loss.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/ctc_loss_native.h>
#include <ATen/ops/cudnn_batch_norm.h>
#include <ATen/ops/cudnn_grid_sampler.h>
#include <ATen/ops/grid_sampler_native.h>
#include <ATen/ops/group_norm_native.h>
#include <ATen/ops/log_softmax_native.h>
#include <ATen/ops/softmax_native.h>

#include <limits>

namespace sky {

bool on_gpu(const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  // Shapes are also worked out with tensors that only claim to be on our device.
  if (!is_sky(t) || !impl->has_storage() || !impl->unsafe_storage().unsafeGetStorageImpl()) return false;
  if (!impl->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get_context()) return false;
  auto& session = Session::of(impl);
  return !session.on_cpu && session.traits()[kIsCuda];
}

bool takes_cudnn(const at::Tensor& t) {
  if (!at::globalContext().userEnabledCuDNN() || t.numel() == 0 || !on_gpu(t)) return false;
  if (!Session::of(t.unsafeGetTensorImpl()).traits()[kCudnnVersion]) return false;
  auto dtype = t.scalar_type();
  if (dtype == at::kBFloat16) return Session::of(t.unsafeGetTensorImpl()).traits()[kCudnnRecurrentBrain];
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf;
}

namespace {

using Optional = std::optional<at::Tensor>;

at::Tensor given(const Optional& t) { return t ? *t : at::Tensor(); }

// Normalization.

struct Norms {
  at::Tensor weight, bias, mean, variance;
};

// The kernels of cuDNN take spatial inputs, with all of the weights, or none of the statistics only in training.
bool normalizes_with_cudnn(const at::Tensor& input, const Norms& norms, bool training, double eps) {
  constexpr int64_t kTrainingMost = 880801, kInferenceMost = 65535;
  if (!on_gpu(input) || !norms.weight.defined() || !norms.bias.defined()) return false;
  auto dtype = input.scalar_type(), of_weight = norms.weight.scalar_type();
  if (dtype == at::kBFloat16 || of_weight == at::kBFloat16) return false;
  if (dtype == at::kHalf && of_weight != at::kFloat) return false;
  bool has_statistics = norms.mean.defined() && norms.variance.defined();
  bool has_none = !norms.mean.defined() && !norms.variance.defined() && training;
  if (!(has_statistics || has_none) || input.dim() < 3 || eps < 0) return false;
  if (input.size(0) > (training ? kTrainingMost : kInferenceMost)) return false;
  if (input.numel() >= std::numeric_limits<int32_t>::max()) return false;
  auto& session = Session::of(input.unsafeGetTensorImpl());
  return at::globalContext().userEnabledCuDNN() && session.traits()[kCudnnVersion];
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, int64_t> batch_norm(
    const at::Tensor& input, const Optional& weight, const Optional& bias, const Optional& mean,
    const Optional& variance, bool training, double momentum, double eps, bool cudnn) {
  constexpr int64_t kByCudnn = 1;
  Norms norms{given(weight), given(bias), given(mean), given(variance)};
  auto features = input.dim() > 1 ? input.size(1) : 0;
  auto fits = [&](const at::Tensor& t) { return !t.defined() || t.numel() == features; };
  bool is_usual = input.numel() && fits(norms.weight) && fits(norms.bias) && fits(norms.mean) && fits(norms.variance);
  if (!is_usual || !normalizes_with_cudnn(input, norms, training, eps))
    return at::native::_batch_norm_impl_index(input, weight, bias, mean, variance, training, momentum, eps, cudnn);
  auto dense = [](const at::Tensor& t) { return t.defined() ? t.contiguous() : t; };
  auto [output, saved_mean, saved_variance, reserve] =
      at::cudnn_batch_norm(input.contiguous(input.suggest_memory_format()), dense(norms.weight), dense(norms.bias),
                           dense(norms.mean), dense(norms.variance), training, momentum, eps);
  return {output, saved_mean, saved_variance, reserve, kByCudnn};
}

// A GPU's kernel takes dense inputs only, whatever the order of their channels was.
at::Tensor group_norm(const at::Tensor& input, int64_t groups, const Optional& weight, const Optional& bias, double eps,
                      bool cudnn) {
  return at::native::group_norm(on_gpu(input) ? input.contiguous() : input, groups, weight, bias, eps, cudnn);
}

// A GPU has one kernel for it, with a gradient of its own; other devices compute it in parts.
template <c10::DispatchKey key>
void rms_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& input = (*stack)[stack->size() - op.schema().arguments().size()].toTensor();
  if (on_gpu(input)) return run_as_registered<key>(op, stack);
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
}

// Half precision in, float out: a GPU's kernel does both in one.
bool widens(const at::Tensor& input, std::optional<at::ScalarType> dtype) {
  return dtype == at::kFloat && input.scalar_type() == at::kHalf && on_gpu(input);
}

at::Tensor softmax(const at::Tensor& input, int64_t dim, std::optional<at::ScalarType> dtype) {
  return widens(input, dtype) ? at::_softmax(input, dim, true) : at::native::softmax(input, dim, dtype);
}

at::Tensor log_softmax(const at::Tensor& input, int64_t dim, std::optional<at::ScalarType> dtype) {
  return widens(input, dtype) ? at::_log_softmax(input, dim, true) : at::native::log_softmax(input, dim, dtype);
}

at::Tensor grid_sampler(const at::Tensor& input, const at::Tensor& grid, int64_t interpolation, int64_t padding,
                        bool aligned) {
  constexpr int64_t kBilinear = 0, kZeros = 0, kChannelsMost = 1024;
  auto fits = [](const at::Tensor& t) {
    return takes_cudnn(t) && t.scalar_type() != at::kBFloat16 && t.numel() <= std::numeric_limits<int32_t>::max();
  };
  if (interpolation == kBilinear && padding == kZeros && aligned && input.dim() == 4 &&
      input.size(1) <= kChannelsMost && fits(input) && fits(grid))
    return at::cudnn_grid_sampler(input, grid);
  return at::native::grid_sampler(input, grid, interpolation, padding, aligned);
}

// The loss of connectionist temporal classification.

// Whether the arguments are of the kind that cuDNN's kernel takes; their lengths are looked at apart.
bool may_use_cudnn_ctc(const at::Tensor& log_probs, const at::Tensor& targets, int64_t blank) {
  return blank == 0 && log_probs.dim() == 3 && log_probs.scalar_type() == at::kFloat && takes_cudnn(log_probs) &&
         targets.dim() == 1 && targets.scalar_type() == at::kInt && targets.is_contiguous();
}

bool fit_cudnn_ctc(at::IntArrayRef inputs, at::IntArrayRef targets) {
  constexpr int64_t kMost = 256;
  if (inputs.size() != targets.size()) return false;
  for (size_t i = 0; i < targets.size(); i++)
    if (targets[i] >= kMost || targets[i] > inputs[i]) return false;
  return true;
}

at::Tensor reduced(const at::Tensor& losses, const at::Tensor& target_lengths, int64_t reduction) {
  constexpr int64_t kMean = 1, kSum = 2;
  if (reduction == kMean) return (losses / target_lengths.clamp_min(1)).mean();
  return reduction == kSum ? losses.sum() : losses;
}

// A tensor in the worker's own memory, where some of a GPU's kernels want it.
at::Tensor in_worker_memory(const at::Tensor& t) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_to_copy", "");
  torch::jit::Stack stack{t, c10::IValue(), c10::IValue(), c10::Device(c10::kCPU), c10::IValue(), false, c10::IValue()};
  fallback(op, &stack);
  return stack.back().toTensor();
}

at::Tensor ctc_loss(const at::Tensor& log_probs, const at::Tensor& targets, at::IntArrayRef input_lengths,
                    at::IntArrayRef target_lengths, int64_t blank, int64_t reduction, bool zero_infinity) {
  bool whole = log_probs.dim() == 3 &&
               std::all_of(input_lengths.begin(), input_lengths.end(), [&](auto n) { return n == log_probs.size(0); });
  if (!whole || !targets.device().is_cpu() || !may_use_cudnn_ctc(log_probs, targets, blank) ||
      !fit_cudnn_ctc(input_lengths, target_lengths))
    return at::native::ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity);
  auto losses = std::get<0>(at::_cudnn_ctc_loss(log_probs, in_worker_memory(targets.to(log_probs.device())),
                                                input_lengths, target_lengths, blank, true, zero_infinity));
  return reduced(losses, at::tensor(target_lengths, losses.options()), reduction);
}

at::Tensor ctc_loss_of_tensors(const at::Tensor& log_probs, const at::Tensor& targets, const at::Tensor& input_lengths,
                               const at::Tensor& target_lengths, int64_t blank, int64_t reduction, bool zero_infinity) {
  auto inputs = input_lengths.to(at::kCPU, at::kLong).contiguous();
  auto lengths = target_lengths.to(at::kCPU, at::kLong).contiguous();
  auto ints = [](const at::Tensor& t) {
    return at::IntArrayRef(static_cast<const int64_t*>(t.const_data_ptr()), static_cast<size_t>(t.numel()));
  };
  bool are_ints = input_lengths.scalar_type() == at::kInt && target_lengths.scalar_type() == at::kInt;
  if (!are_ints || !may_use_cudnn_ctc(log_probs, targets, blank) || !fit_cudnn_ctc(ints(inputs), ints(lengths)))
    return at::native::ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity);
  auto there = [&](const at::Tensor& t) { return t.to(log_probs.device()); };
  auto losses = std::get<0>(at::_cudnn_ctc_loss(log_probs, there(targets), there(input_lengths), there(target_lengths),
                                                blank, true, zero_infinity));
  return reduced(losses, there(target_lengths), reduction);
}

// On both: PyTorch's own would run above autograd, and below it where a program left autograd.
template <typename Library>
void take_over(Library& m) {
  m.impl("_batch_norm_impl_index", batch_norm);
  m.impl("group_norm", group_norm);
  m.impl("softmax.int", softmax);
  m.impl("log_softmax.int", log_softmax);
  m.impl("grid_sampler", grid_sampler);
  m.impl("ctc_loss.IntList", ctc_loss);
  m.impl("ctc_loss.Tensor", ctc_loss_of_tensors);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  take_over(m);
  m.impl("_fused_rms_norm", torch::CppFunction::makeFromBoxedFunction<&rms_norm<c10::DispatchKey::Autograd>>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  take_over(m);
  m.impl("_fused_rms_norm", torch::CppFunction::makeFromBoxedFunction<&rms_norm<c10::DispatchKey::PrivateUse1>>());
}

}  // namespace
}  // namespace sky
