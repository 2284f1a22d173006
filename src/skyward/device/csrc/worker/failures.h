// What went wrong with an operation, as it is told to the client.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <memory>
#include <string>

#include "../wire/records.h"

namespace sky {

struct Failure {
  std::string text;  // as PyTorch says it
  Status kind;
  std::string where;       // the operation's name, or what was done
  uint64_t operation = 0;  // its number

  // What the client is told at a later wait, where the text alone would not say what it is about. The text comes
  // first: programs look at how a message begins.
  std::string told() const {
    if (!operation) return text + "\n(" + where + ")";
    return text + "\n(" + where + ", operation " + std::to_string(operation) + std::string(kNoticedLate) + ")";
  }
};
using Reason = std::shared_ptr<const Failure>;

// Thrown where a tensor is read that an earlier failure should have written.
struct Poisoned {
  Reason reason;
};

inline Status kind_of(const std::exception& e) {
  if (dynamic_cast<const c10::IndexError*>(&e)) return kIndexError;
  if (dynamic_cast<const c10::ValueError*>(&e)) return kValueError;
  if (dynamic_cast<const c10::TypeError*>(&e)) return kTypeError;
  if (dynamic_cast<const c10::NotImplementedError*>(&e)) return kNotImplemented;
  if (dynamic_cast<const c10::LinAlgError*>(&e)) return kLinearAlgebra;
  if (dynamic_cast<const c10::OutOfMemoryError*>(&e)) return kOutOfMemory;
  return kFailed;
}

// Without C++ stack traces, which say nothing to a user of Python.
inline std::string text_of(const std::exception& e) {
  auto* ours = dynamic_cast<const c10::Error*>(&e);
  return ours ? ours->what_without_backtrace() : e.what();
}

}  // namespace sky
