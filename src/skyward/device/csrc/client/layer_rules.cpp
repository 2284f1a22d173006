// Rules for layers and their gradients. Some depend on what the worker computes on; what is not known of a processor
// is refused, and the worker is asked.
#include <ATen/AccumulateType.h>
#include <ATen/EmptyTensor.h>
#include <ATen/OpMathType.h>
#include <ATen/native/layer_norm.h>
#include <ATen/ops/_softmax_meta_dispatch.h>
#include <ATen/ops/avg_pool2d_backward_meta_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul_meta_dispatch.h>
#include <ATen/ops/upsample_bilinear2d_backward_meta_dispatch.h>
#include <ATen/ops/upsample_bilinear2d_meta_dispatch.h>
#include <ATen/ops/upsample_nearest2d_backward_meta_dispatch.h>
#include <ATen/ops/upsample_nearest2d_meta_dispatch.h>

#include "rules.h"

namespace sky {
namespace layer_rules {
namespace {

using at::Tensor;
using Ints = at::IntArrayRef;
using OptInts = at::OptionalIntArrayRef;
using OptTensor = std::optional<Tensor>;
using OptReal = std::optional<double>;
using Pair = std::tuple<Tensor, Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;
using Mask = std::array<bool, 3>;

bool is_known() { return ruled_for != Processor::kOther; }

Tensor dense(Ints sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype).device(at::kMeta));
}
Tensor dense_like(const Tensor& t) { return dense(t.sizes(), t.scalar_type()); }
Tensor defined_or_none(const OptTensor& t) { return t ? *t : Tensor(); }

bool is_index(const Tensor& t) { return t.scalar_type() == at::kLong || t.scalar_type() == at::kInt; }

// Whether reduced numbers are scaled by parameters of float32, which CPUs alone take.
bool is_mixed(const Tensor& input, std::initializer_list<Tensor> parameters) {
  std::optional<at::ScalarType> dtype;
  for (auto& t : parameters) {
    if (!t.defined()) continue;
    TORCH_CHECK(dtype.value_or(t.scalar_type()) == t.scalar_type(), "parameters of two dtypes");
    dtype = t.scalar_type();
  }
  TORCH_CHECK(c10::isFloatingType(input.scalar_type()), "no layer takes it");
  if (!dtype || *dtype == input.scalar_type()) return false;
  TORCH_CHECK(ruled_for == Processor::kCpu && at::isReducedFloatingType(input.scalar_type()) && *dtype == at::kFloat,
              "another dtype");
  return true;
}

Triple layer_norm(const Tensor& input, Ints shape, const OptTensor& weight, const OptTensor& bias, double) {
  TORCH_CHECK(is_known(), "unknown");
  auto gamma = defined_or_none(weight), beta = defined_or_none(bias);
  at::native::_check_layer_norm_inputs(input, shape, gamma, beta);
  bool mixed = is_mixed(input, {gamma, beta});
  auto dtype = ruled_for == Processor::kCuda ? at::toAccumulateType(input.scalar_type(), true)
               : mixed                       ? at::kFloat
                                             : input.scalar_type();
  auto sizes = input.sizes().vec();
  std::fill(sizes.end() - static_cast<int64_t>(shape.size()), sizes.end(), 1);
  return {dense_like(input), dense(sizes, dtype), dense(sizes, dtype)};
}

Triple layer_norm_backward(const Tensor& grad, const Tensor& input, Ints shape, const Tensor&, const Tensor&,
                           const OptTensor& weight, const OptTensor& bias, Mask wanted) {
  TORCH_CHECK(is_known() && grad.sizes() == input.sizes(), "unknown");
  auto gamma = defined_or_none(weight), beta = defined_or_none(bias);
  at::native::_check_layer_norm_inputs(input, shape, gamma, beta);
  is_mixed(input, {gamma, beta});
  TORCH_CHECK((!wanted[1] || gamma.defined()) && (!wanted[2] || beta.defined()), "a gradient of nothing");
  return {wanted[0] ? dense_like(input) : Tensor(), wanted[1] ? dense_like(gamma) : Tensor(),
          wanted[2] ? dense_like(beta) : Tensor()};
}

Triple group_norm(const Tensor& input, const OptTensor& weight, const OptTensor& bias, int64_t n, int64_t, int64_t,
                  int64_t groups, double) {
  TORCH_CHECK(is_known() && input.is_contiguous() && n > 0 && groups > 0, "unknown");
  auto dtype = is_mixed(input, {defined_or_none(weight), defined_or_none(bias)}) ? at::kFloat : input.scalar_type();
  auto format = ruled_for == Processor::kCpu ? input.suggest_memory_format() : at::MemoryFormat::Contiguous;
  return {made_like(input, {}, format), dense({n, groups}, dtype), dense({n, groups}, dtype)};
}

Triple group_norm_backward(const Tensor& grad, const Tensor& input, const Tensor&, const Tensor&,
                           const OptTensor& weight, int64_t, int64_t, int64_t, int64_t, Mask wanted) {
  TORCH_CHECK(is_known() && input.is_contiguous() && grad.scalar_type() == input.scalar_type(), "unknown");
  auto gamma = defined_or_none(weight);
  TORCH_CHECK(gamma.defined() || !(wanted[1] || wanted[2]), "a gradient of nothing");
  auto format = ruled_for == Processor::kCpu ? input.suggest_memory_format() : at::MemoryFormat::Contiguous;
  return {wanted[0] ? made_like(input, {}, format) : Tensor(), wanted[1] ? dense_like(gamma) : Tensor(),
          wanted[2] ? dense_like(gamma) : Tensor()};
}

// On a CPU, in one memory format throughout, and one dtype.
void check_batch_norm(const Tensor& input, std::initializer_list<OptTensor> parameters) {
  TORCH_CHECK(ruled_for == Processor::kCpu && input.dim() >= 2 && input.numel() > 0, "unknown");
  TORCH_CHECK(input.scalar_type() == at::kFloat || input.scalar_type() == at::kDouble, "reduced");
  TORCH_CHECK(input.is_contiguous() && input.suggest_memory_format() == at::MemoryFormat::Contiguous, "a format");
  for (auto& each : parameters) {
    if (!each || !each->defined()) continue;
    TORCH_CHECK(each->dim() == 1 && each->size(0) == input.size(1) && each->is_contiguous(), "another size");
    TORCH_CHECK(each->scalar_type() == input.scalar_type(), "another dtype");
  }
}

Triple batch_norm(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const OptTensor& mean,
                  const OptTensor& variance, bool training, double, double) {
  check_batch_norm(input, {weight, bias, mean, variance});
  TORCH_CHECK(training || (mean && mean->defined() && variance && variance->defined()), "nothing to norm by");
  auto kept = training ? input.size(1) : 0;
  return {dense_like(input), dense({kept}, input.scalar_type()), dense({kept}, input.scalar_type())};
}

Triple batch_norm_backward(const Tensor& grad, const Tensor& input, const OptTensor& weight, const OptTensor& mean,
                           const OptTensor& variance, const OptTensor&, const OptTensor&, bool, double, Mask wanted) {
  check_batch_norm(input, {weight, mean, variance});
  TORCH_CHECK(grad.is_contiguous() && grad.suggest_memory_format() == at::MemoryFormat::Contiguous, "a format");
  TORCH_CHECK(grad.sizes() == input.sizes() && grad.scalar_type() == input.scalar_type(), "another size");
  Ints channels(&input.sizes()[1], 1);
  return {wanted[0] ? dense_like(input) : Tensor(), wanted[1] ? dense(channels, input.scalar_type()) : Tensor(),
          wanted[2] ? dense(channels, input.scalar_type()) : Tensor()};
}

Pair dropout(const Tensor& input, double p, std::optional<bool> train) {
  TORCH_CHECK(is_known() && input.numel() > 0 && 0 <= p && p <= 1, "unknown");
  TORCH_CHECK(c10::isFloatingType(input.scalar_type()), "no number");
  auto mask = made_like(input, at::kBool);
  if (ruled_for == Processor::kCuda || !train.value_or(true)) return {made_like(input), mask};
  return {at::meta::mul(input, mask), mask};
}

Tensor dropout_backward(const Tensor& grad, const Tensor& mask, double) {
  TORCH_CHECK(is_known() && mask.scalar_type() == at::kBool && mask.sizes() == grad.sizes(), "unknown");
  TORCH_CHECK(c10::isFloatingType(grad.scalar_type()), "no number");
  return ruled_for == Processor::kCuda ? made_like(grad) : at::meta::mul(grad, mask);
}

Tensor embedding(const Tensor& weight, const Tensor& indices, int64_t, bool, bool) {
  TORCH_CHECK(weight.dim() == 2 && is_index(indices) && indices.is_meta(), "no table");
  auto sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  return dense(sizes, weight.scalar_type());
}

Tensor embedding_backward(const Tensor& grad, const Tensor& indices, int64_t rows, int64_t, bool) {
  TORCH_CHECK(is_known() && grad.dim() == indices.dim() + 1 && is_index(indices) && rows >= 0, "no table");
  TORCH_CHECK(grad.sizes().slice(0, static_cast<size_t>(indices.dim())) == indices.sizes(), "another size");
  return dense({rows, grad.size(-1)}, grad.scalar_type());
}

Tensor safe_softmax(const Tensor& self, int64_t dim, std::optional<at::ScalarType> dtype) {
  TORCH_CHECK(!dtype && c10::isFloatingType(self.scalar_type()), "converted");
  return at::meta::_softmax(self, dim, false);
}

// As the CPU lays them out: batch, rows, heads, width.
Tensor by_rows(Ints sizes, at::ScalarType dtype) {
  auto heads = sizes[1], rows = sizes[2], width = sizes[3];
  return Tensor(at::detail::empty_strided_meta(sizes, {rows * heads * width, width, heads * width, 1}, dtype));
}

void check_attention(const Tensor& query, const Tensor& key, const Tensor& value, double dropout,
                     const OptTensor& mask) {
  TORCH_CHECK(ruled_for == Processor::kCpu && dropout == 0, "unknown");
  for (auto* t : {&query, &key, &value})
    TORCH_CHECK(t->dim() == 4 && t->scalar_type() == query.scalar_type() && t->size(3) == query.size(3) &&
                    t->size(0) == query.size(0) && t->numel() > 0,
                "sizes that differ");
  TORCH_CHECK(key.size(2) == value.size(2) && key.size(1) == value.size(1), "sizes that differ");
  TORCH_CHECK(c10::isFloatingType(query.scalar_type()), "no number");
  if (!mask || !mask->defined()) return;
  TORCH_CHECK(mask->scalar_type() == at::kFloat || mask->scalar_type() == query.scalar_type(), "another mask");
  TORCH_CHECK(mask->dim() == 2 || mask->dim() == 4, "another mask");
}

Pair attention(const Tensor& query, const Tensor& key, const Tensor& value, double dropout, bool, const OptTensor& mask,
               OptReal) {
  check_attention(query, key, value, dropout, mask);
  auto batch = query.size(0), heads = query.size(1), rows = query.size(2);
  Tensor sums(at::detail::empty_strided_meta({batch, heads, rows}, {rows * heads, 1, heads},
                                             at::toOpMathType(query.scalar_type())));
  return {made_like(query), sums};
}

Triple attention_backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
                          const Tensor&, const Tensor&, double dropout, bool, const OptTensor& mask, OptReal) {
  check_attention(query, key, value, dropout, mask);
  TORCH_CHECK(grad.defined() && grad.sizes() == query.sizes(), "no gradient");
  return {by_rows(query.sizes(), query.scalar_type()), by_rows(key.sizes(), key.scalar_type()),
          by_rows(value.sizes(), value.scalar_type())};
}

// The memory format of a result. Where nothing asks for another one it is the plain one.
at::MemoryFormat format_of(std::initializer_list<Tensor> tensors) {
  auto dtype = tensors.begin()->scalar_type();
  TORCH_CHECK(is_known() && c10::isFloatingType(dtype), "unknown");
  is_rule_unsure = dtype != at::kFloat && dtype != at::kDouble;
  auto format = at::MemoryFormat::Contiguous;
  for (auto& t : tensors) {
    TORCH_CHECK(t.scalar_type() == dtype && t.dim() == tensors.begin()->dim() && t.numel() > 0, "another dtype");
    auto wanted = t.suggest_memory_format();
    is_rule_unsure = is_rule_unsure || wanted != at::MemoryFormat::Contiguous || !t.is_contiguous();
    if (wanted != at::MemoryFormat::Contiguous) format = wanted;
  }
  return format;
}

Tensor in_format(Ints sizes, at::ScalarType dtype, at::MemoryFormat format) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype).device(at::kMeta).memory_format(format));
}

Tensor convolution(const Tensor& input, const Tensor& weight, const OptTensor& bias, Ints stride, Ints padding,
                   Ints dilation, bool transposed, Ints added, int64_t groups) {
  auto format = format_of({input, weight});
  is_rule_unsure = is_rule_unsure || transposed;
  auto axes = static_cast<size_t>(input.dim() - 2);
  TORCH_CHECK((axes == 1 || axes == 2) && groups > 0, "another kind");
  for (auto each : {stride, padding, dilation}) TORCH_CHECK(each.size() == axes, "short for all axes");
  TORCH_CHECK(!transposed || added.size() == axes, "short for all axes");
  auto channels = transposed ? weight.size(1) * groups : weight.size(0);
  TORCH_CHECK(input.size(1) == (transposed ? weight.size(0) : weight.size(1) * groups), "other channels");
  TORCH_CHECK(weight.size(0) % groups == 0, "other channels");
  if (bias && bias->defined())
    TORCH_CHECK(bias->dim() == 1 && bias->size(0) == channels && bias->scalar_type() == input.scalar_type(),
                "another bias");
  std::vector<int64_t> sizes{input.size(0), channels};
  for (size_t i = 0; i < axes; i++) {
    auto axis = static_cast<int64_t>(i) + 2;
    auto kernel = dilation[i] * (weight.size(axis) - 1) + 1, length = input.size(axis);
    TORCH_CHECK(stride[i] > 0 && padding[i] >= 0 && dilation[i] > 0, "no convolution");
    auto room = length + 2 * padding[i] - kernel;
    auto made = transposed ? (length - 1) * stride[i] - 2 * padding[i] + kernel + added[i] : room / stride[i] + 1;
    TORCH_CHECK((transposed || room >= 0) && made > 0, "a kernel that does not fit");
    sizes.push_back(made);
  }
  return in_format(sizes, input.scalar_type(), format);
}

Triple convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight, OptInts bias, Ints, Ints,
                            Ints, bool transposed, Ints, int64_t, Mask wanted) {
  auto format = format_of({grad, input, weight});
  is_rule_unsure = is_rule_unsure || transposed;
  TORCH_CHECK(input.dim() <= 4 && (!wanted[2] || bias), "another kind");
  auto dtype = input.scalar_type();
  return {wanted[0] ? in_format(input.sizes(), dtype, format) : Tensor(),
          wanted[1] ? in_format(weight.sizes(), dtype, format) : Tensor(), wanted[2] ? dense(*bias, dtype) : Tensor()};
}

}  // namespace
}  // namespace layer_rules

void add_layer_rules(Rules& r) {
  add(r, "native_layer_norm", &layer_rules::layer_norm);
  add(r, "native_layer_norm_backward", &layer_rules::layer_norm_backward);
  add(r, "native_group_norm", &layer_rules::group_norm);
  add(r, "native_group_norm_backward", &layer_rules::group_norm_backward);
  add(r, "native_batch_norm", &layer_rules::batch_norm);
  add(r, "native_batch_norm_backward", &layer_rules::batch_norm_backward);
  add(r, "native_dropout", &layer_rules::dropout);
  add(r, "native_dropout_backward", &layer_rules::dropout_backward);
  add(r, "embedding", &layer_rules::embedding);
  add(r, "embedding_dense_backward", &layer_rules::embedding_backward);
  add(r, "_safe_softmax", &layer_rules::safe_softmax);
  add(r, "_scaled_dot_product_flash_attention_for_cpu", &layer_rules::attention);
  add(r, "_scaled_dot_product_flash_attention_for_cpu_backward", &layer_rules::attention_backward);
  add(r, "convolution", &layer_rules::convolution);
  add(r, "convolution_backward", &layer_rules::convolution_backward);
  add(r, "avg_pool2d_backward", &at::meta::avg_pool2d_backward);
  add(r, "upsample_nearest2d", &at::meta::upsample_nearest2d);
  add(r, "upsample_nearest2d_backward", &at::meta::upsample_nearest2d_backward);
  add(r, "upsample_bilinear2d", &at::meta::upsample_bilinear2d);
  add(r, "upsample_bilinear2d_backward", &at::meta::upsample_bilinear2d_backward);
}

}  // namespace sky
