// A recording of what the worker does and when, for the client's profile.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "../wire/recording.h"

namespace sky {

class Recording {
 public:
  explicit Recording(c10::Device device);

  bool is_on() const { return on_; }
  void start();
  void stop();

  // The operation has been issued, and on a processor has run.
  void ran(uint32_t operation, uint64_t start);
  void spent(SpanKind kind, uint64_t start, uint64_t bytes);

  // What was recorded last, part by part; empty after the last part.
  std::string_view next_part();

 private:
  // When a GPU passed an event, and what the host's clock said then.
  struct Pass {
    uint64_t host = 0;
    double gpu = 0;
  };
  void pass(c10::Event& event, Pass& into);
  void settle();
  void place_kernels();

  c10::Device device_;
  bool on_ = false;
  std::vector<Run> runs_;
  std::vector<Span> spans_;
  uint64_t operations_dropped_ = 0, spans_dropped_ = 0;
  std::string told_;
  size_t told_up_to_ = 0;

  // One event after each run, used again when the GPU has long passed it.
  bool times_kernels_ = false;
  std::optional<c10::impl::VirtualGuardImpl> guard_;
  std::optional<c10::Event> first_, last_;
  Pass began_, ended_;
  std::deque<c10::Event> events_;
  std::vector<double> passed_;  // of the runs settled so far: nanoseconds since the first event
  std::unordered_map<int64_t, uint32_t> streams_;
};

}  // namespace sky
