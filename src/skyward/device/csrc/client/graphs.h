// Compiled graphs: what a call will return, which Python works out from the graph's symbols.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <vector>

namespace sky {

// Tensors without memory that are as those which this call of `skyward::run` will return; none if nobody knows.
std::optional<std::vector<at::Tensor>> promised_results(const c10::IValue* args);

}  // namespace sky
