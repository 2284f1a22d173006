// The worker core's C interface: one call is one client's session, without Python and without the GIL.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include "session.h"

// Serves one client until it leaves. Returns 0, or 1 with a message for the log.
extern "C" int sky_worker_serve(int ops, const int* bulk, int bulk_count, int shares_memory, const char* device,
                                char* message, size_t size) {
  try {
    c10::Device real{std::string(device)};
    if (real.is_cuda() && !real.has_index()) real = c10::Device(c10::kCUDA, 0);
    c10::OptionalDeviceGuard guard;
    if (!real.is_cpu()) guard.reset_device(real);
    at::AutoDispatchBelowADInplaceOrView below;
    at::NoGradGuard no_grad;
    sky::Session(ops, std::vector<int>(bulk, bulk + bulk_count), shares_memory != 0, real).serve();
    return 0;
  } catch (const std::exception& e) {
    snprintf(message, size, "%s", e.what());
    return 1;
  }
}
