// Peers: the processes of other devices, to which this one has a link.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../wire/shared_memory.h"
#include "carriers.h"
#include "progress.h"

namespace sky {

// Two rings between the processes of two devices on one host, one for each direction.
class PeerRings {
 public:
  static constexpr size_t kHeads = 4096, kBytes = 16 << 20, kSize = kHeads + 2 * kBytes;

  // The one who dialed makes the memory.
  PeerRings(int fd, int socket, bool is_dialer)
      : memory_(fd, kSize), out(ring(!is_dialer, socket)), in(ring(is_dialer, socket)) {
    memory_.close_descriptor();
  }

 private:
  Ring ring(bool second, int socket) const {
    auto* heads = reinterpret_cast<RingHead*>(memory_.bytes());
    return {heads + second, memory_.bytes() + kHeads + second * kBytes, kBytes, socket};
  }
  SharedMemory memory_;

 public:
  Ring out, in;
};

// One link. Two threads of its own carry what the session hands over, so that the session goes on.
class Peer {
 public:
  // The sockets stay the caller's. All but the first lead to carriers, half of them outward. `own` is this device's
  // name if this side dialed.
  Peer(uint64_t link, const std::vector<int>& sockets, bool shares_memory, const char* own, std::string name);
  ~Peer();
  Peer(const Peer&) = delete;

  void start(c10::Device device);
  void send(std::shared_ptr<Passage> passage) { hand_over(leaving_, std::move(passage)); }
  void expect(std::shared_ptr<Passage> passage) { hand_over(arriving_, std::move(passage)); }
  // Whatever is on its way ends; the first reason counts.
  void close(const std::string& why) noexcept;

 private:
  using Queue = std::deque<std::shared_ptr<Passage>>;
  // Page-locked memory between a GPU and the link; while one half is used by the link, the GPU uses the other.
  struct Staging;

  void hand_over(Queue& queue, std::shared_ptr<Passage> passage);
  std::shared_ptr<Passage> first(Queue& queue);
  void drop_first(Queue& queue, Reason failure);
  void carry_out();
  void carry_in();
  void give(Passage& passage);
  void take(Passage& passage);
  void give_from_host(Passage& passage);
  void give_from_device(Passage& passage);
  void take_to_host(Passage& passage);
  void take_to_device(Passage& passage);
  void drop(uint64_t bytes);
  void write(const void* data, uint64_t size, uint64_t done, uint64_t total);
  void read(void* into, uint64_t size, uint64_t done, uint64_t total);
  Reason lost() const;

  const uint64_t link_;
  const OwnSocket socket_;
  Carriers outward_, inward_;
  std::unique_ptr<PeerRings> rings_;
  std::string name_;
  c10::Device device_{c10::kCPU};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Queue leaving_, arriving_;
  bool is_closed_ = false;
  std::string why_;
  std::thread sender_, receiver_;
};

// All links of this process. They are made on threads of Python's, and used by the session's.
class Peers {
 public:
  static Peers& all();
  void add(uint64_t link, const std::vector<int>& sockets, bool shares_memory, const char* own, std::string name);
  std::shared_ptr<Peer> find(uint64_t link);
  void end(uint64_t link, const std::string& why);
  void end_all() noexcept;

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Peer>> peers_;
};

}  // namespace sky
