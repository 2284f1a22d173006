// A session: one device of one worker process, its connection, slots and templates.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "../wire/coding.h"
#include "../wire/records.h"
#include "../wire/stream.h"
#include "address.h"
#include "bulk.h"
#include "errors.h"
#include "interpreter.h"
#include "lives.h"
#include "pinned.h"
#include "recording.h"
#include "remembered.h"
#include "slots.h"
#include "tape.h"
#include "warnings.h"

namespace sky {

constexpr auto kSky = c10::DeviceType::PrivateUse1;
constexpr int kDevicesMax = 64;

struct Layout {
  c10::ScalarType dtype{};
  c10::SmallVector<int64_t, 6> sizes, strides;
  uint8_t bits = 0;
  bool contiguous = true;  // to the letter: dimensions of size one count as well
  uint64_t bytes = 0;      // of the storage
};

struct OutInfo {
  Output kind = kNothing;
  Layout layout;
  std::vector<OutInfo> items;
  c10::IValue value;
};

// What an operation writes to an argument besides its elements: `out=` may resize it.
struct Resized {
  uint32_t tensor;  // counted over the tensor arguments
  Layout layout;
};

struct OpInfo;

struct Template {
  uint32_t id = 0;
  const OpInfo* op = nullptr;
  std::vector<uint64_t> key;
  bool known = false;
  bool recalled = false;  // it is known from an earlier session
  bool told = false;      // it is known from the worker of this one
  bool asks_always = false;
  std::string origin;  // of another library's: its signature, and the modules that register it, a line each
  uint32_t new_tensors = 0;
  std::vector<OutInfo> outs;
  std::vector<Resized> resized;
  Template* next = nullptr;  // what came after it last time
  uint64_t used = 0;         // the number of the last operation that was of it
  uint32_t programs = 0;     // that have operations of it, so that it is not forgotten
  uint64_t kind = 0;         // of its arguments, where a rule is not sure of them
  std::optional<std::vector<OutInfo>> guess;
};

struct Stats {
  uint64_t operations = 0, hits = 0, asks = 0, bytes = 0, waits = 0, uploaded = 0, fetched = 0;
  uint64_t sent_on = 0, taken_over = 0;  // to other devices, and from them
  std::atomic<uint64_t> coded = 0;       // bytes of records as they went out
};

class Session;

// What frees a slice of a storage: PyTorch's own function, which Python shows us a slice to learn.
inline c10::DeleterFnPtr slice_deleter = nullptr;

// Where a storage's first byte is: in whose slot, and how many bytes into it. The offset is 0 but for slices.
struct Place {
  Session* session;
  uint32_t slot;
  uint64_t offset;
};

// Where a tensor's first element is; its offset is counted in elements.
struct TensorPlace {
  Session& session;
  uint32_t slot;
  int64_t offset;
};

class Session {
 public:
  // `bulk` are the sockets for the bytes of tensors: one, or over a network several.
  Session(int index, uint32_t serial, std::vector<Way> ways, bool shares_memory, bool on_cpu);
  ~Session();
  Session(const Session&) = delete;

  // Storage: an address in place of a pointer. Thread-safe, and the deleter may run on any thread.
  c10::Storage new_storage(uint64_t bytes, bool tell);
  void resize_storage(c10::StorageImpl* storage, uint64_t bytes);  // here and in the worker
  void set_size(c10::StorageImpl* storage, uint64_t bytes);        // here only: the worker has resized it
  void release(uint32_t slot) noexcept;
  static Session& of(const c10::TensorImpl* tensor) { return *behind(pointer_of(tensor)).session; }
  static TensorPlace place_of(const c10::TensorImpl* tensor);
  // Before it is written to: its memory becomes its own, where it shares it with a lazy clone.
  static void unshare(const c10::TensorImpl* tensor) { unshare(tensor->unsafe_storage().unsafeGetStorageImpl()); }
  static void unshare(c10::StorageImpl* storage) {
    if (C10_UNLIKELY(storage->_mutable_data_ptr_no_checks().get_deleter() != &Session::delete_storage))
      copy_if_shared(storage);
  }
  // Throws where no storage that is alive is behind it.
  static Place behind(const c10::DataPtr& pointer);
  static Place behind(uintptr_t address);
  static void delete_storage(void* context) noexcept;

  // With the lock held: notes an operation if this session is being recorded.
  Issue* recorded(uint32_t operation, uint64_t began) {
    return C10_UNLIKELY(recording_ != nullptr) ? recording_->issue(operation, began) : nullptr;
  }

  // Records, each begun with the lock held.
  void begin();  // checks that the session is open, and says which stream what follows is for
  void put(const void* data, size_t size);
  void flush();
  uint32_t new_template();  // its number; forgets those that were used longest ago when there are very many
  void forget_template(const Template& t);
  // Sends, flushes and waits for the reply. Ctrl-C ends the wait if it may; the reply is then skipped when it comes,
  // with the bytes that follow it beside the records.
  std::string ask(const void* data, size_t size, bool interruptibly = false, uint64_t following = 0);

  // With the lock held: the content of a slot is about to change. Counted from the first copy between devices on.
  void wrote(uint32_t slot) {
    if (C10_UNLIKELY(versions_ != nullptr)) versions_[slot]++;
  }
  bool counts_writes() const { return versions_ != nullptr; }
  // With the lock held: whether other processes may write to the slot's memory, which nobody counts.
  bool is_exported(uint32_t slot) const { return exported_.count(slot); }
  uint32_t version(uint32_t slot) {
    if (!versions_) versions_ = std::make_unique<uint32_t[]>(Slots::kCount);
    return versions_[slot];
  }

  // Each takes the lock itself.
  void upload(uint32_t slot, uint64_t offset, const at::Tensor& dense, bool later);
  void fetch(const at::Tensor& source, void* into, uint64_t size);
  void fetch_later(const at::Tensor& source, at::Tensor into);
  void synchronize(uint32_t stream);
  void used_on(uint32_t slot, uint32_t stream);
  std::string event(uint32_t event, EventAction action, uint32_t other);
  std::array<uint64_t, kMemoryFigures> memory(MemoryAction action);
  std::string captured();  // what the worker has said of a loop that it runs as graphs, or not; never waits
  const std::array<uint64_t, kTraitCount>& traits();
  void unshare(uint32_t area);  // pinned memory that is no more
  std::string exported(const std::vector<uint32_t>& slots);
  void start_recording();
  Profile stop_recording();

  // tape.cpp: what this thread issues, noted; and slots for what the worker makes when it does that again.
  void start_tape();
  std::string stop_tape();
  Tape* tape() { return C10_UNLIKELY(tape_ != nullptr) && tape_->is_mine() ? tape_.get() : nullptr; }
  // Before this session's lock is taken: a replay of what this thread is taped on would not do it here.
  void block_tape_elsewhere(std::string_view what);
  std::vector<uint32_t> reserve(uint32_t count);
  void give_back(const std::vector<uint32_t>& slots) noexcept;
  void close(const std::string& why);
  void retire();  // after closing: its threads end, and what it held is given back
  void check_open() const;
  void disown();  // in a forked child: the connection is the parent's
  bool is_disowned() const { return is_disowned_; }

  // How many copies from and to pinned memory the worker has finished.
  uint64_t copies_done() const { return rings_ ? copies_before_ + rings_->counters().copies.load() : ~uint64_t{0}; }
  bool is_retired() const { return is_retired_; }

  // The worker is the first rank of a mesh: its records go to all ranks, and their answers come as one.
  void join_mesh(std::string_view ranks);
  void make_groups(std::string_view groups);
  bool is_mesh() const { return is_mesh_; }

  // lives.cpp: the storages that live, and what becomes of them after the worker is gone.
  std::vector<Life> living();
  c10::Storage alias(uint32_t slot);  // the slot is not free before the alias is
  void let_go(uint32_t slot) noexcept;
  void renew(uint32_t slot);  // new memory for a slot whose contents are not to be had
  void inherit(Session& before, const Inheritance& inheritance);

  // kept_storages.cpp: memory that is kept in the worker's process when its client leaves.
  std::string numbered(const std::vector<uint32_t>& slots);  // the worker's answer
  // Storages over such memory, by its numbers. What a living storage here has already is shared with that.
  std::vector<c10::Storage> adopt(const std::vector<uint64_t>& numbers, const std::vector<uint64_t>& sizes);

  Mutex mutex;
  const int index;
  const uint32_t serial;
  const bool on_cpu;  // what the worker computes on
  Stats stats;
  std::unordered_multimap<uint64_t, std::unique_ptr<Template>> templates;
  uint32_t template_count = 0;      // of numbers given
  std::vector<uint32_t> forgotten;  // numbers that may be given again
  Template* last = nullptr;
  const std::unique_ptr<Remembered> remembered;               // over a network only
  std::unordered_map<uint64_t, int> confirmations;            // of rules, by kind; -1: one was not right
  std::map<std::vector<int64_t>, int64_t> attention_choices;  // by the kind of arguments
  std::atomic<uint64_t> seedings{0};                          // of the device's own generator
  uint64_t settings = 0;                                      // as the worker knows them; 0: not told yet
  bool warned = false;                                        // with the last reply
  std::atomic<bool> was_surprised{false};                     // a promise was not kept: none is made any more

 private:
  static const c10::DataPtr& pointer_of(const c10::TensorImpl* tensor) {
    return tensor->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  }
  static Place behind_slice(const c10::DataPtr& pointer);
  static void copy_if_shared(c10::StorageImpl* storage);
  void begin_life(uint32_t slot, uint64_t bytes) {
    if (C10_UNLIKELY(slot >= lives_.size())) lives_.resize(2 * slot + 64);
    auto& life = lives_[slot];
    life = {slot, life.birth + 1, bytes};
  }
  void check_span(uint32_t slot, uint64_t bytes) const;
  uintptr_t address_for(uint32_t slot, uint64_t bytes);
  std::string reply(bool interruptibly);
  void skip_unwanted(bool interruptibly);
  [[noreturn]] void complain(Complaint complaint);
  void distrust();
  std::string located(const at::Tensor& source) const;  // its slot, layout and offset, as records have them
  void raise_late();
  std::string profile(ProfileAction action);
  ClockReading read_clock();
  void notice_waiting();
  void append(const void* data, size_t size);
  void transmit(std::string& records);
  void flush_later();
  bool flush_now(size_t least);
  void hurry();
  void mark();
  void await_mark();
  void forget_templates();
  void tell_ranks(Record kind, std::string_view what);
  [[noreturn]] void broken(const char* what);

  // The ranks of a mesh but the first do not see the client's memory.
  bool uses_pinned() const { return rings_ && !is_mesh_; }
  void copy_in(uint32_t slot, uint64_t offset, uint64_t size, const PinnedPlace& pinned);
  void copy_out(const at::Tensor& source, const PinnedPlace& pinned);
  void share(const PinnedPlace& pinned);

  const std::unique_ptr<SharedRings> rings_;  // none over a network
  Stream ops_;
  Bulk bulk_;
  std::set<uint32_t> areas_;    // of pinned memory that the worker knows
  uint64_t copies_ = 0;         // from and to pinned memory, asked of the worker
  uint64_t copies_before_ = 0;  // of the session that this one succeeds
  std::unique_ptr<const std::array<uint64_t, kTraitCount>> traits_;
  uint32_t stream_ = 0;
  uint64_t noticed_waits_ = 0, noticed_operations_ = 0, noticed_last_ = 0;
  bool advised_ = false;
  Warnings warnings_;
  std::string out_;
  // Of the thread that sends. Who holds both locks has taken the session's first.
  std::mutex sending_mutex_;
  std::string leaving_, coded_;
  const std::unique_ptr<Encoder> encoder_;  // over a network only
  uint64_t marked_ = 0;                     // bytes of records before the last mark
  uint32_t marks_ = 0;                      // that the worker has not come to yet
  std::deque<uint64_t> unwanted_;           // replies whose wait was interrupted: the bytes that follow each
  std::unique_ptr<Recording> recording_;
  std::unique_ptr<Tape> tape_;
  std::unordered_set<uint32_t> reserved_;  // slots that no storage here has
  Slots slots_;
  std::vector<Life> lives_;  // by slot
  std::unordered_map<uint32_t, Hold> held_;
  std::unordered_map<uint64_t, Life> kept_;             // by their numbers, as they were when this session met them
  Session* successor_ = nullptr;                        // has the storages of this one, whose worker is gone
  std::array<uint32_t, Address::kLargeCount> large_{};  // the slots of storages of more than 4 GiB
  uint32_t large_count_ = 0;
  std::unique_ptr<uint32_t[]> versions_;  // of each slot's content
  std::unordered_set<uint32_t> exported_;
  std::mutex reason_mutex_;
  std::condition_variable explained_;
  std::string reason_;  // of the first to close it
  std::mutex captured_mutex_;
  std::string captured_;
  std::string closed_;
  bool is_closed_ = false, is_disowned_ = false, is_mesh_ = false;
  std::atomic<bool> is_retired_{false};
  std::atomic<bool> dirty_{false}, asleep_{false}, ending_{false}, hurried_{false}, dozes_{false}, is_near_{false};
  std::mutex wake_mutex_;
  std::condition_variable wake_;
  std::thread flusher_;
};

inline bool is_sky(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->key_set().has_backend(c10::BackendComponent::PrivateUse1Bit);
}

// The session behind a device index; throws if there is none.
Session& session_at(c10::DeviceIndex index);
Session* session_by_serial(uint32_t serial) noexcept;
Session& open_session(int index, std::vector<Way> ways, bool shares_memory, bool on_cpu);
void close_session(int index, const std::string& why);  // the last one that had this index
void forget_index(const Session& session);              // it is closed, and its index free
// Takes the place of a session whose worker is gone: its index, its serial, and so its tensors.
Session& reopen_session(uint32_t serial, std::vector<Way> ways, bool shares_memory, bool on_cpu,
                        const Inheritance& inheritance);
int open_count();
std::vector<int> open_indices();
bool in_bad_fork();  // all there are were opened before this process was forked
bool synchronous();
void unshare_everywhere(uint32_t area);

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
uint32_t current_stream(c10::DeviceIndex index);
void set_current_stream(c10::DeviceIndex index, uint32_t stream);

at::Tensor make_tensor(Session& session, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype,
                       uint64_t bytes, bool tell);

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sky
