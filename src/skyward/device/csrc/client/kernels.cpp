// Kernels of our own: making tensors, looking at them differently, moving their bytes.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOptions.h>
#include <ATen/native/Resize.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/COW.h>
#include <torch/library.h>

#include "links.h"
#include "pinned.h"

namespace sky {

at::Tensor make_tensor(Session& session, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype,
                       uint64_t bytes, bool tell) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(session.new_storage(bytes, tell),
                                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                   c10::scalarTypeToTypeMeta(dtype));
  impl->set_sizes_and_strides(sizes, strides);
  return at::Tensor(std::move(impl));
}

namespace {

using OptDtype = std::optional<at::ScalarType>;
using OptLayout = std::optional<at::Layout>;
using OptDevice = std::optional<at::Device>;

Session& wanted(const OptDevice& device, const OptLayout& layout) {
  SKY_CHECK(c10::layout_or_default(layout) == c10::kStrided, "a sky device holds dense tensors only");
  return session_at(device ? device->index() : c10::DeviceIndex(-1));
}

// PyTorch warns of this dtype where it makes a tensor of it.
void warn_of(c10::ScalarType dtype) {
  if (C10_UNLIKELY(dtype == c10::kComplexHalf)) at::detail::empty_cpu({0}, at::TensorOptions().dtype(dtype));
}

// Memory as it was is no deterministic result.
bool fills_memory() {
  auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

at::Tensor filled_if_asked(at::Tensor t) {
  if (C10_UNLIKELY(fills_memory())) at::native::fill_empty_deterministic_(t);
  return t;
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, OptDtype dtype, OptLayout layout,
                         OptDevice device, std::optional<bool>) {
  at::detail::check_size_nonnegative(sizes);
  auto kind = c10::dtype_or_default(dtype);
  warn_of(kind);
  auto bytes = at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(kind));
  return filled_if_asked(make_tensor(wanted(device, layout), sizes, strides, kind, bytes, true));
}

at::Tensor empty(c10::IntArrayRef sizes, OptDtype dtype, OptLayout layout, OptDevice device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  at::detail::check_size_nonnegative(sizes);
  auto kind = c10::dtype_or_default(dtype);
  warn_of(kind);
  auto bytes = at::detail::computeStorageNbytesContiguous(sizes, c10::elementSize(kind));
  auto t = make_tensor(wanted(device, layout), sizes, c10::contiguous_strides(sizes), kind, bytes, true);
  if (format && *format != at::MemoryFormat::Contiguous) t.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return filled_if_asked(std::move(t));
}

// Elsewhere a tensor without memory that stands for zeros; here every tensor has a slot.
at::Tensor efficient_zeros(c10::IntArrayRef sizes, OptDtype dtype, OptLayout layout, OptDevice device,
                           std::optional<bool> pin) {
  return at::zeros(sizes, dtype, layout, device, pin);
}

// Elements of a dense tensor lie in its storage without gaps, in order.
void upload(const at::Tensor& to, const at::Tensor& host, bool later) {
  Session::unshare(to.unsafeGetTensorImpl());
  auto place = Session::place_of(to.unsafeGetTensorImpl());
  auto offset = static_cast<uint64_t>(place.offset) * to.itemsize();
  place.session.upload(place.slot, offset, host, later);
}

void copy_on_worker(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  torch::jit::Stack stack{to, from, non_blocking};
  fallback(op, &stack);
}

void copy_to_sky(const at::Tensor& to, const at::Tensor& from, bool later) {
  auto host = from.to(to.scalar_type()).expand(to.sizes()).contiguous();
  if (to.is_contiguous()) {
    upload(to, host, later);
    return;
  }
  auto staged = at::empty(to.sizes(), to.options().memory_format(at::MemoryFormat::Contiguous));
  upload(staged, host, later);
  copy_on_worker(to, staged, false);
}

// As with page-locked memory elsewhere, only pinned memory is filled while the program goes on.
void copy_to_host(at::Tensor to, const at::Tensor& from, bool later) {
  auto& session = Session::of(from.unsafeGetTensorImpl());
  bool direct = to.device().is_cpu() && to.is_contiguous() && to.scalar_type() == from.scalar_type() &&
                to.sizes() == from.sizes();
  if (later && direct && is_pinned(to.const_data_ptr())) {
    session.fetch_later(from, to);
    return;
  }
  auto host = direct ? to : at::empty(from.sizes(), at::TensorOptions().dtype(from.scalar_type()));
  session.fetch(from, host.mutable_data_ptr(), host.nbytes());
  if (!direct) to.copy_(host);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  if (self.is_same(given)) return self;
  auto to = self;
  auto from = given;
  // Lazy conjugation and negation are bits here and must become values on the way.
  if (to.is_conj()) {
    to = to.conj();
    from = from.conj();
  }
  if (to.is_neg()) {
    to = to._neg_view();
    from = from._neg_view();
  }
  from = from.resolve_conj().resolve_neg();
  if (!to.numel()) {
    (void)from.expand(to.sizes());
    return self;
  }
  if (is_sky(to) && is_sky(from)) {
    if (to.device() == from.device()) copy_on_worker(to, from, non_blocking);
    else copy_between(to, from);
  } else if (is_sky(to)) {
    copy_to_sky(to, from.cpu(), non_blocking);
  } else {
    copy_to_host(to, from, non_blocking);
  }
  return self;
}

// From anywhere to anywhere, as on other devices; in one operation where all is on one of ours.
void foreach_copy_(at::TensorList to, at::TensorList from, bool non_blocking) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_foreach_copy_", "");
  SKY_CHECK(!to.empty(), "Tensor list must have at least one tensor.");
  SKY_CHECK(to.size() == from.size(), "Tensor lists must have the same number of tensors, got ", to.size(), " and ",
            from.size());
  auto is_there = [&](const at::Tensor& t) { return is_sky(t) && t.device() == to[0].device(); };
  if (std::all_of(to.begin(), to.end(), is_there) && std::all_of(from.begin(), from.end(), is_there)) {
    torch::jit::Stack stack{to, from, non_blocking};
    fallback(op, &stack);
    return;
  }
  for (size_t i = 0; i < to.size(); i++) to[i].copy_(from[i], non_blocking);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  copy_(target, from, non_blocking);
  return to;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  SKY_CHECK(self.numel() > 0, "_local_scalar_dense: Empty tensor not supported");
  auto first = self.as_strided({}, {});
  auto host = at::empty({}, at::TensorOptions().dtype(self.scalar_type()));
  Session::of(first.unsafeGetTensorImpl()).fetch(first, host.mutable_data_ptr(), host.nbytes());
  return host.item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  SKY_CHECK(stream.device() == self.device(), "a tensor of ", self.device(), " is not used on a stream of ",
            stream.device());
  auto place = Session::place_of(self.unsafeGetTensorImpl());
  place.session.used_on(place.slot, static_cast<uint32_t>(stream.id()));
}

// Views share the storage and never travel.

at::Tensor view(const at::Tensor& self, c10::IntArrayRef sizes) { return at::native::view(self, sizes); }

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}

at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

// Storage.

void ensure(c10::StorageImpl* storage, uint64_t bytes) {
  if (storage->nbytes() < bytes)
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(
        c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)), bytes);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  // As on the CPU, a tensor of that size already keeps its strides.
  if (impl->sizes() != sizes) {
    at::detail::check_size_nonnegative(sizes);
    impl->set_sizes_contiguous(sizes);
  }
  if (format) {
    SKY_CHECK(*format != at::MemoryFormat::Preserve, "Unsupported memory format ", *format);
    impl->empty_tensor_restride(*format);
  }
  auto bytes = self.numel() ? at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), self.itemsize(),
                                                               self.storage_offset())
                            : 0;
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  auto before = static_cast<int64_t>(storage->nbytes());
  ensure(storage, bytes);
  if (C10_UNLIKELY(fills_memory())) at::native::fill_resize_deterministic_(self, before);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  SKY_CHECK(offset >= 0, "Tensor: invalid storage offset ", offset);
  SKY_CHECK(self.device() == source.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
            "\" to a storage on different device \"", source.device(), "\".");
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(offset);
  // Without strides it is a resize, and as there, the same size keeps its strides.
  if (strides.data()) impl->set_sizes_and_strides(sizes, strides);
  else if (impl->sizes() != sizes) impl->set_sizes_contiguous(sizes);
  auto bytes = self.numel() ? at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), self.itemsize(),
                                                               static_cast<size_t>(offset))
                            : 0;
  ensure(impl->unsafe_storage().unsafeGetStorageImpl(), bytes);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  auto items = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {items}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// `.data =` and `module.to()` may put a tensor's content on another device, as between CPU and CUDA.
bool may_take_content(const at::Tensor& self, const at::Tensor& from) {
  auto is_dense = [](const at::Tensor& t) {
    return t.layout() == c10::kStrided && !t.is_quantized() && !t.is_nested() && !t.is_meta();
  };
  return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set()) ||
         (is_dense(self) && is_dense(from));
}

// Both share memory until one is written to, when `Session::unshare` copies it.
at::Tensor lazy_clone(const at::Tensor& self) {
  auto* impl = self.unsafeGetTensorImpl();
  auto shared = c10::impl::cow::lazy_clone_storage(*impl->unsafe_storage().unsafeGetStorageImpl());
  if (!shared) return self.clone();  // a slice of a storage, or more than 4 GiB
  auto copy = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(shared)), self.key_set(), self.dtype());
  copy->set_sizes_and_strides(self.sizes(), self.strides(), self.storage_offset());
  return at::Tensor(std::move(copy));
}

at::Tensor& set_nothing(at::Tensor& self) {
  auto& session = session_at(self.device().index());
  return set_storage(self, session.new_storage(0, true), 0, {0}, {});
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", efficient_zeros);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_lazy_clone", lazy_clone);
  m.impl("_foreach_copy_", foreach_copy_);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("view", view);
  m.impl("_unsafe_view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_has_compatible_shallow_copy_type", may_take_content);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", may_take_content); }

}  // namespace
}  // namespace sky
