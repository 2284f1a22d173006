// The two directions of a connection between the cores: through rings on one host, else over a socket.
#pragma once

#include "shared_memory.h"
#include "socket.h"

namespace sky {

class Stream {
 public:
  // Without rings, all goes over the socket.
  Stream(int socket, Ring* out, Ring* in) : socket_(socket), out_(out), in_(in) {}

  void send(const void* data, size_t size) {
    if (out_) out_->write(data, size);
    else send_all(socket_, data, size);
  }
  // What goes out without waiting.
  size_t send_some(const void* data, size_t size) {
    return out_ ? out_->write_some(data, size) : sky::send_some(socket_, data, size);
  }
  void receive(void* into, size_t size) {
    if (in_) in_->read(into, size);
    else receive_all(socket_, into, size);
  }

  // Whether there are bytes to receive, or within that time. A signal ends the wait as well.
  bool await_bytes(const timespec& most) { return in_ ? in_->await_bytes(most) : is_readable(socket_, most); }

  enum Arrival { kBytes, kNothing, kEnd };
  // At least one byte, after which `got` is how many; waits at most so long if that is given.
  Arrival receive_some(void* into, size_t size, size_t& got, const timespec* most) try {
    if (in_) {
      do got = in_->read_some(into, size, most);
      while (!got && !most);
    } else {
      if (most && !is_readable(socket_, *most)) return kNothing;
      got = sky::receive_some(socket_, into, size);
      if (!got) return kEnd;
    }
    return got ? kBytes : kNothing;
  } catch (const Disconnected&) {
    if (in_) return kEnd;
    throw;
  }

  // Ends it from this side; whoever waits in it notices at once.
  void close() noexcept {
    ::shutdown(socket_, SHUT_RDWR);
    for (auto* ring : {out_, in_})
      if (ring) ring->wake();
  }

 private:
  int socket_;
  Ring* out_;
  Ring* in_;
};

}  // namespace sky
