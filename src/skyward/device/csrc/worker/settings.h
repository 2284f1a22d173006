// The client's switches, set here: operations are to compute as they would in the client's own process.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace sky {

void settle(uint64_t settings, c10::Device device);

}  // namespace sky
