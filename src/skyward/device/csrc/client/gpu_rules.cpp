// Rules for the fused attention of a GPU. Its layouts change from version to version: each rule is confirmed first.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>

#include "rules.h"

namespace sky {
namespace gpu_rules {
namespace {

using at::Tensor;
using Ints = at::IntArrayRef;
using OptTensor = std::optional<Tensor>;
using OptReal = std::optional<double>;
using Flash = std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, Tensor, Tensor, Tensor>;
using Efficient = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Tensor dense(Ints sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype).device(at::kMeta));
}

// Batch, rows, heads, width: the order in which the kernels compute.
Tensor by_rows(int64_t batch, int64_t heads, int64_t rows, int64_t width, at::ScalarType dtype) {
  return Tensor(at::detail::empty_strided_meta({batch, heads, rows, width},
                                               {rows * heads * width, width, heads * width, 1}, dtype));
}

void check_heads(std::initializer_list<Tensor> tensors) {
  TORCH_CHECK(ruled_for == Processor::kCuda, "not on a GPU");
  is_rule_unsure = true;
  for (auto& t : tensors)
    TORCH_CHECK(t.dim() == 4 && t.numel() > 0 && t.scalar_type() == tensors.begin()->scalar_type(), "unknown");
}

Flash flash(const Tensor& query, const Tensor& key, const Tensor& value, double, bool, bool debug, OptReal) {
  check_heads({query, key, value});
  TORCH_CHECK(!debug, "unknown");
  return {made_like(query),
          dense({query.size(0), query.size(1), query.size(2)}, at::kFloat),
          Tensor(),
          Tensor(),
          query.size(2),
          key.size(2),
          dense({2}, at::kUInt64),
          dense({}, at::kUInt64),
          dense({0}, query.scalar_type())};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor&, const Tensor& query, const Tensor& key,
                                                  const Tensor& value, const Tensor&, const Tensor&, const Tensor&,
                                                  const Tensor&, int64_t, int64_t, double, bool, const Tensor&,
                                                  const Tensor&, OptReal) {
  check_heads({query, key, value});
  return {made_like(query), made_like(key), made_like(value)};
}

Efficient efficient(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor&, bool keeps, double,
                    bool, OptReal) {
  check_heads({query, key, value});
  auto batch = query.size(0), heads = query.size(1), rows = query.size(2);
  constexpr int64_t kRows = 32;  // that the kernel computes at once
  auto sums = keeps ? (rows + kRows - 1) / kRows * kRows : 0;
  return {by_rows(batch, heads, rows, value.size(3), query.scalar_type()), dense({batch, heads, sums}, at::kFloat),
          dense({}, at::kLong), dense({}, at::kLong)};
}

Efficient efficient_backward(const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor&,
                             const Tensor&, const Tensor&, const Tensor&, const Tensor&, double,
                             std::array<bool, 4> wanted, bool, OptReal) {
  check_heads({query, key, value});
  TORCH_CHECK(!wanted[3], "unknown");
  auto made = [](const Tensor& t) { return by_rows(t.size(0), t.size(1), t.size(2), t.size(3), t.scalar_type()); };
  return {made(query), made(key), made(value), Tensor()};
}

}  // namespace
}  // namespace gpu_rules

void add_gpu_rules(Rules& r) {
  add(r, "_scaled_dot_product_flash_attention", &gpu_rules::flash);
  add(r, "_scaled_dot_product_flash_attention_backward", &gpu_rules::flash_backward);
  add(r, "_scaled_dot_product_efficient_attention", &gpu_rules::efficient);
  add(r, "_scaled_dot_product_efficient_attention_backward", &gpu_rules::efficient_backward);
}

}  // namespace sky
