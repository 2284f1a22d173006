// Copies that the device makes on its own time, in the order in which they were asked for.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <deque>
#include <optional>
#include <vector>

#include "../wire/shared_memory.h"

namespace sky {

// The bytes of a GPU that go over a network pass through page-locked memory, in two parts of at most so many; and how
// many the GPU copies at a time.
constexpr uint64_t kStage = 32 << 20, kCopied = 2 << 20;

// A CPU has copied when it returns; a GPU is asked by an event whether it has. A GPU that has failed copies nothing any
// more: then all of them count as done, and the operations say what is wrong.
class Copies {
 public:
  Copies(c10::Device device, SharedRings* rings);

  // The last bytes read from the ring are being copied: they are the ring's again when that is done.
  void from_ring(size_t bytes);
  // A copy from or to memory that the client shares; the client is told how many of those are done.
  void of_shared();

  bool is_empty() const { return pending_.empty(); }
  // Takes note of those that are done.
  void collect();
  // Waits until at most so many bytes of the ring are still in use.
  void await(size_t most);
  void finish_all();

 private:
  struct Pending {
    c10::Event event;
    size_t bytes;
    uint64_t shared;
  };
  void add(size_t bytes, uint64_t shared);
  void finish(size_t bytes, uint64_t shared);
  void drop_first();

  c10::Device device_;
  SharedRings* rings_;
  std::optional<c10::impl::VirtualGuardImpl> guard_;
  std::deque<Pending> pending_;
  std::vector<c10::Event> spare_;  // making one costs more than recording one again
  size_t held_ = 0;
  uint64_t shared_ = 0;
};

}  // namespace sky
