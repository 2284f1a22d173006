// What the worker keeps of a function, to do it again when it is told to: one message in place of its operations.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "session.h"

namespace sky {

// A number that varies: a Field, and for one of a tensor's its dtype.
struct Varying {
  char field;
  c10::ScalarType dtype;
};

// What is copied into the program's own memory before it runs, and back after it if it writes to that.
struct ProgramInput {
  uint32_t slot;
  uint64_t bytes;
  bool is_written;
};

struct ProgramResult {
  uint32_t slot;   // in the program
  uint64_t bytes;  // of its storage
};

// A tensor over one of the results.
struct ResultTensor {
  uint32_t result;
  Layout layout;
  int64_t offset;
};

// A tensor that a function reaches, as it was when it was recorded. It lives as long as what runs the program.
struct Watched {
  const c10::TensorImpl* tensor;
  const void* data;
  size_t bytes;  // of its storage
  bool requires_grad;
  std::vector<int64_t> sizes, strides;
  int64_t sharers_most;  // over its storage, if it is to be the program's alone; else -1
};

class Program {
 public:
  // As `replay/program.py` writes it.
  Program(Session& session, Reader& r);
  ~Program();
  Program(const Program&) = delete;

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, const std::vector<double>& reals,
                              const std::vector<int64_t>& integers);

  void watch(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& sharers_most);
  bool finds_unchanged() const;

 private:
  std::string written(const std::vector<double>& reals, const std::vector<int64_t>& integers) const;
  void pin(int by);

  const uint32_t serial_, id_;
  uint64_t settings_before_, settings_after_;
  std::vector<uint32_t> reserved_, written_;
  std::vector<uint32_t> templates_;
  std::vector<Varying> varying_;
  std::vector<ProgramInput> inputs_;
  std::vector<ProgramResult> results_;
  std::vector<ResultTensor> tensors_;
  std::vector<Watched> watched_;
};

// By their numbers.
int64_t add_program(Session& session, std::string_view content);
void drop_program(int64_t number) noexcept;
bool finds_unchanged(int64_t number) noexcept;

}  // namespace sky
