#include "copies.h"

namespace sky {

Copies::Copies(c10::Device device, SharedRings* rings) : device_(device), rings_(rings) {
  if (device.is_cuda()) guard_.emplace(device.type());
}

void Copies::from_ring(size_t bytes) {
  if (!guard_) return rings_->up.took(bytes);
  rings_->up.keep(bytes);
  held_ += bytes;
  add(bytes, 0);
}

void Copies::of_shared() {
  shared_++;
  if (guard_) add(0, shared_);
  else finish(0, shared_);
}

void Copies::add(size_t bytes, uint64_t shared) {
  c10::Event event(device_.type());
  if (!spare_.empty()) {
    event = std::move(spare_.back());
    spare_.pop_back();
  }
  try {
    event.record(guard_->getStream(device_));
    pending_.push_back({std::move(event), bytes, shared});
  } catch (const std::exception&) {
    finish_all();
    finish(bytes, shared);
  }
}

void Copies::finish(size_t bytes, uint64_t shared) {
  if (bytes) {
    held_ -= bytes;
    rings_->up.release(bytes);
  }
  if (shared) rings_->counters().copies.store(shared);
}

void Copies::drop_first() {
  auto done = std::move(pending_.front());
  pending_.pop_front();
  finish(done.bytes, done.shared);
  spare_.push_back(std::move(done.event));
}

void Copies::collect() {
  try {
    while (!pending_.empty() && pending_.front().event.query()) drop_first();
  } catch (const std::exception&) {
    finish_all();
  }
}

void Copies::await(size_t most) {
  try {
    while (held_ > most) {
      pending_.front().event.synchronize();
      collect();
    }
  } catch (const std::exception&) {
    finish_all();
  }
}

void Copies::finish_all() {
  for (; !pending_.empty(); drop_first()) try {
      pending_.front().event.synchronize();
    } catch (const std::exception&) {
      // Nothing is copied any more.
    }
}

}  // namespace sky
