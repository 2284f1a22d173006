// A recording of what a session issues and waits for, and when, for its profile.
#pragma once

#include <c10/macros/Macros.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "../wire/platform.h"
#include "../wire/recording.h"

namespace sky {

// How many sessions are being recorded: all that an operation looks at while there are none.
inline std::atomic<int> recordings{0};

inline uint64_t issue_began() { return C10_UNLIKELY(recordings.load(std::memory_order_relaxed)) ? nanoseconds() : 0; }

// What PyTorch's own profiler calls the operation that this thread is in, if it is at work.
inline thread_local uint64_t correlation = 0;

inline uint32_t this_thread() {
  thread_local const auto number = thread_number();
  return number;
}

struct Issue {
  uint64_t start, end, correlation;
  uint32_t operation;  // its template
  uint32_t thread;
};

// By how much the worker's clock is ahead, and the round trip that says so: the error is half of it at most.
struct ClockReading {
  uint64_t at = 0;
  int64_t ahead = 0;
  uint64_t round_trip = 0;
};

// Guarded by the session's mutex, which waits and flushes are made with.
class Recording {
 public:
  explicit Recording(ClockReading clock) : clock(clock), started(nanoseconds()) {
    issues.reserve(kOperationsMost);
    spans.reserve(kSpansMost);
  }

  // The operation's record is about to be sent; null when there is no more room. An operation that had begun
  // before the recording is recorded as well, since the worker records it.
  Issue* issue(uint32_t operation, uint64_t began) {
    if (issues.size() == kOperationsMost) {
      operations_dropped++;
      return nullptr;
    }
    issues.push_back({std::max(began, started), nanoseconds(), correlation, operation, this_thread()});
    return &issues.back();
  }
  void spent(SpanKind kind, uint64_t start, uint64_t bytes) {
    if (spans.size() == kSpansMost) spans_dropped++;
    else spans.push_back({start, nanoseconds(), bytes, kind, this_thread()});
  }

  const ClockReading clock;
  const uint64_t started;
  std::vector<Issue> issues;
  std::vector<Span> spans;
  uint64_t operations_dropped = 0, spans_dropped = 0;
};

// Records the time of a block; costs a test of a pointer where nothing is recorded.
class Spent {
 public:
  Spent(Recording* recording, SpanKind kind, uint64_t bytes) : recording_(recording), bytes_(bytes), kind_(kind) {
    if (C10_UNLIKELY(recording_ != nullptr)) start_ = nanoseconds();
  }
  ~Spent() {
    if (C10_UNLIKELY(recording_ != nullptr)) recording_->spent(kind_, start_, bytes_);
  }
  Spent(const Spent&) = delete;

 private:
  Recording* recording_;
  uint64_t start_ = 0, bytes_;
  SpanKind kind_;
};

// What took time for a record that is replied.
SpanKind wait_for(const void* record);

// One operation, by the client's clock: issued here, run there; 0 where it is not known.
struct OperationTimes {
  uint64_t issue_start, issue_end, run_start, run_end, kernel_start, kernel_end;
  uint32_t name, thread, stream, reserved;
};

// A finished recording of both ends, all times by the client's clock.
struct Profile {
  int index = 0;
  uint64_t start = 0, end = 0, clock_error = 0;
  uint64_t operations_dropped = 0, spans_dropped = 0;
  std::vector<OperationTimes> operations;
  std::vector<uint64_t> correlations;  // of the operations
  std::vector<Span> spans, worker_spans;
  std::vector<std::string> names;
  std::string missing;  // why the worker's part is

  std::string written() const;
};

}  // namespace sky
