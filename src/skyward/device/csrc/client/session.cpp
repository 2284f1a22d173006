#include "session.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "../wire/socket.h"
#include "links.h"

namespace sky {
namespace {

// Inline at about a kilobyte, and after a moment when dirty: measured best for latency and rate.
constexpr size_t kFlushAt = 1024;
constexpr auto kFlushAfter = std::chrono::microseconds(100);
constexpr auto kSleepAfter = std::chrono::milliseconds(5);
// Over a network every flush costs a record of the link and one of TLS, 30 bytes, and the worker is far behind anyway.
// The moment grows as long as operations keep coming, from the end of each wait on.
constexpr size_t kFarFlushAt = 64 << 10;
constexpr auto kFarFlushAfter = std::chrono::microseconds(8000);
// A worker that has answered so soon would have nothing to do meanwhile, and the next wait would be as much longer:
// there the moment ends, too, when so many bytes are there that those around them do not matter.
constexpr auto kNear = std::chrono::microseconds(1000), kNearLook = std::chrono::microseconds(250);
constexpr size_t kNearFlushAt = 2048;
// How far the worker may be behind. Coded records are so short that the link would take hours of them.
constexpr uint64_t kMarkEvery = 512 << 10;
constexpr size_t kReplyPart = 1 << 20;
constexpr uint32_t kMarksMost = 16;
// Templates of a session: those of a hundred shapes of a large model.
constexpr size_t kTemplatesMost = 32768;
// A training step is forty operations at the very least: three waits in it are one every dozen.
constexpr uint64_t kWaitsNoticed = 256;
constexpr uint64_t kOperationsPerWait = 12;
// An agent that is there says it far sooner.
constexpr auto kExplainedAfter = std::chrono::seconds(5);

[[noreturn]] void raise(const Complaint& complaint) {
  note_failed_copies();
  switch (complaint.status) {
    case kIndexError: C10_THROW_ERROR(IndexError, complaint.text);
    case kValueError: C10_THROW_ERROR(ValueError, complaint.text);
    case kTypeError: C10_THROW_ERROR(TypeError, complaint.text);
    case kNotImplemented: C10_THROW_ERROR(NotImplementedError, complaint.text);
    case kLinearAlgebra: C10_THROW_ERROR(LinAlgError, complaint.text);
    case kOutOfMemory: C10_THROW_ERROR(OutOfMemoryError, complaint.text);
    default: fail(complaint.text);
  }
}

}  // namespace

Session::Session(int index, uint32_t serial, std::vector<Way> ways, bool shares_memory, bool on_cpu)
    : index(index),
      serial(serial),
      on_cpu(on_cpu),
      remembered(shares_memory ? nullptr : std::make_unique<Remembered>()),
      rings_(shares_memory ? SharedRings::make(ways[0].socket(), ways[1].socket()) : nullptr),
      ops_(ways[0], rings_ ? &rings_->records : nullptr, rings_ ? &rings_->replies : nullptr),
      bulk_({ways.begin() + 1, ways.end()}, rings_.get()),
      encoder_(shares_memory ? nullptr : std::make_unique<Encoder>()) {
  if (rings_) rings_->replies.spin(std::thread::hardware_concurrency() > 2);
  out_.reserve(1 << 16);
  flusher_ = std::thread([this] { flush_later(); });
}

Session::~Session() { retire(); }

void Session::retire() {
  {
    std::lock_guard lock(wake_mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  if (flusher_.joinable()) flusher_.join();
  bulk_.retire();
  std::lock_guard lock(mutex);
  if (rings_ && !is_retired_) rings_->retire();
  is_retired_ = true;
  last = nullptr;
  if (!recording_) templates.clear();  // else its profile needs their names
}

void Session::begin() {
  check_open();
  if (C10_UNLIKELY(encoder_ && stats.bytes - marked_ >= kMarkEvery)) mark();
  auto wanted = current_stream(static_cast<c10::DeviceIndex>(index));
  if (C10_LIKELY(wanted == stream_)) return;
  uint32_t record[] = {kStream, wanted};
  put(record, sizeof record);
  stream_ = wanted;
  if (auto* noted = tape()) noted->streamed(wanted);
}

void Session::append(const void* data, size_t size) {
  out_.append(static_cast<const char*>(data), size);
  stats.bytes += size;
}

void Session::put(const void* data, size_t size) {
  append(data, size);
  if (out_.size() >= (encoder_ ? kFarFlushAt : kFlushAt)) {
    flush();
    return;
  }
  // Both in one order that the flusher sees too, or it would fall asleep on what was just written.
  dirty_.store(true);
  if (asleep_.load()) {
    std::lock_guard lock(wake_mutex_);
    asleep_ = false;
    wake_.notify_one();
  }
}

void Session::flush() {
  dirty_.store(false, std::memory_order_relaxed);
  if (out_.empty()) return;
  Spent spent(recording_.get(), kFlushing, out_.size());
  std::unique_lock sending(sending_mutex_, std::try_to_lock);
  if (!sending) {
    OutsidePython outside;
    sending.lock();
  }
  try {
    transmit(out_);
  } catch (const Disconnected& e) {
    broken(e.what());
  }
}

// With the sending lock.
void Session::transmit(std::string& records) {
  if (encoder_) {
    coded_.clear();
    encoder_->encode(records, coded_);
    std::swap(records, coded_);
  }
  stats.coded += records.size();
  auto sent = ops_.send_some(records.data(), records.size());
  if (sent < records.size()) {
    OutsidePython outside;
    ops_.send(records.data() + sent, records.size() - sent);
  }
  records.clear();
}

// What comes now is not to wait for the moment that the flusher is in.
void Session::hurry() {
  if (!encoder_) return;
  hurried_ = true;
  if (!dozes_) return;
  std::lock_guard lock(wake_mutex_);
  wake_.notify_one();
}

void Session::flush_later() {
  auto quiet_since = std::chrono::steady_clock::now(), flushed_at = quiet_since;
  std::chrono::microseconds moment = kFlushAfter;
  while (!ending_) {
    if (encoder_) {
      auto look = is_near_ ? std::min<std::chrono::microseconds>(moment, kNearLook) : moment;
      std::unique_lock lock(wake_mutex_);
      dozes_ = look > kFlushAfter;
      wake_.wait_for(lock, look, [this] { return (dozes_ && hurried_) || ending_; });
      dozes_ = false;
      if (hurried_.exchange(false)) moment = kFlushAfter;
    } else {
      std::this_thread::sleep_for(moment);
    }
    auto now = std::chrono::steady_clock::now();
    if (dirty_.load(std::memory_order_relaxed)) {
      if (flush_now(now - flushed_at >= moment ? 1 : kNearFlushAt)) {
        flushed_at = now;
        if (encoder_) moment = std::min<std::chrono::microseconds>(2 * moment, kFarFlushAfter);
      }
      quiet_since = now;
    } else if (now - quiet_since > kSleepAfter) {
      std::unique_lock lock(wake_mutex_);
      asleep_.store(true);
      if (!dirty_) wake_.wait(lock, [this] { return !asleep_ || ending_.load(); });
      asleep_ = false;
      moment = kFlushAfter;
      quiet_since = now;
    }
  }
}

// On the flusher's thread, if there are that many bytes. Over a network, others use the session while they are sent.
bool Session::flush_now(size_t least) {
  std::unique_lock lock(mutex);
  try {
    if (is_closed_ || out_.size() < least) return false;
    if (!encoder_ || recording_) {
      flush();
      return true;
    }
    dirty_.store(false, std::memory_order_relaxed);
    std::lock_guard sending(sending_mutex_);
    std::swap(out_, leaving_);
    lock.unlock();
    transmit(leaving_);
  } catch (const Disconnected& e) {
    lock.lock();
    try {
      broken(e.what());
    } catch (...) {
      // The next operation raises it.
    }
  } catch (...) {
    // Noted by `broken`; the next operation raises it.
  }
  return true;
}

void Session::mark() {
  marked_ = stats.bytes;
  uint32_t record = kMark;
  put(&record, sizeof record);
  if (++marks_ < kMarksMost) return;
  flush();
  skip_unwanted(false);
  while (marks_ > kMarksMost / 2) await_mark();
}

void Session::await_mark() {
  char head[5];
  try {
    OutsidePython outside;
    ops_.receive(head, sizeof head);
  } catch (const Disconnected& e) {
    broken(e.what());
  }
  SKY_CHECK(head[4] == kMarked && marks_, "the worker answered what was not asked");
  marks_--;
}

uint32_t Session::new_template() {
  // A profile tells operations by their templates' numbers.
  if (templates.size() >= kTemplatesMost && !recording_) forget_templates();
  if (forgotten.empty()) return template_count++;
  auto id = forgotten.back();
  forgotten.pop_back();
  return id;
}

// A quarter of them, so that this is rare.
void Session::forget_templates() {
  std::vector<uint64_t> times;
  for (auto& [hash, each] : templates) times.push_back(each->used);
  auto limit = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 4);
  std::nth_element(times.begin(), limit, times.end());
  auto goes = [&](const Template& t) { return t.used <= *limit && !t.programs; };
  for (auto& [hash, each] : templates)
    if (each->next && goes(*each->next)) each->next = nullptr;
  if (last && goes(*last)) last = nullptr;
  std::erase_if(templates, [&](auto& entry) {
    if (!goes(*entry.second)) return false;
    forgotten.push_back(entry.second->id);
    return true;
  });
}

// Not while its number may be in a recording.
void Session::forget_template(const Template& t) {
  if (recording_) return;
  for (auto& [hash, each] : templates)
    if (each->next == &t) each->next = nullptr;
  if (last == &t) last = nullptr;
  forgotten.push_back(t.id);
  std::erase_if(templates, [&](auto& entry) { return entry.second.get() == &t; });
}

void Session::broken(const char* what) {
  {
    // The agent says a moment later how the worker's process ended, and another thread closes the session with that.
    OutsidePython outside;
    std::unique_lock lock(reason_mutex_);
    explained_.wait_for(lock, kExplainedAfter, [this] { return !reason_.empty(); });
  }
  close(std::string("sky:") + std::to_string(index) + " is gone: " + what);
  check_open();
  std::abort();  // unreachable: check_open throws
}

void Session::close(const std::string& why) {
  {
    std::lock_guard lock(reason_mutex_);
    if (reason_.empty()) reason_ = why;
  }
  explained_.notify_all();
  // Whoever waits for the worker holds the mutex: the end of the sockets wakes it, and the reason is there.
  ops_.close();
  bulk_.close();
  std::lock_guard lock(mutex);
  if (is_closed_) return;
  is_closed_ = true;
  closed_ = reason_;
  out_.clear();
  forget_index(*this);
}

void Session::disown() {
  mutex.forget_holder();
  is_disowned_ = true;
  out_.clear();
  if (is_closed_) return;
  is_closed_ = true;
  closed_ = "sky:" + std::to_string(index) +
            " belongs to the process that opened it; a forked child cannot use it. "
            "Move tensors to the device in the parent, or open a device in the child";
}

void Session::check_open() const { SKY_CHECK(!is_closed_, closed_); }

std::string Session::reply(bool interruptibly) {
  stats.waits++;
  char head[5];
  std::string content;
  try {
    OutsidePython outside;
    do {
      while (interruptibly && !ops_.await_bytes(kMoment)) check_interrupts();
      ops_.receive(head, sizeof head);
    } while (head[4] == kMarked && marks_ && marks_--);
    uint32_t length;
    std::memcpy(&length, head, 4);
    // As it comes: the length is only what the worker says.
    for (size_t done = 0; done < length; done = content.size()) {
      content.resize(std::min<size_t>(length, std::max(2 * done, kReplyPart)));
      ops_.receive(content.data() + done, content.size() - done);
    }
  } catch (const Disconnected& e) {
    broken(e.what());
  }
  hurry();
  auto status = static_cast<uint8_t>(head[4]);
  warned = status & kWarned;
  if (C10_UNLIKELY(warned)) try {
      warnings_.take_from(content);
    } catch (const Malformed& e) {
      fail(std::string("the worker's warnings cannot be read: ") + e.what());
    }
  if (C10_UNLIKELY(status & kLinksLost)) try {
      Reader r(content.data(), content.size());
      note_lost_links(r.text());
      content.erase(0, content.size() - r.left());
    } catch (const Malformed& e) {
      fail(std::string("the worker's lost links cannot be read: ") + e.what());
    }
  if (C10_UNLIKELY(status & kCaptureTold)) try {
      Reader r(content.data(), content.size());
      std::lock_guard lock(captured_mutex_);
      captured_ = r.text();
      content.erase(0, content.size() - r.left());
    } catch (const Malformed& e) {
      fail(std::string("what the worker captures cannot be read: ") + e.what());
    }
  warnings_.raise();
  status &= ~(kWarned | kLinksLost | kCaptureTold);
  if (status != kOk) complain({static_cast<Status>(status), std::move(content)});
  return content;
}

void Session::complain(Complaint complaint) {
  if (complaint.status == kRankLost) broken(complaint.text.c_str());
  if (complaint.status == kRankAbsent) complaint.text.insert(0, c10::str("sky:", index, " misses ranks: "));
  if (complaint.status == kSurprised) {
    distrust();
    complaint.text +=
        "\nThe client believed to know what the operation returns, from an answer that it has kept since an earlier "
        "session or by a rule of its own. It has forgotten all such answers, and asks the worker from now on: make the "
        "tensor again, with what was computed from it";
  }
  // It was noticed at once.
  if (auto advice = complaint.text.find(kNoticedLate); synchronous() && advice != std::string::npos)
    complaint.text.erase(advice, kNoticedLate.size());
  raise(complaint);
}

// The worker has contradicted what the client believed to know. If answers of earlier sessions were in use, it was one
// of them: the worker is asked for those again. If not, it is asked for all that it has not said itself.
void Session::distrust() {
  if (remembered) remembered->forget();
  attention_choices.clear();
  bool was_recalled =
      std::any_of(templates.begin(), templates.end(), [](auto& entry) { return entry.second->recalled; });
  if (!was_recalled) {
    was_surprised = true;
    std::erase_if(confirmations, [](auto& entry) { return entry.second > 0; });
  }
  for (auto& [hash, each] : templates) {
    if (was_recalled ? !each->recalled : each->told || (each->outs.empty() && each->resized.empty())) continue;
    each->known = each->recalled = false;
  }
}

std::string Session::ask(const void* data, size_t size, bool interruptibly, uint64_t following) {
  auto wait = wait_for(data);
  if (auto* noted = tape(); noted && wait == kAskingOther) noted->blocked("a question to the device");
  // A read is recorded by `fetch`, which knows its size.
  Spent spent(wait == kReading ? nullptr : recording_.get(), wait, 0);
  skip_unwanted(interruptibly);
  append(data, size);
  flush();
  auto began = std::chrono::steady_clock::now();
  try {
    auto content = reply(interruptibly);
    if (std::chrono::steady_clock::now() - began < kNear) is_near_ = true;
    return content;
  } catch (const Interrupted&) {
    unwanted_.push_back(following);
    throw;
  }
}

// Before any other reply. An error that one of them tells is raised here.
void Session::skip_unwanted(bool interruptibly) {
  while (C10_UNLIKELY(!unwanted_.empty())) {
    auto following = unwanted_.front();
    unwanted_.pop_front();
    try {
      reply(interruptibly);
      if (following) bulk_.skip(following);
    } catch (const Interrupted&) {
      unwanted_.push_front(following);
      throw;
    } catch (const Disconnected& e) {
      broken(e.what());
    }
  }
}

void Session::notice_waiting() {
  // Saving a model reads one tensor after the other, with nothing in between: that is no loop of the user's.
  auto before = std::exchange(noticed_last_, stats.operations);
  if (advised_ || before == stats.operations || ++noticed_waits_ < kWaitsNoticed) return;
  auto since = stats.operations - noticed_operations_;
  noticed_waits_ = 0;
  noticed_operations_ = stats.operations;
  if (since >= kWaitsNoticed * kOperationsPerWait) return;
  advised_ = true;
  // PyTorch's binding around us turns it into a Python warning with the user's line, or into an exception.
  c10::warn(c10::Warning(c10::UserWarning(), {nullptr, nullptr, 0},
                         "this loop waits for sky:" + std::to_string(index) +
                             " every few operations (.item(), .cpu(), printing a "
                             "tensor, or an `if` on one); each wait is a round trip. Read values less often",
                         false));
}

// Waits for what `fetch_later` promised.
void Session::raise_late() {
  Spent spent(bulk_.is_idle() ? nullptr : recording_.get(), kDownloading, 0);
  try {
    OutsidePython outside;
    if (auto complaint = bulk_.drain()) complain(std::move(*complaint));
  } catch (const Disconnected& e) {
    broken(e.what());
  }
}

void Session::synchronize(uint32_t stream) {
  std::lock_guard lock(mutex);
  begin();
  uint32_t record[] = {kSync, stream};
  ask(record, sizeof record, true);
  raise_late();
}

void Session::used_on(uint32_t slot, uint32_t stream) {
  std::lock_guard lock(mutex);
  begin();
  uint32_t record[] = {kUsedOn, slot, stream};
  put(record, sizeof record);
}

std::string Session::event(uint32_t event, EventAction action, uint32_t other) {
  if (action != kForgetEvent) block_tape_elsewhere("an event of another device");
  std::lock_guard lock(mutex);
  begin();
  struct __attribute__((packed)) {
    uint32_t kind, event;
    uint8_t action;
    uint32_t other;
  } record{kEvent, event, action, other};
  if (action == kQuery && !bulk_.is_idle()) return std::string(1, '\0');
  if (action == kQuery || action == kQueryStream || action == kElapsed) return ask(&record, sizeof record);
  if (action == kAwait) {
    ask(&record, sizeof record, true);
    raise_late();
  } else {
    put(&record, sizeof record);
    if (auto* noted = tape()) noted->event(event, action, other);
  }
  return "";
}

std::array<uint64_t, kMemoryFigures> Session::memory(MemoryAction action) {
  block_tape_elsewhere("a question to another device");
  std::lock_guard lock(mutex);
  begin();
  struct __attribute__((packed)) {
    uint32_t kind;
    uint8_t action;
  } record{kMemory, action};
  auto content = ask(&record, sizeof record);
  std::array<uint64_t, kMemoryFigures> figures;
  SKY_CHECK(content.size() == sizeof figures, "the worker answered with ", content.size(), " bytes");
  std::memcpy(figures.data(), content.data(), sizeof figures);
  return figures;
}

std::string Session::captured() {
  std::lock_guard lock(captured_mutex_);
  return captured_;
}

const std::array<uint64_t, kTraitCount>& Session::traits() {
  std::lock_guard lock(mutex);
  if (!traits_) {
    begin();
    uint32_t record = kTraits;
    auto content = ask(&record, sizeof record);
    auto told = std::make_unique<std::array<uint64_t, kTraitCount>>();
    SKY_CHECK(content.size() == sizeof *told, "the worker answered with ", content.size(), " bytes");
    std::memcpy(told->data(), content.data(), sizeof *told);
    traits_ = std::move(told);
  }
  return *traits_;
}

void Session::join_mesh(std::string_view ranks) {
  tell_ranks(kRanks, ranks);
  is_mesh_ = true;
}

void Session::make_groups(std::string_view groups) { tell_ranks(kGroups, groups); }

void Session::tell_ranks(Record kind, std::string_view what) {
  std::lock_guard lock(mutex);
  begin();
  Writer w;
  w.u32(kind);
  w.text(what);
  ask(w.bytes().data(), w.size(), true);
}

std::string Session::exported(const std::vector<uint32_t>& slots) {
  std::lock_guard lock(mutex);
  begin();
  for (auto slot : slots) {
    wrote(slot);
    exported_.insert(slot);  // whoever opens it may write to it at any time
  }
  Writer w;
  w.u32(kExport);
  w.text({reinterpret_cast<const char*>(slots.data()), slots.size() * sizeof slots[0]});
  return ask(w.bytes().data(), w.size());
}

}  // namespace sky
