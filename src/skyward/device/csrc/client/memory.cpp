#include "memory.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <sys/mman.h>

#include <bit>
#include <map>

#include "session.h"

namespace sky {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto storage = session_at(current_device()).new_storage(bytes, true);
    return std::move(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks());
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Session::delete_storage; }
  void copy_data(void*, const void*, size_t) const override {
    SKY_CHECK(false, "a sky storage has no memory here to copy");
  }

  bool initialized() override { return open_count() > 0; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override { session_at(-1).memory(kEmptyCache); }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (!pointer) return;
    auto place = Session::behind(pointer);
    place.session->used_on(place.slot, static_cast<uint32_t>(stream.id()));
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto figures = session_at(device).memory(kTellMemory);
    DeviceStats stats;
    fill(stats.allocated_bytes, figures[kAllocated], figures[kAllocatedPeak]);
    fill(stats.requested_bytes, figures[kAllocated], figures[kAllocatedPeak]);
    fill(stats.active_bytes, figures[kAllocated], figures[kAllocatedPeak]);
    fill(stats.reserved_bytes, figures[kReserved], figures[kReservedPeak]);
    return stats;
  }
  // Only levels and their peaks are known here, no sums.
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { session_at(device).memory(kResetPeak); }
  // Not marked as overriding: older versions of the interface lack it.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {
    auto figures = session_at(device).memory(kTellMemory);
    return {figures[kFreeMemory], figures[kTotalMemory]};
  }

 private:
  static void fill(c10::CachingAllocator::StatArray& stat, uint64_t now, uint64_t peak) {
    stat[0].current = static_cast<int64_t>(now);
    stat[0].peak = static_cast<int64_t>(peak);
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kSky, &allocator);

// Blocks are kept and given out again: the first touch of fresh memory costs more than a copy into it.
class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, c10::Device(c10::kCPU)};
    auto size = std::bit_ceil(std::max<size_t>(bytes, 4096));
    auto* block = take(size);
    return {block, block, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* into, const void* from, size_t bytes) const override { default_copy_data(into, from, bytes); }

  bool holds(const void* at) {
    std::lock_guard lock(mutex_);
    auto next = used_.upper_bound(reinterpret_cast<uintptr_t>(at));
    if (next == used_.begin()) return false;
    auto& [start, size] = *std::prev(next);
    return reinterpret_cast<uintptr_t>(at) < start + size;
  }

 private:
  static constexpr size_t kKeptMost = 512 << 20;

  void* take(size_t size) {
    std::lock_guard lock(mutex_);
    void* block;
    if (auto found = free_.find(size); found != free_.end()) {
      block = found->second;
      free_.erase(found);
      kept_ -= size;
    } else {
      block = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK_WITH(OutOfMemoryError, block != MAP_FAILED, "no ", size, " bytes of host memory to pin");
    }
    used_[reinterpret_cast<uintptr_t>(block)] = size;
    return block;
  }

  void give(void* block) noexcept {
    std::lock_guard lock(mutex_);
    auto found = used_.find(reinterpret_cast<uintptr_t>(block));
    auto size = found->second;
    used_.erase(found);
    if (kept_ + size > kKeptMost) {
      ::munmap(block, size);
    } else {
      free_.emplace(size, block);
      kept_ += size;
    }
  }

  static void give_back(void* block);

  std::mutex mutex_;
  std::map<uintptr_t, size_t> used_;
  std::multimap<size_t, void*> free_;
  size_t kept_ = 0;
};

// Never destroyed: tensors may outlive everything static.
Pinned& pinned() {
  static auto& instance = *std::make_unique<Pinned>().release();
  return instance;
}

void Pinned::give_back(void* block) { pinned().give(block); }

}  // namespace

c10::Allocator* storage_allocator() { return &allocator; }
c10::Allocator* pinned_allocator() { return &pinned(); }

bool is_pinned(const void* at) {
  // Where PyTorch finds a GPU here too, it pins for that one.
  return pinned().holds(at) || (at::globalContext().hasCUDA() && at::detail::getCUDAHooks().isPinnedPtr(at));
}

}  // namespace sky
