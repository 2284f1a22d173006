// The client's streams and events on the real device.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <optional>
#include <unordered_map>

#include "../wire/records.h"

namespace sky {

// A CPU runs in order and has finished what it was given: there a stream is a name, and an event a time.
class Streams {
 public:
  explicit Streams(c10::Device device);

  void use(uint32_t stream);
  bool uses_default() const { return guard_ && guard_->getStream(device_) == guard_->getDefaultStream(device_); }
  void used_on(const c10::Storage& storage, uint32_t stream);
  void synchronize(uint32_t stream);
  void synchronize_current();
  // The event of all that the current stream was given so far; made anew or used again. None but for CUDA.
  void mark(std::optional<c10::Event>& event);
  bool is_done(uint32_t stream);

  void record(uint32_t event, uint32_t stream, bool timed);
  void block(uint32_t event, uint32_t stream);
  bool has_happened(uint32_t event);
  void await(uint32_t event);
  double milliseconds(uint32_t from, uint32_t to);
  void forget(uint32_t event) { events_.erase(event); }

 private:
  struct Event {
    std::optional<c10::Event> real;
    std::chrono::steady_clock::time_point at;
    bool timed;
  };
  c10::Stream stream(uint32_t number);
  Event& event(uint32_t number);

  c10::Device device_;
  bool real_;
  std::optional<c10::impl::VirtualGuardImpl> guard_;
  std::unordered_map<uint32_t, c10::Stream> streams_;
  std::unordered_map<uint32_t, Event> events_;
};

}  // namespace sky
