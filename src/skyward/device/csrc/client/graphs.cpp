#include "graphs.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "session.h"

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

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// One graph on the worker, as `skyward::run` names it.
struct Graph {
  at::Tensor token;
  int64_t number = -1;
};

// How a function that torch.compile has made is called: which tensors go where. All is numbers of places: in a list of
// `given` tensors, of those that the forward graph has `made`, and so on.
struct Plan {
  ~Plan();

  Graph forward, backward;
  // Whether the worker may run it as a CUDA graph, for which it is told of each call of a compiled function.
  bool is_recorded = false;
  // Of those given: what the forward graph reads and writes to, and whose changes autograd is to notice.
  std::vector<int64_t> read, written, noticed;
  // Of those made: what the function returns; and for each, whether it has a gradient.
  std::vector<int64_t> results, differentiable;
  // What the backward graph reads: of those given, then of those made; -1 for the next tangent.
  std::vector<int64_t> saved;
  // For each that is given: of those that the backward graph has made, then of those that it reads; -1 for none.
  std::vector<int64_t> gradients;
  // Dropped by Python while a call's gradients may still be wanted; to be dropped with the plan.
  std::vector<Graph> left;
};

struct Known {
  std::shared_ptr<Plan> wanted;  // none once the function is gone
  std::weak_ptr<Plan> used;      // by what waits for its gradients, too
};

std::mutex plans_mutex;
// These live as long as the process: at its end the devices of their tensors may be gone before them.
auto& plans = *std::make_unique<std::unordered_map<int64_t, Known>>().release();
auto& to_drop = *std::make_unique<std::vector<Graph>>().release();

Plan::~Plan() {
  if (left.empty()) return;
  // Not here: this may be any thread, in the middle of anything.
  std::lock_guard lock(plans_mutex);
  to_drop.insert(to_drop.end(), left.begin(), left.end());
}

std::shared_ptr<Plan> plan_of(int64_t number) {
  std::lock_guard lock(plans_mutex);
  auto found = plans.find(number);
  auto plan = found == plans.end() ? nullptr : found->second.used.lock();
  SKY_CHECK(plan, "no compiled function has the number ", number, "; compile it again");
  return plan;
}

void drop_graph(const Graph& graph) {
  static const auto drop = c10::Dispatcher::singleton().findSchemaOrThrow("skyward::drop", "");
  torch::jit::Stack stack;
  torch::jit::push(stack, graph.token, graph.number);
  drop.callBoxed(stack);
}

void drop_what_is_left() {
  std::vector<Graph> gone;
  {
    std::lock_guard lock(plans_mutex);
    if (C10_LIKELY(to_drop.empty())) return;
    gone.swap(to_drop);
  }
  for (auto& graph : gone) try {
      drop_graph(graph);
    } catch (const std::exception&) {
      // A device that is gone has taken its worker's graphs along.
    }
}

// A backward graph belongs to the call of a compiled function that the worker was told of last.
std::atomic<int64_t> last_generation{0};

std::vector<at::Tensor> run_graph(const Graph& graph, int64_t generation, std::vector<at::Tensor> read,
                                  std::vector<at::Tensor> written, const std::vector<int64_t>& numbers) {
  static const auto run = c10::Dispatcher::singleton().findSchemaOrThrow("skyward::run", "");
  torch::jit::Stack stack;
  torch::jit::push(stack, graph.token, graph.number, at::Scalar(generation), std::move(read), std::move(written),
                   numbers);
  run.callBoxed(stack);
  return stack[0].toTensorVector();
}

// A call: what it is given, and what it makes.
struct Call {
  std::shared_ptr<Plan> plan;
  int64_t generation;
  const std::vector<at::Tensor>& given;
  std::vector<int64_t> numbers, backward_numbers;
  std::vector<at::Tensor> made{};

  void run() {
    std::vector<at::Tensor> read, written;
    read.reserve(plan->read.size());
    for (auto at : plan->read) read.push_back(given.at(at));
    for (auto at : plan->written) written.push_back(given.at(at));
    for (auto at : plan->noticed)
      if (!given.at(at).is_inference()) given[at].unsafeGetTensorImpl()->bump_version();
    if (plan->is_recorded) last_generation = generation;
    made = run_graph(plan->forward, plan->is_recorded ? generation : 0, std::move(read), std::move(written), numbers);
  }
};

// PyTorch 2.13 counts the references to its nodes in another way than those before.
template <typename N, typename... Args>
auto make_node(Args&&... args) {
  using Held = decltype(torch::autograd::Edge::function);
  if constexpr (std::is_same_v<Held, std::shared_ptr<Node>>)
    return std::shared_ptr<N>(new N(std::forward<Args>(args)...), [](auto* node) { deleteNode(node); });
  else return c10::make_intrusive<N>(std::forward<Args>(args)...);
}

// What AOTAutograd does around two compiled graphs, without Python: it saves tensors, and runs the backward graph.
struct CompiledFunction : Node {
  std::shared_ptr<Plan> plan;
  std::vector<int64_t> numbers;
  std::vector<SavedVariable> saved;
  bool is_released = false;

  std::string name() const override { return "CompiledFunctionOfSkyward"; }

  void release_variables() override {
    std::lock_guard lock(mutex_);
    saved.clear();
    is_released = true;
  }

  variable_list apply(variable_list&& tangents) override {
    std::lock_guard lock(mutex_);
    TORCH_CHECK(!is_released, torch::autograd::ERR_BACKWARD_TWICE);
    std::vector<at::Tensor> read;
    size_t next = 0, tangent = 0;
    for (auto at : plan->saved)
      read.push_back(at >= 0 ? saved.at(next++).unpack(getptr()) : taken(tangents, tangent++));
    variable_list gradients;
    {
      at::AutoGradMode off(false);
      auto made = run_graph(plan->backward, plan->is_recorded ? last_generation.load() : 0, read, {}, numbers);
      auto count = static_cast<int64_t>(made.size());
      for (auto at : plan->gradients)
        if (at >= 0) gradients.push_back(at < count ? made[at] : read.at(at - count));
    }
    if (at::GradMode::is_enabled()) refuse_second(gradients, read);
    return gradients;
  }

 private:
  // The graph is compiled for a tangent that is there, and is dense.
  at::Tensor taken(const variable_list& tangents, size_t at) {
    auto& tangent = tangents.at(at);
    return tangent.defined() ? tangent.contiguous() : input_metadata(at).zeros_like();
  }

  // As AOTAutograd: the gradient of a gradient is an error for who asks for it, and not for who only could.
  static void refuse_second(variable_list& gradients, const variable_list& read) {
    auto node = make_node<torch::autograd::Error>("torch.compile does not support double backward on a sky device");
    node->set_next_edges(torch::autograd::collect_next_edges(read));
    for (auto& each : gradients) {
      each = each.detach();
      torch::autograd::set_history(each, node);
    }
  }
};

// The results that have gradients get their node, if anybody wants these.
void keep_for_backward(const Call& call) {
  const auto& plan = *call.plan;
  variable_list variables;
  for (size_t i = 0; i < call.given.size(); i++)
    if (plan.gradients[i] >= 0) variables.push_back(call.given[i]);
  if (std::none_of(variables.begin(), variables.end(), [](auto& each) { return each.requires_grad(); })) return;
  auto node = make_node<CompiledFunction>();
  node->set_next_edges(torch::autograd::collect_next_edges(variables));
  for (size_t i = 0; i < plan.results.size(); i++)
    if (plan.differentiable[i]) torch::autograd::set_history(call.made.at(plan.results[i]), node);
  node->plan = call.plan;
  node->numbers = call.backward_numbers;
  auto given = static_cast<int64_t>(call.given.size());
  for (auto at : plan.saved) {
    if (at < 0) continue;
    if (at < given) node->saved.emplace_back(call.given[at], false);
    else node->saved.emplace_back(call.made.at(at - given), call.made[at - given].requires_grad());
  }
}

// skyward::call(Tensor token, int plan, Scalar generation, Tensor[] given, int[] numbers, int[] backward_numbers)
//     -> Tensor[]
void call(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  drop_what_is_left();
  auto args = torch::jit::last(*stack, 6);
  auto given = args[3].toTensorVector();
  Call one{plan_of(args[1].toInt()), args[2].toScalar().toLong(), given, args[4].toIntVector(), args[5].toIntVector()};
  const auto& plan = *one.plan;
  SKY_CHECK(given.size() == plan.gradients.size(), "a compiled function of ", plan.gradients.size(),
            " tensors was given ", given.size());
  {
    at::AutoGradMode off(false);
    one.run();
  }
  if (plan.backward.token.defined()) keep_for_backward(one);
  c10::List<at::Tensor> results;
  for (auto at : plan.results) results.push_back(one.made.at(at));
  torch::jit::drop(*stack, 6);
  torch::jit::push(*stack, std::move(results));
}

// skyward::plan(Tensor token, int plan, int graph, Tensor? backward, int backward_graph, bool is_recorded, int[] read,
//     int[] written, int[] noticed, int[] results, int[] differentiable, int[] saved, int[] gradients) -> ()
void take_plan(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  constexpr size_t kArguments = 13;
  auto args = torch::jit::last(*stack, kArguments);
  auto plan = std::make_shared<Plan>();
  // Not the tensors that are given, as above.
  plan->forward = {args[0].toTensor().detach(), args[2].toInt()};
  if (!args[3].isNone()) plan->backward = {args[3].toTensor().detach(), args[4].toInt()};
  plan->is_recorded = args[5].toBool();
  size_t next = 6;
  for (auto* each : {&plan->read, &plan->written, &plan->noticed, &plan->results, &plan->differentiable, &plan->saved,
                     &plan->gradients})
    *each = args[next++].toIntVector();
  {
    std::lock_guard lock(plans_mutex);
    plans[args[1].toInt()] = {plan, plan};
  }
  torch::jit::drop(*stack, kArguments);
}

// skyward::leave(Tensor token, int graph) -> (). The function that has the graph is gone.
void leave(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto args = torch::jit::last(*stack, 2);
  Graph graph{args[0].toTensor().detach(), args[1].toInt()};
  torch::jit::drop(*stack, 2);
  std::vector<std::shared_ptr<Plan>> gone;
  {
    std::lock_guard lock(plans_mutex);
    for (auto& [number, known] : plans)
      if (known.wanted &&
          (known.wanted->forward.number == graph.number || known.wanted->backward.number == graph.number))
        gone.push_back(std::move(known.wanted));
  }
  gone.clear();
  bool is_used = false;
  {
    std::lock_guard lock(plans_mutex);
    for (auto each = plans.begin(); each != plans.end();) {
      auto plan = each->second.used.lock();
      if (plan && plan->backward.number == graph.number) {
        plan->left.push_back(graph);
        is_used = true;
      }
      each = plan ? std::next(each) : plans.erase(each);
      gone.push_back(std::move(plan));  // it may be the last, whose end takes the lock
    }
  }
  gone.clear();
  drop_what_is_left();
  if (!is_used) drop_graph(graph);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(skyward, m) {
  m.def(
      "call(Tensor token, int plan, Scalar generation, Tensor[] given, int[] numbers, int[] backward_numbers)"
      " -> Tensor[]");
  m.def(
      "plan(Tensor token, int plan, int graph, Tensor? backward, int backward_graph, bool is_recorded, int[] read, "
      "int[] written, int[] noticed, int[] results, int[] differentiable, int[] saved, int[] gradients) -> ()");
  for (auto key : {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1})
    m.impl("call", torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&call>()));
  m.def("leave(Tensor token, int graph) -> ()");
  auto here = c10::DispatchKey::CompositeImplicitAutograd;
  m.impl("plan", torch::dispatch(here, torch::CppFunction::makeFromBoxedFunction<&take_plan>()));
  m.impl("leave", torch::dispatch(here, torch::CppFunction::makeFromBoxedFunction<&leave>()));
}

TORCH_LIBRARY_IMPL(skyward, CompositeExplicitAutograd, m) {
  m.impl("promise", torch::CppFunction::makeFromBoxedFunction<&take_promise>());
}

}  // namespace sky
