// Memory, and the bytes that come and go.
#include "exports.h"
#include "kept_storages.h"
#include "session.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <atomic>
#include <bit>
#include <stop_token>
#include <thread>
#include <vector>

// Of Linux 5.14; the headers may be older.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace sky {
namespace {

constexpr int64_t kPart = 2 << 20;
constexpr int kMakersMost = 3;

// Into whole pages that were never touched. A new page costs eight times as much as the bytes in it: other threads make
// pages, from the end, while this one copies.
void read_into_new_pages(Ring& ring, char* into, uint64_t bytes) {
  auto parts = static_cast<int64_t>(bytes / kPart);
  std::atomic<int64_t> copied = 0, made = parts;
  auto make = [&](std::stop_token stop) {
    for (int64_t part; (part = --made) > copied && !stop.stop_requested();)
      if (::madvise(into + part * kPart, kPart, MADV_POPULATE_WRITE)) return;
  };
  std::vector<std::jthread> makers;
  auto count = std::min<int64_t>({kMakersMost, at::get_num_threads() - 1, parts / 2});
  for (int64_t i = 0; i < count; i++) makers.emplace_back(make);
  for (; copied < parts; copied++) ring.read(into + copied * kPart, kPart);
  ring.read(into + parts * kPart, bytes - static_cast<uint64_t>(parts * kPart));
}

}  // namespace

at::Tensor make_view(const c10::Storage& storage, const Layout& layout, int64_t offset) {
  // Not always our device: the seeds of fused attention stay on the host, and go back in from there.
  auto type = storage.device_type();
  auto keys = type == c10::kCPU    ? c10::DispatchKeySet(c10::DispatchKey::CPU)
              : type == c10::kCUDA ? c10::DispatchKeySet(c10::DispatchKey::CUDA)
                                   : c10::DispatchKeySet(c10::DispatchKey::MPS);
  TORCH_CHECK(layout.extent(offset) <= storage.nbytes(), "a tensor needs ", layout.extent(offset),
              " bytes of a storage of ", storage.nbytes());
#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
  // With strides of zero a few bytes are any number of elements, which take as long as their client wants.
  TORCH_CHECK(c10::multiply_integers(layout.sizes) <= 1 << 20, "more elements than a fuzzer has time for");
#endif
  auto t =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(layout.dtype));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides, offset);
  set_bits(t, layout.bits);
  return t;
}

at::Tensor byte_view(const c10::Storage& storage, uint64_t offset, uint64_t bytes) {
  Layout layout{at::kByte, {static_cast<int64_t>(bytes)}, {1}, 0};
  return make_view(storage, layout, static_cast<int64_t>(offset));
}

at::Tensor host_view(const char* at, uint64_t bytes) {
  return at::from_blob(const_cast<char*>(at), {static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
}

c10::Storage Session::new_storage(uint64_t bytes) {
  if (device_.is_cpu())
    if (auto storage = shareable(bytes)) return storage;
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device_)).storage();
}

void Session::allocate(Reader& r) {
  auto& held = slots_[r.u32()];
  auto bytes = r.u64();
  slots_.clear(held);
  held.poison = attempt("allocating memory", [&] { slots_.hold(held, new_storage(bytes)); });
}

void Session::resize(Reader& r) {
  auto& held = slots_[r.u32()];
  auto bytes = r.u64();
  settle(held, true);
  auto failed = attempt("resizing memory", [&] {
    auto bigger = new_storage(bytes);
    auto kept = std::min<uint64_t>(bytes, held.has_memory() ? held.memory().nbytes() : 0);
    if (kept) byte_view(bigger, 0, kept).copy_(byte_view(held.memory(), 0, kept));
    slots_.clear(held);
    slots_.hold(held, bigger);
  });
  if (failed) held.poison = failed;
}

// Whether the slot can take the bytes. A slice may have been made before its storage shrank.
bool Session::accepts(Slot& held, uint64_t offset, uint64_t bytes) {
  settle(held, true);
  if (held.poison) return false;
  if (!held.has_memory()) throw Malformed("an upload to an empty slot");
  if (bytes <= held.memory().nbytes() && offset <= held.memory().nbytes() - bytes) return true;
  note({std::to_string(bytes) + " bytes at " + std::to_string(offset) + " do not fit a storage of " +
            std::to_string(held.memory().nbytes()),
        kFailed, "copying to the device"});
  return false;
}

size_t Session::upload(const char* data, size_t size) {
  constexpr size_t head = 4 + 4 + 8 + 8 + 1;
  if (size < head) return 0;
  Reader r(data + 4, head - 4);
  auto& held = slots_[r.u32()];
  auto offset = r.u64(), bytes = r.u64();
  bool is_inline = r.u8();
  if (is_inline && bytes > size - head) return 0;
  // If not, the bytes are taken from the stream and dropped.
  bool drop = !accepts(held, offset, bytes);
  if (is_inline) {
    if (!drop) put(held, offset, data + head, bytes);
    return head + bytes;
  }
  receive_bulk(held, offset, bytes, drop);
  return head;
}

void Session::put(Slot& held, uint64_t offset, const char* from, uint64_t bytes) {
  if (held.memory().device_type() == c10::kCPU) {
    std::memcpy(static_cast<char*>(held.memory().mutable_data()) + offset, from, bytes);
    return;
  }
  // CUDA reads page-locked memory later; any other has been read when this returns.
  auto failed = attempt("copying to the device", [&] {
    byte_view(held.memory(), offset, bytes).copy_(host_view(from, bytes), /*non_blocking=*/device_.is_cuda());
  });
  if (failed) held.poison = failed;
}

// Of a mesh: the bytes go on to other ranks, whatever becomes of them here.
void Session::receive_and_pass(Slot& held, uint64_t offset, uint64_t bytes, bool drop) {
  arrivals_.await_all();
  for (uint64_t done = 0; done < bytes;) {
    auto n = std::min(kStage, bytes - done);
    auto* stage = static_cast<char*>(staging(turn_, n).mutable_data_ptr());
    if (rings_) rings_->up.read(stage, n);
    else bulk_.receive(stage, n, done, bytes);
    ranks_.pass_bytes(stage, n, done, bytes);
    if (!drop && !held.poison) put(held, offset + done, stage, n);
    attempt("copying to the device", [&] { streams_.mark(staged_[turn_]); });
    turn_ ^= 1;
    done += n;
  }
}

void Session::receive_bulk(Slot& held, uint64_t offset, uint64_t bytes, bool drop) {
  if (C10_UNLIKELY(ranks_.passes_on())) return receive_and_pass(held, offset, bytes, drop);
  if (device_.is_cpu() && !drop) {
    auto* into = static_cast<char*>(held.memory().mutable_data()) + offset;
    bool is_all = !offset && bytes == held.memory().nbytes();
    if (rings_ && is_all && begin_to_fill(held.memory())) read_into_new_pages(rings_->up, into, bytes);
    else if (rings_) rings_->up.read(into, bytes);
    else bulk_.receive(into, bytes, 0, bytes);
    return;
  }
  if (rings_) return receive_from_ring(held, offset, bytes, drop);
  if (drop) {
    arrivals_.await_all();
    Stripes::Progress progress;
    while (!bulk_.receive_some(nullptr, bytes, progress, {1, 0})) continue;
    return;
  }
  // A profile says what the bytes on their way take, so it has this thread wait for them. If they do not come, a GPU
  // that waits goes on without them, and may fail: that is for memory of this session alone.
  bool waits_here = recording_.is_on() || !streams_.uses_default() || is_seen_ || KeptStorages::all().count();
  for (uint64_t done = 0; done < bytes;) {
    auto n = std::min(kStage, bytes - done);
    auto* stage = static_cast<char*>(staging(turn_, n).mutable_data_ptr());
    auto number = arrivals_.expect(stage, n, done, bytes);
    // The GPU copies the first bytes while the others come.
    for (uint64_t at = 0; at < n; at += kCopied) {
      if (++number; waits_here || !arrivals_.await_on_gpu(number)) arrivals_.await(number);
      if (!held.poison) put(held, offset + done + at, stage + at, std::min(kCopied, n - at));
    }
    attempt("copying to the device", [&] { streams_.mark(staged_[turn_]); });
    turn_ ^= 1;
    done += n;
  }
}

void Session::receive_from_ring(Slot& held, uint64_t offset, uint64_t bytes, bool drop) {
  for (uint64_t done = 0; done < bytes;) {
    // The client needs room to go on.
    copies_.await(SharedRings::kBytes / 2);
    size_t n;
    auto* from = rings_->up.to_read(bytes - done, n);
    if (!drop && !held.poison) put(held, offset + done, from, n);
    copies_.from_ring(n);
    done += n;
  }
}

// Page-locked where the device can copy from it directly. Free to be written to.
at::Tensor& Session::staging(int which, uint64_t bytes) {
  auto& stage = staging_[which];
  if (staged_[which]) staged_[which]->synchronize();
  if (!stage.defined() || stage.nbytes() < bytes)
    stage = at::empty({static_cast<int64_t>(std::max<uint64_t>(std::bit_ceil(bytes), kPart))},
                      at::TensorOptions().dtype(at::kByte).pinned_memory(device_.is_cuda()));
  return stage;
}

at::Tensor Session::dense(Slot& held, const Layout& layout, int64_t offset) {
  TORCH_CHECK(held.has_memory(), "the tensor has no memory");
  return make_view(held.memory(), layout, offset).contiguous();
}

// Its bytes. A GPU copies into page-locked memory without the detour that it takes into any other.
std::string Session::small(const at::Tensor& dense) {
  auto bytes = dense.nbytes();
  if (dense.is_cpu()) return {static_cast<const char*>(dense.const_data_ptr()), bytes};
  auto start = static_cast<uint64_t>(dense.storage_offset()) * dense.itemsize();
  auto part = staging(0, bytes).narrow(0, 0, static_cast<int64_t>(bytes));
  if (bytes) part.copy_(byte_view(dense.storage(), start, bytes), /*non_blocking=*/device_.is_cuda());
  streams_.synchronize_current();
  return {static_cast<const char*>(part.const_data_ptr()), bytes};
}

// Later: the client goes on, and a thread of its own takes status, size and bytes from the bulk connection.
void Session::fetch(Reader& r) {
  bool later = r.u8();
  auto& held = slots_[r.u32()];
  auto dtype = r.u8(), dim = r.u8();
  auto layout = Layout::read(r, dtype, dim, 0);
  auto offset = r.i64();
  std::string mark;
  auto answer = [&](Status status, std::string_view content, uint64_t following) {
    if (!later) return reply(status, content, mark, Agreement::kSame);
    Writer w;
    w.u8(status);
    w.u64(content.size() + following);
    w.raw(content.data(), content.size());
    send_bulk(w.bytes().data(), w.size(), 0, w.size());
    return true;
  };
  settle(held, false);
  if (first_error_ || held.poison) {
    auto failure = first_error_ ? std::exchange(first_error_, nullptr) : held.poison;
    answer(failure->kind, failure->told(), 0);
    return;
  }
  at::Tensor whole;
  std::string content;
  try {
    whole = dense(held, layout, offset);
    if (C10_UNLIKELY(ranks_.is_mesh())) {
      whole = whole.cpu();
      mark = mark_of(whole.const_data_ptr(), whole.nbytes());
    }
    if (whole.nbytes() <= kInlineFetch) content = small(whole);
  } catch (const std::exception& e) {
    answer(kind_of(e), Failure{text_of(e), kind_of(e), "copying to the host"}.told(), 0);
    return;
  }
  if (whole.nbytes() <= kInlineFetch) {
    answer(kOk, content, 0);
    return;
  }
  if (answer(kOk, "", whole.nbytes()) && ranks_.is_first()) send_tensor(whole);
}

// A part of `total` bytes, of which `done` went before it.
void Session::send_bulk(const void* data, uint64_t size, uint64_t done, uint64_t total) {
  if (rings_) rings_->down.write(data, size);
  else bulk_.send(data, size, done, total);
}

void Session::send_tensor(const at::Tensor& dense) {
  size_t bytes = dense.nbytes();
  if (dense.is_cpu()) {
    send_bulk(dense.const_data_ptr(), bytes, 0, bytes);
    return;
  }
  // Through page-locked memory: a copy into fresh pages runs at the speed of their page faults. While a part is sent,
  // the GPU copies the next one.
  auto start = static_cast<uint64_t>(dense.storage_offset()) * dense.itemsize();
  // The first part is small, as nothing is sent while the GPU copies it.
  auto part_at = [&](uint64_t at) { return std::min(at ? kStage : 2 * kCopied, bytes - at); };
  auto begin = [&](uint64_t at, int which) {
    auto n = part_at(at);
    auto part = staging(which, n).narrow(0, 0, static_cast<int64_t>(n));
    part.copy_(byte_view(dense.storage(), start + at, n), /*non_blocking=*/device_.is_cuda());
    streams_.mark(staged_[which]);
  };
  int turn = 0;
  begin(0, turn);
  for (uint64_t done = 0, n; done < bytes; done += n, turn ^= 1) {
    n = part_at(done);
    if (done + n < bytes) begin(done + n, turn ^ 1);
    send_bulk(staging(turn, n).const_data_ptr(), n, done, bytes);
  }
}

}  // namespace sky
