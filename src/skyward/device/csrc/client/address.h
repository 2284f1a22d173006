// Addresses: what a storage has for a data pointer, since its memory is in the worker.
//
// PyTorch computes with data pointers: a slice of a storage, or a tensor that came through DLPack, points to its
// parent's address plus an offset. So every slot has a span of addresses of its own, longer than its storage, and an
// address is a slot and an offset in bytes. No address is one that a processor would accept.
//
//   up to 4 GiB   0 | serial of the session: 12 bits | slot: 18 bits              | offset: 32 bits
//   larger        1 | serial of the session: 12 bits | number in a table: 9 bits  | offset: 41 bits
#pragma once

#include <cstdint>

namespace sky {

struct Address {
  static constexpr int kSerialBits = 12, kSlotBits = 18, kOffsetBits = 32, kLargeBits = 9, kLargeOffsetBits = 41;
  static constexpr int kSerialShift = kSlotBits + kOffsetBits;
  static constexpr uint64_t kLarge = 1ull << (kSerialShift + kSerialBits);
  static constexpr uint32_t kSerials = 1u << kSerialBits, kLargeCount = 1u << kLargeBits;
  // A slice may begin at the very end of a storage, and that address must lie in the span as well.
  static constexpr uint64_t kSmallMost = (1ull << kOffsetBits) - 1, kLargeMost = (1ull << kLargeOffsetBits) - 1;
  static_assert(kSlotBits + kOffsetBits == kLargeBits + kLargeOffsetBits);

  uint32_t serial = 0;
  uint32_t number = 0;  // the slot, or where the session's table of large storages names it
  uint64_t offset = 0;
  bool is_large = false;

  static constexpr uintptr_t of_slot(uint32_t serial, uint32_t slot) {
    return uint64_t{serial} << kSerialShift | uint64_t{slot} << kOffsetBits;
  }
  static constexpr uintptr_t of_large(uint32_t serial, uint32_t number) {
    return kLarge | uint64_t{serial} << kSerialShift | uint64_t{number} << kLargeOffsetBits;
  }

  static constexpr uint32_t serial_in(uintptr_t address) { return (address >> kSerialShift) & (kSerials - 1); }
  static constexpr uint32_t slot_in(uintptr_t address) { return (address >> kOffsetBits) & ((1u << kSlotBits) - 1); }

  static constexpr Address read(uintptr_t address) {
    if (address & kLarge)
      return {serial_in(address), static_cast<uint32_t>(address >> kLargeOffsetBits) & (kLargeCount - 1),
              address & kLargeMost, true};
    return {serial_in(address), slot_in(address), address & kSmallMost, false};
  }
};

}  // namespace sky
