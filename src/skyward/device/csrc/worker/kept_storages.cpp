#include "kept_storages.h"

#include <algorithm>

namespace sky {

KeptStorages& KeptStorages::all() {
  // Never destroyed: what it holds would be freed after the device's own library.
  static KeptStorages& kept = *std::make_unique<KeptStorages>().release();
  return kept;
}

uint64_t KeptStorages::number_of(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  std::lock_guard lock(mutex_);
  auto [found, is_new] = numbers_.try_emplace(impl, last_ + 1);
  if (is_new) {
    last_++;
    entries_.try_emplace(last_, Entry{Weak(storage.getWeakStorageImpl()), {}, 0});
  }
  return found->second;
}

bool KeptStorages::hold(const std::vector<uint64_t>& numbers) {
  std::vector<c10::Storage> living;  // freed, if it comes to that, after the lock
  std::lock_guard lock(mutex_);
  for (auto number : numbers) {
    auto found = entries_.find(number);
    if (found == entries_.end()) return false;
    living.emplace_back(found->second.weak.lock());
    if (!living.back()) return false;
  }
  for (size_t i = 0; i < numbers.size(); i++) {
    auto& entry = entries_.at(numbers[i]);
    entry.held = living[i];
    entry.holds++;
  }
  return true;
}

void KeptStorages::drop(const std::vector<uint64_t>& numbers) {
  std::vector<c10::Storage> freed;
  std::lock_guard lock(mutex_);
  for (auto number : numbers) {
    auto found = entries_.find(number);
    if (found == entries_.end() || !found->second.holds || --found->second.holds) continue;
    freed.push_back(std::move(found->second.held));
    found->second.held = c10::Storage();
  }
}

c10::Storage KeptStorages::find(uint64_t number) {
  std::lock_guard lock(mutex_);
  auto found = entries_.find(number);
  return found == entries_.end() ? c10::Storage() : c10::Storage(found->second.weak.lock());
}

uint64_t KeptStorages::count() {
  std::lock_guard lock(mutex_);
  return static_cast<uint64_t>(std::count_if(entries_.begin(), entries_.end(), [](auto& e) { return e.second.holds; }));
}

void KeptStorages::sweep() {
  std::lock_guard lock(mutex_);
  std::erase_if(numbers_, [&](auto& e) { return !entries_.at(e.second).holds; });
  std::erase_if(entries_, [](auto& e) { return !e.second.holds; });
}

}  // namespace sky
