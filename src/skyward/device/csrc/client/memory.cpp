#include "memory.h"

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

}  // namespace

c10::Allocator* storage_allocator() { return &allocator; }

}  // namespace sky
