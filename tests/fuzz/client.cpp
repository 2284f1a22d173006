// What a worker answers to the client of a device: shapes, values, warnings, clocks, recordings, and the bytes of
// tensors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/split.h>
#include <ATen/ops/unique_dim.h>

#include "../../src/skyward/device/csrc/client/registry.cpp"
#include "ways.h"

namespace {

// A use of the device that asks the worker.
void use(uint8_t which, const at::Tensor& t, sky::Session& session) {
  switch (which % 12) {
    case 0: at::nonzero(t); break;
    case 1: at::sort(t, 0, false); break;
    case 2: t.cpu(); break;
    case 3: at::empty({64 << 10}, t.options()).cpu(); break;
    case 4: session.synchronize(sky::kAllStreams); break;
    case 5: session.memory(sky::kTellMemory); break;
    case 6: session.traits(); break;
    case 7:
      session.start_recording();
      at::add(t, t);
      session.stop_recording();
      break;
    case 8: session.event(1, sky::kElapsed, 2); break;
    case 9: {
      auto into = at::empty({3}, at::TensorOptions().dtype(at::kInt));
      session.fetch_later(t, into);
      session.synchronize(0);
      break;
    }
    case 10: {
      auto out = at::empty({0}, t.options().dtype(at::kLong));
      at::nonzero_out(out, t);
      break;
    }
    default: session.numbered({sky::Session::place_of(t.unsafeGetTensorImpl()).slot});
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 5) return 0;
  std::array<uint8_t, 4> uses;
  std::copy_n(data, uses.size(), uses.begin());
  auto& session = sky::open_session(0, fuzz::ways(data + 4, size - 4), false, true);
  {
    auto t = at::empty({3}, at::TensorOptions().dtype(at::kInt).device(c10::Device(sky::kSky, 0)));
    for (auto which : uses) try {
        use(which, t, session);
      } catch (const std::exception&) {
        // What the program would see.
      }
  }
  sky::close_session(0, "the input ends");
  std::lock_guard lock(sky::registry_mutex);
  sky::by_serial[session.serial] = nullptr;
  sky::sessions.clear();
  return 0;
}
