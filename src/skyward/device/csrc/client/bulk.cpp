#include "bulk.h"

#include "../wire/socket.h"

namespace sky {
namespace {

// Snapshots that wait for the link; beyond, the caller waits too.
constexpr uint64_t kQueuedMost = 256 << 20;

}  // namespace

Bulk::Bulk(std::vector<int> sockets, SharedRings* rings) : sockets_(std::move(sockets)), rings_(rings) {}

Bulk::~Bulk() { retire(); }

void Bulk::retire() {
  close();
  if (sender_.joinable()) sender_.join();
  if (receiver_.joinable()) receiver_.join();
}

void Bulk::close() noexcept {
  sockets_.close();
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
  else sockets_.send(data, size, 0, size);
}

void Bulk::read(void* into, uint64_t size) {
  if (rings_) rings_->down.read(into, size);
  else sockets_.receive(into, size, 0, size);
}

void Bulk::send(const void* data, uint64_t size, bool later) {
  {
    std::unique_lock lock(mutex_);
    check();
    bool fits = parcels_.empty() && rings_ && size <= rings_->up.room();
    if (later && !fits) {
      changed_.wait(lock, [&] { return !queued_ || queued_ + size <= kQueuedMost || ending_ || !broken_.empty(); });
      check();
      Parcel parcel{std::make_unique_for_overwrite<char[]>(size), size};
      std::memcpy(parcel.bytes.get(), data, size);
      parcels_.push_back(std::move(parcel));
      queued_ += size;
      if (!sender_.joinable()) sender_ = std::thread([this] { send_queued(); });
      changed_.notify_all();
      return;
    }
    changed_.wait(lock, [&] { return parcels_.empty() || ending_ || !broken_.empty(); });
    check();
  }
  write(data, size);
}

void Bulk::send_queued() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !parcels_.empty() || ending_; });
    if (ending_) return;
    auto& parcel = parcels_.front();
    lock.unlock();
    std::string problem;
    try {
      write(parcel.bytes.get(), parcel.size);
    } catch (const Disconnected& e) {
      problem = e.what();
    }
    lock.lock();
    queued_ -= parcel.size;
    parcels_.pop_front();
    if (broken_.empty()) broken_ = problem;
    changed_.notify_all();
    if (!broken_.empty()) return;
  }
}

void Bulk::receive(void* into, uint64_t size) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return landings_.empty() || ending_ || !broken_.empty(); });
    check();
  }
  read(into, size);
}

void Bulk::receive_later(at::Tensor into) {
  std::lock_guard lock(mutex_);
  check();
  landings_.push_back(std::move(into));
  if (!receiver_.joinable()) receiver_ = std::thread([this] { receive_queued(); });
  changed_.notify_all();
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
      char head[9];
      read(head, sizeof head);
      uint64_t size;
      std::memcpy(&size, head + 1, 8);
      if (head[0] == kOk && size == landing.nbytes()) {
        read(landing.mutable_data_ptr(), size);
      } else {
        if (size > kQueuedMost) throw Disconnected("an answer of impossible size");
        std::string text(size, '\0');
        read(text.data(), size);
        if (head[0] == kOk) text = "the worker sent " + std::to_string(size) + " bytes of another tensor";
        complaint = std::make_unique<Complaint>(Complaint{static_cast<Status>(head[0]), text});
      }
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
    landing.reset();
    lock.lock();
  }
}

std::unique_ptr<Complaint> Bulk::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return landings_.empty() || ending_ || !broken_.empty(); });
  if (!landings_.empty()) check();
  return std::move(complaint_);
}

bool Bulk::is_idle() {
  std::lock_guard lock(mutex_);
  return landings_.empty() || ending_ || !broken_.empty();
}

}  // namespace sky
