// Ways of a device's core whose other end is the input of a fuzzer: what comes over each, and then the end.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "../../src/skyward/device/csrc/wire/coding.h"
#include "../../src/skyward/device/csrc/wire/way.h"

// What cannot be had is an exception, as without the address sanitizer, whose own operators end the process.
void* operator new(size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
void* operator new(size_t size) {
  if (auto* made = std::malloc(size)) return made;
  throw std::bad_alloc();
}
void* operator new[](size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
void* operator new[](size_t size) { return operator new(size); }
void operator delete(void* made) noexcept { std::free(made); }
void operator delete[](void* made) noexcept { std::free(made); }
void operator delete(void* made, size_t) noexcept { std::free(made); }
void operator delete[](void* made, size_t) noexcept { std::free(made); }

namespace fuzz {

struct Coming {
  std::string bytes;
  size_t at = 0;

  int64_t take(void* into, uint64_t size) {
    auto n = std::min<uint64_t>(size, bytes.size() - at);
    if (!n && size) return -1;
    if (into) std::memcpy(into, bytes.data() + at, n);
    at += n;
    return static_cast<int64_t>(n);
  }
};

// The records or replies, and the bytes of tensors.
inline std::array<Coming, 2> coming;

inline Coming& of(void* link) { return coming[reinterpret_cast<uintptr_t>(link) - 1]; }

inline const sky_link_functions kLinks{
    [](void*, const void*, uint64_t size, int) { return static_cast<int64_t>(size); },
    [](void* link, void* into, uint64_t size, int) { return of(link).take(into, size); },
    [](void* link, int) -> int64_t { return of(link).at < of(link).bytes.size() ? 1 : -1; },
    [](void* const*, int, const void*, uint64_t size, uint64_t, uint64_t, void* owner, void (*release)(void*)) {
      if (owner) release(owner);
      return static_cast<int64_t>(size);
    },
    [](void* const* links, int, void* into, uint64_t size, uint64_t, uint64_t, uint64_t* progress, int,
       void (*reached)(void*, uint64_t), void* context) -> int64_t {
      auto got = of(links[0]).take(into ? static_cast<char*>(into) + progress[0] : nullptr, size - progress[0]);
      if (got < 0) return got;
      progress[0] += static_cast<uint64_t>(got);
      if (progress[0] < size) return -1;
      if (reached) reached(context, size);
      return 1;
    },
    [](void*, const char*) {},
    [](void*, char* into, size_t size) {
      if (size) *into = '\0';
    },
};

// An input is a byte, how much of the rest are bytes of tensors, in parts of 64, and then these after the others.
inline std::vector<sky::Way> ways(const uint8_t* data, size_t size) {
  sky::link_functions = &kLinks;
  auto* from = reinterpret_cast<const char*>(data) + 1;
  auto tail = std::min<size_t>(size - 1, data[0] * size_t{64});
  coming[0] = {{from, size - 1 - tail}};
  coming[1] = {{from + size - 1 - tail, tail}};
  return {sky::Way(1, false), sky::Way(2, false)};
}

}  // namespace fuzz
