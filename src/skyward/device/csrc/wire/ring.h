// A ring of bytes in memory that two processes share: one writes, the other reads, neither asks the kernel
// unless it has to wait.
#pragma once

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>

#include "socket.h"

namespace sky {

constexpr size_t kRing = 16 << 20;
// Small enough that the reader begins early, large enough that a wake-up is rare.
constexpr size_t kRingStep = 512 << 10;

struct RingHead {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) std::atomic<uint32_t> turns;  // changes with either; the futex both wait on
  std::atomic<uint32_t> waiting;
};

class Ring {
 public:
  // `alive` is a socket to the other end: its closing ends a wait.
  Ring(RingHead* head, char* bytes, int alive) : head_(head), bytes_(bytes), alive_(alive) {}

  size_t room() const { return kRing - static_cast<size_t>(head_->written.load() - head_->read.load()); }

  // The next part to fill or to empty, at most `wanted` bytes; waits until there is some.
  char* to_write(size_t wanted, size_t& got) {
    while (!room()) wait([this] { return room() > 0; });
    auto at = head_->written.load(std::memory_order_relaxed) % kRing;
    got = std::min({wanted, room(), kRing - at, kRingStep});
    return bytes_ + at;
  }
  const char* to_read(size_t wanted, size_t& got) {
    while (!available()) wait([this] { return available() > 0; });
    auto at = head_->read.load(std::memory_order_relaxed) % kRing;
    got = std::min({wanted, available(), kRing - at, kRingStep});
    return bytes_ + at;
  }
  void wrote(size_t n) { advance(head_->written, n); }
  void took(size_t n) { advance(head_->read, n); }

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
  size_t available() const { return static_cast<size_t>(head_->written.load() - head_->read.load()); }

  void advance(std::atomic<uint64_t>& counter, size_t n) {
    counter.fetch_add(n);
    head_->turns.fetch_add(1);
    if (head_->waiting.load()) ::syscall(SYS_futex, &head_->turns, FUTEX_WAKE, 2, nullptr, nullptr, 0);
  }

  template <typename F>
  void wait(F&& ready) {
    for (int i = 0; i < 200; i++)
      if (ready()) return;
    auto turns = head_->turns.load();
    if (ready()) return;
    head_->waiting.fetch_add(1);
    timespec moment{0, 100'000'000};
    if (!ready()) ::syscall(SYS_futex, &head_->turns, FUTEX_WAIT, turns, &moment, nullptr, 0);
    head_->waiting.fetch_sub(1);
    char byte;
    auto peeked = ::recv(alive_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    bool open = peeked > 0 || (peeked < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
    if (!open && !ready()) throw Disconnected("the other end is gone");
  }

  RingHead* head_;
  char* bytes_;
  int alive_;
};

// Two rings, one for each direction.
class SharedRings {
  static constexpr size_t kHeads = 4096;
  void* memory_;

 public:
  static constexpr size_t kSize = kHeads + 2 * kRing;

  SharedRings(int fd, int socket)
      : memory_(map(fd)), up(head(0), bytes(), socket), down(head(1), bytes() + kRing, socket) {}
  SharedRings(const SharedRings&) = delete;
  ~SharedRings() { ::munmap(memory_, kSize); }

  // Made here, and told over the socket to the one who calls `join`; null where the kernel gives no memory.
  static std::unique_ptr<SharedRings> make(int socket) {
    int fd = static_cast<int>(::syscall(SYS_memfd_create, "skyward-device", 1u /* close on exec */));
    if (fd >= 0 && ::ftruncate(fd, kSize)) {
      ::close(fd);
      fd = -1;
    }
    send_descriptor(socket, fd);
    return over(fd, socket);
  }

  static std::unique_ptr<SharedRings> join(int socket) { return over(receive_descriptor(socket), socket); }

  void* memory() const { return memory_; }

  Ring up, down;

 private:
  static std::unique_ptr<SharedRings> over(int fd, int socket) {
    if (fd < 0) return nullptr;
    auto rings = std::make_unique<SharedRings>(fd, socket);
    ::close(fd);
    return rings;
  }

  static void* map(int fd) {
    void* memory = ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) throw Disconnected(std::string("shared memory: ") + std::strerror(errno));
    return memory;
  }

  char* bytes() const { return static_cast<char*>(memory_) + kHeads; }
  RingHead* head(int which) const {
    return reinterpret_cast<RingHead*>(static_cast<char*>(memory_) + which * sizeof(RingHead));
  }

  static void send_descriptor(int socket, int fd) {
    char byte = fd >= 0;
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (fd >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      auto* head = CMSG_FIRSTHDR(&message);
      head->cmsg_level = SOL_SOCKET;
      head->cmsg_type = SCM_RIGHTS;
      head->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(head), &fd, sizeof fd);
    }
    ssize_t sent;
    do sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent != 1) throw Disconnected(std::string("the connection broke: ") + std::strerror(errno));
  }

  static int receive_descriptor(int socket) {
    char byte = 0;
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    ssize_t got;
    do got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    if (got != 1) throw Disconnected("the other end is gone");
    auto* head = CMSG_FIRSTHDR(&message);
    if (!byte || !head || head->cmsg_type != SCM_RIGHTS) return -1;
    int fd;
    std::memcpy(&fd, CMSG_DATA(head), sizeof fd);
    return fd;
  }
};

}  // namespace sky
