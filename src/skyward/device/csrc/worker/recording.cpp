#include "recording.h"

#include <algorithm>
#include <utility>

#include "session.h"

namespace sky {
namespace {

// More than a GPU's queue holds, so that the oldest has happened when it is needed again.
constexpr size_t kEvents = 4096;
constexpr int kPasses = 5;
// Over less than this, two readings of the clocks say nothing about how they drift.
constexpr double kDriftSpan = 50e6;

}  // namespace

Recording::Recording(c10::Device device) : device_(device) {
  if (device.is_cuda()) guard_.emplace(device.type());
}

void Recording::start() {
  runs_.clear();
  spans_.clear();
  runs_.reserve(kOperationsMost);
  spans_.reserve(kSpansMost);
  operations_dropped_ = spans_dropped_ = 0;
  told_.clear();
  passed_.clear();
  streams_.clear();
  times_kernels_ = guard_.has_value();
  if (times_kernels_) try {
      guard_->synchronizeDevice(device_.index());
      first_.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
      pass(*first_, began_);
    } catch (const std::exception&) {
      // An earlier failure of the GPU, which the client hears of at its next wait.
      times_kernels_ = false;
    }
  on_ = true;
}

// On an idle GPU: the event happens between the two readings, which are closest together when nothing interferes.
void Recording::pass(c10::Event& event, Pass& into) {
  auto least = ~uint64_t{0};
  for (int i = 0; i < kPasses; i++) {
    c10::Event trial(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    auto before = nanoseconds();
    trial.record(guard_->getStream(device_));
    trial.synchronize();
    auto after = nanoseconds();
    if (after - before >= least) continue;
    least = after - before;
    into.host = before + (after - before) / 2;
    event = std::move(trial);
  }
}

void Recording::ran(uint32_t operation, uint64_t start) {
  if (runs_.size() == kOperationsMost) {
    operations_dropped_++;
    return;
  }
  runs_.push_back({start, nanoseconds(), 0, 0, operation, 0});
  if (!times_kernels_) return;
  try {
    auto stream = guard_->getStream(device_);
    runs_.back().stream = streams_.emplace(stream.id(), static_cast<uint32_t>(streams_.size())).first->second;
    auto number = runs_.size() - 1;
    if (number - passed_.size() == kEvents - 1) settle();
    if (events_.size() < kEvents) events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    events_[number % kEvents].record(stream);
  } catch (const std::exception&) {
    times_kernels_ = false;
  }
}

void Recording::spent(SpanKind kind, uint64_t start, uint64_t bytes) {
  if (spans_.size() == kSpansMost) spans_dropped_++;
  else spans_.push_back({start, nanoseconds(), bytes, kind, 0});
}

// Learns when the GPU passed the oldest event. Times are taken from one event to the next: they come as
// floats, which over minutes are coarser than a kernel is long.
void Recording::settle() {
  auto number = passed_.size();
  auto& event = events_[number % kEvents];
  event.synchronize();
  auto& before = number ? events_[(number - 1) % kEvents] : *first_;
  passed_.push_back((number ? passed_.back() : 0) + before.elapsedTime(event) * 1e6);
}

void Recording::stop() {
  on_ = false;
  if (times_kernels_) try {
      guard_->synchronizeDevice(device_.index());
      while (passed_.size() < runs_.size()) settle();
      last_.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
      pass(*last_, ended_);
      auto& before = runs_.empty() ? *first_ : events_[(runs_.size() - 1) % kEvents];
      ended_.gpu = (passed_.empty() ? 0 : passed_.back()) + before.elapsedTime(*last_) * 1e6;
      place_kernels();
    } catch (const std::exception&) {
      times_kernels_ = false;
    }
  RecordingHead head{runs_.size(), spans_.size(), operations_dropped_, spans_dropped_};
  told_.append(reinterpret_cast<const char*>(&head), sizeof head);
  told_.append(reinterpret_cast<const char*>(runs_.data()), runs_.size() * sizeof(Run));
  told_.append(reinterpret_cast<const char*>(spans_.data()), spans_.size() * sizeof(Span));
  told_up_to_ = 0;
  runs_ = {};
  spans_ = {};
  passed_ = {};
  events_.clear();
  first_.reset();
  last_.reset();
}

// From the GPU's clock to the host's. A stream runs its kernels one after another, and none before it was issued.
void Recording::place_kernels() {
  auto span = static_cast<double>(ended_.host - began_.host);
  auto rate = ended_.gpu > kDriftSpan ? span / ended_.gpu : 1;
  std::vector<uint64_t> done(streams_.size(), 0);
  for (size_t i = 0; i < runs_.size(); i++) {
    auto& run = runs_[i];
    run.kernel_start = std::max(run.start, done[run.stream]);
    auto passed = began_.host + static_cast<uint64_t>(std::max(passed_[i] * rate, 0.0));
    run.kernel_end = done[run.stream] = std::max(run.kernel_start, passed);
  }
}

std::string_view Recording::next_part() {
  auto part = std::string_view(told_).substr(told_up_to_, kRecordingPart);
  told_up_to_ += part.size();
  return part;
}

void Session::profile(Reader& r) {
  auto action = static_cast<ProfileAction>(r.u8());
  switch (action) {
    case kStartProfile:
      recording_.start();
      reply(kOk, "");
      break;
    case kTellClock: {
      auto now = nanoseconds();
      reply(kOk, {reinterpret_cast<const char*>(&now), sizeof now}, "", Agreement::kFirst);
      break;
    }
    case kStopProfile:
      recording_.stop();
      reply(kOk, "");
      break;
    case kTellProfile: reply(kOk, recording_.next_part(), "", Agreement::kFirst); break;
    default: throw Malformed("a profile's action of unknown kind");
  }
}

// As `step`, and takes the time.
size_t Session::recorded_step(const char* data, size_t size) {
  auto start = nanoseconds();
  auto used = step(data, size);
  if (!used || !recording_.is_on()) return used;
  Reader r(data, used);
  auto head = r.u32();
  if (head < kFirstRecord) {
    recording_.ran(head, start);
    return used;
  }
  switch (head) {
    case kAsk:
      r.u32();
      recording_.ran(r.u32(), start);
      break;
    case kUpload:
      r.bytes(12);
      recording_.spent(kTakingUpload, start, r.u64());
      break;
    case kCopyIn:
      r.bytes(12);
      recording_.spent(kTakingUpload, start, r.u64());
      break;
    case kFetch:
    case kCopyOut: recording_.spent(kSendingValue, start, 0); break;
    case kSync:
    case kEvent: recording_.spent(kAwaitingDevice, start, 0); break;
    default: break;
  }
  return used;
}

}  // namespace sky
