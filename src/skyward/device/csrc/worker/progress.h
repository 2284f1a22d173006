// Bytes between this device and another: how far they have come, and who waits for them.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Storage.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "failures.h"

namespace sky {

// A part of a storage that comes from, or goes to, the device behind a link.
class Passage {
 public:
  Passage(uint64_t link, uint64_t number, uint64_t offset, uint64_t bytes)
      : link(link), number(number), offset(offset), bytes(bytes) {}
  Passage(const Passage&) = delete;

  const uint64_t link, number;   // counted on the link, in this direction
  const uint64_t offset, bytes;  // in the storage

  // For the link alone, once it has the passage.
  c10::Storage memory;                  // none: there is nothing to send, or no place for what comes
  std::optional<c10::Event> may_begin;  // a GPU has done what was issued before
  std::shared_ptr<Passage> source;      // what goes out is still coming in, as a part of this
  Reason refused;                       // why there is nothing to send
  bool is_of_graph = false;             // the memory is that of a compiled graph's result

  bool covers(uint64_t from, uint64_t count) const { return offset <= from && from + count <= offset + bytes; }
  bool touches(uint64_t from, uint64_t count) const { return offset < from + count && from < offset + bytes; }

  void advance(uint64_t count) {
    std::lock_guard lock(mutex_);
    count_ = count;
    changed_.notify_all();
  }
  void end(Reason failure) {
    memory = c10::Storage();
    source.reset();
    std::lock_guard lock(mutex_);
    if (is_over_) return;
    is_over_ = true;
    failure_ = std::move(failure);
    changed_.notify_all();
  }
  bool is_over() const {
    std::lock_guard lock(mutex_);
    return is_over_;
  }
  // Why the bytes did not come; null if they did.
  Reason wait() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_over_; });
    return failure_;
  }
  // How many bytes are there, more than `known`.
  uint64_t wait_beyond(uint64_t known) const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_over_ || count_ > known; });
    if (failure_) throw Poisoned{failure_};
    return is_over_ ? bytes : count_;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  uint64_t count_ = 0;
  bool is_over_ = false;
  Reason failure_;
};

// What is on its way to and from one slot.
struct Traffic {
  std::vector<std::shared_ptr<Passage>> arriving, leaving;
};

}  // namespace sky
