// What an operation costs when C++ calls it directly, below autograd as the worker does.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>

#include <ctime>

namespace {

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace

// Seconds of this thread's CPU time per call of operation 0 (add), 1 (mm) or 2 (layer norm).
extern "C" double floor_seconds(int operation, int calls, int width) {
  at::AutoDispatchBelowADInplaceOrView below;
  at::NoGradGuard no_grad;
  auto x = at::ones({width, width}), weight = at::ones({width}), bias = at::ones({width});
  auto start = thread_seconds();
  for (int i = 0; i < calls; i++) {
    if (operation == 0) at::add(x, 1);
    if (operation == 1) at::mm(x, x);
    if (operation == 2) at::native_layer_norm(x, {width}, weight, bias, 1e-5);
  }
  return (thread_seconds() - start) / calls;
}
