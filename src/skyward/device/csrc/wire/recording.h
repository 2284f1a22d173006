// What a worker records while it is profiled, as it is told to the client: a head, the runs of operations in
// the order of their records, and spans of everything else that takes time. Times are nanoseconds of the
// clock of the end that took them.
#pragma once

#include <cstdint>
#include <ctime>

namespace sky {

inline uint64_t nanoseconds() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// Each end keeps the first this many, so that the n-th issue and the n-th run are of one operation.
constexpr size_t kOperationsMost = 4 << 20;
constexpr size_t kSpansMost = 1 << 20;

struct RecordingHead {
  uint64_t runs, spans, operations_dropped, spans_dropped;
};

// On a processor an operation has run when its call returns. A GPU runs its kernels later: 0 if there were none.
struct Run {
  uint64_t start, end, kernel_start, kernel_end;
  uint32_t operation;  // its template
  uint32_t stream;
};

enum SpanKind : uint32_t {
  // Of the client.
  kUploading,
  kDownloading,  // what does not fit a reply
  kReading,
  kAskingShape,
  kSynchronizing,
  kAskingOther,  // of events, memory and generators
  kFlushing,
  kFinishing,  // the end of the recording waits for everything issued
  // Of the worker.
  kTakingUpload,
  kSendingValue,
  kAwaitingDevice,
  kSpanKinds,
};

struct Span {
  uint64_t start, end, bytes;
  SpanKind kind;
  uint32_t thread;  // of the client
};

static_assert(sizeof(RecordingHead) == 32 && sizeof(Run) == 40 && sizeof(Span) == 32);

}  // namespace sky
