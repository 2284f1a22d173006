// What PyTorch's allocator interface is for this device: slots for storage, the worker's figures for statistics.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace sky {

c10::Allocator* storage_allocator();

// Host memory that copies may use while the program goes on, as page-locked memory is elsewhere.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* at);

}  // namespace sky
