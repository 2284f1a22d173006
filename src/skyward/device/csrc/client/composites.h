// What PyTorch computes in parts and decides by the device: taken as a GPU would where the worker has one.
#pragma once

#include <torch/library.h>

#include "session.h"

namespace sky {

// Whether a tensor is a sky tensor with memory, whose worker computes with CUDA.
bool on_gpu(const at::Tensor& t);

// Whether the worker's cuDNN would take it.
bool takes_cudnn(const at::Tensor& t);

// Runs an operation for which we have a kernel as if we had none: above autograd, or on the worker.
template <c10::DispatchKey key>
void run_as_registered(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if constexpr (key == c10::DispatchKey::Autograd) op.callBoxedForDispatchKey(key, *stack);
  else fallback(op, stack);
}

}  // namespace sky
