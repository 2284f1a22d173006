#include "ranks.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <chrono>
#include <cstring>
#include <numeric>

namespace sky {
namespace {

// Records that wait for a rank. It is behind what this one has carried out, so this one may wait for it.
constexpr size_t kQueuedMost = 64 << 20;
constexpr size_t kAnswerMost = 256 << 20;
// How long one rank's answer is awaited before the next one's.
constexpr timespec kMoment{0, 20'000'000};
// `nodes/devices.py` looks for it.
constexpr auto* kAbsent = "it did not come to where the others are";

std::string failure(bool is_everywhere, std::string_view where, std::string_view what) {
  Writer w;
  w.u8(is_everywhere);
  w.text(where);
  w.text(what);
  return w.bytes();
}

// How the answers so far have failed, if they have.
struct Failed {
  Status status = kOk;
  bool is_everywhere = false;
  std::string where, what;

  void add(Status its_status, bool is_all_there, std::string its_where, std::string its_what) {
    bool is_same = is_all_there && status == its_status && what == its_what;
    is_everywhere = is_everywhere && is_same;
    if (status != kOk) {
      // The failure of the others may come of it.
      if (its_status != kRankLost && its_status != kRankAbsent) return;
      what += "\n" + its_where + ": " + its_what;
      if (status != kRankLost) status = its_status;
      return;
    }
    status = its_status;
    where = std::move(its_where);
    what = std::move(its_what);
  }
};

at::Tensor wait(const at::Tensor& tensor) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("_c10d_functional::wait_tensor", "");
  torch::jit::Stack stack{tensor};
  op.callBoxed(&stack);
  return tensor;
}

TORCH_LIBRARY(skyward_mesh, m) {
  m.def("wait(Tensor(a!) tensor) -> Tensor(a!)");
  m.impl("wait", c10::DispatchKey::CompositeExplicitAutograd, wait);
}

}  // namespace

std::string mark_of(const void* data, uint64_t size) {
  constexpr uint64_t kOdd[] = {0x9e3779b97f4a7c15, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9, 0xd6e8feb86659fd93};
  uint64_t lanes[] = {size, 1, 2, 3};
  auto* at = static_cast<const char*>(data);
  auto mix = [](uint64_t lane, uint64_t word, uint64_t odd) {
    lane = (lane ^ word) * odd;
    return lane ^ (lane >> 29);
  };
  for (; size >= sizeof lanes; at += sizeof lanes, size -= sizeof lanes) {
    uint64_t words[4];
    std::memcpy(words, at, sizeof words);
    for (int i = 0; i < 4; i++) lanes[i] = mix(lanes[i], words[i], kOdd[i]);
  }
  uint64_t words[4] = {};
  if (size) std::memcpy(words, at, size);
  for (int i = 0; i < 4; i++) lanes[i] = mix(lanes[i], words[i], kOdd[i]);
  return {reinterpret_cast<const char*>(lanes), sizeof lanes};
}

RankBelow::RankBelow(std::string name, const std::vector<Way>& ways, bool shares_memory, std::string_view tree)
    : name_(std::move(name)),
      rings_(shares_memory ? SharedRings::make(ways[0].socket(), ways[1].socket()) : nullptr),
      ops_(ways[0], rings_ ? &rings_->records : nullptr, rings_ ? &rings_->replies : nullptr),
      bulk_({ways.begin() + 1, ways.end()}),
      encoder_(shares_memory ? nullptr : std::make_unique<Encoder>()),
      sender_([this] { send_queued(); }) {
  Writer w;
  w.u32(kRanks);
  w.text(tree);
  pass(w.bytes().data(), w.size());
}

RankBelow::~RankBelow() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  ops_.close();
  bulk_.close();
  if (rings_) rings_->up.wake();
  sender_.join();
}

bool RankBelow::is_lost() {
  std::lock_guard lock(mutex_);
  return !lost_.empty();
}

void RankBelow::lose(const std::string& why) {
  std::lock_guard lock(mutex_);
  if (lost_.empty()) lost_ = why;
  queued_.clear();
  changed_.notify_all();
}

void RankBelow::pass(const char* records, size_t size) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queued_.size() < kQueuedMost || ending_; });
  if (!lost_.empty()) return;
  queued_.append(records, size);
  changed_.notify_all();
}

void RankBelow::send_queued() {
  std::string leaving, coded;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !queued_.empty() || ending_ || !lost_.empty(); });
    if (ending_ || !lost_.empty()) return;
    leaving.clear();
    std::swap(leaving, queued_);
    changed_.notify_all();
    lock.unlock();
    std::string why;
    try {
      if (encoder_) {
        coded.clear();
        encoder_->encode(leaving, coded);
        std::swap(leaving, coded);
      }
      ops_.send(leaving.data(), leaving.size());
    } catch (const Disconnected& e) {
      why = e.what();
    }
    if (!why.empty()) return lose(why);
    lock.lock();
  }
}

void RankBelow::pass_bytes(const void* data, uint64_t size, uint64_t done, uint64_t total) noexcept try {
  if (is_lost()) return;
  if (rings_) rings_->up.write(data, size);
  else bulk_.send(data, size, done, total);
} catch (const Disconnected& e) {
  lose(e.what());
}

bool RankBelow::has_answered(const timespec& most) {
  try {
    return is_lost() || ops_.await_bytes(most);
  } catch (const Disconnected& e) {
    lose(e.what());
    return true;
  }
}

Answer RankBelow::answer() {
  try {
    if (is_lost()) throw Disconnected(lost_);
    char head[5];
    ops_.receive(head, sizeof head);
    uint32_t length;
    std::memcpy(&length, head, 4);
    if (length > kAnswerMost) throw Disconnected("an answer of impossible size");
    std::string content(length, '\0');
    ops_.receive(content.data(), length);
    return {static_cast<Status>(head[4]), std::move(content)};
  } catch (const Disconnected& e) {
    lose(e.what());
    return {kRankLost, failure(false, name_, "the rank is lost: " + std::string(e.what()))};
  }
}

// Never destroyed: threads of Python's may come late.
Ranks& Ranks::all() {
  static auto& ranks = *std::make_unique<Ranks>().release();
  return ranks;
}

void Ranks::begin(uint32_t number, std::string name, double patience) {
  patience_ = std::chrono::duration<double>(patience);
  number_ = number;
  name_ = std::move(name);
}

void Ranks::add(std::string name, const std::vector<Way>& ways, bool shares_memory, std::string_view tree) {
  below_.push_back(std::make_unique<RankBelow>(std::move(name), ways, shares_memory, tree));
}

void Ranks::end() {
  below_.clear();
  name_.clear();
  number_ = 0;
}

std::string Ranks::tagged(std::string_view content) const {
  Writer w;
  w.u32(number_);
  w.text(content);
  return w.bytes();
}

Answer Ranks::together(Answer own, std::string_view mark, Agreement agreement) {
  Failed failed;
  if (own.status != kOk) failed = {own.status, true, name_, own.content};
  std::string differs;
  std::vector<std::string> each(below_.size());
  auto take = [&](size_t at, Answer said) {
    if (said.status != kOk) {
      Reader r(said.content.data(), said.content.size());
      bool is_everywhere = r.u8();
      auto where = r.text();
      return failed.add(said.status, is_everywhere, std::move(where), r.text());
    }
    failed.is_everywhere = false;
    if (agreement == Agreement::kSame && said.content != mark && differs.empty()) differs = below_[at]->name();
    if (agreement == Agreement::kEach) each[at] = std::move(said.content);
  };
  std::vector<size_t> awaited(below_.size());
  std::iota(awaited.begin(), awaited.end(), 0);
  for (auto since = std::chrono::steady_clock::now(); !awaited.empty();) {
    std::erase_if(awaited, [&](size_t at) {
      if (!below_[at]->has_answered(kMoment)) return false;
      take(at, below_[at]->answer());
      return true;
    });
    // Those that wait for it need not come, and the mesh is lost in any case.
    if (failed.status == kRankLost) break;
    // Where one rank has failed, another may not come at all: it may be what the first one waited for.
    if (failed.status == kOk) since = std::chrono::steady_clock::now();
    if (std::chrono::steady_clock::now() - since < patience_) continue;
    for (auto at : awaited) {
      below_[at]->lose(kAbsent);
      take(at, {kRankAbsent, failure(false, below_[at]->name(), kAbsent)});
    }
    awaited.clear();
  }
  if (failed.status == kOk && !differs.empty())
    failed = {
        kFailed, false, name_ + " and " + differs,
        "the ranks of the mesh have different values here; tensor.on(rank) reads one of them, mesh.each(tensor) all "
        "of them, and a collective makes them one"};
  if (failed.status != kOk) {
    if (!is_first()) return {failed.status, failure(failed.is_everywhere, failed.where, failed.what)};
    return {failed.status, failed.is_everywhere ? failed.what : failed.where + ": " + failed.what};
  }
  if (!is_first() && agreement != Agreement::kEach) return {kOk, std::string(mark)};
  for (auto& of_rank : each) own.content += of_rank;
  return own;
}

}  // namespace sky
