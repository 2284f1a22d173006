// The ways that carry the bytes of tensors. Long transfers over a network are cut into stripes, which go over all links
// in turn: each is encrypted by a thread of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "way.h"

namespace sky {

class Stripes {
 public:
  static constexpr uint64_t kLong = 1 << 20, kStripe = 256 << 10;

  explicit Stripes(std::vector<Way> ways) : ways_(std::move(ways)) {
    for (auto& way : ways_) links_.push_back(way.link());
  }

  // A part of `total` bytes, of which `done` went before it. Both ends cut alike, however they divide the bytes.
  void send(const void* data, uint64_t size, uint64_t done, uint64_t total) const {
    send(data, size, done, total, nullptr, nullptr);
  }
  // The links may use the memory until they let go of its owner, on any thread.
  void send_kept(const void* data, uint64_t size, std::shared_ptr<const void> owner) const {
    if (is_whole(size)) return first().send(data, size);
    using Owner = std::shared_ptr<const void>;
    auto release = [](void* held) { delete static_cast<Owner*>(held); };
    send(data, size, 0, size, std::make_unique<Owner>(std::move(owner)).release(), release);
  }
  void receive(void* into, uint64_t size, uint64_t done, uint64_t total) const {
    receive(into, size, done, total, nullptr, nullptr);
  }
  // `reached` hears now and then, and at the end, how many of the first bytes are all there; it must not throw.
  template <typename F>
  void receive(void* into, uint64_t size, uint64_t done, uint64_t total, F&& reached) const {
    receive(
        into, size, done, total, [](void* f, uint64_t bytes) { (*static_cast<std::remove_reference_t<F>*>(f))(bytes); },
        &reached);
  }

  // What has come of a transfer, on each way.
  using Progress = std::vector<uint64_t>;

  // Goes on with a transfer for at most that time; returns whether all of it is there. Without memory, it is dropped.
  // A signal may end the wait as well.
  bool receive_some(void* into, uint64_t total, Progress& progress, const timespec& most) const {
    progress.resize(ways_.size());
    if (!is_whole(total)) {
      auto limit = milliseconds_of(most);
      return first().check(link_functions->receive_striped(links_.data(), count(), into, total, 0, stripe(total),
                                                           progress.data(), limit, nullptr, nullptr));
    }
    auto& done = progress.front();
    if (done == total) return true;
    if (!first().is_readable(most)) return false;
    char nowhere[16 << 10];
    auto n = into ? first().receive_some(static_cast<char*>(into) + done, total - done)
                  : first().receive_some(nowhere, std::min<uint64_t>(total - done, sizeof nowhere));
    if (!n) throw Disconnected("the other end is gone");
    done += n;
    return done == total;
  }

  const Way& first() const { return ways_.front(); }
  void close() const noexcept {
    for (auto& way : ways_) way.close();
  }

 private:
  void send(const void* data, uint64_t size, uint64_t done, uint64_t total, void* owner, void (*release)(void*)) const {
    if (is_whole(total)) return first().send(data, size);
    first().check(
        link_functions->send_striped(links_.data(), count(), data, size, done, stripe(total), owner, release));
  }
  void receive(void* into, uint64_t size, uint64_t done, uint64_t total, void (*reached)(void*, uint64_t),
               void* context) const {
    if (is_whole(total)) {
      first().receive(into, size);
      if (reached) reached(context, size);
      return;
    }
    std::vector<uint64_t> progress(links_.size());
    first().check(link_functions->receive_striped(links_.data(), count(), into, size, done, stripe(total),
                                                  progress.data(), -1, reached, context));
  }
  bool is_whole(uint64_t total) const { return ways_.size() == 1 || total < kLong; }
  int count() const { return static_cast<int>(links_.size()); }
  // How much goes over one link before the next one's turn: whole pages, and as much over each as over the others.
  uint64_t stripe(uint64_t total) const {
    auto turns = std::max<uint64_t>(1, total / (links_.size() * kStripe)) * links_.size();
    return ((total + turns - 1) / turns + 4095) / 4096 * 4096;
  }

  std::vector<Way> ways_;
  std::vector<void*> links_;
};

}  // namespace sky
