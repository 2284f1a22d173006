// Storages over time: those that live, for checkpoints, and what becomes of them after the worker is gone.
#include "lives.h"

#include "memory.h"
#include "session.h"

namespace sky {

std::vector<Life> Session::living() {
  std::lock_guard lock(mutex);
  std::vector<Life> found;
  for (uint32_t slot = 1; slot < lives_.size(); slot++)
    if (slots_.is_taken(slot) && !reserved_.count(slot)) found.push_back(lives_[slot]);
  return found;
}

c10::Storage Session::alias(uint32_t slot) {
  std::lock_guard lock(mutex);
  check_open();
  SKY_CHECK(slot < lives_.size() && slots_.is_taken(slot), "no tensor of sky:", index, " has the slot ", slot);
  auto bytes = lives_[slot].bytes;
  auto* address = reinterpret_cast<void*>(address_for(slot, bytes));
  auto* name = reinterpret_cast<void*>(Address::of_slot(serial, slot));
  auto let_go = [](void* context) {
    auto at = reinterpret_cast<uintptr_t>(context);
    if (auto* session = session_by_serial(Address::serial_in(at))) session->let_go(Address::slot_in(at));
  };
  c10::Device device(kSky, static_cast<c10::DeviceIndex>(index));
  auto made = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                    c10::DataPtr(address, name, let_go, device),
                                                    storage_allocator(index), /*resizable=*/false);
  held_[slot].count++;
  return c10::Storage(std::move(made));
}

void Session::let_go(uint32_t slot) noexcept {
  std::lock_guard lock(mutex);
  auto found = held_.find(slot);
  if (found == held_.end() || --found->second.count) return;
  bool released = found->second.released;
  held_.erase(found);
  if (released) release(slot);
}

void Session::renew(uint32_t slot) {
  std::lock_guard lock(mutex);
  begin();
  SKY_CHECK(slot < lives_.size() && slots_.is_taken(slot), "no tensor of sky:", index, " has the slot ", slot);
  wrote(slot);
  exported_.erase(slot);
  Writer w;
  w.u32(kNew);
  w.u32(slot);
  w.u64(lives_[slot].bytes);
  put(w.bytes().data(), w.size());
}

void Session::inherit(Session& before, const Inheritance& inheritance) {
  std::lock_guard own(mutex);
  // If the new worker is gone as well, everything stays with the session before.
  struct Undo {
    Session &mine, &before;
    bool wanted = true;
    ~Undo() {
      if (!wanted || before.successor_ != &mine) return;
      std::lock_guard lock(before.mutex);
      before.slots_ = mine.slots_;
      before.held_ = mine.held_;
      before.successor_ = nullptr;
    }
  } undo{*this, before};
  {
    std::lock_guard lock(before.mutex);
    SKY_CHECK(before.is_retired_ && !before.successor_, "sky:", index, " is open");
    slots_ = before.slots_;
    lives_ = before.lives_;
    held_ = before.held_;
    reserved_ = before.reserved_;
    large_ = before.large_;
    large_count_ = before.large_count_;
    copies_ = copies_before_ = before.copies_;
    before.successor_ = this;
  }
  for (auto& life : living()) {
    auto slot = static_cast<uint32_t>(life.slot);
    auto kept = inheritance.kept.find(slot);
    Writer w;
    if (kept != inheritance.kept.end() && kept->second.birth == life.birth && kept->second.bytes == life.bytes) {
      w.u32(kNew);
      w.u32(slot);
      w.u64(life.bytes);
    } else {
      auto said = inheritance.lost.find(slot);
      auto& text = said == inheritance.lost.end() ? inheritance.otherwise : said->second;
      w.u32(kLose);
      w.u32(static_cast<uint32_t>(8 + text.size()));
      w.u32(slot);
      w.text(text);
    }
    put(w.bytes().data(), w.size());
  }
  undo.wanted = false;
}

}  // namespace sky
