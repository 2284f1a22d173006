#include "memory.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <array>

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

// Of the storages of one device. PyTorch copies with it what a lazy clone shares, before the clone is written to, and
// cannot bear an error there: where the device is gone nothing is copied, and the next operation says so.
class OfDevice final : public c10::Allocator {
 public:
  c10::DeviceIndex index = 0;

  c10::DataPtr allocate(size_t bytes) override try {
    auto storage = session_at(index).new_storage(bytes, true);
    return std::move(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks());
  } catch (const std::exception&) {
    return {nullptr, c10::Device(kSky, index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Session::delete_storage; }
  void copy_data(void* into, const void* from, size_t bytes) const override try {
    at::AutoDispatchBelowADInplaceOrView below;
    bytes_at(into, bytes).copy_(bytes_at(const_cast<void*>(from), bytes));
  } catch (const std::exception&) {}

 private:
  at::Tensor bytes_at(void* address, size_t bytes) const {
    c10::Device device(kSky, index);
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(address, address, [](void*) {}, device));
    return at::empty({0}, at::TensorOptions().dtype(at::kByte).device(device)).set_(storage);
  }
};

}  // namespace

c10::Allocator* storage_allocator(int index) {
  static auto of_devices = [] {
    std::array<OfDevice, kDevicesMax> made;
    for (int i = 0; i < kDevicesMax; i++) made[i].index = static_cast<c10::DeviceIndex>(i);
    return made;
  }();
  return &of_devices.at(static_cast<size_t>(index));
}

}  // namespace sky
