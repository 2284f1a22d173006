#include "arrivals.h"

#include <ATen/ops/zeros.h>

#include <atomic>

#include "copies.h"
#include "pages.h"

namespace sky {

void Arrivals::end() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (!thread_.joinable()) return;
  ways_.close();
  thread_.join();
  tell(expected_);
}

uint32_t Arrivals::expect(char* into, uint64_t size, uint64_t done, uint64_t total) {
  std::lock_guard lock(mutex_);
  if (!lost_.empty()) throw Disconnected(lost_);
  if (!come_.defined()) {
    come_ = at::zeros({1}, at::TensorOptions().dtype(at::kInt).pinned_memory(at::globalContext().hasCUDA()));
    thread_ = std::thread([this] { receive(); });
  }
  auto before = expected_;
  parts_.push_back({into, size, done, total, before});
  expected_ += static_cast<uint32_t>((size + kCopied - 1) / kCopied);
  changed_.notify_all();
  return before;
}

void Arrivals::await(uint32_t number) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !lost_.empty() || expected_ == 0 || static_cast<int32_t>(come() - number) >= 0; });
  if (!lost_.empty()) throw Disconnected(lost_);
}

bool Arrivals::await_on_gpu(uint32_t number) const { return gpu_awaits(come_.const_data_ptr(), number); }

void Arrivals::receive() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !parts_.empty() || ending_; });
    if (ending_) return;
    auto part = parts_.front();
    parts_.pop_front();
    lock.unlock();
    std::string problem;
    try {
      ways_.receive(part.into, part.size, part.done, part.total, [&](uint64_t there) {
        auto whole = there == part.size ? there + kCopied - 1 : there;
        tell(part.before + static_cast<uint32_t>(whole / kCopied));
      });
    } catch (const std::exception& e) {
      problem = e.what();
    }
    if (!problem.empty()) lose_();
    lock.lock();
    if (problem.empty()) continue;
    lost_ = problem;
    lock.unlock();
    tell(expected_);
    return;
  }
}

void Arrivals::tell(uint32_t number) {
  {
    std::lock_guard lock(mutex_);
    std::atomic_ref(*static_cast<uint32_t*>(come_.mutable_data_ptr())).store(number, std::memory_order_release);
  }
  changed_.notify_all();
}

uint32_t Arrivals::come() const {
  return std::atomic_ref(*static_cast<uint32_t*>(come_.mutable_data_ptr())).load(std::memory_order_acquire);
}

}  // namespace sky
