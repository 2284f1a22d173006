// What is known of an operation before it is ever called.
#pragma once

#include "session.h"

namespace sky {

// The kinds of products whose internal precision a user can choose.
enum class Product : uint8_t { kNone, kMatmul, kConvolution, kRecurrent };

struct OpInfo {
  c10::OperatorName own_name{"", ""};  // a copy: a library of the user's may take its operations back
  const c10::OperatorName* name = &own_name;
  std::optional<c10::FunctionSchema> schema;  // of another library's, which may define it anew
  size_t arguments = 0;
  std::vector<bool> number;    // arguments of type Scalar
  std::vector<bool> written;   // arguments it writes to
  std::vector<size_t> outs;    // arguments it may resize
  std::vector<ListOf> list;    // element type of list arguments
  int device = -1;             // the argument that says where a tensor like the first is made
  std::vector<int> returns;    // the argument each return is, or -1 if it is new
  bool asks_always = false;    // its shapes depend on data
  bool scalars_shape = false;  // scalars decide the result's shape or value: arange and its kin
  bool indexes = false;        // a mask among its indices makes it depend on data
  bool only_writes = false;    // it makes no tensors and resizes none
  bool names_graphs = false;   // it is about graphs of this process, by their numbers
  bool drops_graph = false;    // garbage was collected, which comes in the middle of anything
  bool is_foreign = false;     // it is of another library than PyTorch
  bool is_view = false;        // it is that, and returns an argument's memory without writing to it
  Product product = Product::kNone;
  const c10::KernelFunction* shape = nullptr;  // what works out the shapes of its results
};

const OpInfo& info_of(const c10::OperatorHandle& op);

// Python's answer to which modules register an operation of another library, a line each; null where no Python has said
// it. Returns 1 with a reason if it does not know.
inline int (*modules_of)(const char* name, char* text, uint64_t size) = nullptr;

// Unlike TensorImpl's own, exact for dimensions of size one, whose strides results may inherit.
bool strictly_contiguous(c10::IntArrayRef sizes, c10::IntArrayRef strides);

}  // namespace sky
