// The worker core's C interface: one call is one client's session, without Python and without the GIL.
#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <sstream>

#include "exports.h"
#include "kept_storages.h"
#include "peers.h"
#include "session.h"

// Serves one client until it leaves. Returns 0, or 1 with a message for the log.
extern "C" int sky_worker_serve(const uint64_t* ways, int count, int shares_memory, const char* device,
                                int (*make_link)(const char*, char*, size_t), void (*end_link)(uint64_t),
                                int (*join)(const char*, char*, size_t), char* message, size_t size) {
  try {
    c10::Device real{std::string(device)};
    if (real.is_cuda() && !real.has_index()) real = c10::Device(c10::kCUDA, 0);
    c10::OptionalDeviceGuard guard;
    if (real.is_cuda()) at::globalContext().lazyInitDevice(c10::kCUDA);
    if (!real.is_cpu()) guard.reset_device(real);
    at::AutoDispatchBelowADInplaceOrView below;
    at::NoGradGuard no_grad;
    sky::Session(sky::ways_of(ways, count, shares_memory != 0), shares_memory != 0, real, {make_link, end_link, join})
        .serve();
    return 0;
  } catch (const std::exception& e) {
    snprintf(message, size, "%s", e.what());
    return 1;
  }
}

// Torch has not been imported yet: `import` does that, when an operator is named that only Python may know, or one of
// `names`, a line each: Python may have another kernel for it.
extern "C" void sky_worker_import_later(void (*import)(), const char* names) {
  sky::later_import().names.clear();
  std::istringstream lines(names);
  for (std::string line; std::getline(lines, line);) sky::later_import().names.insert(line);
  sky::later_import().run = import;
}

extern "C" void sky_worker_import_operator(int (*import)(const char*, char*, size_t)) { sky::import_operator = import; }

extern "C" void sky_worker_use_captures(int (*begin)(), uint64_t (*end)(int), int (*run)(uint64_t),
                                        void (*drop)(uint64_t)) {
  sky::captures = {begin, end, run, drop};
}

// What torch's libraries know of this machine. `own_torch.py` has the same.
struct About {
  int64_t gpus;
  char instructions[64];  // the newest vector instructions of this processor that torch uses
};

extern "C" void sky_worker_about(About* about) {
  *about = {};
  snprintf(about->instructions, sizeof about->instructions, "%s", at::get_cpu_capability().c_str());
  try {
    about->gpus = c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount();
  } catch (const std::exception&) {
    // A torch for the CPU alone.
  }
}

// Whether a GPU cannot be used: it may be another process's alone, or full.
extern "C" int sky_worker_try(const char* device) {
  try {
    at::globalContext().lazyInitDevice(c10::kCUDA);
    c10::impl::VirtualGuardImpl(c10::kCUDA).synchronizeDevice(c10::Device{std::string(device)}.index());
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

// Of the library of links, once, before anything comes over a network.
extern "C" void sky_worker_use_links(const sky_link_functions* functions) { sky::link_functions = functions; }

// A link to the process of another device, over a socket, or over links of which all but the first carry long copies.
// The core uses a duplicate of the socket. `own` and `name` are the two devices' names if this side has dialed;
// else `own` is null. Returns 0, or 1 with a message.
extern "C" int sky_worker_link(uint64_t link, const uint64_t* ways, int count, int shares_memory, const char* own,
                               const char* name, char* message, size_t size) {
  try {
    sky::Peers::all().add(link, sky::ways_of(ways, count, shares_memory != 0), shares_memory != 0, own, name);
    return 0;
  } catch (const std::exception& e) {
    snprintf(message, size, "%s", e.what());
    return 1;
  }
}

// While the session joins a mesh: which rank this is, and those that it passes its records on to. `tree` is for them.
// Where a rank has failed, others are awaited for `patience` seconds.
extern "C" void sky_worker_rank(uint32_t number, const char* name, double patience) {
  sky::Ranks::all().begin(number, name, patience);
}

extern "C" int sky_worker_add_rank(const char* name, const uint64_t* ways, int count, int shares_memory,
                                   const char* tree, char* message, size_t size) {
  try {
    sky::Ranks::all().add(name, sky::ways_of(ways, count, shares_memory != 0), shares_memory != 0, tree);
    return 0;
  } catch (const std::exception& e) {
    snprintf(message, size, "%s", e.what());
    return 1;
  }
}

// The link's connections are lost for good.
extern "C" void sky_worker_lose_link(uint64_t link, const char* why) { sky::Peers::all().lose(link, why); }

// The link's connections are closed. Returns when no thread of the core uses them.
extern "C" void sky_worker_free_link(uint64_t link) { sky::Peers::all().free(link); }

// Storages that stay when the client leaves, by their numbers. Returns 0, or 1 if one of them is not there: then none
// is held. Each is held until it is dropped as often.
extern "C" int sky_worker_hold(const uint64_t* numbers, uint64_t count) {
  return !sky::KeptStorages::all().hold({numbers, numbers + count});
}

extern "C" void sky_worker_drop(const uint64_t* numbers, uint64_t count) {
  sky::KeptStorages::all().drop({numbers, numbers + count});
}

extern "C" uint64_t sky_worker_held() { return sky::KeptStorages::all().count(); }

// After a session: waits for the device, and gives back all memory but what is held. Returns 0, or 1 with a message if
// the device cannot be used any more.
extern "C" int sky_worker_rest(const char* device, char* message, size_t size) {
  try {
    c10::Device real{std::string(device)};
    sky::KeptStorages::all().sweep();
    sky::free_idle(true);
    if (real.is_cuda()) {
      c10::impl::VirtualGuardImpl(c10::kCUDA).synchronizeDevice(real.has_index() ? real.index() : 0);
      sky::collect_exports();
      c10::getDeviceAllocator(c10::kCUDA)->emptyCache();
    }
    return 0;
  } catch (const std::exception& e) {
    snprintf(message, size, "%s", e.what());
    return 1;
  }
}
