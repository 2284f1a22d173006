// Refusals: what is not a dense tensor cannot be on a sky device, and says so where it would get there.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_nested_tensor_size_native.h>
#include <ATen/ops/_nested_tensor_storage_offsets_native.h>
#include <ATen/ops/_nested_tensor_strides_native.h>
#include <ATen/ops/empty_like_ops.h>
#include <torch/library.h>

#include "session.h"

namespace sky {
namespace {

[[noreturn]] void refuse(const std::string& name) {
  C10_THROW_ERROR(NotImplementedError,
                  name +
                      ": a sky device holds dense tensors only, not sparse, nested or quantized "
                      "ones; call .to_dense() (or .to_padded_tensor(), .dequantize()) on the CPU before .to(device)");
}

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) { refuse(op.schema().name()); }

torch::CppFunction refusal() { return torch::CppFunction::makeFromBoxedFunction<&refuse>(); }

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(refusal()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) { m.fallback(refusal()); }
TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) { m.fallback(refusal()); }
TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) { m.fallback(refusal()); }

// Their composite kernels win over the fallback, and would assemble the tensor from dense parts.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) { m.impl("_to_copy", refusal()); }
TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  m.impl("_to_copy", refusal());
  m.impl("_sparse_compressed_tensor_unsafe", refusal());
  m.impl("sparse_compressed_tensor.comp_plain_value", refusal());
  m.impl("sparse_compressed_tensor.comp_plain_value_size", refusal());
}

// Its arguments are tensors of the host, and only this one says where the result is to be.
void refuse_our_device(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  constexpr size_t kArguments = 5, kDeviceAt = 3;
  auto& device = torch::jit::peek(*stack, kDeviceAt, kArguments);
  if (device.isDevice() && device.toDevice().type() == kSky) refuse(op, stack);
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect),
                     stack);
}

// PyTorch makes one like a nested tensor of the host on any device. Others are as quick as before.
at::Tensor refuse_nested_like(c10::DispatchKeySet keys, const at::Tensor& self, std::optional<at::ScalarType> dtype,
                              std::optional<at::Layout> layout, std::optional<at::Device> device,
                              std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  if (C10_UNLIKELY(self.is_nested() && device && device->type() == kSky)) refuse("aten::empty_like");
  return at::_ops::empty_like::redispatch(
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect), self, dtype, layout,
      device, pinned, format);
}

TORCH_LIBRARY_IMPL(aten, BackendSelect, m) {
  m.impl("empty_like", &refuse_nested_like);
  m.impl("_nested_tensor_from_tensor_list", torch::CppFunction::makeFromBoxedFunction<&refuse_our_device>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (auto* name : {"_nested_tensor_from_tensor_list", "_nested_view_from_buffer", "_nested_view_from_buffer_copy",
                     "_nested_from_padded", "_nested_tensor_from_mask"})
    m.impl(name, refusal());
}

// What autograd asks of any tensor that needs a gradient, in functions that must not throw: an error would end the
// process. The answers are tensors of the host.
TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, m) {
  m.impl("_nested_tensor_size", at::native::_nested_tensor_size);
  m.impl("_nested_tensor_strides", at::native::_nested_tensor_strides);
  m.impl("_nested_tensor_storage_offsets", at::native::_nested_tensor_storage_offsets);
}

}  // namespace
}  // namespace sky
