// The registry: every session of this process, by the index of its device and by its serial.
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <utility>

#include "links.h"

namespace sky {
namespace {

std::mutex registry_mutex;
// Never destroyed: storages are freed until the very end, and a forked child lacks the threads to join.
std::vector<std::unique_ptr<Session>>& sessions = *std::make_unique<std::vector<std::unique_ptr<Session>>>().release();
Session* by_index[kDevicesMax] = {};
// A storage's deleter looks sessions up without the lock.
std::atomic<Session*> by_serial[Address::kSerials] = {};
// Those whose place others have taken: a thread may still wait for one.
std::vector<std::unique_ptr<Session>>& former = *std::make_unique<std::vector<std::unique_ptr<Session>>>().release();
thread_local c10::DeviceIndex current = 0;
thread_local uint32_t current_streams[kDevicesMax] = {};

void disown_all() {
  for (auto& session : sessions) session->disown();
}

// What closed the last device of this index, if there was one.
void say_why_gone(c10::DeviceIndex index) {
  std::lock_guard lock(registry_mutex);
  for (auto each = sessions.rbegin(); each != sessions.rend(); ++each)
    if ((*each)->index == index) return (*each)->check_open();
}

}  // namespace

Session& session_at(c10::DeviceIndex index) {
  if (index < 0) index = current_device();
  if (index < kDevicesMax && !by_index[index]) say_why_gone(index);
  SKY_CHECK(index < kDevicesMax && by_index[index], "there is no device sky:", int(index),
            "; get one with compute.device()");
  return *by_index[index];
}

Session* session_by_serial(uint32_t serial) noexcept {
  return serial < Address::kSerials ? by_serial[serial].load(std::memory_order_acquire) : nullptr;
}

Session& open_session(int index, std::vector<Way> ways, bool shares_memory, bool on_cpu) {
  std::lock_guard lock(registry_mutex);
  if (sessions.capacity() < Address::kSerials - 1) {
    sessions.reserve(Address::kSerials - 1);
    pthread_atfork(nullptr, nullptr, disown_all);
    guard_pinned_in_forks();
  }
  SKY_CHECK(sessions.size() < sessions.capacity(), "this process has opened ", sessions.size(),
            " sky devices, which is the most; start another");
  auto serial = static_cast<uint32_t>(sessions.size() + 1);
  sessions.push_back(std::make_unique<Session>(index, serial, std::move(ways), shares_memory, on_cpu));
  by_serial[serial] = sessions.back().get();
  by_index[index] = sessions.back().get();
  return *sessions.back();
}

Session& reopen_session(uint32_t serial, std::vector<Way> ways, bool shares_memory, bool on_cpu,
                        const Inheritance& inheritance) {
  auto* before = session_by_serial(serial);
  SKY_CHECK(before && !before->is_disowned(), "no device of this process had the number ", serial);
  auto index = before->index;
  auto made = std::make_unique<Session>(index, serial, std::move(ways), shares_memory, on_cpu);
  made->inherit(*before, inheritance);
  std::lock_guard lock(registry_mutex);
  auto& place = sessions.at(serial - 1);
  former.push_back(std::exchange(place, std::move(made)));
  by_serial[serial] = place.get();
  by_index[index] = place.get();
  return *place;
}

void close_session(int index, const std::string& why) {
  Session* found = nullptr;
  {
    std::lock_guard lock(registry_mutex);
    for (auto each = sessions.rbegin(); each != sessions.rend() && !found; ++each)
      if ((*each)->index == index) found = each->get();
  }
  if (!found || found->is_disowned() || found->is_retired()) return;
  found->close(why);
  end_links(*found, why);
  found->retire();
}

int open_count() {
  int count = 0;
  for (int i = 0; i < kDevicesMax; i++)
    if (by_index[i]) count = i + 1;
  return count;
}

void unshare_everywhere(uint32_t area) {
  for (int i = 0; i < kDevicesMax; i++)
    if (auto* session = by_index[i]) session->unshare(area);
}

std::vector<int> open_indices() {
  std::vector<int> indices;
  for (int i = 0; i < kDevicesMax; i++)
    if (by_index[i]) indices.push_back(i);
  return indices;
}

bool in_bad_fork() {
  bool any = false;
  for (auto& session : sessions) {
    if (!session->is_disowned()) return false;
    any = true;
  }
  return any;
}

bool synchronous() {
  static const bool on = [] {
    auto* v = std::getenv("SKYWARD_DEVICE_SYNC");
    return v && *v && *v != '0';
  }();
  return on;
}

c10::DeviceIndex current_device() {
  // A new pool's device has a new index: "sky" alone then means the first device that is open.
  if (current >= kDevicesMax || !by_index[current])
    for (int i = 0; i < kDevicesMax; i++)
      if (by_index[i]) return static_cast<c10::DeviceIndex>(i);
  return current;
}
void set_current_device(c10::DeviceIndex index) { current = index < 0 ? 0 : index; }

uint32_t current_stream(c10::DeviceIndex index) { return current_streams[index]; }
void set_current_stream(c10::DeviceIndex index, uint32_t stream) { current_streams[index] = stream; }

void forget_index(const Session& session) {
  if (by_index[session.index] == &session) by_index[session.index] = nullptr;
}

}  // namespace sky
