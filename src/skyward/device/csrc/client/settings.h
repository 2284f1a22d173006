// The switches of PyTorch that operations depend on: read here, and told to the worker when they change.
#pragma once

#include "operations.h"

namespace sky {

// All of them but the internal precision of float32.
uint64_t settings_now();

// The same with the precision for the operation's kind of product, where `known` says what the worker knows of the
// others. Such a precision is looked up in a hash table, which is too slow to do for all kinds at every operation.
uint64_t with_precision(uint64_t settings, uint64_t known, Product product, bool on_cpu);

}  // namespace sky
