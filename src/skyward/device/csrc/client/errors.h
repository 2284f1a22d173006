// Errors of the client core: Python raises them as skyward.DeviceError, which is a RuntimeError as well.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <exception>
#include <string>
#include <utility>

struct _object;  // a Python object; Python's headers are not needed for a pointer to one

namespace torch {

// Declared as PyTorch declares it: its Python binding catches this type and raises the class it names. PyTorch's
// own header cannot be included without Python's.
struct PyTorchError : public std::exception {
  PyTorchError() = default;
  PyTorchError(std::string text) : msg(std::move(text)) {}
  virtual _object* python_type() = 0;
  const char* what() const noexcept override { return msg.c_str(); }
  std::string msg;
};

}  // namespace torch

namespace sky {

// The class that Python raises; null where no Python has said it.
inline _object* error_class = nullptr;

struct DeviceError final : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  _object* python_type() override { return error_class; }
};

// The class that Python raises for Ctrl-C.
inline _object* interrupt_class = nullptr;

// Ctrl-C has ended a wait. What the worker answers later is skipped.
struct Interrupted final : torch::PyTorchError {
  _object* python_type() override { return interrupt_class; }
};

[[noreturn]] inline void fail(std::string text) {
  if (error_class) throw DeviceError(std::move(text));
  C10_THROW_ERROR(Error, std::move(text));
}

}  // namespace sky

#define SKY_CHECK(condition, ...) \
  if (C10_UNLIKELY(!(condition))) ::sky::fail(::c10::str(__VA_ARGS__))
