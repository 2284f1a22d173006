#include "streams.h"

#include <c10/core/CachingDeviceAllocator.h>

#include "exports.h"

namespace sky {

Streams::Streams(c10::Device device) : device_(device), real_(device.is_cuda()) {
  if (real_) guard_.emplace(device.type());
}

c10::Stream Streams::stream(uint32_t number) {
  if (!number) return guard_->getDefaultStream(device_);
  auto found = streams_.find(number);
  if (found == streams_.end()) {
    auto made = guard_->getNewStream(device_, number >= kUrgentStreams ? -1 : 0);
    found = streams_.emplace(number, made).first;
  }
  return found->second;
}

void Streams::use(uint32_t number) {
  if (real_) guard_->exchangeStream(stream(number));
}

void Streams::used_on(const c10::Storage& storage, uint32_t number) {
  if (real_) c10::getDeviceAllocator(device_.type())->recordStream(allocated(storage), stream(number));
}

void Streams::synchronize(uint32_t number) {
  if (!real_) return;
  if (number == kAllStreams) guard_->synchronizeDevice(device_.index());
  else guard_->synchronizeStream(stream(number));
}

void Streams::synchronize_current() {
  if (real_) guard_->synchronizeStream(guard_->getStream(device_));
}

void Streams::mark(std::optional<c10::Event>& event) {
  if (!real_) return;
  if (!event) event.emplace(device_.type());
  event->record(guard_->getStream(device_));
}

bool Streams::is_done(uint32_t number) { return !real_ || guard_->queryStream(stream(number)); }

void Streams::record(uint32_t number, uint32_t on, bool timed) {
  auto& e = events_[number];
  e.timed = timed;
  e.at = std::chrono::steady_clock::now();
  if (!real_) return;
  if (!e.real)
    e.real.emplace(device_.type(), timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
  e.real->record(stream(on));
}

Streams::Event& Streams::event(uint32_t number) {
  auto found = events_.find(number);
  if (found == events_.end()) throw Malformed("an event that was never recorded");
  return found->second;
}

void Streams::block(uint32_t number, uint32_t on) {
  auto& e = event(number);
  if (real_) e.real->block(stream(on));
}

bool Streams::has_happened(uint32_t number) {
  auto& e = event(number);
  return !real_ || e.real->query();
}

void Streams::await(uint32_t number) {
  auto& e = event(number);
  if (real_) e.real->synchronize();
}

double Streams::milliseconds(uint32_t from, uint32_t to) {
  auto &a = event(from), &b = event(to);
  if (real_) return a.real->elapsedTime(*b.real);
  return std::chrono::duration<double, std::milli>(b.at - a.at).count();
}

}  // namespace sky
