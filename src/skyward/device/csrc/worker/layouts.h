// How tensors lie in their storages: each layout met gets a number, which is quick to compare.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <tuple>
#include <vector>

#include "../wire/records.h"

namespace sky {

inline uint8_t bits_of(const at::Tensor& t) { return (t.is_conj() ? kConjugated : 0) | (t.is_neg() ? kNegated : 0); }

inline void set_bits(const at::Tensor& t, uint8_t bits) {
  if (bits & kConjugated) t.unsafeGetTensorImpl()->_set_conj(true);
  if (bits & kNegated) t.unsafeGetTensorImpl()->_set_neg(true);
}

// Undefined is a dtype too, but no tensor has it.
inline c10::ScalarType checked_dtype(uint8_t number) {
  auto dtype = static_cast<c10::ScalarType>(number);
  if (number >= static_cast<uint8_t>(c10::ScalarType::NumOptions) || dtype == c10::ScalarType::Undefined)
    throw Malformed("an unknown dtype");
  return dtype;
}

struct Layout {
  c10::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
  uint8_t bits = 0;

  static Layout of(const at::Tensor& t) { return {t.scalar_type(), t.sizes().vec(), t.strides().vec(), bits_of(t)}; }

  static Layout read(Reader& r, uint8_t dtype, uint8_t dim, uint8_t bits) {
    Layout layout{checked_dtype(dtype), {}, {}, bits};
    for (int i = 0; i < dim; i++) layout.sizes.push_back(r.i64());
    for (int i = 0; i < dim; i++) layout.strides.push_back(r.i64());
    for (int i = 0; i < dim; i++)
      if (layout.sizes[i] < 0 || layout.strides[i] < 0) throw Malformed("a negative size or stride");
    return layout;
  }

  bool operator<(const Layout& o) const {
    return std::tie(dtype, bits, sizes, strides) < std::tie(o.dtype, o.bits, o.sizes, o.strides);
  }

  // Bytes from the start of a storage that a tensor so laid out may touch; throws where no storage has as many.
  uint64_t extent(int64_t offset) const {
    if (offset < 0) throw Malformed("a negative offset");
    auto last = offset;
    bool is_beyond = false;
    for (size_t i = 0; i < sizes.size(); i++) {
      if (!sizes[i]) return 0;
      int64_t span;
      is_beyond |= __builtin_mul_overflow(sizes[i] - 1, strides[i], &span);
      is_beyond |= __builtin_add_overflow(last, span, &last);
    }
    uint64_t bytes;
    is_beyond |= __builtin_mul_overflow(static_cast<uint64_t>(last) + 1, c10::elementSize(dtype), &bytes);
    if (is_beyond) throw Malformed("a tensor larger than any memory");
    return bytes;
  }
};

class Layouts {
 public:
  int number(Layout layout) {
    auto [it, added] = numbers_.try_emplace(layout, static_cast<int>(layouts_.size()));
    if (added) layouts_.push_back(std::move(layout));
    return it->second;
  }
  const Layout& operator[](int number) const { return layouts_[static_cast<size_t>(number)]; }

 private:
  std::map<Layout, int> numbers_;
  std::vector<Layout> layouts_;
};

// A tensor over a storage there already is.
at::Tensor make_view(const c10::Storage& storage, const Layout& layout, int64_t offset);
at::Tensor byte_view(const c10::Storage& storage, uint64_t offset, uint64_t bytes);
// Memory of this process, which must outlive it.
at::Tensor host_view(const char* at, uint64_t bytes);

}  // namespace sky
