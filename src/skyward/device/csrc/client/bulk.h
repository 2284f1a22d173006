// The bytes of tensors: a way of their own beside the records, through shared memory on the same host.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../wire/records.h"
#include "../wire/shared_memory.h"
#include "../wire/stripes.h"

namespace sky {

// What a worker said went wrong, kept with its kind.
struct Complaint {
  Status status;
  std::string text;
};

// Threads that make pages; they end with it. (Not every C++ library has threads that can be told to stop.)
class PageMakers {
 public:
  PageMakers() = default;
  PageMakers(PageMakers&&) = default;
  PageMakers& operator=(PageMakers&&) = default;
  ~PageMakers() {
    if (stop) *stop = true;
    for (auto& thread : threads) thread.join();
  }

  std::shared_ptr<std::atomic<bool>> stop;
  std::vector<std::thread> threads;
};

class Bulk {
 public:
  // Through the rings if there are any; they belong to the caller.
  Bulk(std::vector<Way> ways, SharedRings* rings);
  ~Bulk();
  Bulk(const Bulk&) = delete;

  // When it returns the memory may change. `later` does not wait for the link, unless very much is queued.
  void send(const void* data, uint64_t size, bool later);
  // The memory may change when its owner was let go of, and does not before.
  void send_later(const void* data, uint64_t size, std::shared_ptr<const void> owner);
  // Memory that is to receive so much soon: has the kernel make it of large pages, if it is new. Those who read over
  // several links would all come to a new page at once, and all but one of them would clear it in vain; so other
  // threads make the pages, ahead of them, as long as the caller keeps these.
  PageMakers make_pages(void* into, uint64_t bytes);
  // Ctrl-C ends it: what is to come is skipped then.
  void receive(void* into, uint64_t size);
  void skip(uint64_t size) { land({{}, size}); }

  // Fills the tensor's memory when the bytes come; `drain` waits until they have.
  void receive_later(at::Tensor into) { land({std::move(into)}); }
  std::unique_ptr<Complaint> drain();
  bool is_idle();

  void close() noexcept;
  void retire();  // ends its threads; nothing may be sent any more
  void send_descriptor(int fd) { sky::send_descriptor(ways_.first().socket(), fd); }

 private:
  struct Parcel {
    const void* bytes;
    uint64_t size;
    std::shared_ptr<const void> owner;
  };
  // What a thread of ours receives: a tensor with its head, or bytes that nobody wants any more.
  struct Landing {
    at::Tensor into;
    uint64_t skipped = 0;
    Stripes::Progress progress{};  // of what is skipped
  };
  void land(Landing landing);
  void write(const void* data, uint64_t size);
  void read(void* into, uint64_t size);
  bool read_some(void* into, uint64_t total, Stripes::Progress& progress);
  std::unique_ptr<Complaint> read_tensor(const at::Tensor& into);
  void await_landings(std::unique_lock<std::mutex>& lock);
  void await_room(std::unique_lock<std::mutex>& lock, uint64_t size);
  void enqueue(Parcel parcel);
  void send_queued();
  void receive_queued();
  void check();

  Stripes ways_;
  SharedRings* rings_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Parcel> parcels_;
  uint64_t queued_ = 0;
  std::deque<Landing> landings_;
  std::unique_ptr<Complaint> complaint_;
  std::string broken_;
  bool ending_ = false;
  std::thread sender_, receiver_;
};

}  // namespace sky
