// What the client's slot numbers stand for here: storages, with the views of them used last.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "failures.h"
#include "layouts.h"
#include "progress.h"

namespace sky {

struct Slot {
  // A result's storage is held by view[0] alone, which saves counting a second reference for every operation;
  // `memory` finds it either way.
  c10::Storage storage;
  at::Tensor view[2];
  int layout[2] = {-1, -1};
  int64_t offset[2] = {0, 0};
  uint64_t counted = 0;      // of its storage's bytes, which `out=` may grow
  bool is_of_graph = false;  // a compiled graph's result, whose memory its next run may use again
  Reason poison;
  std::unique_ptr<Traffic> traffic;  // none: nothing is on its way to or from another device

  bool needs_a_look() const { return poison != nullptr || traffic != nullptr; }
  bool has_memory() const { return storage || view[0].defined(); }
  const c10::Storage& memory() const { return storage ? storage : view[0].storage(); }
  // Before a view is dropped or added: from then on the slot itself holds the storage.
  void keep_memory() {
    if (!storage && view[0].defined()) storage = view[0].storage();
  }
};

class Slots {
 public:
#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
  static constexpr uint32_t kCount = 1u << 8;  // a session for each input
#else
  static constexpr uint32_t kCount = 1u << 18;
#endif

  Slot& operator[](uint32_t number) {
    if (number >= kCount) throw Malformed("a slot out of range");
    return slots_[number];
  }

  void clear(Slot& slot) {
    if (!slot.has_memory() && !slot.poison) return;  // has nothing else either
    bytes_ -= slot.counted;
    slot.counted = 0;
    slot.is_of_graph = false;
    slot.storage = c10::Storage();
    for (int i = 0; i < 2; i++) {
      slot.view[i].reset();
      slot.layout[i] = -1;
      slot.offset[i] = 0;
    }
    slot.poison.reset();
    slot.traffic.reset();
  }

  // The slot must be clear.
  void hold(Slot& slot, c10::Storage storage) {
    slot.storage = std::move(storage);
    count(slot);
  }

  void hold(Slot& slot, at::Tensor tensor, int layout, bool is_of_graph) {
    slot.view[0] = std::move(tensor);
    slot.layout[0] = layout;
    slot.is_of_graph = is_of_graph;
    count(slot);
  }

  void count(Slot& slot) {
    auto bytes = slot.memory().nbytes();
    bytes_ += bytes - slot.counted;
    slot.counted = bytes;
    peak_ = std::max(peak_, bytes_);
  }

  // Bytes of all storages held.
  uint64_t bytes() const { return bytes_; }
  uint64_t peak() const { return peak_; }
  void reset_peak() { peak_ = bytes_; }

 private:
  std::vector<Slot> slots_ = std::vector<Slot>(kCount);
  uint64_t bytes_ = 0, peak_ = 0;
};

}  // namespace sky
