// Memory, and the bytes that come and go.
#include "session.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <dlfcn.h>

namespace sky {
namespace {

constexpr size_t kStage = 8 << 20;

at::Tensor host_view(const char* at, size_t bytes) {
  return at::from_blob(const_cast<char*>(at), {static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
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

c10::Storage Session::new_storage(uint64_t bytes) {
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
  auto failed = attempt("resizing memory", [&] {
    auto bigger = new_storage(bytes);
    auto kept = std::min<uint64_t>(bytes, held.storage ? held.storage.nbytes() : 0);
    if (kept) byte_view(bigger, 0, kept).copy_(byte_view(held.storage, 0, kept));
    slots_.clear(held);
    slots_.hold(held, bigger);
  });
  if (failed) held.poison = failed;
}

size_t Session::upload(const char* data, size_t size) {
  constexpr size_t head = 4 + 4 + 8 + 8 + 1;
  if (size < head) return 0;
  Reader r(data + 4, head - 4);
  auto& held = slots_[r.u32()];
  auto offset = r.u64(), bytes = r.u64();
  bool is_inline = r.u8();
  if (is_inline && size < head + bytes) return 0;
  if (!held.poison && !held.storage) throw Malformed("an upload to an empty slot");
  // A slice may have been made before its storage shrank. The bytes are taken from the stream and dropped.
  bool fits = held.poison || (bytes <= held.storage.nbytes() && offset <= held.storage.nbytes() - bytes);
  if (!fits)
    note("copying to the device: " + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
             " do not fit a storage of " + std::to_string(held.storage.nbytes()),
         kFailed);
  bool drop = held.poison || !fits;
  if (is_inline) {
    if (!drop) put(held, offset, data + head, bytes);
    return head + bytes;
  }
  receive_bulk(held, offset, bytes, drop);
  return head;
}

void Session::put(Slot& held, uint64_t offset, const char* from, uint64_t bytes) {
  if (held.storage.device_type() == c10::kCPU) {
    std::memcpy(static_cast<char*>(held.storage.mutable_data()) + offset, from, bytes);
    return;
  }
  auto failed =
      attempt("copying to the device", [&] { byte_view(held.storage, offset, bytes).copy_(host_view(from, bytes)); });
  if (failed) held.poison = failed;
}

void Session::receive_bulk(Slot& held, uint64_t offset, uint64_t bytes, bool drop) {
  if (device_.is_cpu() && !drop) {
    auto* into = static_cast<char*>(held.storage.mutable_data()) + offset;
    if (rings_) rings_->up.read(into, bytes);
    else receive_all(bulk_, into, bytes);
    return;
  }
  for (uint64_t done = 0; done < bytes;) {
    size_t n;
    const char* from;
    if (rings_) {
      from = rings_->up.to_read(bytes - done, n);
    } else {
      n = std::min<uint64_t>(kStage, bytes - done);
      receive_all(bulk_, staging().mutable_data_ptr(), n);
      from = static_cast<const char*>(staging().const_data_ptr());
    }
    if (!drop && !held.poison) put(held, offset + done, from, n);
    if (rings_) rings_->up.took(n);
    done += n;
  }
}

// Page-locked where the device can copy from it directly.
at::Tensor& Session::staging() {
  if (!staging_.defined())
    staging_ = at::empty({static_cast<int64_t>(kStage)},
                         at::TensorOptions().dtype(at::kByte).pinned_memory(device_.is_cuda()));
  return staging_;
}

// A GPU copies from and to the rings themselves once they are page-locked. There are no CUDA headers to
// build with, but where there is a GPU its runtime is in this process.
void Session::use_rings() {
  using Register = int (*)(void*, size_t, unsigned);
  auto lock = device_.is_cuda() ? reinterpret_cast<Register>(::dlsym(RTLD_DEFAULT, "cudaHostRegister")) : nullptr;
  if (lock) lock(rings_->memory(), SharedRings::kSize, 0);
}

// Later: the client goes on, and a thread of its own takes status, size and bytes from the bulk connection.
void Session::fetch(Reader& r) {
  bool later = r.u8();
  auto& held = slots_[r.u32()];
  auto dtype = r.u8(), dim = r.u8();
  auto layout = Layout::read(r, dtype, dim, 0);
  auto offset = r.i64();
  auto answer = [&](Status status, std::string_view content, uint64_t following) {
    if (!later) return reply(status, content);
    Writer w;
    w.u8(status);
    w.u64(content.size() + following);
    w.raw(content.data(), content.size());
    send_bulk(w.bytes().data(), w.size());
  };
  if (first_error_ || held.poison) {
    auto failure = first_error_ ? std::exchange(first_error_, nullptr) : held.poison;
    answer(failure->kind, failure->text, 0);
    return;
  }
  at::Tensor dense;
  try {
    TORCH_CHECK(held.storage, "the tensor has no memory");
    dense = make_view(held.storage, layout, offset).contiguous();
    if (dense.nbytes() <= kInlineFetch) dense = dense.cpu();
  } catch (const std::exception& e) {
    answer(kind_of(e), "copying to the host: " + text_of(e), 0);
    return;
  }
  size_t bytes = dense.nbytes();
  if (bytes <= kInlineFetch) {
    answer(kOk, std::string_view(static_cast<const char*>(dense.const_data_ptr()), bytes), 0);
    return;
  }
  answer(kOk, "", bytes);
  send_tensor(dense);
}

void Session::send_bulk(const void* data, size_t bytes) {
  if (rings_) rings_->down.write(data, bytes);
  else send_all(bulk_, data, bytes);
}

void Session::send_tensor(const at::Tensor& dense) {
  size_t bytes = dense.nbytes();
  if (dense.is_cpu()) {
    send_bulk(dense.const_data_ptr(), bytes);
    return;
  }
  // Through page-locked memory: a copy into fresh pages runs at the speed of their page faults.
  auto start = static_cast<uint64_t>(dense.storage_offset()) * dense.itemsize();
  for (uint64_t done = 0; done < bytes;) {
    size_t n;
    if (rings_) {
      auto* into = rings_->down.to_write(bytes - done, n);
      host_view(into, n).copy_(byte_view(dense.storage(), start + done, n));
      rings_->down.wrote(n);
    } else {
      n = std::min<uint64_t>(kStage, bytes - done);
      auto part = staging().narrow(0, 0, static_cast<int64_t>(n));
      part.copy_(byte_view(dense.storage(), start + done, n));
      send_all(bulk_, part.const_data_ptr(), n);
    }
    done += n;
  }
}

}  // namespace sky
