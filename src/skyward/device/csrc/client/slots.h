// The lowest free slot: a three-level bitmap.
//
// The slot chosen depends only on the set of free ones, not on the order of frees, so a loop in steady
// state writes byte-identical records every time around.
#pragma once

#include <cstdint>
#include <cstring>

namespace sky {

class Slots {
 public:
  static constexpr uint32_t kCount = 1u << 18;

  Slots() {
    std::memset(leaves_, 0xff, sizeof leaves_);
    std::memset(middle_, 0xff, sizeof middle_);
    leaves_[0] &= ~uint64_t{1};  // slot 0 stands for "none"
  }

  // 0 when there is none left.
  uint32_t take() {
    if (!top_) return 0;
    auto a = static_cast<uint32_t>(__builtin_ctzll(top_));
    auto b = a * 64 + static_cast<uint32_t>(__builtin_ctzll(middle_[a]));
    auto c = static_cast<uint32_t>(__builtin_ctzll(leaves_[b]));
    if (!(leaves_[b] &= leaves_[b] - 1))
      if (!(middle_[a] &= ~(uint64_t{1} << (b & 63)))) top_ &= ~(uint64_t{1} << a);
    return b * 64 + c;
  }

  bool is_taken(uint32_t slot) const { return slot && slot < kCount && !(leaves_[slot >> 6] >> (slot & 63) & 1); }

  void give(uint32_t slot) noexcept {
    auto b = slot >> 6, a = b >> 6;
    leaves_[b] |= uint64_t{1} << (slot & 63);
    middle_[a] |= uint64_t{1} << (b & 63);
    top_ |= uint64_t{1} << a;
  }

 private:
  uint64_t leaves_[kCount / 64], middle_[kCount / 4096], top_ = ~uint64_t{0};
};

}  // namespace sky
