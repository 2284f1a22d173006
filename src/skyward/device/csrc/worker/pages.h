// Page-locked memory for a GPU. There are no CUDA headers to build with, but where there is a GPU its runtime is in
// this process.
#pragma once

#include <dlfcn.h>

#include <cstddef>

namespace sky {

// A GPU then copies from and to this memory directly. Where that fails, it copies all the same, only slower.
inline void lock_pages(void* memory, size_t bytes) {
  using Register = int (*)(void*, size_t, unsigned);
  if (auto lock = reinterpret_cast<Register>(::dlsym(RTLD_DEFAULT, "cudaHostRegister"))) lock(memory, bytes, 0);
}

inline void unlock_pages(void* memory) {
  using Unregister = int (*)(void*);
  if (auto unlock = reinterpret_cast<Unregister>(::dlsym(RTLD_DEFAULT, "cudaHostUnregister"))) unlock(memory);
}

}  // namespace sky
