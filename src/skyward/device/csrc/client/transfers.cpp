// The bytes of tensors, both ways: in the stream of operations, beside it, or through pinned memory that is shared.
#include "session.h"

namespace sky {
namespace {

// Small uploads ride in the op stream; the copy there is their snapshot.
constexpr uint64_t kInlineUpload = 64 << 10;

std::string fetch_record(const std::string& located, bool later) {
  Writer w;
  w.u32(kFetch);
  w.u32(static_cast<uint32_t>(1 + located.size()));
  w.u8(later);
  w.raw(located.data(), located.size());
  return w.bytes();
}

}  // namespace

void Session::upload(uint32_t slot, uint64_t offset, const at::Tensor& dense, bool later) {
  const auto* data = dense.const_data_ptr();
  auto size = dense.nbytes();
  std::lock_guard lock(mutex);
  Spent spent(recording_.get(), kUploading, size);
  begin();
  wrote(slot);
  bool is_inline = size <= kInlineUpload;
  if (auto* noted = tape()) noted->uploaded(slot, offset, data, size, is_inline);
  if (later && !is_inline && uses_pinned())
    if (auto pinned = use_pinned(data, size, serial, copies_ + 1)) {
      stats.uploaded += size;
      copy_in(slot, offset, size, *pinned);
      return;
    }
  struct __attribute__((packed)) {
    uint32_t kind, slot;
    uint64_t offset, size;
    uint8_t is_inline;
  } record{kUpload, slot, offset, size, is_inline};
  put(&record, sizeof record);
  stats.uploaded += size;
  if (is_inline) {
    put(data, size);
    return;
  }
  flush();
  // As a GPU does, the links read pinned memory while the program goes on; it is not given out again before. What
  // nobody else has cannot change either.
  bool is_ours = dense.use_count() == 1 && dense.storage().use_count() == 1;
  bool is_kept = later && !rings_ && (is_ours || is_pinned(data));
  try {
    OutsidePython outside;
    if (is_kept) bulk_.send_later(data, size, std::make_shared<c10::Storage>(dense.storage()));
    else bulk_.send(data, size, later);
  } catch (const Disconnected& e) {
    broken(e.what());
  }
}

std::string Session::located(const at::Tensor& source) const {
  Writer w;
  auto place = place_of(source.unsafeGetTensorImpl());
  w.u32(place.slot);
  w.u8(static_cast<uint8_t>(source.scalar_type()));
  w.u8(static_cast<uint8_t>(source.dim()));
  for (auto s : source.sizes()) w.i64(s);
  for (auto s : source.strides()) w.i64(s);
  w.i64(place.offset);
  return w.bytes();
}

void Session::fetch(const at::Tensor& source, void* into, uint64_t size) {
  auto line = line_of_tape();
  std::lock_guard lock(mutex);
  notice_waiting();
  struct Noted {
    Tape* tape;
    uint32_t line;
    std::string located;
    const void* into;
    ~Noted() {
      if (C10_UNLIKELY(tape != nullptr)) tape->read(line, located, into);
    }
  } noted{tape(), line, C10_UNLIKELY(tape() != nullptr) ? located(source) : std::string(), into};
  Spent spent(recording_.get(), size <= kInlineFetch ? kReading : kDownloading, size);
  begin();
  stats.fetched += size;
  if (size > kInlineFetch && uses_pinned())
    if (auto pinned = use_pinned(into, size, serial, copies_ + 1)) {
      copy_out(source, *pinned);
      uint32_t record[] = {kSync, stream_};
      ask(record, sizeof record, true);
      return;
    }
  PageMakers makers;
  if (size >= Stripes::kLong) makers = bulk_.make_pages(into, size);
  auto record = fetch_record(located(source), false);
  auto content = ask(record.data(), record.size(), true, size <= kInlineFetch ? 0 : size);
  if (size <= kInlineFetch) {
    SKY_CHECK(content.size() == size, "the worker sent ", content.size(), " bytes of ", size);
    std::memcpy(into, content.data(), size);
    return;
  }
  try {
    OutsidePython outside;
    bulk_.receive(into, size);
  } catch (const Disconnected& e) {
    broken(e.what());
  }
}

void Session::fetch_later(const at::Tensor& source, at::Tensor into) {
  // The ranks have to agree on what is fetched.
  if (is_mesh_) return fetch(source, into.mutable_data_ptr(), into.nbytes());
  std::lock_guard lock(mutex);
  Spent spent(recording_.get(), kDownloading, into.nbytes());
  begin();
  if (auto* noted = tape()) noted->blocked("a copy to the host that is not waited for");
  stats.fetched += into.nbytes();
  if (uses_pinned())
    if (auto pinned = use_pinned(into.const_data_ptr(), into.nbytes(), serial, copies_ + 1)) {
      copy_out(source, *pinned);
      return;
    }
  skip_unwanted(true);
  auto record = fetch_record(located(source), true);
  try {
    bulk_.receive_later(std::move(into));
  } catch (const Disconnected& e) {
    broken(e.what());
  }
  put(record.data(), record.size());
}

// Pinned memory that the worker has not seen yet is mapped there first.
void Session::share(const PinnedPlace& pinned) {
  if (!areas_.insert(pinned.area).second) return;
  struct __attribute__((packed)) {
    uint32_t kind, area;
    uint64_t size;
  } record{kShare, pinned.area, pinned.area_size};
  put(&record, sizeof record);
  try {
    bulk_.send_descriptor(pinned.descriptor);
  } catch (const Disconnected& e) {
    broken(e.what());
  }
}

void Session::unshare(uint32_t area) {
  std::lock_guard lock(mutex);
  if (is_closed_ || !areas_.erase(area)) return;
  uint32_t record[] = {kUnshare, area};
  try {
    put(record, sizeof record);
  } catch (...) {
    // The connection broke; the next operation says so.
  }
}

void Session::copy_in(uint32_t slot, uint64_t offset, uint64_t size, const PinnedPlace& pinned) {
  share(pinned);
  struct __attribute__((packed)) {
    uint32_t kind, slot;
    uint64_t offset, size;
    uint32_t area;
    uint64_t from;
  } record{kCopyIn, slot, offset, size, pinned.area, pinned.offset};
  put(&record, sizeof record);
  copies_++;
}

void Session::copy_out(const at::Tensor& source, const PinnedPlace& pinned) {
  share(pinned);
  auto from = located(source);
  Writer w;
  w.u32(kCopyOut);
  w.u32(static_cast<uint32_t>(from.size() + 4 + 8));
  w.raw(from.data(), from.size());
  w.u32(pinned.area);
  w.u64(pinned.offset);
  put(w.bytes().data(), w.size());
  copies_++;
}

}  // namespace sky
