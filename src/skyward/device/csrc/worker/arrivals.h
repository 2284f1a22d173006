// What comes for a GPU over a network. A thread receives it into page-locked memory, and the session's thread goes on:
// it has the GPU wait for the bytes, so that the operations behind an upload are there when its last byte is.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "../wire/stripes.h"

namespace sky {

class Arrivals {
 public:
  // `lose` is called when the bytes do not come, and ends the session. Then the GPU goes on with whatever is in their
  // place, so nobody else may see the session's memory: for others, the session's thread waits itself.
  Arrivals(const Stripes& ways, std::function<void()> lose) : ways_(ways), lose_(std::move(lose)) {}
  ~Arrivals() { end(); }

  // The next bytes to come, after `done` of `total`. Returns a number; the next one comes with their first `kCopied`
  // bytes, and one more with each further `kCopied`, and with the rest.
  uint32_t expect(char* into, uint64_t size, uint64_t done, uint64_t total);
  // Waits until that number has come.
  void await(uint32_t number);
  // Has the GPU wait for it on its default stream; false where it cannot.
  bool await_on_gpu(uint32_t number) const;
  void await_all() { await(expected_); }
  // No more come, and nobody waits any longer.
  void end();

 private:
  struct Part {
    char* into;
    uint64_t size, done, total;
    uint32_t before;
  };
  void receive();
  void tell(uint32_t number);
  uint32_t come() const;

  const Stripes& ways_;
  const std::function<void()> lose_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Part> parts_;
  uint32_t expected_ = 0;  // the last number
  at::Tensor come_;        // the number that has come, where the GPU sees it
  std::string lost_;       // why no more come
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace sky
