// Blocking sockets that say what went wrong.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <string>
#include <utility>

#include "platform.h"

namespace sky {

class Disconnected : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A duplicate of a socket, closed with its owner: whoever gave the socket may close it before.
class OwnSocket {
 public:
  explicit OwnSocket(int socket) : fd_(::fcntl(socket, F_DUPFD_CLOEXEC, 0)) {
    if (fd_ < 0) throw Disconnected(std::string("a socket cannot be used: ") + std::strerror(errno));
  }
  OwnSocket(OwnSocket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~OwnSocket() {
    if (fd_ >= 0) ::close(fd_);
  }
  operator int() const { return fd_; }

 private:
  int fd_;
};

inline void send_all(int fd, const void* data, size_t size) {
  auto* p = static_cast<const char*>(data);
  while (size) {
    ssize_t n = ::send(fd, p, size, kNoSignal);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw Disconnected(std::string("the connection broke: ") + std::strerror(errno));
    p += n;
    size -= static_cast<size_t>(n);
  }
}

// What goes out without waiting.
inline size_t send_some(int fd, const void* data, size_t size) {
  for (;;) {
    ssize_t n = ::send(fd, data, size, kNoSignal | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
    if (n < 0) throw Disconnected(std::string("the connection broke: ") + std::strerror(errno));
    return static_cast<size_t>(n);
  }
}

// At least one byte; 0 only at the end of the stream.
inline size_t receive_some(int fd, void* into, size_t size) {
  for (;;) {
    ssize_t n = ::recv(fd, into, size, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw Disconnected(std::string("the connection broke: ") + std::strerror(errno));
    return static_cast<size_t>(n);
  }
}

// Whether there is something to read, or becomes so within that time.
inline bool is_readable(int fd, const timespec& most) {
  pollfd watched{fd, POLLIN, 0};
  auto milliseconds = most.tv_sec * 1000 + (most.tv_nsec + 999'999) / 1'000'000;
  return ::poll(&watched, 1, static_cast<int>(milliseconds)) > 0;
}

inline void receive_all(int fd, void* into, size_t size) {
  auto* p = static_cast<char*>(into);
  while (size) {
    size_t n = receive_some(fd, p, size);
    if (!n) throw Disconnected("the other end is gone");
    p += n;
    size -= n;
  }
}

}  // namespace sky
