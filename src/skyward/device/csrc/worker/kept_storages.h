// Kept storages: those that are still in this process when its client has left, for the next one.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace sky {

// The session's thread numbers storages and takes them up again; the thread that hears the agent holds and drops them.
class KeptStorages {
 public:
  static KeptStorages& all();

  // The storage's number, the same each time; it means something only as long as the storage lives.
  uint64_t number_of(const c10::Storage& storage);
  // Whether all of them live: then they stay until `drop` has been called as often. If not, nothing changes.
  bool hold(const std::vector<uint64_t>& numbers);
  void drop(const std::vector<uint64_t>& numbers);
  // Empty if there is none any more.
  c10::Storage find(uint64_t number);
  // How many are held.
  uint64_t count();
  // Forgets the numbers of those that are not held.
  void sweep();

 private:
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Entry {
    Weak weak;  // its address is no other storage's as long as this is there
    c10::Storage held;
    uint64_t holds = 0;
  };

  std::mutex mutex_;
  uint64_t last_ = 0;
  std::unordered_map<uint64_t, Entry> entries_;
  std::unordered_map<const c10::StorageImpl*, uint64_t> numbers_;
};

}  // namespace sky
