// Memory that two processes of one host share: where the rings between them are, and what is copied from in place.
#pragma once

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>

#include "platform.h"
#include "ring.h"

namespace sky {

inline void send_descriptor(int socket, int fd) {
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
  do sent = ::sendmsg(socket, &message, kNoSignal);
  while (sent < 0 && errno == EINTR);
  if (sent != 1) throw Disconnected(std::string("the connection broke: ") + std::strerror(errno));
}

inline int receive_descriptor(int socket) {
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got;
  do got = ::recvmsg(socket, &message, kCloseOnExec);
  while (got < 0 && errno == EINTR);
  if (got != 1) throw Disconnected("the other end is gone");
  auto* head = CMSG_FIRSTHDR(&message);
  if (!byte || !head || head->cmsg_type != SCM_RIGHTS) return -1;
  int fd;
  std::memcpy(&fd, CMSG_DATA(head), sizeof fd);
  return fd;
}

// Memory that another process can map as well. It has a descriptor, to be sent to that process.
class SharedMemory {
 public:
  // Throws where the kernel gives none.
  explicit SharedMemory(size_t size) : SharedMemory(create(size), size) {}
  // Takes the descriptor over. Without one, it is memory of this process alone.
  SharedMemory(int fd, size_t size) : fd_(fd), size_(size) {
    int kind = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    memory_ = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, kind, fd, 0);
    if (memory_ != MAP_FAILED) return;
    auto why = std::string("shared memory: ") + std::strerror(errno);
    if (fd >= 0) ::close(fd);
    throw Disconnected(why);
  }
  SharedMemory(const SharedMemory&) = delete;
  ~SharedMemory() {
    trim(0);
    if (fd_ >= 0) ::close(fd_);
  }
  // Gives all but the first bytes back; they are whole pages.
  void trim(size_t kept) {
    ::munmap(bytes() + kept, size_ - kept);
    size_ = kept;
  }
  // No other process is to get it any more.
  void close_descriptor() {
    ::close(fd_);
    fd_ = -1;
  }
  char* bytes() const { return static_cast<char*>(memory_); }
  size_t size() const { return size_; }
  int descriptor() const { return fd_; }

 private:
  static int create(size_t size) {
    int fd = shareable_memory(size);
    if (fd < 0) throw Disconnected(std::string("shared memory: ") + std::strerror(errno));
    return fd;
  }

  int fd_;
  size_t size_;
  void* memory_;
};

// One end makes rings and tells the other over the socket, which joins them; null where the kernel gives no memory.
// `Rings` are made from the descriptor of `Rings::kSize` bytes and what else is given.
template <typename Rings, typename... Given>
std::unique_ptr<Rings> make_rings(int socket, Given... given) {
  std::unique_ptr<SharedMemory> memory;
  std::unique_ptr<Rings> rings;
  try {
    memory = std::make_unique<SharedMemory>(Rings::kSize);
    rings = std::make_unique<Rings>(::dup(memory->descriptor()), given...);
  } catch (const Disconnected&) {
    rings.reset();
  }
  send_descriptor(socket, rings ? memory->descriptor() : -1);
  return rings;
}

template <typename Rings, typename... Given>
std::unique_ptr<Rings> join_rings(int socket, Given... given) {
  int fd = receive_descriptor(socket);
  if (fd < 0) return nullptr;
  if (auto size = size_of_memory(fd); size < Rings::kSize) {
    ::close(fd);
    throw Disconnected("it shares memory of " + std::to_string(size) + " bytes, and not of " +
                       std::to_string(Rings::kSize) + ": use the same version of skyward at both ends");
  }
  return std::make_unique<Rings>(fd, given...);
}

// What both ends see besides the rings.
struct SharedCounters {
  alignas(64) std::atomic<uint64_t> copies;  // of those from and to shared memory: how many the worker has finished
};

// Rings between two processes of one host: records and replies, and the bytes of tensors each way.
class SharedRings {
  static constexpr size_t kHeads = 4096, kRecords = 4 << 20, kReplies = 1 << 20;
  SharedMemory memory_;

 public:
  static constexpr size_t kBytes = 16 << 20;  // of tensors, in each direction
  static constexpr size_t kSize = kHeads + kRecords + kReplies + 2 * kBytes;

  // `ops` and `bulk` are the sockets to the other end.
  SharedRings(int fd, int ops, int bulk)
      : memory_(fd, kSize),
        records(head(0), part(0), kRecords, ops),
        replies(head(1), part(kRecords), kReplies, ops),
        up(head(2), part(kRecords + kReplies), kBytes, bulk),
        down(head(3), part(kRecords + kReplies + kBytes), kBytes, bulk) {
    memory_.close_descriptor();
  }

  static std::unique_ptr<SharedRings> make(int ops, int bulk) { return make_rings<SharedRings>(bulk, ops, bulk); }
  static std::unique_ptr<SharedRings> join(int ops, int bulk) { return join_rings<SharedRings>(bulk, ops, bulk); }

  // Gives the memory of the rings back; the counters stay.
  void retire() { memory_.trim(kHeads); }

  void* memory() const { return memory_.bytes(); }
  SharedCounters& counters() const { return *reinterpret_cast<SharedCounters*>(memory_.bytes() + kHeads / 2); }

  Ring records, replies, up, down;

 private:
  char* part(size_t at) const { return memory_.bytes() + kHeads + at; }
  RingHead* head(int which) const { return reinterpret_cast<RingHead*>(memory_.bytes()) + which; }
};

}  // namespace sky
