#include "pinned.h"

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <bit>
#include <map>
#include <vector>

#include "../wire/shared_memory.h"
#include "session.h"

namespace sky {
namespace {

// Small blocks are cut from areas that stay; a large block has an area of its own, which goes with it.
constexpr size_t kSmallest = 4096, kLarge = 4 << 20, kArea = 16 << 20;
// Free blocks are kept up to this size: the first touch of fresh memory costs more than a copy into it.
constexpr size_t kKeptMost = 512 << 20;

struct Area {
  // Where no memory can be shared, it is plain memory, and bytes are copied from it as from any other.
  Area(uint32_t number, size_t size) : number(number), memory(shareable_memory(size), size) {}
  uint32_t number;
  SharedMemory memory;
  size_t used = 0;
};

struct Block {
  size_t size;
  std::shared_ptr<Area> area;
  // The last copy from or to it that a worker was asked for.
  uint32_t serial = 0;
  uint64_t copy = 0;

  bool is_busy() const {
    auto* session = serial ? session_by_serial(serial) : nullptr;
    return session && session->copies_done() < copy;
  }
  // Its worker was left while it copied, and may still do so: nobody can use the block any more.
  bool is_lost() const { return is_busy() && session_by_serial(serial)->is_retired(); }
};

class Pinned final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, c10::Device(c10::kCPU)};
    auto* block = take(std::bit_ceil(std::max(bytes, kSmallest)));
    return {block, block, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* into, const void* from, size_t bytes) const override { default_copy_data(into, from, bytes); }

  void empty_cache() override {
    std::vector<uint32_t> gone;
    {
      std::lock_guard lock(mutex_);
      keep_finished(gone);
      // Small blocks are parts of areas that stay.
      std::erase_if(free_, [&](auto& each) {
        auto& [size, place] = each;
        if (size < kLarge) return false;
        gone.push_back(place.second.area->number);
        kept_ -= size;
        return true;
      });
    }
    for (auto area : gone) unshare_everywhere(area);
  }
  // A block waits by itself for the worker's last copy from or to it.
  bool record_event(void*, void*, c10::Stream) override { return false; }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool holds(const void* at) {
    std::lock_guard lock(mutex_);
    return find(at) != used_.end();
  }

  std::optional<PinnedPlace> use(const void* at, uint64_t bytes, uint32_t serial, uint64_t copy) {
    std::lock_guard lock(mutex_);
    auto found = find(at);
    if (found == used_.end()) return std::nullopt;
    auto& [start, block] = *found;
    if (reinterpret_cast<uintptr_t>(at) + bytes > start + block.size) return std::nullopt;
    if (block.area->memory.descriptor() < 0) return std::nullopt;
    // Two devices may copy from one block: only one of them is remembered, so the other is not let in.
    if (block.serial != serial && block.is_busy()) return std::nullopt;
    block.serial = serial;
    block.copy = copy;
    auto& memory = block.area->memory;
    auto offset = static_cast<const char*>(at) - memory.bytes();
    return PinnedPlace{block.area->number, static_cast<uint64_t>(offset), memory.descriptor(), memory.size()};
  }

  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }
  // What is in use is the parent's as well: it is neither given out again here nor unmapped.
  void in_child() noexcept {
    std::construct_at(&mutex_);
    inherited_.merge(used_);
    free_.clear();
    waiting_.clear();
    current_.reset();
    kept_ = 0;
  }

 private:
  using Blocks = std::map<uintptr_t, Block>;

  Blocks::iterator find(const void* at) {
    auto next = used_.upper_bound(reinterpret_cast<uintptr_t>(at));
    if (next == used_.begin()) return used_.end();
    auto found = std::prev(next);
    return reinterpret_cast<uintptr_t>(at) < found->first + found->second.size ? found : used_.end();
  }

  void* take(size_t size) {
    std::vector<uint32_t> gone;
    std::unique_lock lock(mutex_);
    keep_finished(gone);
    uintptr_t start;
    if (auto found = free_.find(size); found != free_.end()) {
      start = found->second.first;
      used_.emplace(start, std::move(found->second.second));
      free_.erase(found);
      kept_ -= size;
    } else {
      auto block = fresh(size, start);
      used_.emplace(start, std::move(block));
    }
    lock.unlock();
    for (auto area : gone) unshare_everywhere(area);
    return reinterpret_cast<void*>(start);
  }

  Block fresh(size_t size, uintptr_t& start) try {
    auto area = size >= kLarge ? std::make_shared<Area>(next_++, size) : current_;
    if (!area || area->used + size > area->memory.size()) area = current_ = std::make_shared<Area>(next_++, kArea);
    start = reinterpret_cast<uintptr_t>(area->memory.bytes()) + area->used;
    area->used += size;
    return {size, area};
  } catch (const Disconnected& e) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "no ", size, " bytes of host memory to pin: ", e.what());
  }

  void give(void* block) noexcept {
    std::vector<uint32_t> gone;
    {
      std::lock_guard lock(mutex_);
      auto found = used_.find(reinterpret_cast<uintptr_t>(block));
      if (found == used_.end()) return;  // it is the parent's
      waiting_.emplace_back(found->first, std::move(found->second));
      used_.erase(found);
      keep_finished(gone);
    }
    for (auto area : gone) unshare_everywhere(area);
  }

  // Blocks that no worker copies from any more are free; `gone` gets the areas of those that are not kept.
  void keep_finished(std::vector<uint32_t>& gone) {
    std::erase_if(waiting_, [&](auto& waiting) {
      auto& [start, block] = waiting;
      bool is_lost = block.is_lost();
      if (block.is_busy() && !is_lost) return false;
      if (is_lost && block.size < kLarge) return true;
      if (is_lost || (block.size >= kLarge && kept_ + block.size > kKeptMost)) {
        gone.push_back(block.area->number);
      } else {
        auto size = block.size;
        free_.emplace(size, std::pair(start, std::move(block)));
        kept_ += size;
      }
      return true;
    });
  }

  static void give_back(void* block);

  std::mutex mutex_;
  Blocks used_, inherited_;
  std::multimap<size_t, std::pair<uintptr_t, Block>> free_;
  std::vector<std::pair<uintptr_t, Block>> waiting_;  // given back, but a worker may still copy
  std::shared_ptr<Area> current_;
  uint32_t next_ = 1;
  size_t kept_ = 0;
};

// Never destroyed: tensors may outlive everything static.
Pinned& pinned() {
  static auto& instance = *std::make_unique<Pinned>().release();
  return instance;
}

void Pinned::give_back(void* block) { pinned().give(block); }

// `torch.accelerator.empty_host_cache` calls the allocator of the device without a look at whether it has one.
at::HostAllocatorRegistry<kSky> registered_pinned(&pinned());

}  // namespace

c10::Allocator* pinned_allocator() { return &pinned(); }

bool is_pinned(const void* at) {
  // Where PyTorch finds a GPU here too, it pins for that one.
  return pinned().holds(at) || (at::globalContext().hasCUDA() && at::detail::getCUDAHooks().isPinnedPtr(at));
}

std::optional<PinnedPlace> use_pinned(const void* at, uint64_t bytes, uint32_t serial, uint64_t copy) {
  return pinned().use(at, bytes, serial, copy);
}

void guard_pinned_in_forks() {
  ::pthread_atfork([] { pinned().before_fork(); }, [] { pinned().after_fork(); }, [] { pinned().in_child(); });
}

}  // namespace sky
