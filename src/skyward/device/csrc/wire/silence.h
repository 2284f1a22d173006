// No warnings of PyTorch from this thread, where the other end warns of the same.
#pragma once

#include <c10/util/Exception.h>

namespace sky {

class Silence final : c10::WarningHandler {
 public:
  Silence() = default;
  Silence(const Silence&) = delete;
  void process(const c10::Warning&) override {}

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

}  // namespace sky
