// Memory that is kept in the worker's process when its client leaves, and that the next session takes up.
#include "session.h"

namespace sky {

std::string Session::numbered(const std::vector<uint32_t>& slots) {
  std::lock_guard lock(mutex);
  begin();
  for (auto slot : slots) {
    wrote(slot);
    exported_.insert(slot);  // whoever opens it may write to it at any time
  }
  Writer w;
  w.u32(kNumbered);
  w.text({reinterpret_cast<const char*>(slots.data()), slots.size() * sizeof slots[0]});
  auto answer = ask(w.bytes().data(), w.size());
  try {
    Reader r(answer.data(), answer.size());
    for (auto slot : slots) {
      auto number = r.u64();
      r.text();
      if (number) kept_[number] = lives_.at(slot);
    }
  } catch (const Malformed& e) {
    fail(std::string("the worker's answer cannot be read: ") + e.what());
  }
  return answer;
}

std::vector<c10::Storage> Session::adopt(const std::vector<uint64_t>& numbers, const std::vector<uint64_t>& sizes) {
  std::lock_guard lock(mutex);
  begin();
  std::vector<c10::Storage> made;
  Writer taken;
  for (size_t i = 0; i < numbers.size(); i++) {
    auto known = kept_.find(numbers[i]);
    if (known != kept_.end()) {
      auto& life = known->second;
      auto slot = static_cast<uint32_t>(life.slot);
      if (slots_.is_taken(slot) && lives_[slot].birth == life.birth && life.bytes >= sizes[i]) {
        made.push_back(alias(slot));
        continue;
      }
    }
    made.push_back(new_storage(sizes[i], false));
    auto slot = behind(made.back().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()).slot;
    exported_.insert(slot);
    kept_[numbers[i]] = lives_[slot];
    taken.u32(slot);
    taken.u64(numbers[i]);
    taken.u64(sizes[i]);
  }
  if (!taken.size()) return made;
  Writer w;
  w.u32(kAdopt);
  w.text(taken.bytes());
  ask(w.bytes().data(), w.size());
  return made;
}

}  // namespace sky
