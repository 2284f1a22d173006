#include "recording.h"

#include <algorithm>
#include <cmath>

#include "operations.h"
#include "session.h"

namespace sky {
namespace {

// As many round trips as fit the time, but some: the shortest has met the least that is in the way.
constexpr int kClockReadings = 32, kClockReadingsLeast = 4;
constexpr uint64_t kClockTime = 250'000'000;

// Turns times of the worker into the client's. The clocks may drift apart, evenly.
class Clocks {
 public:
  Clocks(const ClockReading& first, const ClockReading& last) : first_(first), last_(last) {
    auto is_one = [](const ClockReading& c) { return 2 * uint64_t(std::abs(c.ahead)) <= c.round_trip; };
    // Two hosts do not start within a round trip of each other: it is the clock of one host.
    if (is_one(first_) && is_one(last_)) first_.ahead = last_.ahead = 0;
  }
  uint64_t error() const { return std::max(first_.round_trip, last_.round_trip) / 2; }
  uint64_t here(uint64_t there) const {
    if (!there) return 0;
    // Unsigned: a worker may say anything of its clock.
    auto first = static_cast<uint64_t>(first_.ahead), drift = static_cast<uint64_t>(last_.ahead) - first;
    auto at = static_cast<double>(static_cast<int64_t>(there - first_.at - first));
    auto part = last_.at > first_.at ? at / static_cast<double>(last_.at - first_.at) : 0;
    auto ahead = std::llround(static_cast<double>(static_cast<int64_t>(drift)) * part);
    return there - first - static_cast<uint64_t>(ahead);
  }

 private:
  ClockReading first_, last_;
};

constexpr size_t kLongest = sizeof(RecordingHead) + kOperationsMost * sizeof(Run) + kSpansMost * sizeof(Span);

template <typename T>
void take(Reader& r, std::vector<T>& into, uint64_t count) {
  if (count > r.left() / sizeof(T)) throw Malformed("a recording ends in the middle");
  into.resize(count);
  std::memcpy(into.data(), r.bytes(count * sizeof(T)), count * sizeof(T));
}

template <typename T>
void append(std::string& out, const std::vector<T>& items) {
  out.append(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T));
}

}  // namespace

SpanKind wait_for(const void* record) {
  uint32_t kind;
  std::memcpy(&kind, record, sizeof kind);
  switch (kind) {
    case kAsk: return kAskingShape;
    case kFetch: return kReading;
    case kSync: return kSynchronizing;
    default: return kAskingOther;
  }
}

std::string Session::profile(ProfileAction action) {
  struct __attribute__((packed)) {
    uint32_t kind;
    uint8_t action;
  } record{kProfile, action};
  return ask(&record, sizeof record);
}

ClockReading Session::read_clock() {
  ClockReading best{0, 0, ~uint64_t{0}};
  auto began = nanoseconds();
  for (int i = 0; i < kClockReadings; i++) {
    auto before = nanoseconds();
    if (i >= kClockReadingsLeast && before - began > kClockTime) break;
    auto answer = profile(kTellClock);
    auto after = nanoseconds();
    SKY_CHECK(answer.size() == sizeof(uint64_t), "the worker answered with ", answer.size(), " bytes");
    if (after - before >= best.round_trip) continue;
    uint64_t there;
    std::memcpy(&there, answer.data(), sizeof there);
    auto middle = before + (after - before) / 2;
    best = {middle, static_cast<int64_t>(there - middle), after - before};
  }
  return best;
}

void Session::start_recording() {
  std::lock_guard lock(mutex);
  begin();
  SKY_CHECK(!recording_, "sky:", index, " is being profiled already; leave the other block first");
  profile(kStartProfile);
  recording_ = std::make_unique<Recording>(read_clock());
  recordings++;
}

// Errors of earlier operations are left for the next wait.
Profile Session::stop_recording() {
  std::lock_guard lock(mutex);
  SKY_CHECK(recording_, "sky:", index, " is not being profiled");
  auto recording = std::move(recording_);
  recordings--;
  Profile made;
  made.index = index;
  made.start = recording->started;
  made.operations_dropped = recording->operations_dropped;
  made.spans_dropped = recording->spans_dropped;
  std::vector<Run> runs;
  auto last = recording->clock;
  try {
    begin();
    auto finishing = nanoseconds();
    profile(kStopProfile);
    recording->spent(kFinishing, finishing, 0);
    made.end = nanoseconds();
    last = read_clock();
    std::string told;
    for (std::string part; !(part = profile(kTellProfile)).empty();) {
      told += part;
      if (told.size() > kLongest) throw Malformed("a recording longer than any");
    }
    Reader r(told.data(), told.size());
    RecordingHead head;
    std::memcpy(&head, r.bytes(sizeof head), sizeof head);
    take(r, runs, head.runs);
    take(r, made.worker_spans, head.spans);
    made.spans_dropped += head.spans_dropped;
  } catch (const std::exception& e) {
    auto* ours = dynamic_cast<const c10::Error*>(&e);
    made.missing = ours ? ours->what_without_backtrace() : e.what();
    runs.clear();
    made.worker_spans.clear();
  }
  if (!made.end) made.end = nanoseconds();
  Clocks clocks(recording->clock, last);
  made.clock_error = clocks.error();
  made.spans = std::move(recording->spans);
  for (auto& span : made.worker_spans) {
    span.start = clocks.here(span.start);
    span.end = clocks.here(span.end);
  }
  std::vector<uint32_t> names(template_count, 0);
  for (auto& [hash, each] : templates) {
    names[each->id] = static_cast<uint32_t>(made.names.size());
    auto& name = *each->op->name;
    made.names.push_back(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
  }
  if (is_retired_) templates.clear();
  made.operations.reserve(recording->issues.size());
  made.correlations.reserve(recording->issues.size());
  for (size_t i = 0; i < recording->issues.size(); i++) {
    auto& issue = recording->issues[i];
    Run run = i < runs.size() ? runs[i] : Run{};
    if (run.start && run.operation != issue.operation) run = {};
    made.operations.push_back({issue.start, issue.end, clocks.here(run.start), clocks.here(run.end),
                               clocks.here(run.kernel_start), clocks.here(run.kernel_end), names[issue.operation],
                               issue.thread, run.stream, 0});
    made.correlations.push_back(issue.correlation);
  }
  return made;
}

// A head of ten u64, the operations, the spans of both ends, the names, each ended by a zero, and what is missing.
std::string Profile::written() const {
  std::string text;
  for (auto& name : names) text += name + '\0';
  uint64_t head[] = {start,         end,
                     clock_error,   operations_dropped,
                     spans_dropped, operations.size(),
                     spans.size(),  worker_spans.size(),
                     text.size(),   missing.size()};
  std::string out(reinterpret_cast<const char*>(head), sizeof head);
  out.reserve(out.size() + operations.size() * sizeof(OperationTimes) +
              (spans.size() + worker_spans.size()) * sizeof(Span) + text.size() + missing.size());
  append(out, operations);
  append(out, spans);
  append(out, worker_spans);
  return out + text + missing;
}

}  // namespace sky
