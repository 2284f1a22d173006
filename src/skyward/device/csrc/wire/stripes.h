// The connections that carry the bytes of tensors over a network. Long transfers are cut into stripes, which go over
// all of them in turn: each is encrypted by a thread of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "socket.h"

namespace sky {

class Stripes {
 public:
  // Small enough that a socket's buffer takes it, so that all of them are filled at once.
  static constexpr uint64_t kStripe = 64 << 10, kLong = 1 << 20;

  explicit Stripes(std::vector<int> sockets) : sockets_(std::move(sockets)) {}

  // A part of `total` bytes, of which `done` went before it. Both ends cut alike, however they divide the bytes.
  void send(const void* data, uint64_t size, uint64_t done, uint64_t total) {
    auto* p = static_cast<const char*>(data);
    each(size, done, total, [&](int socket, uint64_t at, uint64_t n) { send_all(socket, p + at, n); });
  }
  void receive(void* into, uint64_t size, uint64_t done, uint64_t total) {
    auto* p = static_cast<char*>(into);
    each(size, done, total, [&](int socket, uint64_t at, uint64_t n) { receive_all(socket, p + at, n); });
  }

  // At least a byte of what follows `done`; 0 where none came within that time. A signal ends the wait as well.
  uint64_t receive_some(void* into, uint64_t size, uint64_t done, uint64_t total, const timespec& most) {
    bool is_long = sockets_.size() > 1 && total >= kLong;
    int socket = sockets_[is_long ? done / kStripe % sockets_.size() : 0];
    if (!is_readable(socket, most)) return 0;
    auto got = sky::receive_some(socket, into, is_long ? std::min(size, kStripe - done % kStripe) : size);
    if (!got) throw Disconnected("the other end is gone");
    return got;
  }

  int first() const { return sockets_.front(); }
  void close() noexcept {
    for (int socket : sockets_) ::shutdown(socket, SHUT_RDWR);
  }

 private:
  template <typename F>
  void each(uint64_t size, uint64_t done, uint64_t total, F&& f) {
    if (sockets_.size() == 1 || total < kLong) return f(sockets_.front(), 0, size);
    for (uint64_t at = 0; at < size;) {
      auto place = done + at;
      auto n = std::min(size - at, kStripe - place % kStripe);
      f(sockets_[place / kStripe % sockets_.size()], at, n);
      at += n;
    }
  }

  std::vector<int> sockets_;
};

}  // namespace sky
