// Which operations' results need no asking, and what they are.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>

#include <set>

#include "operations.h"

namespace sky {

// What works out the shapes of an operation's results; null if none is known.
const c10::KernelFunction* shape_kernel(const c10::OperatorName& name);

// Whether it makes no tensors and resizes none.
bool only_writes(const c10::OperatorName& name);

// Fills in what the template's operation returns; false: the worker must be asked.
bool infer(Session& session, const c10::OperatorHandle& op, const OpInfo& info, const c10::IValue* args, Template& t);

// The same for an operation of another library that works out its results' shapes from tensors without data. It is a
// guess until the worker has confirmed it.
bool guess_foreign(const c10::OperatorHandle& op, const OpInfo& info, const c10::IValue* args, Template& t);

// With the session's lock held. What a rule has worked out that is not sure stays a guess until the worker has
// confirmed it for such arguments: before it is defined, and after the worker's answer.
void hold_guess(const Session& session, Template& t);
void compare_guess(Session& session, Template& t);

}  // namespace sky
