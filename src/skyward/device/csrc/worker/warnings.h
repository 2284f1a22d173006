// Warnings that PyTorch raises while operations run, kept for the client's next reply.
#pragma once

#include <c10/util/Exception.h>

#include <string>

#include "../wire/records.h"

namespace sky {

class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    // A loop that warns at each step and never waits repeats itself.
    if (count_ == kMost) return;
    count_++;
    auto& where = warning.source_location();
    bool deprecation = std::holds_alternative<c10::DeprecationWarning>(warning.type());
    written_.u8((deprecation ? kDeprecation : 0) | (warning.verbatim() ? kVerbatim : 0));
    written_.text(where.file ? where.file : "");
    written_.u32(where.line);
    written_.text(warning.msg());
  }

  // All since the last time; empty if there are none.
  std::string take() {
    auto taken = written_.bytes();
    written_.clear();
    count_ = 0;
    return taken;
  }

 private:
  static constexpr int kMost = 100;
  Writer written_;
  int count_ = 0;
};

}  // namespace sky
