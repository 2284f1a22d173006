// Rules for operations that make, combine, reduce or pick elements. Each does with sizes and strides what PyTorch's
// kernel does; what a rule does not cover it refuses with an error, and the worker is asked.
#include <ATen/ExpandUtils.h>
#include <ATen/ScalarOps.h>
#include <ATen/TensorIterator.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/add_meta_dispatch.h>
#include <ATen/ops/all_meta_dispatch.h>
#include <ATen/ops/any_meta_dispatch.h>
#include <ATen/ops/argmin_meta_dispatch.h>
#include <ATen/ops/atan2_meta_dispatch.h>
#include <ATen/ops/bitwise_and_meta_dispatch.h>
#include <ATen/ops/bitwise_not_meta_dispatch.h>
#include <ATen/ops/bitwise_or_meta_dispatch.h>
#include <ATen/ops/bitwise_xor_meta_dispatch.h>
#include <ATen/ops/cat_meta_dispatch.h>
#include <ATen/ops/clamp_max_meta_dispatch.h>
#include <ATen/ops/cumprod_meta_dispatch.h>
#include <ATen/ops/div_meta_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/fmod_meta_dispatch.h>
#include <ATen/ops/index_add_meta_dispatch.h>
#include <ATen/ops/index_meta_dispatch.h>
#include <ATen/ops/linalg_vector_norm_meta_dispatch.h>
#include <ATen/ops/mean_meta_dispatch.h>
#include <ATen/ops/mul_meta_dispatch.h>
#include <ATen/ops/prod_meta_dispatch.h>
#include <ATen/ops/remainder_meta_dispatch.h>
#include <ATen/ops/result_type_native.h>
#include <ATen/ops/scatter_add_meta_dispatch.h>
#include <ATen/ops/scatter_meta_dispatch.h>
#include <ATen/ops/sort_meta_dispatch.h>
#include <ATen/ops/sub_meta_dispatch.h>
#include <ATen/ops/sum_meta_dispatch.h>
#include <ATen/ops/topk_meta_dispatch.h>
#include <ATen/ops/unsqueeze_native.h>
#include <ATen/ops/view_native.h>

#include <algorithm>

#include "rules.h"
#include "session.h"

namespace sky {
namespace plain_rules {
namespace {

using at::Scalar;
using at::Tensor;
using Ints = at::IntArrayRef;
using OptInts = at::OptionalIntArrayRef;
using OptDtype = std::optional<at::ScalarType>;
using OptLayout = std::optional<at::Layout>;
using OptDevice = std::optional<at::Device>;
using OptBool = std::optional<bool>;
using OptFormat = std::optional<at::MemoryFormat>;

Tensor dense(Ints sizes, at::ScalarType dtype) {
  for (auto n : sizes) TORCH_CHECK(n >= 0, "no size");
  return at::empty(sizes, at::TensorOptions().dtype(dtype).device(at::kMeta));
}

// Only what is made as a plain tensor where the operation runs.
void check_made(OptLayout layout, OptDevice device, OptBool pinned) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided && (!device || device->type() == kSky), "elsewhere");
  TORCH_CHECK(!pinned.value_or(false), "pinned");
}

// Factories.

Tensor filled(Ints sizes, OptDtype dtype, OptLayout layout, OptDevice device, OptBool pinned) {
  check_made(layout, device, pinned);
  return dense(sizes, c10::dtype_or_default(dtype));
}

Tensor full(Ints sizes, const Scalar& value, OptDtype dtype, OptLayout layout, OptDevice device, OptBool pinned) {
  TORCH_CHECK(dtype || value.isFloatingPoint() || value.isBoolean() || value.isIntegral(false), "a complex number");
  auto natural = value.isBoolean()         ? at::kBool
                 : value.isIntegral(false) ? at::kLong
                                           : c10::get_default_dtype_as_scalartype();
  return filled(sizes, dtype.value_or(natural), layout, device, pinned);
}

Tensor scalar_tensor(const Scalar&, OptDtype dtype, OptLayout layout, OptDevice device, OptBool pinned) {
  return filled({}, dtype, layout, device, pinned);
}

Tensor range(const Scalar& start, const Scalar& end, const Scalar& step, OptDtype dtype, OptLayout layout,
             OptDevice device, OptBool pinned) {
  TORCH_CHECK(start.isIntegral(false) && end.isIntegral(false) && step.isIntegral(false), "fractions");
  auto kind = dtype.value_or(at::kLong);
  TORCH_CHECK(kind == at::kLong || kind == at::kInt || kind == at::kFloat || kind == at::kDouble, "rounded");
  auto from = start.toLong(), to = end.toLong(), by = step.toLong();
  constexpr int64_t kExact = int64_t{1} << 31;
  for (auto n : {from, to, by}) TORCH_CHECK(-kExact < n && n < kExact, "large");
  TORCH_CHECK(by > 0 ? from <= to : by < 0 && from >= to, "no range");
  auto span = by > 0 ? to - from : from - to, each = by > 0 ? by : -by;
  return filled({(span + each - 1) / each}, kind, layout, device, pinned);
}
Tensor range_from(const Scalar& start, const Scalar& end, OptDtype dtype, OptLayout layout, OptDevice device,
                  OptBool pinned) {
  return range(start, end, 1, dtype, layout, device, pinned);
}
Tensor range_to(const Scalar& end, OptDtype dtype, OptLayout layout, OptDevice device, OptBool pinned) {
  return range(0, end, 1, dtype, layout, device, pinned);
}

Tensor like(const Tensor& self, OptDtype dtype, OptLayout layout, OptDevice device, OptBool pinned, OptFormat format) {
  check_made(layout, device, pinned);
  return made_like(self, dtype, format);
}
Tensor full_like(const Tensor& self, const Scalar&, OptDtype dtype, OptLayout layout, OptDevice device, OptBool pinned,
                 OptFormat format) {
  return like(self, dtype, layout, device, pinned, format);
}
Tensor made_new(const Tensor& self, Ints sizes, OptDtype dtype, OptLayout layout, OptDevice device, OptBool pinned) {
  return filled(sizes, dtype.value_or(self.scalar_type()), layout, device, pinned);
}
Tensor new_full(const Tensor& self, Ints sizes, const Scalar&, OptDtype dtype, OptLayout layout, OptDevice device,
                OptBool pinned) {
  return made_new(self, sizes, dtype, layout, device, pinned);
}

// Element by element.

Tensor without_memory(const Tensor& t) { return t.is_meta() ? t : dense(t.sizes(), t.scalar_type()); }

Tensor each_element(std::initializer_list<Tensor> inputs, at::ScalarType dtype) {
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).declare_static_dtype_and_device(dtype, at::kMeta).add_owned_output(Tensor());
  for (auto& input : inputs) config.add_owned_const_input(without_memory(input));
  return config.build().output();
}

Tensor where(const Tensor& condition, const Tensor& self, const Tensor& other) {
  TORCH_CHECK(condition.scalar_type() == at::kBool, "an old condition");
  auto dtype = at::native::result_type(self, other);
  // A number of another dtype is converted first, which makes an expanded one dense.
  auto as = [&](const Tensor& t) { return t.scalar_type() == dtype || !t.is_meta() ? t : made_like(t, dtype); };
  return each_element({condition, as(self), as(other)}, dtype);
}

template <Tensor (*Function)(const Tensor&, const Tensor&)>
Tensor with_number(const Tensor& self, const Scalar& other) {
  return Function(self, at::native::wrapped_scalar_tensor(other));
}
template <Tensor& (*Function)(Tensor&, const Tensor&)>
Tensor& with_number_(Tensor& self, const Scalar& other) {
  return Function(self, at::native::wrapped_scalar_tensor(other));
}
template <Tensor (*Function)(const Tensor&, const Tensor&, const Scalar&)>
Tensor with_scaled(const Tensor& self, const Scalar& other, const Scalar& alpha) {
  return Function(self, at::native::wrapped_scalar_tensor(other), alpha);
}
template <Tensor& (*Function)(Tensor&, const Tensor&, const Scalar&)>
Tensor& with_scaled_(Tensor& self, const Scalar& other, const Scalar& alpha) {
  return Function(self, at::native::wrapped_scalar_tensor(other), alpha);
}
Tensor subtracted_from(const Tensor& self, const Scalar& other, const Scalar& alpha) {
  return at::meta::sub(at::native::wrapped_scalar_tensor(other), self, alpha);
}

Tensor absolute(const Tensor& self) {
  TORCH_CHECK(c10::isFloatingType(self.scalar_type()) || c10::isIntegralType(self.scalar_type(), false), "complex");
  return each_element({self}, self.scalar_type());
}

Tensor truth(const Tensor& self) { return each_element({self}, at::kBool); }
Tensor truth_of_number(const Tensor& self) {
  TORCH_CHECK(c10::isFloatingType(self.scalar_type()), "always the same");
  return truth(self);
}
Tensor truth_of_two(const Tensor& self, const Tensor& other) { return each_element({self, other}, at::kBool); }

Tensor masked_fill(const Tensor& self, const Tensor& mask, const Scalar& value) {
  TORCH_CHECK(mask.scalar_type() == at::kBool && mask.is_meta(), "an old mask");
  bool fits = self.scalar_type() == at::kFloat || self.scalar_type() == at::kDouble ||
              self.scalar_type() == at::kBFloat16 || (self.scalar_type() == at::kLong && value.isIntegral(false));
  TORCH_CHECK(fits && !value.isComplex(), "a number that may not fit");
  return dense(at::infer_size(mask.sizes(), self.sizes()), self.scalar_type());
}

// Reductions of everything.

Tensor sum(const Tensor& self, OptDtype dtype) { return at::meta::sum(self, Ints{}, false, dtype); }
Tensor mean(const Tensor& self, OptDtype dtype) { return at::meta::mean(self, Ints{}, false, dtype); }
Tensor extreme(const Tensor& self) {
  TORCH_CHECK(self.numel() > 0 && !c10::isComplexType(self.scalar_type()), "nothing");
  return dense({}, self.scalar_type());
}

// Picking and putting.

Tensor index(const Tensor& self, const c10::List<std::optional<Tensor>>& indices) {
  for (const std::optional<Tensor>& each : indices) {
    if (!each || !each->defined()) continue;
    auto dtype = each->scalar_type();
    TORCH_CHECK(each->is_meta() && (dtype == at::kLong || dtype == at::kInt), "a mask");
  }
  return at::meta::index(self, indices);
}

Tensor index_select(const Tensor& self, int64_t dim, const Tensor& index) {
  TORCH_CHECK(self.dim() > 0 && index.dim() == 1 && index.is_meta(), "no list");
  TORCH_CHECK(index.scalar_type() == at::kLong || index.scalar_type() == at::kInt, "no index");
  auto sizes = self.sizes().vec();
  sizes[at::maybe_wrap_dim(dim, self.dim())] = index.numel();
  return dense(sizes, self.scalar_type());
}

Tensor stack(at::TensorList tensors, int64_t dim) {
  TORCH_CHECK(!tensors.empty(), "nothing");
  auto sizes = tensors[0].sizes().vec();
  for (auto& t : tensors) TORCH_CHECK(t.sizes() == tensors[0].sizes() && t.is_meta(), "another size");
  auto axis = at::maybe_wrap_dim(dim, tensors[0].dim() + 1);
  if (axis < tensors[0].dim()) {
    sizes.insert(sizes.begin() + axis, static_cast<int64_t>(tensors.size()));
    return at::native::view(at::meta::cat(tensors, axis), sizes);
  }
  std::vector<Tensor> wider;
  for (auto& t : tensors) wider.push_back(at::native::unsqueeze(t, axis));
  return at::meta::cat(wider, axis);
}

Tensor pad(const Tensor& self, Ints pads, const Scalar&) {
  auto sizes = self.sizes().vec();
  TORCH_CHECK(pads.size() % 2 == 0 && pads.size() <= 2 * sizes.size(), "pads that do not fit");
  bool some = false;
  for (size_t i = 0; i < pads.size(); i++) {
    TORCH_CHECK(pads[i] >= 0, "cut");
    some = some || pads[i] > 0;
    sizes[sizes.size() - 1 - i / 2] += pads[i];
  }
  TORCH_CHECK(some, "nothing added");
  return at::empty(sizes, self.options().memory_format(self.suggest_memory_format()));
}

Tensor repeat(const Tensor& self, Ints repeats) {
  TORCH_CHECK(repeats.size() >= static_cast<size_t>(self.dim()), "too few");
  auto sizes = repeats.vec();
  auto before = sizes.size() - static_cast<size_t>(self.dim());
  for (size_t i = before; i < sizes.size(); i++) sizes[i] *= self.sizes()[i - before];
  return dense(sizes, self.scalar_type());
}

// Gradients of views: zeros of the whole, into which the part is written.
Tensor whole(const Tensor& grad, Ints sizes) { return dense(sizes, grad.scalar_type()); }
Tensor slice_backward(const Tensor& grad, Ints sizes, int64_t, int64_t, int64_t, int64_t) { return whole(grad, sizes); }
Tensor select_backward(const Tensor& grad, Ints sizes, int64_t, int64_t) { return whole(grad, sizes); }

}  // namespace
}  // namespace plain_rules

// clang-format takes a row of macros for one long expression.
// clang-format off
void add_plain_rules(Rules& r) {
  using namespace plain_rules;
  using OfTwo = Tensor(const Tensor&, const Tensor&);
  using OfTwo_ = Tensor&(Tensor&, const Tensor&);
  using Pair = std::tuple<Tensor, Tensor>;
  for (auto* name : {"zeros", "ones"}) add(r, name, &filled);
  add(r, "full", &full);
  add(r, "scalar_tensor", &scalar_tensor);
  add(r, "arange", &range_to);
  add(r, "arange.start", &range_from);
  add(r, "arange.start_step", &range);
  for (auto* name : {"zeros_like", "ones_like", "rand_like", "randn_like"}) add(r, name, &like);
  add(r, "full_like", &full_like);
  for (auto* name : {"new_zeros", "new_ones"}) add(r, name, &made_new);
  add(r, "new_full", &new_full);

  add(r, "where.self", &where);
  add(r, "abs", &absolute);
  add(r, "logical_not", &truth);
  for (auto* name : {"isinf", "isnan"}) add(r, name, &truth_of_number);
  for (auto* name : {"logical_and", "logical_or", "logical_xor"}) add(r, name, &truth_of_two);
  add(r, "masked_fill.Scalar", &masked_fill);
  add<Tensor(const Tensor&)>(r, "bitwise_not", &at::meta::bitwise_not);
#define SKY_WITH_NUMBER(name)                                             \
  add<OfTwo>(r, #name ".Tensor", &at::meta::name);                        \
  add<OfTwo_>(r, #name "_.Tensor", &at::meta::name##_);                   \
  add(r, #name ".Scalar", &with_number<static_cast<OfTwo*>(&at::meta::name)>); \
  add(r, #name "_.Scalar", &with_number_<static_cast<OfTwo_*>(&at::meta::name##_)>);
  SKY_WITH_NUMBER(mul) SKY_WITH_NUMBER(div) SKY_WITH_NUMBER(bitwise_and) SKY_WITH_NUMBER(bitwise_or)
  SKY_WITH_NUMBER(bitwise_xor) SKY_WITH_NUMBER(remainder) SKY_WITH_NUMBER(fmod)
#undef SKY_WITH_NUMBER
  using Scaled = Tensor(const Tensor&, const Tensor&, const Scalar&);
  using Scaled_ = Tensor&(Tensor&, const Tensor&, const Scalar&);
  add(r, "add.Scalar", &with_scaled<static_cast<Scaled*>(&at::meta::add)>);
  add(r, "add_.Scalar", &with_scaled_<static_cast<Scaled_*>(&at::meta::add_)>);
  add(r, "sub.Scalar", &with_scaled<static_cast<Scaled*>(&at::meta::sub)>);
  add(r, "sub_.Scalar", &with_scaled_<static_cast<Scaled_*>(&at::meta::sub_)>);
  add(r, "rsub.Scalar", &subtracted_from);
  add<OfTwo>(r, "atan2", &at::meta::atan2);
  add<Tensor(const Tensor&, const Scalar&)>(r, "clamp_max", &at::meta::clamp_max);

  add(r, "sum", &sum);
  add(r, "mean", &mean);
  for (auto* name : {"max", "min"}) add(r, name, &extreme);
  add(r, "argmin", &at::meta::argmin);
  add(r, "linalg_vector_norm", &at::meta::linalg_vector_norm);
  add<Tensor(const Tensor&, int64_t, bool)>(r, "all.dim", &at::meta::all);
  add<Tensor(const Tensor&, int64_t, bool)>(r, "any.dim", &at::meta::any);
  add<Tensor(const Tensor&, int64_t, bool, OptDtype)>(r, "prod.dim_int", &at::meta::prod);
  add(r, "cumprod", &at::meta::cumprod);
  add(r, "topk", &at::meta::topk);
  add<Pair(const Tensor&, OptBool, int64_t, bool)>(r, "sort.stable", &at::meta::sort);

  add(r, "index.Tensor", &index);
  add(r, "index_select", &index_select);
  using Put = Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&);
  using Put_ = Tensor&(Tensor&, int64_t, const Tensor&, const Tensor&);
  add<Put>(r, "scatter.src", &at::meta::scatter);
  add<Put_>(r, "scatter_.src", &at::meta::scatter_);
  add<Put>(r, "scatter_add", &at::meta::scatter_add);
  add<Put_>(r, "scatter_add_", &at::meta::scatter_add_);
  add<Tensor(const Tensor&, int64_t, const Tensor&, const Scalar&)>(r, "scatter.value", &at::meta::scatter);
  add<Tensor&(Tensor&, int64_t, const Tensor&, const Scalar&)>(r, "scatter_.value", &at::meta::scatter_);
  add<Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, const Scalar&)>(r, "index_add", &at::meta::index_add);
  add(r, "stack", &stack);
  add(r, "constant_pad_nd", &pad);
  add(r, "repeat", &repeat);
  add(r, "slice_backward", &slice_backward);
  add(r, "select_backward", &select_backward);
}
// clang-format on

}  // namespace sky
