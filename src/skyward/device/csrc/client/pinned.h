// Page-locked memory: host memory that the workers of this host share, and that GPUs copy from and to directly.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <optional>

namespace sky {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* at);

// Where pinned memory is in what can be shared with other processes.
struct PinnedPlace {
  uint32_t area;
  uint64_t offset;
  int descriptor;
  uint64_t area_size;
};

// Where these bytes are, if all of them are in one block that can be shared. The block is not given out again before
// the session of that serial has finished its copy of that number.
std::optional<PinnedPlace> use_pinned(const void* at, uint64_t bytes, uint32_t serial, uint64_t copy);

// A forked child is not to give out what the parent has; once per process.
void guard_pinned_in_forks();

}  // namespace sky
