// A loop of the client's that was recognised, and whether graphs in place of its records are worth it.
#pragma once

#include <chrono>
#include <string>
#include <unordered_set>
#include <vector>

#include "programs.h"
#include "repeats.h"

namespace sky {

using Clock = std::chrono::steady_clock;

// Records that come again with the same bytes.
struct Stretch {
  Program program;  // of one part
  size_t count, operations;

  Part& part() { return program.parts.front(); }
};

struct Repeating {
  // A loop goes through them in this order. All but the first and the last two last some rounds.
  enum Phase { kLooking, kTimingRecords, kMaking, kTimingGraphs, kKept, kOff };

  Phase phase = kLooking;
  Repeats repeats;
  // Of the loop:
  std::vector<Stretch> stretches;
  std::unordered_set<uint32_t> kept;  // slots that stay as they are while it runs: those of parameters, say
  size_t period = 0;                  // records once around
  uint64_t settings = 0;
  Clock::time_point found;
  // Of its phase:
  size_t seen = 0, replayed = 0;  // records, and of those the ones that ran as graphs
  std::vector<double> times;      // seconds a record
  Clock::time_point began;
  double by_records = 0;
  uint64_t memory = 0;
  // What comes now has begun like a stretch, the rest of which is not there yet; and whether that is awaited.
  bool waits = false, may_wait = true;

  int failures = 0;
  std::string said, news;  // what became of the loop; and what of that the client does not know yet
};

}  // namespace sky
