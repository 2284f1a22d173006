// What went wrong with an operation, as it is told to the client.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <memory>
#include <string>

#include "../wire/records.h"

namespace sky {

struct Failure {
  std::string text;
  Status kind;
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
