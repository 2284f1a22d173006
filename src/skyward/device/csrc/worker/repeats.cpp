#include "repeats.h"

#include <c10/macros/Macros.h>

#include <algorithm>

#include "../wire/records.h"

namespace sky {
namespace {

// More are not kept: a loop is found that takes a third of them at most.
constexpr size_t kNotedMost = 1 << 16, kBytesMost = 16 << 20;
// So many records one after another are looked for before, from so many places.
constexpr size_t kWindow = 16, kPlaces = 16;
constexpr size_t kPeriodLeast = 8;
// Once around, so much of what comes again has the same bytes.
constexpr double kSamePart = 0.6;
// Fewer operations are no stretch: whether it is worth while is measured.
constexpr size_t kStretchLeast = 3;
// Before the next look, so many times as many records pass unseen at most.
constexpr size_t kSkipsMost = 64;

uint64_t hash_of(std::string_view bytes) {
  constexpr uint64_t kFactor = 0x9e3779b97f4a7c15u;
  uint64_t hash = bytes.size() * kFactor;
  auto mix = [&](uint64_t word) {
    hash = (hash ^ word) * kFactor;
    hash ^= hash >> 29;
  };
  size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + at, 8);
    mix(word);
  }
  uint64_t last = 0;
  if (at < bytes.size()) std::memcpy(&last, bytes.data() + at, bytes.size() - at);
  mix(last);
  return hash;
}

}  // namespace

bool Repeats::Noted::is_like(const Noted& other) const {
  if (head & other.head & kFree) return true;
  return head == other.head && (size == other.size || !may_be_graph);
}

void Repeats::forget() {
  noted_.clear();
  bytes_.clear();
  next_look_ = kFirstLook;
}

void Repeats::rest(size_t least) {
  skips_ = std::min(kSkipsMost, std::max(least, 2 * skips_));
  skipped_ = 0;
}

void Repeats::note(std::string_view record, bool may_be_graph, bool is_operation) {
  if (C10_UNLIKELY(skipped_ < skips_ * kNotedMost)) {
    skipped_++;
    return;
  }
  uint32_t head;
  std::memcpy(&head, record.data(), sizeof head);
  noted_.push_back(
      {hash_of(record), bytes_.size(), static_cast<uint32_t>(record.size()), head, may_be_graph, is_operation});
  bytes_.append(record);
}

// Whether the last three times around are alike, the records one by one.
bool Repeats::repeats(size_t period) const {
  size_t same = 0;
  for (size_t i = noted_.size() - 2 * period; i < noted_.size(); i++) {
    if (!noted_[i].is_like(noted_[i - period])) return false;
    same += noted_[i].hash == noted_[i - period].hash;
  }
  return same >= 2 * kSamePart * static_cast<double>(period);
}

size_t Repeats::period() const {
  auto count = noted_.size();
  auto same = [&](size_t a, size_t b) {
    for (size_t i = 1; i <= kWindow; i++)
      if (noted_[a - i].hash != noted_[b - i].hash) return false;
    return true;
  };
  for (size_t place = 0; place < kPlaces && (place + 1) * kWindow < count / 3; place++) {
    auto end = count - place * kWindow;
    for (size_t period = kPeriodLeast; period <= count / 3 && period + kWindow <= end; period++)
      if (same(end, end - period) && repeats(period)) return period;
  }
  return 0;
}

std::optional<Repeats::Period> Repeats::look() {
  auto period = this->period();
  if (!period) {
    next_look_ = 2 * noted_.size();
    if (next_look_ <= kNotedMost && bytes_.size() < kBytesMost) return std::nullopt;
    forget();
    rest(1);
    return std::nullopt;
  }
  auto last = noted_.size() - period;
  // Of the last twice around, which are there without a gap.
  auto is_cut = [&](size_t i) {
    auto* each = &noted_[i < last ? i + period : i];
    auto *before = each - period, *earlier = before - period;
    return !each->may_be_graph || each->hash != before->hash || before->hash != earlier->hash;
  };
  auto begin = last - period;
  while (begin < last && !is_cut(begin)) begin++;
  begin = begin < last ? begin + 1 : last - period;
  auto end = begin + period;
  auto bytes = [&](size_t from, size_t to) {
    auto at = noted_[from].at;
    return std::string_view(bytes_).substr(at, noted_[to - 1].at + noted_[to - 1].size - at);
  };
  Period found;
  for (auto i = begin; i < end; i++) found.records.push_back(bytes(i, i + 1));
  for (auto i = begin; i < end; i++) {
    auto from = i;
    size_t operations = 0;
    for (; i < end && !is_cut(i); i++) operations += noted_[i].is_operation;
    if (operations < kStretchLeast) continue;
    auto records = bytes(from, i);
    auto is_same = [&](auto& each) { return each.records == records; };
    if (std::none_of(found.stretches.begin(), found.stretches.end(), is_same))
      found.stretches.push_back({records, i - from, operations});
  }
  return found;
}

}  // namespace sky
