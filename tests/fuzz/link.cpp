// What an authenticated peer sends over the connections of a link: records, counts and stripes.
//
// An input is a byte of choices, the sizes of what comes over two stripes, and how many bytes the peer says it has; the
// rest is what it sends, first over the main connection, and again over a second pair if that is chosen.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "../../src/skyward/wire/csrc/link.h"

namespace {

using sky::Connection;
using sky::Link;

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~Socket() { close(); }
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  int fd() const { return fd_; }

 private:
  int fd_;
};

struct Ends {
  std::shared_ptr<Connection> near;
  Socket far;
};

Ends connect() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) std::abort();
  return {std::make_shared<Connection>(ends[0], nullptr, nullptr), Socket(ends[1])};
}

// A connection over which this has come, and no more will.
std::shared_ptr<Connection> saying(const uint8_t* data, size_t size) {
  auto [near, far] = connect();
  if (size && ::send(far.fd(), data, size, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) std::abort();
  return near;
}

// A reader waits for a stripe that is announced and not there yet: not here.
size_t up_to_unknown_stripe(const uint8_t* data, size_t size) {
  for (size_t at = 0; at + 8 <= size;) {
    uint64_t head;
    std::memcpy(&head, data + at, 8);
    at += 8;
    if (head & sky::kIsCount) continue;
    auto stripe = head >> sky::kStripeBit;
    if (stripe > 2) return at - 8;
    if (!stripe) at += std::min<uint64_t>(head & 0xffffffff, size - at);
  }
  return size;
}

void use(Link& link, bool of_calls) {
  char room[3000];
  if (!of_calls) {
    link.await_bytes(0);
    for (size_t size : {1, 7, 500, 3000})
      while (link.receive(room, size, 0)) continue;
    uint64_t progress[1] = {0};
    link.send("more", 4, true);
    sky::receive_striped({link.shared_from_this()}, nullptr, 100, 0, 64, progress, 0, nullptr);
    return;
  }
  link.adopt();
  auto seen = link.peek(room, 100);
  link.skip(seen / 2);
  if (link.receive_call(room, 33, 0) < 0) return;
  std::vector<char> large(100 << 10);
  uint64_t done = 0;
  link.receive_large({{large.data(), 10}, {large.data() + 10, large.size() - 10}}, done, 0);
  link.send_call("more", 4, false);
  while (link.receive_call(room, sizeof room, 0) > 0) continue;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 8) return 0;
  bool of_calls = data[0] & 1, again = data[0] & 2, cut = data[0] & 4;
  size_t stripes[] = {data[1] * size_t{8}, data[2] * size_t{8}};
  uint64_t arrived = data[3];
  if (data[0] & 8) arrived |= uint64_t{data[4]} << 56;
  data += 8;
  size -= 8;
  auto link = std::make_shared<Link>(1 << 20, -1, "the fuzzer", of_calls);
  try {
    for (uint32_t attempt = 1; attempt <= 1u + again; ++attempt) {
      if (attempt > 1 && link->suspend(attempt) < 0) break;
      auto out = connect();
      link->install(std::make_shared<sky::Pair>(out.near, saying(data, up_to_unknown_stripe(data, size)),
                                                attempt > 1 ? arrived : 0, attempt));
      if (of_calls)
        for (uint32_t number : {1, 2}) {
          auto n = std::min(size, stripes[number - 1]);
          link->add_stripe(attempt, number, saying(data + size - n, n), false);
        }
      if (cut) out.far.close();
      if (of_calls) link->send_call("first", 5, false);
      else link->send("first", 5, true);
      use(*link, of_calls);
    }
  } catch (const sky::LinkEnded&) {}
  link->end("the input ends");
  return 0;
}
