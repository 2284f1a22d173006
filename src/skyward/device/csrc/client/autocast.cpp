// Autocast: PyTorch's own cast policies, for our device.
//
// The kernels are boxed, one for each policy: a kernel for each of 120 operations took the compiler 20 s. A boxed call
// takes 300 ns more, so the products that a model is made of have kernels of their own.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/mm_ops.h>
#include <torch/library.h>

#include <set>
#include <string>

// Which operations have which policy differs from torch to torch, so the lists are those of its own header. The build
// defines them beforehand: the header itself includes every operator that there is, which takes 4 s.
#ifndef AT_FORALL_LOWER_PRECISION_FP
#include <ATen/autocast_mode.h>
#endif

namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(DeviceType device_type);
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, DeviceType device_type);
}  // namespace at::autocast

namespace sky {
namespace {

using torch::jit::peek;
using torch::jit::Stack;

constexpr auto kCastKey = c10::DispatchKey::AutocastPrivateUse1;
constexpr auto kCastDevice = c10::DeviceType::PrivateUse1;

at::ScalarType lower_precision() { return at::autocast::get_autocast_dtype(kCastDevice); }

bool is_eligible(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone() && tensor.is_floating_point() &&
         tensor.scalar_type() != at::kDouble;
}

at::Tensor lowered(const at::Tensor& tensor) {
  return at::autocast::cached_cast(lower_precision(), tensor, kCastDevice);
}

template <typename Op>
at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kCastKey);
  return Op::call(lowered(a), lowered(b));
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kCastKey);
  return at::_ops::linear::call(lowered(input), lowered(weight), bias ? std::optional(lowered(*bias)) : std::nullopt);
}

void cast_arguments(size_t count, Stack& stack, at::ScalarType dtype) {
  for (size_t i = 0; i < count; i++) {
    auto& value = peek(stack, i, count);
    if (value.isTensor()) {
      value = at::autocast::cached_cast(dtype, value.toTensor(), kCastDevice);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = at::autocast::cached_cast(dtype, tensor, kCastDevice);
      value = std::move(tensors);
    }
  }
}

void in_lower_precision(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kCastKey);
  cast_arguments(op.schema().arguments().size(), *stack, lower_precision());
  op.callBoxed(stack);
}

void in_float32(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kCastKey);
  cast_arguments(op.schema().arguments().size(), *stack, at::kFloat);
  op.callBoxed(stack);
}

// The result is float32, unless the caller chose a dtype.
void with_dtype(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kCastKey);
  const auto& arguments = op.schema().arguments();
  if (is_eligible(peek(*stack, 0, arguments.size()).toTensor())) {
    for (size_t i = 1; i < arguments.size(); i++) {
      auto& value = peek(*stack, i, arguments.size());
      if (value.isNone() && arguments[i].name() == "dtype") value = at::kFloat;
    }
  }
  op.callBoxed(stack);
}

// The same for `norm`, where a dtype makes another overload.
void with_appended_dtype(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kCastKey);
  auto first = peek(*stack, 0, op.schema().arguments().size()).toTensor();
  auto overload = op.operator_name().overload_name == "Scalar" ? "ScalarOpt_dtype" : "ScalarOpt_dim_dtype";
  stack->emplace_back(is_eligible(first) ? at::kFloat : first.scalar_type());
  c10::Dispatcher::singleton().findSchemaOrThrow("aten::norm", overload).callBoxed(stack);
}

at::ScalarType wider(at::ScalarType dtype, const at::Tensor& tensor) {
  if (!is_eligible(tensor) || tensor.scalar_type() == dtype) return dtype;
  TORCH_CHECK(dtype == at::kFloat || tensor.scalar_type() == at::kFloat, "autocast to ", dtype,
              " got an argument of dtype ", tensor.scalar_type(), "; convert it to ", dtype, " or float32");
  return at::kFloat;
}

// In the widest dtype among the arguments.
void promoted(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kCastKey);
  const auto& arguments = op.schema().arguments();
  auto dtype = lower_precision();
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& value = peek(*stack, i, arguments.size());
    // An optional argument, such as a bias, follows the others.
    if (arguments[i].type()->kind() == c10::TypeKind::OptionalType) continue;
    if (value.isTensor()) dtype = wider(dtype, value.toTensor());
    else if (value.isTensorList())
      for (const auto& tensor : value.toTensorVector()) dtype = wider(dtype, tensor);
  }
  cast_arguments(arguments.size(), *stack, dtype);
  op.callBoxed(stack);
}

const std::set<std::string> kUnboxed = {"bmm", "linear", "matmul", "mm"};

template <void (*policy)(const c10::OperatorHandle&, Stack*)>
void apply(torch::Library& library, std::initializer_list<std::string> operations) {
  for (auto name : operations) {
    // PyTorch's lists name the overload pow.Scalar as "pow, Scalar".
    if (auto comma = name.find(", "); comma != std::string::npos) name.replace(comma, 2, ".");
    if (kUnboxed.count(name)) continue;
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<policy>());
  }
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  m.impl("bmm", &product<at::_ops::bmm>);
  m.impl("linear", &linear);
  m.impl("matmul", &product<at::_ops::matmul>);
  m.impl("mm", &product<at::_ops::mm>);
#define SKY_NAME(...) #__VA_ARGS__,
  apply<&in_lower_precision>(m, {AT_FORALL_LOWER_PRECISION_FP(SKY_NAME)});
  apply<&in_float32>(m, {AT_FORALL_FP32(SKY_NAME)});
  apply<&with_dtype>(m, {AT_FORALL_FP32_SET_OPT_DTYPE(SKY_NAME)});
  apply<&promoted>(m, {AT_FORALL_PROMOTE(SKY_NAME)});
#undef SKY_NAME
#define SKY_NAME(function, name, ...) name,
  apply<&with_appended_dtype>(m, {AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(SKY_NAME)});
#undef SKY_NAME
}

}  // namespace
}  // namespace sky
