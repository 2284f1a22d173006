// How tensors lie in their storages: each layout met gets a number, which is quick to compare.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <tuple>
#include <vector>

#include "../wire/values.h"

namespace sky {

inline uint8_t bits_of(const at::Tensor& t) { return (t.is_conj() ? kConjugated : 0) | (t.is_neg() ? kNegated : 0); }

inline void set_bits(const at::Tensor& t, uint8_t bits) {
  if (bits & kConjugated) t.unsafeGetTensorImpl()->_set_conj(true);
  if (bits & kNegated) t.unsafeGetTensorImpl()->_set_neg(true);
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
    check_layout(layout.sizes, layout.strides);
    return layout;
  }

  bool operator<(const Layout& o) const {
    return std::tie(dtype, bits, sizes, strides) < std::tie(o.dtype, o.bits, o.sizes, o.strides);
  }

  // Bytes from the start of a storage that a tensor so laid out may touch; throws where no storage has as many.
  uint64_t extent(int64_t offset) const { return extent_of(dtype, sizes, strides, offset); }
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
