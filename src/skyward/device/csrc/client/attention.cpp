// Attention: the kernel the worker itself would choose, asked once for every kind of arguments, whatever the lengths.
//
// PyTorch's own composite knows which fused kernels CPU and CUDA have, not which ours stands for. The
// fused operations carry their gradients, so the graph is the same as on the worker's own device.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "session.h"
#include "settings.h"

namespace sky {
namespace {

enum Choice : int64_t { kMath = 0, kFlash = 1, kEfficient = 2, kByCudnn = 3 };

using Optional = std::optional<at::Tensor>;

constexpr size_t kChoicesMost = 4096;

// Since then, the fused kernels take inputs without a batch, and a mask rules out `is_causal`.
constexpr bool kSince2_14 = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14;

// What PyTorch checks before it chooses a kernel.
void check(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Optional& mask, bool causal) {
  SKY_CHECK(query.dtype() == key.dtype() && query.dtype() == value.dtype(),
            "Expected query, key, and value to have the same dtype, but got query.dtype: ", query.dtype(),
            " key.dtype: ", key.dtype(), " and value.dtype: ", value.dtype(), " instead.");
  SKY_CHECK(query.dim() >= 2 && key.dim() >= 2 && value.dim() >= 2,
            "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: ", query.dim(),
            " key.dim: ", key.dim(), " and value.dim: ", value.dim(), " instead.");
  if (!mask) return;
  SKY_CHECK(!kSince2_14 || !causal,
            "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True");
  auto dtype = mask->scalar_type();
  SKY_CHECK(dtype == c10::kBool || dtype == c10::kFloat || dtype == query.scalar_type(),
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: ",
            mask->dtype(), " and  query.dtype: ", query.dtype(), " instead.");
}

// A mask of booleans as numbers to add, which is what the kernels take.
Optional additive(const Optional& mask, const at::Tensor& query) {
  if (!mask || mask->scalar_type() != c10::kBool) return mask;
  auto number = [&](double v) { return at::scalar_tensor(v, query.options()); };
  return at::where(*mask, number(0.0), number(-std::numeric_limits<double>::infinity()));
}

// While a compiler traces, other sizes of the tensor may be symbols.
int64_t width_of(const at::Tensor& t) { return t.sym_size(-1).guard_int(__FILE__, __LINE__); }

// The last axis, filled up with zeros to a multiple of what a kernel loads at once.
at::Tensor padded(const at::Tensor& t, int64_t multiple) {
  auto over = width_of(t) % multiple;
  return over ? at::constant_pad_nd(t, {0, multiple - over}) : t;
}

at::Tensor flash(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double dropout, bool causal,
                 std::optional<double> scale) {
  auto width = width_of(query);
  auto out = std::get<0>(
      at::_scaled_dot_product_flash_attention(padded(query, 8), padded(key, 8), padded(value, 8), dropout, causal,
                                              false, scale ? *scale : 1.0 / std::sqrt(static_cast<double>(width))));
  return width_of(out) == width ? out : out.narrow(-1, 0, width);
}

// Its rows begin where the kernel can load several elements at once.
bool is_aligned(const at::Tensor& t, int64_t multiple) {
  for (int64_t i = 0; i + 1 < t.dim(); i++)
    if (t.stride(i) % multiple) return false;
  return t.stride(-1) == 1;
}

Optional aligned(const Optional& mask, const at::Tensor& query, const at::Tensor& key) {
  constexpr int64_t kMultiple = 8;
  if (!mask) return mask;
  auto width = mask->size(-1);
  auto rows = *mask;
  if (!is_aligned(rows, kMultiple))
    rows = at::constant_pad_nd(rows, {0, kMultiple - width % kMultiple}).narrow(-1, 0, width);
  return rows.expand({query.size(0), query.size(1), query.size(2), key.size(2)});
}

// A tensor of the device in place of one that has a shape and no memory. Where a size is a symbol any number will do:
// what the worker chooses depends on the last axis, the dtype and what kind of mask there is.
at::Tensor stand_in(const at::Tensor& t) {
  constexpr int64_t kAny = 64;
  std::vector<int64_t> sizes, strides;
  bool has_symbols = false;
  for (auto& size : t.sym_sizes()) {
    sizes.push_back(size.maybe_as_int().value_or(kAny));
    has_symbols = has_symbols || size.is_heap_allocated();
  }
  for (auto& stride : t.sym_strides()) {
    strides.push_back(stride.maybe_as_int().value_or(kAny));
    has_symbols = has_symbols || stride.is_heap_allocated();
  }
  auto options = at::TensorOptions().dtype(t.dtype()).device(t.device());
  return has_symbols ? at::empty(sizes, options) : at::empty_strided(sizes, strides, options);
}

// The worker's choice for tensors of these shapes, also while a compiler traces.
int64_t choice_for(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Optional& mask,
                   double dropout, bool causal, std::optional<double> scale, bool grouped) {
  c10::impl::ExcludeDispatchKeyGuard untraced(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  auto in_place_of = mask ? Optional(stand_in(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(stand_in(query), stand_in(key), stand_in(value), in_place_of, dropout, causal, scale,
                               grouped);
}

bool has_symbols(const at::Tensor& t) { return t.unsafeGetTensorImpl()->has_symbolic_sizes_strides(); }

// While a compiler traces or vmap maps, tensors have shapes and no memory. The CPU's fused kernel takes what is
// checked here.
bool is_for_cpu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Optional& mask,
                double dropout) {
  if (!at::globalContext().userEnabledFlashSDP()) return false;
  auto axes = query.dim();
  bool may_be = axes == 4 || (kSince2_14 && axes == 3);
  if (!may_be || key.dim() != axes || value.dim() != axes || dropout != 0.0) return false;
  if (mask && (at::GradMode::is_enabled() && mask->requires_grad())) return false;
  if (mask && mask->dim() != 2 && mask->dim() != axes) return false;
  auto fits = [&](int64_t axis) {
    return query.sym_size(axis) == key.sym_size(axis) && query.sym_size(axis) == value.sym_size(axis);
  };
  return c10::isFloatingType(query.scalar_type()) && fits(0) && fits(-3) && fits(-1);
}

// A length as far as a choice depends on it: kernels want multiples, and refuse none or one.
int64_t kind_of_length(int64_t length) { return length % 64 == 0 ? std::min<int64_t>(length, 64) : length % 8 ? 1 : 8; }

// What the worker's choice depends on. Lengths and the size of the batch count only by their kind, else every new
// length would be asked for.
std::vector<int64_t> kind_of_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                       const Optional& mask, double dropout, bool causal, bool scaled, bool grouped) {
  std::vector<int64_t> kind{
      static_cast<int64_t>(settings_now()), dropout > 0, causal, scaled, grouped, at::GradMode::is_enabled()};
  auto batch = query.dim() == 4 ? query.size(0) : -1, rows = query.size(-2), columns = key.size(-2);
  kind.insert(kind.end(), {rows == columns, rows == 1, columns == 1, batch == 1, batch == 0});
  for (auto* t : {&query, &key, &value, mask ? &*mask : nullptr}) {
    if (!t) break;
    kind.insert(kind.end(), {t->dim(), static_cast<int64_t>(t->scalar_type()), t->stride(-1) == 1, t->is_contiguous()});
    for (int64_t i = 0; i < t->dim(); i++) {
      auto size = t->size(i);
      bool is_width = i == t->dim() - 1 && t != (mask ? &*mask : nullptr), is_heads = i == t->dim() - 3;
      bool is_batch = t->dim() == 4 && i == 0;
      if (is_width || is_heads) kind.push_back(size);
      else if (is_batch) kind.push_back(size == batch ? -1 : size == 1);
      else kind.insert(kind.end(), {kind_of_length(size), size == rows, size == columns, size == 1});
    }
  }
  return kind;
}

int64_t offered_for(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Optional& mask,
                    double dropout, bool causal, std::optional<double> scale, bool grouped) {
  auto& session = session_at(query.device().index());
  auto kind = kind_of_attention(query, key, value, mask, dropout, causal, scale.has_value(), grouped);
  {
    std::lock_guard lock(session.mutex);
    auto known = session.attention_choices.find(kind);
    if (known != session.attention_choices.end()) return known->second;
  }
  auto choice = at::_fused_sdp_choice(query, key, value, mask, dropout, causal, scale, grouped);
  std::lock_guard lock(session.mutex);
  if (session.attention_choices.size() >= kChoicesMost) session.attention_choices.clear();
  session.attention_choices.emplace(std::move(kind), choice);
  return choice;
}

// By the kernel that was chosen. All but the plain one want a batch: without one, the inputs are a batch of one.
at::Tensor attend(int64_t choice, bool on_cpu, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const Optional& bias, bool keeps_graph, double dropout, bool causal, std::optional<double> scale,
                  bool grouped) {
  if (choice > kMath && query.dim() == 3) {
    auto wide = bias;
    while (wide && wide->dim() < 4) wide = wide->unsqueeze(0);
    return attend(choice, on_cpu, query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), wide, keeps_graph, dropout,
                  causal, scale, grouped)
        .squeeze(0);
  }
  switch (choice) {
    case kFlash:
      if (on_cpu)
        return std::get<0>(
            at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, bias, scale));
      return flash(query, key, value, dropout, causal, scale);
    case kEfficient:
      return std::get<0>(at::_scaled_dot_product_efficient_attention(query, key, value, aligned(bias, query, key),
                                                                     keeps_graph, dropout, causal, scale));
    case kByCudnn:
      return std::get<0>(
          at::_scaled_dot_product_cudnn_attention(query, key, value, bias, keeps_graph, dropout, causal, false, scale));
    case kMath:
      return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, bias, dropout, causal, std::nullopt,
                                                                scale, grouped));
    default: SKY_CHECK(false, "No available kernel. Aborting execution.");
  }
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Optional& given,
                     double dropout, bool causal, std::optional<double> scale, bool grouped) {
  auto mask = given && given->defined() ? given : std::nullopt;
  check(query, key, value, mask, causal);
  bool is_traced = query.key_set().has(c10::DispatchKey::Python);
  bool is_mapped = !is_traced && !query.has_storage();
  bool on_cpu = session_at(query.device().index()).on_cpu;
  bool with_grad = at::GradMode::is_enabled();
  int64_t offered;
  if (is_mapped && !on_cpu) {
    offered = kMath;
  } else if (on_cpu && (is_traced || is_mapped)) {
    offered = is_for_cpu(query, key, value, mask, dropout) ? kFlash : kMath;
  } else if (is_traced) {
    offered = choice_for(query, key, value, mask, dropout, causal, scale, grouped);
    // Its rows are to be aligned, which is not known of symbols.
    if (offered == kEfficient && mask && has_symbols(*mask)) offered = kMath;
  } else {
    // The worker sees no gradients; the CPU's fused kernel has none for the mask.
    bool by_hand = on_cpu && with_grad && mask && mask->requires_grad();
    offered = by_hand ? int64_t{kMath} : offered_for(query, key, value, mask, dropout, causal, scale, grouped);
  }
  auto bias = additive(mask, query);
  bool keeps_graph = with_grad && (query.requires_grad() || key.requires_grad() || value.requires_grad());
  return attend(offered, on_cpu, query, key, value, bias, keeps_graph, dropout, causal, scale, grouped);
}

// Padding masks do not become nested tensors, which cannot live here: the plain path is taken.
bool left_aligned(const at::Tensor&, const at::Tensor&) { return false; }

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("scaled_dot_product_attention", attention); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("scaled_dot_product_attention", attention);
  m.impl("_nested_tensor_from_mask_left_aligned", left_aligned);
}

}  // namespace
}  // namespace sky
