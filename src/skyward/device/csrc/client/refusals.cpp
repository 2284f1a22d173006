// Refusals: what is not a dense tensor cannot be on a sky device, and says so where it would get there.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace sky {
namespace {

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  C10_THROW_ERROR(NotImplementedError,
                  op.schema().name() +
                      ": a sky device holds dense tensors only, not sparse, nested or quantized "
                      "ones; call .to_dense() (or .to_padded_tensor(), .dequantize()) on the CPU before .to(device)");
}

torch::CppFunction refusal() { return torch::CppFunction::makeFromBoxedFunction<&refuse>(); }

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(refusal()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) { m.fallback(refusal()); }
TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) { m.fallback(refusal()); }
TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) { m.fallback(refusal()); }

// Their composite kernels win over the fallback, and would assemble the tensor from dense parts.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) { m.impl("_to_copy", refusal()); }
TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  m.impl("_to_copy", refusal());
  m.impl("sparse_compressed_tensor.comp_plain_value", refusal());
  m.impl("sparse_compressed_tensor.comp_plain_value_size", refusal());
}

}  // namespace
}  // namespace sky
