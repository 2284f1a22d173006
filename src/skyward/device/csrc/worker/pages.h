// Page-locked memory for a GPU, and numbers in it that the GPU waits for. There are no CUDA headers to build with, but
// where there is a GPU its runtime is in this process.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>

namespace sky {

// CUDA keeps an error until someone asks for it, and PyTorch would take it for one of the next kernel.
inline void forget_cuda_error() {
  using LastError = int (*)();
  if (auto last = reinterpret_cast<LastError>(::dlsym(RTLD_DEFAULT, "cudaGetLastError"))) last();
}

// A GPU then copies from and to this memory directly. Where that fails, it copies all the same, only slower.
inline void lock_pages(void* memory, size_t bytes) {
  using Register = int (*)(void*, size_t, unsigned);
  auto lock = reinterpret_cast<Register>(::dlsym(RTLD_DEFAULT, "cudaHostRegister"));
  if (lock && lock(memory, bytes, 0)) forget_cuda_error();
}

inline void unlock_pages(void* memory) {
  using Unregister = int (*)(void*);
  auto unlock = reinterpret_cast<Unregister>(::dlsym(RTLD_DEFAULT, "cudaHostUnregister"));
  if (unlock && unlock(memory)) forget_cuda_error();
}

// Has a GPU wait, on the default stream of its current device, until the number there is as large; false where it
// cannot.
inline bool gpu_awaits(const void* place, uint32_t number) {
  using Wait = int (*)(void* stream, uint64_t place, uint32_t number, unsigned flags);
  static const auto wait = [] {
    auto* driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Wait>(driver ? ::dlsym(driver, "cuStreamWaitValue32_v2") : nullptr);
  }();
  return wait && !wait(nullptr, reinterpret_cast<uint64_t>(place), number, /*at least*/ 0);
}

}  // namespace sky
