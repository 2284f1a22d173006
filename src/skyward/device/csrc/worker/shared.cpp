// Memory of the client's that is mapped here as well: copies between it and the device pass through nothing else.
#include "pages.h"
#include "session.h"

namespace sky {

// There is none without rings: the client is on another host.
void Session::check_shares() const {
  if (!rings_) throw Malformed("shared memory from another host");
}

void Session::share(Reader& r) {
  auto number = r.u32();
  auto bytes = r.u64();
  check_shares();
  if (areas_.count(number)) throw Malformed("an area that is known already");
  int fd = receive_descriptor(bulk_.first().socket());
  if (fd < 0) throw Malformed("shared memory without a descriptor");
  if (size_of_memory(fd) < bytes) {
    ::close(fd);
    throw Malformed("shared memory of another size");
  }
  auto area = std::make_unique<SharedMemory>(fd, bytes);
  area->close_descriptor();
  if (device_.is_cuda()) lock_pages(area->bytes(), bytes);
  areas_[number] = std::move(area);
}

// The client gives memory back after all copies from and to it are done; that is not left to the client alone.
void Session::unshare(Reader& r) {
  auto found = areas_.find(r.u32());
  if (found == areas_.end()) throw Malformed("an unknown area");
  copies_.finish_all();
  if (device_.is_cuda()) unlock_pages(found->second->bytes());
  areas_.erase(found);
}

char* Session::shared(uint32_t number, uint64_t offset, uint64_t bytes) {
  auto found = areas_.find(number);
  if (found == areas_.end()) throw Malformed("an unknown area");
  auto& area = *found->second;
  if (bytes > area.size() || offset > area.size() - bytes) throw Malformed("bytes beyond an area");
  return area.bytes() + offset;
}

void Session::copy_in(Reader& r) {
  check_shares();
  auto& held = slots_[r.u32()];
  auto offset = r.u64(), bytes = r.u64();
  auto area = r.u32();
  auto* from = shared(area, r.u64(), bytes);
  if (accepts(held, offset, bytes)) put(held, offset, from, bytes);
  copies_.of_shared();
}

void Session::copy_out(Reader& r) {
  check_shares();
  auto& held = slots_[r.u32()];
  auto dtype = r.u8(), dim = r.u8();
  auto layout = Layout::read(r, dtype, dim, 0);
  auto offset = r.i64();
  auto area = r.u32();
  auto at = r.u64();
  settle(held, false);
  if (held.poison) {
    if (!first_error_) first_error_ = held.poison;
  } else {
    attempt("copying to the host", [&] {
      auto whole = dense(held, layout, offset);
      auto bytes = whole.nbytes();
      auto* into = shared(area, at, bytes);
      auto start = static_cast<uint64_t>(whole.storage_offset()) * whole.itemsize();
      host_view(into, bytes).copy_(byte_view(whole.storage(), start, bytes), /*non_blocking=*/device_.is_cuda());
    });
  }
  copies_.of_shared();
}

}  // namespace sky
