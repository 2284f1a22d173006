// Loops that are recognised by what they issue, and run as CUDA graphs as long as they issue the same again.
#include "repeating.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iomanip>

#include "session.h"

namespace sky {
namespace {

// Rounds are timed together that take so long, and two at least, so often; before that, some pass untimed: a client
// that was ahead of the worker has issued what comes first.
constexpr std::chrono::milliseconds kTimed{100};
constexpr size_t kRounds = 2, kTimes = 5, kMakingRounds = 4;
// Graphs stay if they take so much of the time that records take; and so much of the memory, or as much more as this
// part of what the GPU has.
constexpr double kTimeMost = 0.97, kMemoryMost = 1.2;
constexpr uint64_t kMemoryPart = 64;
// To make the first graph, Python's part of torch is imported, which takes seconds: a loop has to last so long.
constexpr std::chrono::seconds kBeforeImport{2};
// A loop has ended when so many rounds, and so many records, were not its own.
constexpr size_t kRoundsOfOthers = 4, kRecordsOfOthers = 4096;
// A graph is made anew so often when what it was made for lies elsewhere.
constexpr int kGraphsMost = 3;
// After so many loops that were not worth it, no further one is tried; before that, so many times as many records pass
// as are looked at otherwise: seconds, in which the program may have come to another loop.
constexpr int kFailuresMost = 4;
constexpr size_t kRest = 16;

// The first one is not typical.
double median(std::vector<double> values) {
  values.erase(values.begin());
  auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

enum class Asked { kGraphs, kRecords, kNever };

// What the node's environment asks for. For tests without a GPU, what is recognised is carried out as the records that
// were kept of it.
Asked asked() {
  static const auto found = [] {
    auto* said = std::getenv("SKYWARD_CAPTURE");
    std::string_view name = said ? said : "";
    return name == "0" ? Asked::kNever : name == "records" ? Asked::kRecords : Asked::kGraphs;
  }();
  return found;
}

uint64_t reserved(c10::Device device) {
  auto* allocator = c10::getDeviceAllocator(device.type());
  allocator->emptyCache();
  return static_cast<uint64_t>(allocator->getDeviceStats(device.index()).reserved_bytes[0].current);
}

bool takes_too_much(uint64_t before, c10::Device device) {
  auto now = static_cast<double>(reserved(device)), most = kMemoryMost * static_cast<double>(before);
  auto [free, total] = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
  return now > most && now > static_cast<double>(before) + static_cast<double>(total / kMemoryPart);
}

}  // namespace

bool Session::may_repeat() const {
  if (repeating_.phase == Repeating::kOff || settings_ & kNeverCaptures || ranks_.is_mesh()) return false;
  return captures.begin ? asked() != Asked::kNever : asked() == Asked::kRecords;
}

// For good: what the session does is not for graphs.
void Session::end_repeating(const char* why) {
  if (repeating_.phase == Repeating::kOff) return;
  forget_loop(why);
  repeating_.phase = Repeating::kOff;
}

void Session::forget_loop(const char* why) {
  auto& it = repeating_;
  if (it.phase == Repeating::kKept) it.news = it.said + ", until " + why;
  else if (it.phase != Repeating::kLooking) it.news = std::string("a loop is run operation by operation: ") + why;
  it.stretches.clear();
  it.kept.clear();
  it.repeats.forget();
  it.phase = Repeating::kLooking;
}

void Session::give_up(const char* why) {
  repeating_.repeats.rest(kRest);
  if (++repeating_.failures < kFailuresMost) forget_loop(why);
  else end_repeating(why);
}

void Session::keep_loop() {
  auto& it = repeating_;
  it.phase = Repeating::kKept;
  size_t records = 0;
  for (auto& each : it.stretches) records += each.part().may_be_graph ? each.count : 0;
  auto many = it.stretches.size();
  it.said = c10::str("a loop of ", it.period, " records runs ", records, " of them as ", many,
                     many == 1 ? " graph" : " graphs");
  if (!it.times.empty()) it.said += c10::str(std::setprecision(3), ", ", it.by_records / median(it.times), "x as fast");
  it.news = it.said;
}

void Session::wait_no_longer() {
  repeating_.may_wait = false;
  carry_out();
}

// A record, or a whole stretch.
size_t Session::repeating_step(const char* data, size_t size) {
  auto& it = repeating_;
  it.waits = false;
  if (!it.stretches.empty() && it.phase != Repeating::kTimingRecords) {
    if (auto used = repeat(data, size)) return used;
    if (it.waits) return 0;
  }
  auto used = step(data, size);
  if (used) notice(data, used);
  return used;
}

size_t Session::repeat(const char* data, size_t size) {
  auto& it = repeating_;
  for (auto& stretch : it.stretches) {
    const auto& records = stretch.program.records;
    auto there = std::min(size, records.size());
    if (!stretch.part().may_be_graph || !there || std::memcmp(data, records.data(), there)) continue;
    if (there < records.size()) {
      if (!it.may_wait) continue;
      it.waits = true;
      return 0;
    }
    auto used = records.size(), count = stretch.count;
    if (!run_stretch(stretch)) return 0;
    passed(count, true);
    return used;
  }
  return 0;
}

// Returns false if its records have to be carried out.
bool Session::run_stretch(Stretch& stretch) {
  auto& it = repeating_;
  auto& program = stretch.program;
  if (it.settings != settings_) return false;
  if (asked() == Asked::kRecords) {
    run_records(program, 0, program.records.size());
  } else if (!run_as_graph(program, stretch.part())) {
    if (program.is_stale) {
      program.is_stale = false;
      program.forget_graphs();
      program.parts = {{0, program.records.size(), ++program.divisions < kGraphsMost}};
    }
    return false;
  } else {
    count_ += stretch.operations;
  }
  return true;
}

// A record that was carried out.
void Session::notice(const char* data, size_t size) {
  auto& it = repeating_;
  it.may_wait = true;
  if (it.phase == Repeating::kOff) return;
  uint32_t head;
  std::memcpy(&head, data, sizeof head);
  if (head & kFree && it.kept.count(head & ~kFree)) return forget_loop("a tensor that it uses was freed");
  if (it.phase != Repeating::kLooking) return passed(1, false);
  bool may_be_graph = head & kFree || head == kNew, is_operation = head < kFirstRecord;
  if (is_operation) {
    auto& t = templates_[head];
    may_be_graph = t.is_own && !t.uses_generator && !t.resizes;
  }
  it.repeats.note({data, may_be_graph || is_operation ? size : sizeof head}, may_be_graph, is_operation);
  if (it.repeats.wants_a_look()) try_loop();
}

void Session::try_loop() {
  auto& it = repeating_;
  auto found = it.repeats.look();
  if (!found) return;
  std::vector<uint32_t> own, used;
  for (auto& record : found->records) {
    if (record.size() == sizeof(uint32_t)) continue;
    Touched touched;
    bool may_be_graph;
    look_at(record.data(), record.size(), touched, may_be_graph);
    own.insert(own.end(), touched.made.begin(), touched.made.end());
    used.insert(used.end(), touched.used.begin(), touched.used.end());
  }
  std::sort(own.begin(), own.end());
  for (auto slot : used)
    if (!std::binary_search(own.begin(), own.end(), slot)) it.kept.insert(slot);
  for (auto& each : found->stretches) {
    Stretch stretch{{}, each.count, each.operations};
    stretch.program.records = each.records;
    stretch.program.own = own;
    stretch.program.parts = {{0, each.records.size(), true}};
    it.stretches.push_back(std::move(stretch));
  }
  it.period = found->records.size();
  it.repeats.forget();
  it.settings = settings_;
  it.phase = Repeating::kTimingRecords;
  it.found = it.began = Clock::now();
  it.seen = it.replayed = 0;
  it.times.clear();
  if (it.stretches.empty()) return give_up("no part of it does the same each time");
  if (asked() == Asked::kRecords) keep_loop();
}

// Of the loop, or of something else.
void Session::passed(size_t records, bool as_graph) {
  auto& it = repeating_;
  it.seen += records;
  if (as_graph) it.replayed += records;
  if (it.phase == Repeating::kKept) {
    if (as_graph) it.seen = 0;
    else if (it.seen > kRoundsOfOthers * it.period + kRecordsOfOthers) forget_loop("other operations came");
    return;
  }
  bool is_making = it.phase == Repeating::kMaking;
  if (it.seen < (is_making ? kMakingRounds : kRounds) * it.period) return;
  if (!is_making && Clock::now() - it.began < kTimed) return;
  attempt("waiting for the device", [&] { streams_.synchronize_current(); });
  auto now = Clock::now();
  if (!is_making) it.times.push_back(std::chrono::duration<double>(now - it.began).count() / double(it.seen));
  it.began = now;
  it.seen = 0;
  if (is_making || it.times.size() > kTimes) next_phase();
}

void Session::next_phase() {
  auto& it = repeating_;
  if (it.phase == Repeating::kTimingRecords) {
    // Once more, without the oldest time.
    if (later_import().run && Clock::now() - it.found < kBeforeImport) return void(it.times.erase(it.times.begin()));
    it.by_records = median(it.times);
    it.memory = reserved(device_);
    it.phase = Repeating::kMaking;
  } else if (!it.replayed) {
    it.repeats.rest(1);
    return forget_loop("it ended, or no graph can be made of it");
  } else if (it.phase == Repeating::kMaking) {
    it.phase = Repeating::kTimingGraphs;
  } else if (median(it.times) > kTimeMost * it.by_records) {
    return give_up("graphs are not faster");
  } else if (takes_too_much(it.memory, device_)) {
    return give_up("graphs take too much memory");
  } else {
    keep_loop();
  }
  it.times.clear();
  it.replayed = 0;
  it.began = Clock::now();
}

}  // namespace sky
