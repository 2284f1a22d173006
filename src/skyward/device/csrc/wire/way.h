// A way: how a core's bytes go to another process: over a socket on one host, over a link to another one.
#pragma once

#include <vector>
#include "../../../wire/csrc/link_functions.h"

#include "socket.h"

namespace sky {

// Of the library of links, which Python has loaded; null until it has.
inline const sky_link_functions* link_functions = nullptr;

inline int milliseconds_of(const timespec& most) {
  return static_cast<int>(most.tv_sec * 1000 + (most.tv_nsec + 999'999) / 1'000'000);
}

class Way {
 public:
  // A handle is a socket's number or a link's address.
  Way(uint64_t handle, bool is_socket)
      : socket_(is_socket ? static_cast<int>(handle) : -1),
        link_(is_socket ? nullptr : reinterpret_cast<void*>(handle)) {}

  int socket() const { return socket_; }
  void* link() const { return link_; }

  void send(const void* data, size_t size) const {
    if (link_) check(link_functions->send(link_, data, size, 0));
    else send_all(socket_, data, size);
  }
  // What goes out without waiting.
  size_t send_some(const void* data, size_t size) const {
    if (link_) return check(link_functions->send(link_, data, size, 1));
    return sky::send_some(socket_, data, size);
  }
  // At least one byte; 0 only at the end of the stream, or where none came within that time.
  size_t receive_some(void* into, size_t size, const timespec* most = nullptr) const {
    if (link_) return check(link_functions->receive(link_, into, size, most ? milliseconds_of(*most) : -1));
    return sky::receive_some(socket_, into, size);
  }
  void receive(void* into, size_t size) const {
    if (!link_) return receive_all(socket_, into, size);
    for (auto* p = static_cast<char*>(into); size;) {
      auto n = receive_some(p, size);
      p += n;
      size -= n;
    }
  }
  // Whether there are bytes to receive, or within that time. A signal may end the wait as well.
  bool is_readable(const timespec& most) const {
    return link_ ? check(link_functions->await_bytes(link_, milliseconds_of(most))) : sky::is_readable(socket_, most);
  }
  // Ends it from this side; whoever waits in it notices at once.
  void close() const noexcept {
    if (link_) link_functions->end(link_, "it was closed");
    else ::shutdown(socket_, SHUT_RDWR);
  }

  size_t check(int64_t outcome) const {
    if (outcome >= 0) return static_cast<size_t>(outcome);
    char why[1024] = "";
    link_functions->why(link_, why, sizeof why);
    throw Disconnected(why);
  }

 private:
  int socket_;
  void* link_;
};

// Those of a device: the first is for records, the others are for the bytes of tensors.
inline std::vector<Way> ways_of(const uint64_t* handles, int count, bool are_sockets) {
  std::vector<Way> ways;
  for (int i = 0; i < count; ++i) ways.emplace_back(handles[i], are_sockets);
  return ways;
}

}  // namespace sky
