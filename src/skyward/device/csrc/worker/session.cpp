// Records in, replies out. A failing operation never ends a session: the first error is kept for the client,
// and what depends on it is poisoned.
#include "session.h"
#include "exports.h"
#include "kept_storages.h"
#include "pages.h"
#include "peers.h"
#include "settings.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <fstream>
#include <thread>
#include <utility>

namespace sky {
namespace {

// What the machine could still give, and what it has; of the processor's own memory.
std::pair<uint64_t, uint64_t> host_memory() {
  std::ifstream file("/proc/meminfo");
  uint64_t available = 0, total = 0, kibibytes;
  for (std::string name, unit; file >> name >> kibibytes; std::getline(file, unit)) {
    if (name == "MemTotal:") total = kibibytes << 10;
    if (name == "MemAvailable:") available = kibibytes << 10;
  }
  return {available, total};
}

}  // namespace

Session::Session(const std::vector<Way>& ways, bool shares_memory, c10::Device device, Links links)
    : bulk_({ways.begin() + 1, ways.end()}),
      rings_(shares_memory ? SharedRings::join(ways[0].socket(), ways[1].socket()) : nullptr),
      ops_(ways[0], rings_ ? &rings_->replies : nullptr, rings_ ? &rings_->records : nullptr),
      decoder_(shares_memory ? nullptr : std::make_unique<Decoder>()),
      buffer_(1 << 20),
      device_(device),
      links_(links),
      streams_(device),
      recording_(device),
      copies_(device, rings_.get()),
      arrivals_(bulk_, [this] { ops_.close(); }) {
  if (!rings_) return;
  // The processor is then the GPU's; on a CPU it has other work to do.
  rings_->records.spin(device.is_cuda() && std::thread::hardware_concurrency() > 2);
  if (device.is_cuda()) lock_pages(rings_->memory(), SharedRings::kSize);
}

Session::~Session() {
  ranks_.end();
  Peers::all().end_all();
  arrivals_.end();
  copies_.finish_all();
  if (!device_.is_cuda()) return;
  try {
    // It may still look at the number that `arrivals_` has.
    streams_.synchronize(0);
  } catch (const std::exception&) {
    // A GPU that has failed looks at nothing any more.
  }
  for (auto& [number, area] : areas_) unlock_pages(area->bytes());
  if (rings_) unlock_pages(rings_->memory());
}

void Session::serve() {
  c10::WarningUtils::WarningHandlerGuard guard(&warnings_);
  streams_.use(0);  // the client before may have ended on another one
  std::vector<char> coded(decoder_ ? 64 << 10 : 0);
  // The client may wait for a copy to be done: while there are some, they are looked after.
  constexpr timespec kMoment{0, 100'000};
  // As long as memory is kept to be used again, its age is looked at.
  constexpr timespec kWhile{0, 100'000'000};
  // What has begun as it did before is awaited for so long.
  constexpr timespec kPatience{0, 300'000};
  for (;;) {
    if (have_ == buffer_.size()) buffer_.resize(2 * buffer_.size());
    auto* into = decoder_ ? coded.data() : buffer_.data() + have_;
    auto room = decoder_ ? coded.size() : buffer_.size() - have_;
    size_t n = 0;
    auto* most = !copies_.is_empty() ? &kMoment : repeating_.waits ? &kPatience : idle_bytes() ? &kWhile : nullptr;
    auto arrival = ops_.receive_some(into, room, n, most);
    if (arrival != Stream::kBytes && repeating_.waits) wait_no_longer();
    if (arrival == Stream::kEnd) return;
    copies_.collect();
    free_idle(false);
    if (!decoder_) {
      if (C10_UNLIKELY(ranks_.passes_on())) ranks_.pass(into, n);
      have_ += n;
      carry_out();
      continue;
    }
    decoder_->take(coded.data(), n);
    while (size_t given = decoder_->give(buffer_.data() + have_, buffer_.size() - have_)) {
      if (C10_UNLIKELY(ranks_.passes_on())) ranks_.pass(buffer_.data() + have_, given);
      have_ += given;
      carry_out();
      if (have_ == buffer_.size()) buffer_.resize(2 * buffer_.size());
    }
  }
}

// All records that have arrived whole.
void Session::carry_out() {
  size_t at = 0;
  auto next = [&] {
    auto* data = buffer_.data() + at;
    auto size = have_ - at;
    if (C10_UNLIKELY(recording_.is_on())) return recorded_step(data, size);
    return may_repeat() ? repeating_step(data, size) : step(data, size);
  };
  while (size_t used = next()) at += used;
  std::memmove(buffer_.data(), buffer_.data() + at, have_ - at);
  have_ -= at;
}

template <typename F>
size_t Session::fixed(const char* data, size_t size, size_t length, F&& f) {
  if (size < length) return 0;
  Reader r(data + 4, length - 4);
  f(r);
  return length;
}

template <typename F>
size_t Session::sized(const char* data, size_t size, F&& f) {
  if (size < 8) return 0;
  uint32_t length;
  std::memcpy(&length, data + 4, 4);
  if (size < 8 + size_t(length)) return 0;
  Reader r(data + 8, length);
  f(r);
  return 8 + size_t(length);
}

// One record; returns its length, or 0 if it has not all arrived.
size_t Session::step(const char* data, size_t size) {
  if (size < 4) return 0;
  uint32_t head;
  std::memcpy(&head, data, 4);
  if (head & kFree) {
    slots_.clear(slots_[head & ~kFree]);
    return 4;
  }
  if (head < kFirstRecord) return operation(head, data, size);
  switch (head) {
    case kDefine: return sized(data, size, [&](Reader& r) { define(r); });
    case kRedefine: return sized(data, size, [&](Reader& r) { redefine(r); });
    case kProgram: return sized(data, size, [&](Reader& r) { define_program(r); });
    case kReplay: return sized(data, size, [&](Reader& r) { replay(r); });
    case kForgetProgram: return fixed(data, size, 8, [&](Reader& r) { forget_program(r); });
    case kMark: return fixed(data, size, 4, [&](Reader&) { tell_mark(); });
    case kAsk: return sized(data, size, [&](Reader& r) { ask(r); });
    case kBind: return sized(data, size, [&](Reader& r) { bind_asked(r); });
    case kNew: return fixed(data, size, 16, [&](Reader& r) { allocate(r); });
    case kResize: return fixed(data, size, 16, [&](Reader& r) { resize(r); });
    case kUpload: return upload(data, size);
    case kFetch: return sized(data, size, [&](Reader& r) { fetch(r); });
    case kSync: return fixed(data, size, 8, [&](Reader& r) { synchronize(r); });
    case kGenerator: return sized(data, size, [&](Reader& r) { generator(r); });
    case kStream: return fixed(data, size, 8, [&](Reader& r) { use_stream(r.u32()); });
    case kUsedOn: return fixed(data, size, 12, [&](Reader& r) { used_on(r); });
    case kEvent: return fixed(data, size, 13, [&](Reader& r) { event(r); });
    case kSettings: return fixed(data, size, 12, [&](Reader& r) { sky::settle(settings_ = r.u64(), device_); });
    case kShare: return fixed(data, size, 16, [&](Reader& r) { share(r); });
    case kUnshare: return fixed(data, size, 8, [&](Reader& r) { unshare(r); });
    case kCopyIn: return fixed(data, size, 36, [&](Reader& r) { copy_in(r); });
    case kCopyOut: return sized(data, size, [&](Reader& r) { copy_out(r); });
    case kTraits: return fixed(data, size, 4, [&](Reader&) { tell_traits(); });
    case kMemory: return fixed(data, size, 5, [&](Reader& r) { memory(r); });
    case kProfile: return fixed(data, size, 5, [&](Reader& r) { profile(r); });
    case kLose: return sized(data, size, [&](Reader& r) { lose(r); });
    case kSend: return fixed(data, size, 40, [&](Reader& r) { send_to_peer(r); });
    case kReceive: return fixed(data, size, 40, [&](Reader& r) { receive_from_peer(r); });
    case kLink: return sized(data, size, [&](Reader& r) { link(r); });
    case kUnlink: return sized(data, size, [&](Reader& r) { unlink(r); });
    case kExport: return sized(data, size, [&](Reader& r) { export_slots(r); });
    case kNumbered: return sized(data, size, [&](Reader& r) { numbered(r); });
    case kAdopt: return sized(data, size, [&](Reader& r) { adopt(r); });
    case kRanks:
    case kGroups: return sized(data, size, [&](Reader& r) { join(r); });
    default: throw Malformed("a record of unknown kind");
  }
}

bool Session::reply(Status status, std::string_view content, std::string_view mark, Agreement agreement) {
  Writer w;
  auto warned = warnings_.take();
  auto lost = Peers::all().take_lost();
  auto captured = std::exchange(repeating_.news, {});
  Answer answer;
  if (C10_UNLIKELY(ranks_.is_mesh())) {
    auto own = status == kOk && agreement == Agreement::kEach ? ranks_.tagged(content) : std::string(content);
    answer = ranks_.together({status, std::move(own)}, mark, agreement);
    status = answer.status;
    content = answer.content;
    // The first rank's are those of all.
    if (!ranks_.is_first()) warned.clear();
  }
  bool is_well = status == kOk;
  Writer before;
  for (auto& [text, flag] : {std::pair(&warned, kWarned), {&lost, kLinksLost}, {&captured, kCaptureTold}}) {
    if (text->empty()) continue;
    before.text(*text);
    status = static_cast<Status>(status | flag);
  }
  w.u32(static_cast<uint32_t>(before.size() + content.size()));
  w.u8(status);
  w.raw(before.bytes().data(), before.size());
  w.raw(content.data(), content.size());
  ops_.send(w.bytes().data(), w.size());
  return is_well;
}

// Replies what `f` writes, or how it failed.
template <typename F>
void Session::reply_with(F&& f, Agreement agreement) {
  Writer w;
  try {
    f(w);
  } catch (const Malformed&) {
    throw;
  } catch (const std::exception& e) {
    reply(kind_of(e), text_of(e));
    return;
  }
  reply(kOk, w.bytes(), w.bytes(), agreement);
}

Reason Session::note(const Template& t, const std::string& what, Status kind) {
  return note(Failure{what, kind, t.name, count_});
}

Reason Session::note(Failure failure) {
  auto reason = std::make_shared<const Failure>(std::move(failure));
  if (!first_error_) first_error_ = reason;
  return reason;
}

// Warnings wait for an answer that someone waits for.
void Session::tell_mark() {
  if (!ranks_.is_first()) return;
  Writer w;
  w.u32(0);
  w.u8(kMarked);
  ops_.send(w.bytes().data(), w.size());
}

void Session::synchronize(Reader& r) {
  auto stream = r.u32();
  attempt("waiting for the device", [&] { streams_.synchronize(stream); });
  finish_passages();
  collect_exports();
  reply_done();
}

// That what was asked for is done; or the first thing that went wrong since the last wait.
void Session::reply_done() {
  if (auto earlier = std::exchange(first_error_, nullptr)) reply(*earlier);
  else reply(kOk, "");
}

void Session::use_stream(uint32_t stream) {
  if (stream) end_repeating("the session uses several streams");
  attempt("choosing a stream", [&] { streams_.use(stream); });
}

void Session::used_on(Reader& r) {
  end_repeating("the session uses several streams");
  auto& held = slots_[r.u32()];
  auto stream = r.u32();
  if (held.has_memory()) attempt("record_stream", [&] { streams_.used_on(held.memory(), stream); });
}

void Session::tell_traits() {
  reply_with(
      [&](Writer& w) {
        std::array<uint64_t, kTraitCount> traits{};
        traits[kIsCuda] = device_.is_cuda();
        auto& hooks = at::detail::getCUDAHooks();
        if (device_.is_cuda() && hooks.compiledWithCuDNN()) {
          traits[kCudnnVersion] = static_cast<uint64_t>(hooks.versionCuDNN());
          traits[kCudnnRecurrentBrain] = hooks.supportsBFloat16RNNWithCuDNN();
        }
        for (auto trait : traits) w.u64(trait);
      },
      Agreement::kFirst);
}

// Generator 0 is the device's own.
at::Generator Session::generator_of(uint32_t id) {
  if (id == 0) return at::globalContext().defaultGenerator(device_);
  auto it = generators_.find(id);
  if (it == generators_.end()) {
    auto made = device_.is_cuda() ? at::detail::getCUDAHooks().getNewGenerator(device_.index())
                                  : at::detail::createCPUGenerator();
    it = generators_.emplace(id, std::move(made)).first;
  }
  return it->second;
}

void Session::generator(Reader& r) {
  auto id = r.u32();
  auto action = static_cast<GeneratorAction>(r.u8());
  auto content = r.text();
  if (action == kForget) {
    generators_.erase(id);
    return;
  }
  auto g = generator_of(id);
  std::lock_guard<std::mutex> lock(g.mutex());
  if (action == kSeed) {
    if (content.size() != 8) throw Malformed("a seed of another length");
    uint64_t seed;
    std::memcpy(&seed, content.data(), 8);
    g.set_current_seed(seed);
  } else if (action == kGetState) {
    reply_with(
        [&](Writer& w) {
          auto state = g.get_state();
          w.raw(state.const_data_ptr(), state.nbytes());
        },
        Agreement::kFirst);
  } else if (action == kSetState) {
    reply_with([&](Writer&) {
      auto state = at::empty({static_cast<int64_t>(content.size())}, at::TensorOptions().dtype(at::kByte));
      if (!content.empty()) std::memcpy(state.mutable_data_ptr(), content.data(), content.size());
      g.set_state(state);
    });
  } else {
    throw Malformed("a generator's action of unknown kind");
  }
}

void Session::event(Reader& r) {
  auto number = r.u32();
  auto action = static_cast<EventAction>(r.u8());
  auto other = r.u32();
  switch (action) {
    case kRecordTimed:
    case kRecord: attempt("recording an event", [&] { streams_.record(number, other, action == kRecordTimed); }); break;
    case kBlock: attempt("waiting for an event", [&] { streams_.block(number, other); }); break;
    case kForgetEvent: streams_.forget(number); break;
    case kQuery:
      reply_with([&](Writer& w) { w.u8(!has_passages() && streams_.has_happened(number)); }, Agreement::kFirst);
      break;
    case kQueryStream:
      reply_with([&](Writer& w) { w.u8(!has_passages() && streams_.is_done(other)); }, Agreement::kFirst);
      break;
    case kAwait:
      attempt("waiting for an event", [&] { streams_.await(number); });
      finish_passages();
      reply_done();
      break;
    case kElapsed:
      reply_with([&](Writer& w) { w.f64(streams_.milliseconds(number, other)); }, Agreement::kFirst);
      break;
    default: throw Malformed("an event's action of unknown kind");
  }
}

void Session::memory(Reader& r) {
  auto action = static_cast<MemoryAction>(r.u8());
  collect_exports();
  reply_with(
      [&](Writer& w) {
        std::array<uint64_t, kMemoryFigures> figures;
        if (device_.is_cuda()) {
          auto* allocator = c10::getDeviceAllocator(device_.type());
          if (action == kResetPeak) allocator->resetPeakStats(device_.index());
          if (action == kEmptyCache) allocator->emptyCache();
          auto stats = allocator->getDeviceStats(device_.index());
          auto& allocated = stats.allocated_bytes[0];
          auto& reserved = stats.reserved_bytes[0];
          auto [free, total] = allocator->getMemoryInfo(device_.index());
          figures = {uint64_t(allocated.current),
                     uint64_t(allocated.peak),
                     uint64_t(reserved.current),
                     uint64_t(reserved.peak),
                     free,
                     total};
        } else {
          if (action == kResetPeak) slots_.reset_peak();
          if (action == kEmptyCache) free_idle(true);
          auto [free, total] = host_memory();
          auto reserved = slots_.bytes() + idle_bytes();
          figures = {slots_.bytes(), slots_.peak(), reserved, std::max(slots_.peak(), reserved), free, total};
        }
        for (auto f : figures) w.u64(f);
      },
      Agreement::kFirst);
}

// The tensor was lost with another worker.
void Session::lose(Reader& r) {
  auto& held = slots_[r.u32()];
  auto text = r.text();
  slots_.clear(held);
  held.poison = std::make_shared<const Failure>(Failure{std::move(text), kFailed, "using a tensor that was lost"});
}

// Others are to see what everything issued so far has written.
void Session::export_slots(Reader& r) {
  show_memory();
  attempt("waiting for the device", [&] { streams_.synchronize(kAllStreams); });
  collect_exports();
  Writer w;
  Reason poison;
  while (r.left()) {
    auto& held = slots_[r.u32()];
    settle(held, true);
    if (held.poison) poison = held.poison;
    w.text(held.has_memory() ? exported(held.memory()) : "");
  }
  reply_exports(w, poison);
}

void Session::reply_exports(Writer& w, const Reason& poison) {
  if (auto failure = first_error_ ? std::exchange(first_error_, nullptr) : poison) reply(*failure);
  else reply(kOk, w.bytes(), "", Agreement::kEach);
}

// As for others, with numbers by which a later session of this process finds the same memory.
void Session::numbered(Reader& r) {
  show_memory();
  attempt("waiting for the device", [&] { streams_.synchronize(kAllStreams); });
  collect_exports();
  Writer w;
  Reason poison;
  while (r.left()) {
    auto& held = slots_[r.u32()];
    settle(held, true);
    // The next run of the graph would write to its memory.
    if (!held.poison && held.is_of_graph)
      held.poison = attempt("keeping a tensor", [&] {
        auto bytes = held.memory().nbytes();
        auto own = new_storage(bytes);
        if (bytes) byte_view(own, 0, bytes).copy_(byte_view(held.memory(), 0, bytes));
        slots_.clear(held);
        slots_.hold(held, own);
      });
    if (held.poison) poison = held.poison;
    w.u64(held.has_memory() ? KeptStorages::all().number_of(held.memory()) : 0);
    w.text(held.has_memory() ? exported(held.memory()) : "");
  }
  reply_exports(w, poison);
}

void Session::adopt(Reader& r) {
  show_memory();
  reply_with([&](Writer&) {
    while (r.left()) {
      auto& held = slots_[r.u32()];
      auto number = r.u64(), bytes = r.u64();
      auto storage = KeptStorages::all().find(number);
      TORCH_CHECK(storage && storage.nbytes() >= bytes, "the memory of a kept tensor of ", bytes,
                  " bytes is not there any more");
      slots_.clear(held);
      slots_.hold(held, std::move(storage));
    }
  });
}

}  // namespace sky
