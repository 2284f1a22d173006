#include "bulk.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <system_error>
#include <vector>

#include "../wire/socket.h"
#include "interpreter.h"

namespace sky {
namespace {

// Snapshots that wait for the link; beyond, the caller waits too.
constexpr uint64_t kQueuedMost = 256 << 20;

constexpr uint64_t kLargePage = 2 << 20;
// From here on threads make the pages, at most so many.
constexpr uint64_t kManyPages = 16 << 20;
constexpr unsigned kMakersMost = 3;

// Of Linux 5.14; the headers may be older.
[[maybe_unused]] constexpr int kPopulateWrite = 23;

#ifdef MADV_HUGEPAGE
// Whether the kernel has made the page there.
bool is_made(char* at) {
  unsigned char found = 0;
  return ::mincore(at, 1, &found) || (found & 1);
}
#endif

}  // namespace

PageMakers Bulk::make_pages([[maybe_unused]] void* into, [[maybe_unused]] uint64_t bytes) {
  PageMakers makers;
#ifdef MADV_HUGEPAGE
  auto begin = (reinterpret_cast<uintptr_t>(into) + kLargePage - 1) / kLargePage * kLargePage;
  auto end = (reinterpret_cast<uintptr_t>(into) + bytes) / kLargePage * kLargePage;
  if (begin >= end) return makers;
  auto* first = reinterpret_cast<char*>(begin);
  ::madvise(first, end - begin, MADV_HUGEPAGE);
  if (bytes < kManyPages || rings_ || (is_made(first) && is_made(first + (end - begin) / 2))) return makers;
  auto next = std::make_shared<std::atomic<uintptr_t>>(begin);
  makers.stop = std::make_shared<std::atomic<bool>>(false);
  auto make = [next, end, stop = makers.stop] {
    for (uintptr_t at; (at = next->fetch_add(kLargePage)) < end && !*stop;)
      if (::madvise(reinterpret_cast<void*>(at), kLargePage, kPopulateWrite)) return;
  };
  auto count = std::clamp(std::thread::hardware_concurrency() / 4, 1u, kMakersMost);
  try {
    for (unsigned i = 0; i < count; ++i) makers.threads.emplace_back(make);
  } catch (const std::system_error&) {
    // No more threads: who receives makes them.
  }
#endif
  return makers;
}

Bulk::Bulk(std::vector<Way> ways, SharedRings* rings) : ways_(std::move(ways)), rings_(rings) {}

Bulk::~Bulk() { retire(); }

void Bulk::retire() {
  close();
  if (sender_.joinable()) sender_.join();
  if (receiver_.joinable()) receiver_.join();
}

void Bulk::close() noexcept {
  ways_.close();
  if (rings_) {
    rings_->up.wake();
    rings_->down.wake();
  }
  std::lock_guard lock(mutex_);
  ending_ = true;
  changed_.notify_all();
}

void Bulk::check() {
  if (!broken_.empty()) throw Disconnected(broken_);
  if (ending_) throw Disconnected("it was closed");
}

void Bulk::write(const void* data, uint64_t size) {
  if (rings_) rings_->up.write(data, size);
  else ways_.send(data, size, 0, size);
}

void Bulk::read(void* into, uint64_t size) {
  if (rings_) rings_->down.read(into, size);
  else ways_.receive(into, size, 0, size);
}

// Goes on for a moment with a transfer; returns whether all of it is there. Without memory, it is dropped.
bool Bulk::read_some(void* into, uint64_t total, Stripes::Progress& progress) {
  if (!rings_) return ways_.receive_some(into, total, progress, kMoment);
  progress.resize(1);
  auto& done = progress.front();
  static thread_local std::vector<char> nowhere;
  if (!into) nowhere.resize(kRingStep);
  auto* to = into ? static_cast<char*>(into) + done : nowhere.data();
  done += rings_->down.read_some(to, into ? total - done : std::min<uint64_t>(total - done, kRingStep), &kMoment);
  return done == total;
}

// Waits for those that receive what comes before; Ctrl-C ends it.
void Bulk::await_landings(std::unique_lock<std::mutex>& lock) {
  while (!changed_.wait_for(lock, kLooksAfter, [&] { return landings_.empty() || ending_ || !broken_.empty(); })) {
    lock.unlock();  // who has Python's lock may want this one
    check_interrupts();
    lock.lock();
  }
}

void Bulk::send(const void* data, uint64_t size, bool later) {
  {
    std::unique_lock lock(mutex_);
    check();
    bool fits = parcels_.empty() && rings_ && size <= rings_->up.room();
    if (later && !fits) {
      await_room(lock, size);
      std::shared_ptr<char[]> copy(new char[size]);
      std::memcpy(copy.get(), data, size);
      auto* bytes = copy.get();
      return enqueue({bytes, size, std::move(copy)});
    }
    changed_.wait(lock, [&] { return parcels_.empty() || ending_ || !broken_.empty(); });
    check();
  }
  write(data, size);
}

void Bulk::send_later(const void* data, uint64_t size, std::shared_ptr<const void> owner) {
  std::unique_lock lock(mutex_);
  await_room(lock, size);
  enqueue({data, size, std::move(owner)});
}

void Bulk::await_room(std::unique_lock<std::mutex>& lock, uint64_t size) {
  check();
  changed_.wait(lock, [&] { return !queued_ || queued_ + size <= kQueuedMost || ending_ || !broken_.empty(); });
  check();
}

// With the lock.
void Bulk::enqueue(Parcel parcel) {
  queued_ += parcel.size;
  parcels_.push_back(std::move(parcel));
  if (!sender_.joinable()) sender_ = std::thread([this] { send_queued(); });
  changed_.notify_all();
}

void Bulk::send_queued() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !parcels_.empty() || ending_; });
    if (ending_) return;
    // Its place stays taken. Letting go of its owner may want Python's lock, so not with ours held.
    auto parcel = std::move(parcels_.front());
    lock.unlock();
    std::string problem;
    try {
      if (rings_) write(parcel.bytes, parcel.size);
      else ways_.send_kept(parcel.bytes, parcel.size, parcel.owner);
    } catch (const Disconnected& e) {
      problem = e.what();
    }
    parcel.owner.reset();
    lock.lock();
    queued_ -= parcel.size;
    parcels_.pop_front();
    if (broken_.empty()) broken_ = problem;
    changed_.notify_all();
    if (!broken_.empty()) return;
  }
}

void Bulk::receive(void* into, uint64_t size) {
  Stripes::Progress progress;
  try {
    {
      std::unique_lock lock(mutex_);
      await_landings(lock);
      check();
    }
    for (auto looked = std::chrono::steady_clock::now(); size && !read_some(into, size, progress);) {
      if (auto now = std::chrono::steady_clock::now(); now - looked >= kLooksAfter) {
        check_interrupts();
        looked = now;
      }
    }
  } catch (const Interrupted&) {
    land({{}, size, std::move(progress)});
    throw;
  }
}

void Bulk::land(Landing landing) {
  std::lock_guard lock(mutex_);
  check();
  landings_.push_back(std::move(landing));
  if (!receiver_.joinable()) receiver_ = std::thread([this] { receive_queued(); });
  changed_.notify_all();
}

// After a head that says how many they are, or what went wrong.
std::unique_ptr<Complaint> Bulk::read_tensor(const at::Tensor& into) {
  char head[9];
  read(head, sizeof head);
  uint64_t size;
  std::memcpy(&size, head + 1, 8);
  if (head[0] == kOk && size == into.nbytes()) {
    read(into.mutable_data_ptr(), size);
    return nullptr;
  }
  if (size > kQueuedMost) throw Disconnected("an answer of impossible size");
  std::string text(size, '\0');
  read(text.data(), size);
  if (head[0] == kOk) text = "the worker sent " + std::to_string(size) + " bytes of another tensor";
  return std::make_unique<Complaint>(Complaint{static_cast<Status>(head[0]), text});
}

void Bulk::receive_queued() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !landings_.empty() || ending_; });
    if (ending_) return;
    // Its place stays taken. Letting go of it may want Python's lock, so not with ours held.
    auto landing = std::move(landings_.front());
    lock.unlock();
    std::unique_ptr<Complaint> complaint;
    std::string problem;
    try {
      if (landing.into.defined()) complaint = read_tensor(landing.into);
      else
        while (landing.skipped && !read_some(nullptr, landing.skipped, landing.progress)) continue;
    } catch (const Disconnected& e) {
      problem = e.what();
    }
    lock.lock();
    landings_.pop_front();
    if (complaint && !complaint_) complaint_ = std::move(complaint);
    if (broken_.empty()) broken_ = problem;
    changed_.notify_all();
    if (!broken_.empty()) return;
    // After its place is free: pinned memory that goes may tell the session, whose lock the waiting thread holds.
    lock.unlock();
    landing.into.reset();
    lock.lock();
  }
}

std::unique_ptr<Complaint> Bulk::drain() {
  std::unique_lock lock(mutex_);
  await_landings(lock);
  if (!landings_.empty()) check();
  return std::move(complaint_);
}

bool Bulk::is_idle() {
  std::lock_guard lock(mutex_);
  return landings_.empty() || ending_ || !broken_.empty();
}

}  // namespace sky
