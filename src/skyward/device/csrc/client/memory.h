// What PyTorch's allocator interface is for this device: slots for storage, the worker's figures for statistics.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace sky {

c10::Allocator* storage_allocator(int index);

}  // namespace sky
