// What a client sends to the worker of a device: definitions, operations, memory, events, and the bytes of tensors.
#include "../../src/skyward/device/csrc/worker/session.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include "ways.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  at::globalContext();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (!size) return 0;
  auto ways = fuzz::ways(data, size);
  // The fuzzer changes records, and not their coding, which has a target of its own.
  std::string coded;
  for (std::string_view left = fuzz::coming[0].bytes; !left.empty();) {
    auto part = left.substr(0, 31);
    coded.push_back(static_cast<char>(part.size() << 2 | sky::kLiteral));
    coded.append(part);
    left.remove_prefix(part.size());
  }
  fuzz::coming[0].bytes = coded;
  at::AutoDispatchBelowADInplaceOrView below;
  at::NoGradGuard no_grad;
  try {
    sky::Session(ways, false, c10::Device(c10::kCPU)).serve();
  } catch (const std::exception&) {
    // It ends with a message for the log.
  }
  return 0;
}
