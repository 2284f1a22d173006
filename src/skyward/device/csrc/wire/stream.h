// The two directions of a connection between the cores: through rings on one host, else over a link.
#pragma once

#include "shared_memory.h"
#include "way.h"

namespace sky {

class Stream {
 public:
  // Without rings, all goes its way.
  Stream(Way way, Ring* out, Ring* in) : way_(way), out_(out), in_(in) {}

  void send(const void* data, size_t size) {
    if (out_) out_->write(data, size);
    else way_.send(data, size);
  }
  // What goes out without waiting.
  size_t send_some(const void* data, size_t size) {
    return out_ ? out_->write_some(data, size) : way_.send_some(data, size);
  }
  void receive(void* into, size_t size) {
    if (in_) in_->read(into, size);
    else way_.receive(into, size);
  }

  // Whether there are bytes to receive, or within that time. A signal ends the wait as well.
  bool await_bytes(const timespec& most) { return in_ ? in_->await_bytes(most) : way_.is_readable(most); }

  enum Arrival { kBytes, kNothing, kEnd };
  // At least one byte, after which `got` is how many; waits at most so long if that is given.
  Arrival receive_some(void* into, size_t size, size_t& got, const timespec* most) try {
    if (in_) {
      do got = in_->read_some(into, size, most);
      while (!got && !most);
    } else {
      if (most && !way_.is_readable(*most)) return kNothing;
      got = way_.receive_some(into, size);
      if (!got) return kEnd;
    }
    return got ? kBytes : kNothing;
  } catch (const Disconnected&) {
    if (in_) return kEnd;
    throw;
  }

  // Ends it from this side; whoever waits in it notices at once.
  void close() noexcept {
    way_.close();
    for (auto* ring : {out_, in_})
      if (ring) ring->wake();
  }

 private:
  Way way_;
  Ring* out_;
  Ring* in_;
};

}  // namespace sky
