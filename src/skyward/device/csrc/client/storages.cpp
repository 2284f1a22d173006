// Storages of a session: a slot in the worker each, and the address that stands for it here.
#include <c10/core/impl/COW.h>

#include <algorithm>

#include "memory.h"
#include "session.h"

namespace sky {

c10::Storage Session::new_storage(uint64_t bytes, bool tell) {
  std::lock_guard lock(mutex);
  begin();
  if (C10_UNLIKELY(bytes > Address::kSmallMost)) check_span(0, bytes);
  auto slot = slots_.take();
  SKY_CHECK(slot, "more than ", Slots::kCount, " tensors live on sky:", index);
  begin_life(slot, bytes);
  auto* address = reinterpret_cast<void*>(address_for(slot, bytes));
  if (tell) {
    struct __attribute__((packed)) {
      uint32_t kind, slot;
      uint64_t bytes;
    } record{kNew, slot, bytes};
    put(&record, sizeof record);
    if (auto* noted = tape()) noted->made(slot, bytes);
  }
  auto* name = reinterpret_cast<void*>(Address::of_slot(serial, slot));
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes,
      c10::DataPtr(address, name, &Session::delete_storage, c10::Device(kSky, static_cast<c10::DeviceIndex>(index))),
      storage_allocator(index), true));
}

// The table of large storages must have room, or have the slot already.
void Session::check_span(uint32_t slot, uint64_t bytes) const {
  bool fits = bytes <= Address::kLargeMost &&
              (large_count_ < Address::kLargeCount || std::find(large_.begin(), large_.end(), slot) != large_.end());
  TORCH_CHECK_WITH(OutOfMemoryError, fits, "sky:", index, " cannot hold one more tensor of ", bytes,
                   " bytes: a tensor may have 2 TiB, and ", Address::kLargeCount, " tensors more than 4 GiB each");
}

// The address of a slot whose storage has that many bytes.
uintptr_t Session::address_for(uint32_t slot, uint64_t bytes) {
  if (C10_LIKELY(bytes <= Address::kSmallMost)) return Address::of_slot(serial, slot);
  check_span(slot, bytes);
  auto found = std::find(large_.begin(), large_.end(), slot);
  if (found == large_.end()) {
    found = std::find(large_.begin(), large_.end(), 0u);
    *found = slot;
    large_count_++;
  }
  return Address::of_large(serial, static_cast<uint32_t>(found - large_.begin()));
}

void Session::copy_if_shared(c10::StorageImpl* storage) {
  if (!c10::impl::cow::is_cow_data_ptr(storage->_mutable_data_ptr_no_checks())) return;
  auto& session = *behind(storage->_mutable_data_ptr_no_checks()).session;
  {
    std::lock_guard lock(session.mutex);
    session.check_open();
  }
  storage->mutable_data_ptr();
}

void Session::set_size(c10::StorageImpl* storage, uint64_t bytes) {
  auto& pointer = storage->_mutable_data_ptr_no_checks();
  SKY_CHECK(storage->resizable() && pointer.get_deleter() == &Session::delete_storage,
            "a slice of a storage cannot be resized; resize the storage it was made from");
  auto slot = Address::slot_in(reinterpret_cast<uintptr_t>(pointer.get_context()));
  if (bytes != storage->nbytes()) begin_life(slot, bytes);
  if (C10_UNLIKELY(bytes > Address::kSmallMost)) {
    auto* data = reinterpret_cast<void*>(address_for(slot, bytes));
    auto device = pointer.device();
    auto* context = pointer.release_context();
    storage->set_data_ptr_noswap(c10::DataPtr(data, context, &Session::delete_storage, device));
  }
  storage->set_nbytes(bytes);
}

void Session::resize_storage(c10::StorageImpl* storage, uint64_t bytes) {
  unshare(storage);
  std::lock_guard lock(mutex);
  begin();
  auto before = storage->nbytes();
  set_size(storage, bytes);
  struct __attribute__((packed)) {
    uint32_t kind, slot;
    uint64_t bytes;
  } record{kResize, behind(storage->_mutable_data_ptr_no_checks()).slot, bytes};
  wrote(record.slot);
  put(&record, sizeof record);
  if (auto* noted = tape()) noted->resized(record.slot, before, bytes);
}

void Session::delete_storage(void* context) noexcept {
  auto address = reinterpret_cast<uintptr_t>(context);
  if (auto* session = session_by_serial(Address::serial_in(address))) session->release(Address::slot_in(address));
}

Place Session::behind(const c10::DataPtr& pointer) {
  if (C10_UNLIKELY(pointer.get_deleter() != &Session::delete_storage)) return behind_slice(pointer);
  auto address = reinterpret_cast<uintptr_t>(pointer.get_context());
  auto* session = session_by_serial(Address::serial_in(address));
  SKY_CHECK(session, "a sky tensor without memory");
  return {session, Address::slot_in(address), 0};
}

// PyTorch made this pointer from another, which its context keeps alive. Where the pointer is a slice's, the context is
// the storage that it is a slice of.
Place Session::behind_slice(const c10::DataPtr& pointer) {
  SKY_CHECK(pointer.get(), "a sky tensor without memory");
  SKY_CHECK(pointer.get_context(),
            "a storage that was made from an address alone does not keep the memory there alive, and cannot be "
            "used on a sky device; make a view of a tensor instead");
  auto place = behind(reinterpret_cast<uintptr_t>(pointer.get()));
  if (pointer.get_deleter() == slice_deleter) {
    auto whole = behind(static_cast<c10::StorageImpl*>(pointer.get_context())->_mutable_data_ptr_no_checks());
    SKY_CHECK(whole.session == place.session && whole.slot == place.slot,
              "the address of a slice is not in the storage that it is a slice of");
  }
  return place;
}

Place Session::behind(uintptr_t number) {
  auto address = Address::read(number);
  auto* session = session_by_serial(address.serial);
  SKY_CHECK(session && !(number >> 63), "the address ", number, " is not of a sky device");
  std::lock_guard lock(session->mutex);
  auto slot = address.is_large ? session->large_[address.number] : address.number;
  SKY_CHECK(session->slots_.is_taken(slot), "no tensor of sky:", session->index, " is at the address ", number);
  return {session, slot, address.offset};
}

TensorPlace Session::place_of(const c10::TensorImpl* tensor) {
  auto place = behind(pointer_of(tensor));
  auto offset = tensor->storage_offset();
  if (C10_UNLIKELY(place.offset != 0)) {
    auto item = tensor->itemsize();
    SKY_CHECK(place.offset % item == 0, "a tensor of ", tensor->dtype().name(), " cannot begin ", place.offset,
              " bytes into a storage: that is no multiple of its ", item, " bytes; slice the storage elsewhere");
    offset += static_cast<int64_t>(place.offset / item);
  }
  return {*place.session, place.slot, offset};
}

void Session::release(uint32_t slot) noexcept {
  if (!slot) return;
  std::unique_lock lock(mutex);
  if (C10_UNLIKELY(successor_ != nullptr)) {
    auto* next = successor_;
    lock.unlock();
    next->release(slot);
    return;
  }
  if (C10_UNLIKELY(!held_.empty()))
    if (auto held = held_.find(slot); held != held_.end()) {
      held->second.released = true;
      return;
    }
  if (C10_UNLIKELY(!exported_.empty())) exported_.erase(slot);
  wrote(slot);
  slots_.give(slot);
  if (C10_UNLIKELY(tape_ != nullptr)) tape_->freed(slot);
  if (C10_UNLIKELY(large_count_ > 0))
    for (auto& large : large_)
      if (large == slot) {
        large = 0;
        large_count_--;
      }
  if (is_closed_) return;
  uint32_t record = kFree | slot;
  try {
    put(&record, sizeof record);
  } catch (...) {
    // The connection broke; the next operation says so.
  }
}

}  // namespace sky
