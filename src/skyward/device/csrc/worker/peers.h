// Peers: the processes of other devices, to which this one has a link.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../wire/shared_memory.h"
#include "../wire/stripes.h"
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
  // The ways stay the caller's; all but the first carry long copies. `own` is this device's name if this side dialed.
  Peer(uint64_t link, const std::vector<Way>& ways, bool shares_memory, const char* own, std::string name);
  ~Peer();
  Peer(const Peer&) = delete;

  void start(c10::Device device);
  void send(std::shared_ptr<Passage> passage) { hand_over(leaving_, std::move(passage)); }
  void expect(std::shared_ptr<Passage> passage) { hand_over(arriving_, std::move(passage)); }
  // Whatever is on its way ends; the first reason counts. The client does not know yet of a link that is lost.
  void close(const std::string& why, bool is_lost) noexcept;

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
  template <typename F>
  void read(void* into, uint64_t size, uint64_t done, uint64_t total, F&& reached);
  const uint64_t link_;
  const std::unique_ptr<OwnSocket> socket_;  // on one host
  const Way way_;
  const Stripes long_;
  std::unique_ptr<PeerRings> rings_;
  std::string name_;
  c10::Device device_{c10::kCPU};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Queue leaving_, arriving_;
  bool is_closed_ = false;
  Reason lost_;  // why what was to come does not, once it is closed
  std::thread sender_, receiver_;
};

// All links of this process. They are made on threads of Python's, and used by the session's.
class Peers {
 public:
  static Peers& all();
  void add(uint64_t link, const std::vector<Way>& ways, bool shares_memory, const char* own, std::string name);
  void send(std::shared_ptr<Passage> passage, c10::Device device);
  void expect(std::shared_ptr<Passage> passage, c10::Device device);
  // The connections are lost for good.
  void lose(uint64_t link, const std::string& why) noexcept;
  // The client wants it no more.
  void end(uint64_t link, const std::string& why);
  // The connections are closed: waits for the link's threads, and frees what it has.
  void free(uint64_t link) noexcept;
  void end_all() noexcept;

  // For a link itself: passages over it fail with the reason until the client ends it.
  void note_lost(uint64_t link, Reason reason);
  // The numbers of links that were lost since the last call, each 8 bytes.
  std::string take_lost();

 private:
  std::shared_ptr<Peer> find(uint64_t link);
  // Null if the link is there; throws if it never was.
  Reason why_lost(uint64_t link);

  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Peer>> peers_;
  std::map<uint64_t, Reason> lost_;
  std::string untold_;
  std::atomic<bool> has_untold_ = false;
};

}  // namespace sky
