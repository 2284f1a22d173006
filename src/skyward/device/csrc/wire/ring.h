// A ring of bytes in memory that two processes share: one writes, the other reads, neither asks the kernel
// unless it has to wait.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>

#include "platform.h"
#include "socket.h"

namespace sky {

// Small enough that the reader begins early, large enough that a wake-up is rare.
constexpr size_t kRingStep = 512 << 10;
// A look costs nothing while both ends are awake; a wake-up by the kernel takes 5 to 10 us.
constexpr auto kSpin = std::chrono::microseconds(40);

// Tells the processor that this is a loop that waits.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct RingHead {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) std::atomic<uint32_t> turns;  // changes with either; what both wait on
  std::atomic<uint32_t> waiting;
};

class Ring {
 public:
  // `alive` is a socket to the other end: its closing ends a wait.
  Ring(RingHead* head, char* bytes, size_t size, int alive) : head_(head), bytes_(bytes), size_(size), alive_(alive) {}

  size_t room() const { return size_ - static_cast<size_t>(head_->written.load() - head_->read.load()); }
  // Bytes to read, without those that the reader keeps.
  size_t available() const { return static_cast<size_t>(head_->written.load() - head_->read.load()) - kept_; }

  // The next part to fill or to empty, at most `wanted` bytes; waits until there is some.
  char* to_write(size_t wanted, size_t& got) {
    while (!room()) wait([this] { return room() > 0; });
    auto at = head_->written.load(std::memory_order_relaxed) % size_;
    got = std::min<size_t>({wanted, room(), size_ - at, kRingStep});
    return bytes_ + at;
  }
  const char* to_read(size_t wanted, size_t& got) {
    while (!available()) wait([this] { return available() > 0; });
    auto at = (head_->read.load(std::memory_order_relaxed) + kept_) % size_;
    got = std::min<size_t>({wanted, available(), size_ - at, kRingStep});
    return bytes_ + at;
  }
  void wrote(size_t n) { advance(head_->written, n); }
  void took(size_t n) { advance(head_->read, n); }

  // The reader still uses the part it got last, and goes on with the next; `release` gives the oldest back.
  void keep(size_t n) { kept_ += n; }
  void release(size_t n) {
    kept_ -= n;
    took(n);
  }

  // What goes in without waiting.
  size_t write_some(const void* data, size_t size) {
    auto n = std::min(size, room());
    write(data, n);
    return n;
  }
  // At least one byte; waits at most so long if that is given, and then returns 0.
  size_t read_some(void* into, size_t size, const timespec* most) {
    if (!available() && !wait([this] { return available() > 0; }, most)) return 0;
    auto n = std::min(size, available());
    read(into, n);
    return n;
  }
  // Whether there are bytes to read, or within that time. A signal ends the wait as well.
  bool await_bytes(const timespec& most) {
    return available() || wait([this] { return available() > 0; }, &most);
  }
  // Whoever waits looks whether the other end is still there.
  void wake() {
    head_->turns.fetch_add(1);
    wake_all(head_->turns);
  }
  void spin(bool on) { spins_ = on; }

  void write(const void* data, size_t size) {
    for (auto* p = static_cast<const char*>(data); size;) {
      size_t n;
      auto* into = to_write(size, n);
      std::memcpy(into, p, n);
      wrote(n);
      p += n;
      size -= n;
    }
  }
  void read(void* into, size_t size) {
    for (auto* p = static_cast<char*>(into); size;) {
      size_t n;
      auto* from = to_read(size, n);
      std::memcpy(p, from, n);
      took(n);
      p += n;
      size -= n;
    }
  }

 private:
  void advance(std::atomic<uint64_t>& counter, size_t n) {
    counter.fetch_add(n);
    head_->turns.fetch_add(1);
    if (head_->waiting.load()) wake_all(head_->turns);
  }

  // Waits for a moment, or `most` if that is given; returns whether it is ready.
  template <typename F>
  bool wait(F&& ready, const timespec* most = nullptr) {
    auto until = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 100; i++, pause())
        if (ready()) return true;
    } while (spins_ && std::chrono::steady_clock::now() < until);
    auto turns = head_->turns.load();
    if (ready()) return true;
    head_->waiting.fetch_add(1);
    timespec moment{0, 100'000'000};
    if (!ready()) wait_for_change(head_->turns, turns, most ? *most : moment);
    head_->waiting.fetch_sub(1);
    if (ready()) return true;
    pollfd watched{alive_, 0, 0};
    bool open = ::poll(&watched, 1, 0) == 0 || !(watched.revents & (POLLHUP | POLLERR | POLLNVAL));
    if (!open) throw Disconnected("the other end is gone");
    return false;
  }

  RingHead* head_;
  char* bytes_;
  size_t size_;
  int alive_;
  size_t kept_ = 0;
  bool spins_ = false;
};

}  // namespace sky
