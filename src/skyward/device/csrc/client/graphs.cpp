#include "graphs.h"

#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

namespace sky {
namespace {

// Where the arguments of `skyward::run` have the graph's number and its sizes.
constexpr size_t kGraphAt = 1, kNumbersAt = 5;

struct Promised {
  std::vector<int64_t> numbers;
  std::vector<at::Tensor> results;
};

std::mutex promised_mutex;
// By the graph's number: for the sizes that it was called with last. The templates have all that was used.
std::unordered_map<int64_t, Promised> promised;

// skyward::promise(Tensor[]? results, int graph, int[] numbers) -> (). Without results: the graph is gone.
void take_promise(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto args = torch::jit::last(*stack, 3);
  auto graph = args[1].toInt();
  if (args[0].isNone()) {
    std::lock_guard lock(promised_mutex);
    promised.erase(graph);
  } else {
    Promised made{args[2].toIntVector(), {}};
    // Not those that are given: Python has a hand in their lives, and may end before this does.
    for (const at::Tensor& t : args[0].toTensorVector())
      made.results.emplace_back(at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type()));
    std::lock_guard lock(promised_mutex);
    promised[graph] = std::move(made);
  }
  torch::jit::drop(*stack, 3);
}

}  // namespace

std::optional<std::vector<at::Tensor>> promised_results(const c10::IValue* args) {
  auto numbers = args[kNumbersAt].toIntVector();
  std::lock_guard lock(promised_mutex);
  auto found = promised.find(args[kGraphAt].toInt());
  if (found == promised.end() || found->second.numbers != numbers) return std::nullopt;
  return found->second.results;
}

TORCH_LIBRARY_IMPL(skyward, CompositeExplicitAutograd, m) {
  m.impl("promise", torch::CppFunction::makeFromBoxedFunction<&take_promise>());
}

}  // namespace sky
