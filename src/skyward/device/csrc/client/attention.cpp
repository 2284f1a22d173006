// Attention: the kernel the worker itself would choose, asked once for every kind of arguments.
//
// PyTorch's own composite knows which fused kernels CPU and CUDA have, not which ours stands for. The
// fused operations carry their gradients, so the graph is the same as on the worker's own device.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <limits>

#include "session.h"

namespace sky {
namespace {

enum Choice : int64_t { kMath = 0, kFlash = 1, kEfficient = 2 };

using Optional = std::optional<at::Tensor>;

// A mask of booleans as numbers to add, which is what the kernels take.
Optional additive(const Optional& mask, const at::Tensor& query) {
  if (!mask || !mask->defined() || mask->scalar_type() != c10::kBool) return mask;
  auto number = [&](double v) { return at::scalar_tensor(v, query.options()); };
  return at::where(*mask, number(0.0), number(-std::numeric_limits<double>::infinity()));
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const Optional& mask, double dropout, bool causal, std::optional<double> scale, bool grouped) {
  bool masked = mask && mask->defined();
  auto choice = at::_fused_sdp_choice(query, key, value, mask, dropout, causal, scale, grouped);
  bool on_cpu = Session::of(query.unsafeGetTensorImpl()).on_cpu;
  if (!grouped && choice == kFlash && on_cpu)
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, causal, additive(mask, query), scale));
  if (!grouped && !masked && choice == kFlash && !on_cpu && query.size(-1) % 8 == 0)
    return std::get<0>(at::_scaled_dot_product_flash_attention(query, key, value, dropout, causal, false, scale));
  if (!grouped && !masked && choice == kEfficient) {
    bool keeps_graph = at::GradMode::is_enabled() &&
                       (query.requires_grad() || key.requires_grad() || value.requires_grad());
    return std::get<0>(at::_scaled_dot_product_efficient_attention(
        query, key, value, std::nullopt, keeps_graph, dropout, causal, scale));
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, additive(mask, query), dropout, causal, std::nullopt, scale, grouped));
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("scaled_dot_product_attention", attention); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("scaled_dot_product_attention", attention); }

}  // namespace
}  // namespace sky
