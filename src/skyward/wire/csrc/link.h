// A link: a byte stream each way between two processes that outlives its connections; docs/wire.md has the records.
//
// Whoever writes encrypts and sends on its own thread, and whoever reads reads on its own. Where a thread waits for the
// other end's counts it reads meanwhile, if nobody else does, and keeps the bytes for later. What no thread waits for,
// the keeper does: one thread for all links of the process.
//
// A link of calls is another matter: it has one reader, which reads all the time, so that nobody else does, and which
// takes a connection for lost only when it ends: others look after silence there. Its large writes may go over stripes,
// too, further connections of the pair, each encrypted by a thread of its own.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "connection.h"

namespace sky {

using Clock = std::chrono::steady_clock;

// Records: a count, or a part of the stream, which a stripe may carry.
constexpr uint64_t kIsCount = 1ULL << 63, kPartMost = 4 << 20;
constexpr int kStripeBit = 32;
// How often a thread that waits looks whether something else has happened.
constexpr int kLookMilliseconds = 100;
constexpr size_t kTlsRecord = 16 << 10, kTlsOverhead = 22;

inline uint64_t size_on_wire(uint64_t part) {
  auto written = part + 8;
  return written + (written + kTlsRecord - 1) / kTlsRecord * kTlsOverhead;
}

class LinkEnded : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Two connections that carry a link for a while, and stripes. Only the thread that sends, or reads, touches that half.
struct Pair {
  Pair(std::shared_ptr<Connection> sender, std::shared_ptr<Connection> receiver, uint64_t arrived, uint32_t attempt)
      : out(std::move(sender)), in(std::move(receiver)), arrived(arrived), attempt(attempt) {}

  // With the link's lock.
  void cut() noexcept {
    broken = true;
    out->shut();
    in->shut();
    for (auto* more : {&more_out, &more_in})
      for (auto& [number, connection] : *more) connection->shut();
  }

  const std::shared_ptr<Connection> out, in;
  std::map<uint32_t, std::shared_ptr<Connection>> more_out, more_in;  // the stripes; with the link's lock
  const uint64_t arrived;                                             // of our stream, when the pair was made
  const uint32_t attempt;
  std::atomic<bool> broken = false;  // nothing more is sent over it
  Clock::time_point failed_at{};

  // Reading: what is left of a part, and the stripe that carries it, or the first bytes of the next record.
  uint64_t left = 0;
  uint32_t stripe = 0;
  std::array<char, 8> head{};
  size_t head_size = 0;

  // Writing: a head with the first bytes of its part, which TLS encrypts in one piece, and what is left of the part.
  std::array<char, 16384> joint;
  size_t joint_size = 0, joint_done = 0, joint_part = 0;
  uint64_t part_left = 0;
};

// Memory of a stream. Whoever holds the owner keeps it.
struct Piece {
  const char* data;
  uint64_t start, size;
  std::shared_ptr<void> owner;  // none: borrowed from a thread that waits
  uint64_t room = 0;            // after the bytes, for more; none if the memory is somebody else's
};

struct Striping;  // a part of the stream on its way over stripes

// Memory for arriving bytes.
struct Place {
  char* data;
  uint64_t size;
};

class Link : public std::enable_shared_from_this<Link> {
 public:
  // Keeps at most `window` bytes that are not counted. A link without a connection ends after `patience` seconds.
  Link(uint64_t window, double patience, std::string other, bool is_of_calls);
  ~Link();

  // Keeps a copy. Waits while the window is full, unless `at_once` is set: then returns how many bytes were taken.
  uint64_t send(const void* data, uint64_t size, bool at_once);
  // Straight from the caller's memory, which it may change afterwards, unless it leaves the memory to its owner.
  void send_large(const std::vector<std::pair<const char*, uint64_t>>& parts, const std::shared_ptr<void>& owner);
  // At least a byte, or 0 if none came within that time; negative: waits as long as it takes.
  uint64_t receive(void* into, uint64_t size, int milliseconds);
  void receive_all(void* into, uint64_t size);
  bool await_bytes(int milliseconds);

  // A link of calls.

  // Keeps a copy, however much is kept. If `patient`, waits until the kernel has it, or the connection is lost.
  void send_call(const void* data, uint64_t size, bool patient);
  // A large write straight from the caller's memory: begins it and says where it ends; waits so long for it; and ends
  // it, after which nobody uses that memory.
  uint64_t begin_large(const std::vector<std::pair<const char*, uint64_t>>& parts, uint64_t& first);
  bool await_large(uint64_t last, int milliseconds);
  void finish_large(uint64_t first, uint64_t last);
  // Waits until at most so many bytes are kept; false if the time has passed.
  bool await_room(uint64_t most, int milliseconds);
  static constexpr int64_t kNotConnected = -2;
  // How many bytes have come; 0 if none within that time; `kNotConnected` if none can come, and the caller does not
  // wait.
  int64_t receive_call(void* into, uint64_t size, int milliseconds);
  // A look at what has come, without waiting: copies as much as there is room for, and it stays; `skip` takes it.
  uint64_t peek(void* into, uint64_t size);
  void skip(uint64_t size);
  // Reads on until all places are full or the time has passed; `done` is how far it got.
  void receive_large(const std::vector<Place>& places, uint64_t& done, int milliseconds);
  // The socket to wait on for bytes until the reader has found the pair lost; -1 if there is none now.
  int adopt();
  bool takes_stripes(uint32_t attempt) const;
  void add_stripe(uint32_t attempt, uint32_t number, std::shared_ptr<Connection> connection, bool to_send);

  // The connections, one pair after the other.
  void install(std::shared_ptr<Pair> pair);
  // The client makes a new pair: how many bytes have arrived, or -1 if that pair is not to be.
  int64_t suspend(uint32_t attempt);
  void reconnect() noexcept;
  // `told`: the keeper tells Python that it has ended by itself.
  void end(const std::string& why, bool told = true) noexcept;
  std::string why() const;
  bool is_connected() const;
  bool has_pair() const;
  // How many bytes went over stripes.
  uint64_t striped() const { return striped_bytes_.load(std::memory_order_relaxed); }
  uint64_t received() const;
  uint64_t on_wire() const { return on_wire_.load(std::memory_order_relaxed); }
  uint64_t kept() const;

 private:
  friend class Keeper;
  using Lock = std::unique_lock<std::mutex>;

  void check() const {
    if (ended_) throw LinkEnded(why_);
  }
  void append(const char* data, uint64_t size);
  void push(Lock& lock, bool is_sender = false);
  bool push_one(Lock& lock, Pair& pair);
  uint64_t stripes_until() const;
  bool has_sender() const;
  void push_striped(Lock& lock, uint64_t until);
  void carry(Striping& work, uint32_t number, Connection& to);
  bool carry_one(Striping& work, uint32_t number, Connection& to);
  bool push_heads(Pair& pair, std::string& heads);
  const char* unsent(uint64_t position, uint64_t& size, std::shared_ptr<void>& owner) const;
  bool await(Lock& lock, const std::function<bool()>& ready, int milliseconds = -1, bool is_sender = false);
  void own(uint64_t first, uint64_t last);
  void heard_count(uint64_t count);
  void forget_counted(std::vector<std::shared_ptr<void>>& dropped);
  ssize_t read_head(Pair& pair);
  ssize_t read(Pair& pair, char* into, size_t size);
  bool await_soon(const Connection& in, int milliseconds);
  uint64_t read_places(Pair& pair, const std::vector<Place>& places, uint64_t from, Clock::time_point until,
                       bool& over);
  std::shared_ptr<Connection> stripe(Pair& pair, uint32_t number);
  bool await_pair(Lock& lock, Clock::time_point until);
  uint64_t copy_held(char* into, uint64_t size) const;
  void drop_held(Lock& lock, uint64_t size);
  uint64_t take(Lock& lock, char* into, uint64_t size, int milliseconds, bool for_later);
  void tell_taken();
  void lose(const std::shared_ptr<Pair>& pair);
  void end_locked(const std::string& why, bool told = true) noexcept;
  void look(Clock::time_point now);

  const uint64_t window_;
  const double patience_;
  const std::string other_;
  const bool is_of_calls_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<Pair> pair_, adopted_;  // the newest; and the one that the reader of calls knows
  uint32_t attempt_ = 0;
  Clock::time_point lost_at_ = Clock::now(), heard_ = Clock::now(), used_ = Clock::now(), beat_ = Clock::now();
  bool ended_ = false;
  std::string why_;

  // Out: pieces from `counted_` to `end_`, of which `sent_` went over this pair.
  std::deque<Piece> pieces_;
  uint64_t counted_ = 0, sent_ = 0, end_ = 0;
  std::deque<std::pair<uint64_t, uint64_t>> striped_;  // from where to where stripes may carry the stream
  bool pushing_ = false, count_due_ = false;
  std::atomic<uint64_t> on_wire_ = 0, striped_bytes_ = 0;

  // In: `received_` bytes have come, of which the inbox holds those that nobody has taken.
  uint64_t received_ = 0, told_ = 0;
  bool reading_ = false;
  bool is_soon_ = false;   // the last wait was short
  bool is_small_ = false;  // the last read was
  uint32_t small_reads_ = 0;
  std::deque<std::vector<char>> inbox_;
  size_t inbox_taken_ = 0;  // of the first
  std::unique_ptr<char[]> for_later_;
  uint64_t held_ = 0;
};

// Looks after all links: sends what the kernel did not take at once, reads what nobody reads, and tells what happens.
class Keeper {
 public:
  enum Event { kNothing, kLost, kEnded };

  Keeper();
  ~Keeper();
  static Keeper& instance();
  void add(const std::shared_ptr<Link>& link, uint64_t number);
  void remove(uint64_t number);
  // Runs until something has happened to a link, and says to which.
  Event run(uint64_t& number);
  void tell(const Link* link, Event event);
  void wake();
  // A thread has used a link: the keeper looks again soon.
  void used() {
    if (asleep_.load(std::memory_order_relaxed)) wake();
  }

 private:
  void watch();

  std::mutex mutex_;
  struct Kept {
    uint64_t number;
    const Link* link;
    std::weak_ptr<Link> held;
  };
  std::vector<Kept> links_;
  std::deque<std::pair<uint64_t, Event>> events_;
  std::atomic<bool> asleep_ = false;
  int wake_[2];
};

// How many forks lie between the process that loaded this and the one that runs it. A link belongs to one process: a
// child has the sockets, but neither the threads nor what their locks guard.
uint32_t forks() noexcept;

// Long transfers over several links at once: a thread encrypts or decrypts each. The links take turns of `stripe`
// bytes; `done` bytes went before these.
using Links = std::vector<std::shared_ptr<Link>>;
void send_striped(const Links& links, const char* data, uint64_t size, uint64_t done, uint64_t stripe,
                  const std::shared_ptr<void>& owner);
// Returns whether all are there, after that time at the latest; `progress` has how many came over each link. Without
// memory, they are dropped. `reached` is told, on this thread and now and then, how many of the first are all there.
bool receive_striped(const Links& links, char* into, uint64_t size, uint64_t done, uint64_t stripe, uint64_t* progress,
                     int milliseconds, const std::function<void(uint64_t)>& reached);

}  // namespace sky
