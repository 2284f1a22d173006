// Rules: functions that work out an operation's results on tensors without memory, by the operation's name.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/ops/empty_like_native.h>

#include <string>
#include <unordered_map>

namespace sky {

using Rules = std::unordered_map<std::string, c10::KernelFunction>;

template <typename Signature>
void add(Rules& rules, const char* name, Signature* function) {
  rules.emplace(std::string("aten::") + name, c10::KernelFunction::makeFromUnboxedRuntimeFunction(function));
}

// What the worker computes on, for rules that depend on it; set around each call of a rule.
enum class Processor : uint8_t { kCpu, kCuda, kOther };
inline thread_local Processor ruled_for = Processor::kOther;

// Set by a rule that knows what its kernel does only as far as anyone looked: the worker confirms it first.
inline thread_local bool is_rule_unsure = false;

// What PyTorch's `empty_like` makes. Not through the dispatcher, whose entry for tensors without memory is Python's and
// has other strides where a size is one.
inline at::Tensor made_like(const at::Tensor& t, std::optional<at::ScalarType> dtype = std::nullopt,
                            std::optional<at::MemoryFormat> format = std::nullopt) {
  return at::native::empty_like(t, dtype, std::nullopt, std::nullopt, std::nullopt, format);
}

// Factories, elementwise operations, reductions and indexing.
void add_plain_rules(Rules& rules);
// Layers and their gradients: norms, dropout, attention, convolutions.
void add_layer_rules(Rules& rules);
// Attention on a GPU.
void add_gpu_rules(Rules& rules);

}  // namespace sky
