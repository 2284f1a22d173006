// Warnings that PyTorch raised in the worker, raised again where the client waits.
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace sky {

class Warnings {
 public:
  // Takes the warnings off the front of a reply's content.
  void take_from(std::string& content);
  // Raises those taken so far, if this thread hands warnings to Python; otherwise another one will.
  void raise();

 private:
  std::vector<c10::Warning> waiting_;
};

}  // namespace sky
