#include "tape.h"

#include "session.h"

namespace sky {
namespace {

// `replay/tape.py` reads them.
enum Entry : uint8_t { kOperation, kMade, kFreed, kUploaded, kRead, kSet, kBlocked, kStreamed, kOfEvent, kResized };

}  // namespace

void Tape::operation(uint32_t line, uint32_t id, std::string_view name, std::string_view fields,
                     std::string_view payload, std::string_view slots) {
  w_.u8(kOperation);
  w_.u32(line);
  w_.u32(id);
  w_.text(name);
  w_.text(fields);
  w_.text(payload);
  w_.text(slots);
}

void Tape::made(uint32_t slot, uint64_t bytes) {
  w_.u8(kMade);
  w_.u32(slot);
  w_.u64(bytes);
}

void Tape::freed(uint32_t slot) {
  w_.u8(kFreed);
  w_.u32(slot);
}

void Tape::uploaded(uint32_t slot, uint64_t offset, const void* from, uint64_t size, bool with_bytes) {
  w_.u8(kUploaded);
  w_.u32(slot);
  w_.u64(offset);
  w_.u64(reinterpret_cast<uintptr_t>(from));
  w_.u64(size);
  w_.text(with_bytes ? std::string_view(static_cast<const char*>(from), size) : std::string_view());
}

void Tape::read(uint32_t line, std::string_view located, const void* into) {
  w_.u8(kRead);
  w_.u32(line);
  w_.text(located);
  w_.u64(reinterpret_cast<uintptr_t>(into));
}

void Tape::settings(uint64_t settings) {
  w_.u8(kSet);
  w_.u64(settings);
}

void Tape::streamed(uint32_t stream) {
  w_.u8(kStreamed);
  w_.u32(stream);
}

void Tape::event(uint32_t event, EventAction action, uint32_t stream) {
  w_.u8(kOfEvent);
  w_.u32(event);
  w_.u8(action);
  w_.u32(stream);
}

void Tape::resized(uint32_t slot, uint64_t before, uint64_t bytes) {
  w_.u8(kResized);
  w_.u32(slot);
  w_.u64(before);
  w_.u64(bytes);
}

void Tape::blocked(std::string_view what, uint32_t line) {
  w_.u8(kBlocked);
  w_.u32(line);
  w_.text(what);
}

void Session::start_tape() {
  std::lock_guard lock(mutex);
  begin();
  SKY_CHECK(!tape_, "sky:", index, " is recorded for another sky.replay; call one of them after the other");
  tape_ = std::make_unique<Tape>();
  tape_->settings(settings);
  tapes++;
  taped_on = serial;
}

std::string Session::stop_tape() {
  taped_on = 0;
  std::lock_guard lock(mutex);
  SKY_CHECK(tape_, "sky:", index, " is not recorded");
  auto tape = std::move(tape_);
  tapes--;
  return tape->content();
}

void Session::block_tape_elsewhere(std::string_view what) {
  if (C10_LIKELY(!taped_on || taped_on == serial)) return;
  auto line = line_of_tape();
  auto& taped = *session_by_serial(taped_on);
  std::lock_guard lock(taped.mutex);
  if (auto* noted = taped.tape()) noted->blocked(what, line);
}

std::vector<uint32_t> Session::reserve(uint32_t count) {
  std::lock_guard lock(mutex);
  begin();
  std::vector<uint32_t> slots;
  while (slots.size() < count) {
    auto slot = slots_.take();
    if (!slot)
      for (auto taken : slots) slots_.give(taken);
    SKY_CHECK(slot, "more than ", Slots::kCount, " tensors live on sky:", index);
    slots.push_back(slot);
  }
  reserved_.insert(slots.begin(), slots.end());
  return slots;
}

void Session::give_back(const std::vector<uint32_t>& slots) noexcept {
  for (auto slot : slots) {
    {
      std::lock_guard lock(mutex);
      reserved_.erase(slot);
    }
    release(slot);
  }
}

}  // namespace sky
