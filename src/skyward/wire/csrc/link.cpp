#include "link.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "crew.h"

namespace sky {
namespace {

constexpr uint64_t kPart = 1 << 20;
constexpr uint64_t kCountEvery = 1 << 20;
constexpr uint64_t kChunk = 64 << 10;
// How much a thread sends before it looks whether it should do something else.
constexpr uint64_t kPushMost = 16 << 20;
// How many bytes may come that nobody has taken; an honest other end sends fewer.
constexpr uint64_t kHeldMost = 64 << 20;
constexpr size_t kForLater = 128 << 10;

constexpr auto kBeat = std::chrono::seconds(1);
constexpr auto kSilence = std::chrono::seconds(5);
// How long a connection is still read after the other one has failed.
constexpr auto kLastWords = std::chrono::seconds(1);
// How soon the keeper reads what nobody reads, and how long after the last use it looks so often.
constexpr auto kSoon = std::chrono::milliseconds(10);
constexpr auto kQuiet = std::chrono::milliseconds(100);
// How long a sender waits for a count before it copies what is not counted.
constexpr int kCountMilliseconds = 2;
// How long a thread looks for a small message before it sleeps.
constexpr auto kSpin = std::chrono::microseconds(60);
constexpr ssize_t kSmall = 4 << 10;
// After so many of them, the kernel is told again to acknowledge less.
constexpr uint32_t kSmallReads = 16;

std::shared_ptr<void> memory_of(uint64_t size) {
  auto* made = std::malloc(size);
  if (!made) throw std::bad_alloc();
  return {made, std::free};
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

}  // namespace

Link::Link(uint64_t window, double patience, std::string other, bool is_of_calls)
    : window_(window), patience_(patience), other_(std::move(other)), is_of_calls_(is_of_calls) {}

Link::~Link() { end("the link was closed"); }

// Out.

// Waits for something that needs sending or the other end's counts; does both meanwhile if no other thread does. False
// if the time has passed before.
bool Link::await(Lock& lock, const std::function<bool()>& ready, int milliseconds, bool is_sender) {
  auto until = Clock::now() + std::chrono::milliseconds(milliseconds);
  for (;;) {
    check();
    if (ready()) return true;
    push(lock, is_sender);
    if (ready()) return true;
    // TLS may hold more than one read takes, and no poll sees it.
    if (pair_ && !reading_ && !is_of_calls_ && take(lock, nullptr, 0, 0, true)) continue;
    if (ready()) return true;
    auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    if (milliseconds >= 0 && left <= 0) return false;
    auto wait = milliseconds < 0 ? kLookMilliseconds : static_cast<int>(std::min<long>(left, kLookMilliseconds));
    auto pair = pair_;
    bool writes = pair && !pair->broken && !pushing_ && sent_ < end_, reads = pair && !reading_ && !is_of_calls_;
    if (!writes && !reads) {
      changed_.wait_for(lock, std::chrono::milliseconds(wait));
      continue;
    }
    pollfd watched[]{{writes ? pair->out->fd() : -1, POLLOUT, 0}, {reads ? pair->in->fd() : -1, POLLIN, 0}};
    lock.unlock();
    ::poll(watched, 2, wait);
    lock.lock();
  }
}

uint64_t Link::send(const void* data, uint64_t size, bool at_once) {
  Lock lock(mutex_);
  check();
  auto* from = static_cast<const char*>(data);
  uint64_t done = 0;
  while (done < size) {
    if (end_ - counted_ >= window_) {
      if (at_once) break;
      await(lock, [&] { return end_ - counted_ <= window_ / 2; });
    }
    auto n = std::min(size - done, window_ - (end_ - counted_));
    append(from + done, n);
    push(lock);
    done += n;
  }
  used_ = Clock::now();
  lock.unlock();
  Keeper::instance().used();
  return done;
}

void Link::send_large(const std::vector<std::pair<const char*, uint64_t>>& parts, const std::shared_ptr<void>& owner) {
  Lock lock(mutex_);
  check();
  auto first = end_;
  try {
    for (auto [data, size] : parts)
      for (uint64_t done = 0; done < size;) {
        if (end_ - counted_ >= window_) await(lock, [&] { return end_ - counted_ <= window_ / 2; });
        auto n = std::min({size - done, kPart, window_ - (end_ - counted_)});
        pieces_.push_back({data + done, end_, n, owner});
        end_ += n;
        done += n;
      }
    auto last = end_;
    await(lock, [&] { return sent_ >= last; });
    // A near end that reads counts most of it while this waits, which costs less than copies of it all.
    for (bool is_heard = !owner; is_heard && last > counted_ + kCountEvery;)
      is_heard = await(lock, [&, before = counted_] { return counted_ != before; }, kCountMilliseconds);
    while (pushing_) changed_.wait(lock);
    own(first, last);
  } catch (const std::exception& e) {
    // The link has ended, so nothing is sent any more; but another thread may be in the middle of a write.
    if (!lock.owns_lock()) lock.lock();
    end_locked(e.what());
    while (pushing_) changed_.wait(lock);
    throw;
  }
  check();
  used_ = Clock::now();
  lock.unlock();
  Keeper::instance().used();
}

// With the lock: nobody may use the memory of others afterwards, so what is not counted is copied.
void Link::own(uint64_t first, uint64_t last) {
  for (auto& piece : pieces_) {
    if (piece.owner || piece.start < first || piece.start >= last) continue;
    // The end of a long piece may be all that is left of it.
    auto gone = std::min(piece.size, std::max(std::min(counted_, sent_), piece.start) - piece.start);
    piece.data += gone;
    piece.start += gone;
    piece.size -= gone;
    auto copy = memory_of(std::max<uint64_t>(piece.size, 1));
    std::memcpy(copy.get(), piece.data, piece.size);
    piece.data = static_cast<const char*>(copy.get());
    piece.owner = std::move(copy);
  }
}

// Copies bytes to the last piece, if it has room, else to a new one.
void Link::append(const char* data, uint64_t size) {
  while (size) {
    if (pieces_.empty() || !pieces_.back().room) {
      auto capacity = std::max(kChunk, size);
      auto memory = memory_of(capacity);
      pieces_.push_back({static_cast<const char*>(memory.get()), end_, 0, memory, capacity});
    }
    auto& last = pieces_.back();
    auto n = std::min(size, last.room);
    std::memcpy(const_cast<char*>(last.data) + last.size, data, n);
    last.size += n;
    last.room -= n;
    end_ += n;
    data += n;
    size -= n;
  }
}

// The bytes from that position on, up to the end of their piece.
const char* Link::unsent(uint64_t position, uint64_t& size, std::shared_ptr<void>& owner) const {
  auto after = std::upper_bound(pieces_.begin(), pieces_.end(), position,
                                [](uint64_t at, const Piece& piece) { return at < piece.start; });
  auto& piece = *std::prev(after);
  size = piece.start + piece.size - position;
  owner = piece.owner;
  return piece.data + (position - piece.start);
}

// Sends what is due, as much as the kernel takes, unless another thread does: that one sends this, too. The keeper
// sends the rest. `is_sender`: this thread waits for a large write of its own.
void Link::push(Lock& lock, bool is_sender) {
  if (pushing_) return;
  pushing_ = true;
  auto most = sent_ + kPushMost;
  try {
    while (auto pair = pair_) {
      if (pair->broken || ended_ || sent_ > most) break;
      // Long transfers are for the thread that has the bytes: others have something else to do.
      if (!is_sender && !count_due_ && has_sender()) break;
      auto until = is_sender && !count_due_ && has_sender() ? stripes_until() : 0;
      if (until) return push_striped(lock, until);
      if (!push_one(lock, *pair)) break;
    }
  } catch (...) {
    pushing_ = false;
    throw;
  }
  pushing_ = false;
  changed_.notify_all();
  bool is_left = pair_ && !pair_->broken && (sent_ < end_ || pair_->joint_size);
  if (is_of_calls_ && !is_sender && is_left && !has_sender()) Keeper::instance().wake();
}

// One write; false if there is nothing to send, or the kernel takes nothing now, or the pair is lost.
bool Link::push_one(Lock& lock, Pair& pair) {
  auto held = pair_;
  uint64_t size = 0;
  std::shared_ptr<void> owner;
  const char* data = nullptr;
  bool is_joint = pair.joint_size != 0;
  if (!is_joint && !pair.part_left) {
    if (count_due_) {
      count_due_ = false;
      auto count = (received_ - held_) | kIsCount;
      std::memcpy(pair.joint.data(), &count, 8);
      pair.joint_size = 8;
      pair.joint_part = 0;
    } else if (sent_ < end_) {
      auto* from = unsent(sent_, size, owner);
      // A head costs one more record of TLS, so several short pieces have one. Those of calls are long.
      auto long_enough = is_of_calls_ ? size : std::max(size, std::min(end_ - sent_, kPart));
      auto part = std::min(long_enough, kPartMost);
      std::memcpy(pair.joint.data(), &part, 8);
      pair.joint_part = std::min<uint64_t>({part, size, pair.joint.size() - 8});
      std::memcpy(pair.joint.data() + 8, from, pair.joint_part);
      pair.joint_size = 8 + pair.joint_part;
      pair.part_left = part - pair.joint_part;
      on_wire_ += size_on_wire(part);
    } else {
      return false;
    }
    pair.joint_done = 0;
    is_joint = true;
  }
  if (is_joint) {
    data = pair.joint.data() + pair.joint_done;
    size = pair.joint_size - pair.joint_done;
  } else {
    data = unsent(sent_, size, owner);
    size = std::min(size, pair.part_left);
  }
  lock.unlock();
  auto moved = pair.out->write(data, size);
  lock.lock();
  if (moved == Connection::kOver) {
    // What the other end has sent before it went is still read, for a moment.
    if (!pair.broken) pair.failed_at = Clock::now();
    pair.broken = true;
    pair.out->shut();
    return false;
  }
  // A new pair has come meanwhile, which begins where the other end is.
  if (pair_ != held) return true;
  if (moved == Connection::kNotNow) return false;
  if (!is_joint) {
    sent_ += static_cast<uint64_t>(moved);
    pair.part_left -= static_cast<uint64_t>(moved);
  } else if ((pair.joint_done += static_cast<size_t>(moved)) == pair.joint_size) {
    sent_ += pair.joint_part;
    pair.joint_size = 0;
  }
  return true;
}

// With the lock.
void Link::heard_count(uint64_t count) {
  if (count > end_) {
    end_locked("the other end has " + std::to_string(count) + " bytes of a stream that is between " +
               std::to_string(counted_) + " and " + std::to_string(end_));
    return;
  }
  // Lower ones come after a new pair: its handshake names bytes, too, that nobody has taken yet.
  counted_ = std::max(counted_, count);
  changed_.notify_all();
}

// Pieces that have arrived, unless they are being sent again or the last one has room.
void Link::forget_counted(std::vector<std::shared_ptr<void>>& dropped) {
  auto until = std::min(counted_, sent_);
  while (!striped_.empty() && striped_.front().second <= until) striped_.pop_front();
  while (!pieces_.empty()) {
    auto& first = pieces_.front();
    if (first.start + first.size > until || (pieces_.size() == 1 && first.room)) return;
    dropped.push_back(std::move(first.owner));
    pieces_.pop_front();
  }
}

// In.

// Reads up to the next part of the stream: 1 if there is one, or as a connection's `read` says.
ssize_t Link::read_head(Pair& pair) {
  while (!pair.left) {
    auto n = pair.in->read(pair.head.data() + pair.head_size, pair.head.size() - pair.head_size);
    if (n <= 0) return n;
    if ((pair.head_size += static_cast<size_t>(n)) < pair.head.size()) continue;
    pair.head_size = 0;
    uint64_t value;
    std::memcpy(&value, pair.head.data(), 8);
    if (value & kIsCount) {
      Lock lock(mutex_);
      if (pair_.get() == &pair) {
        heard_ = Clock::now();
        heard_count(value & ~kIsCount);
      }
      if (ended_) return Connection::kOver;
      continue;
    }
    auto size = value & ((1ULL << kStripeBit) - 1);
    if (!size || size > kPartMost) {
      end("a record of " + std::to_string(size) + " bytes; the limit is " + std::to_string(kPartMost));
      return Connection::kOver;
    }
    pair.left = size;
    pair.stripe = static_cast<uint32_t>(value >> kStripeBit);
  }
  return 1;
}

// Bytes of the stream that have come, at least one; or as a connection's `read` says. For the thread that reads. With
// no room, 1 if there are bytes.
ssize_t Link::read(Pair& pair, char* into, size_t size) {
  size_t got = 0;
  for (;;) {
    auto n = read_head(pair);
    if (n > 0 && pair.stripe) {
      end("a frame begins on stripe " + std::to_string(pair.stripe));
      return Connection::kOver;
    }
    if (n > 0 && !size) return 1;
    if (n > 0) n = pair.in->read(into + got, std::min<uint64_t>(pair.left, size - got));
    if (n <= 0) return got ? static_cast<ssize_t>(got) : n;
    pair.left -= static_cast<uint64_t>(n);
    got += static_cast<size_t>(n);
    // After a full record there are mostly more.
    bool is_full = static_cast<size_t>(n) + sizeof pair.head >= kTlsRecord;
    if (got == size || !(is_full || pair.in->has_pending())) return static_cast<ssize_t>(got);
  }
}

// For the thread that reads. A wake-up by the kernel takes 5 to 10 us: who waited for a moment only last time looks for
// such a moment first, where there are processors enough.
bool Link::await_soon(const Connection& in, int milliseconds) {
  static const bool spins = std::thread::hardware_concurrency() > 2;
  auto now = Clock::now(), until = now + kSpin;
  if (spins && is_soon_)
    for (; now < until; now = Clock::now())
      if (in.await(true, 0)) return true;
  bool has_come = in.await(true, milliseconds);
  is_soon_ = has_come && Clock::now() < until;
  return has_come;
}

// Reads once, for the caller or for later; waits so long for it. The caller has made sure that nobody reads.
uint64_t Link::take(Lock& lock, char* into, uint64_t size, int milliseconds, bool for_later) {
  auto pair = pair_;
  if (for_later) {
    if (!for_later_) for_later_ = std::make_unique_for_overwrite<char[]>(kForLater);
    into = for_later_.get();
    size = kForLater;
  }
  reading_ = true;
  lock.unlock();
  // What TLS holds may be a part of its record. In the middle of a long transfer there are mostly more bytes.
  bool waits_first = milliseconds && (size < kForLater || is_small_) && !pair->in->has_pending();
  auto n = waits_first ? Connection::kNotNow : read(*pair, into, size);
  if (n == Connection::kNotNow && milliseconds && await_soon(*pair->in, milliseconds)) n = read(*pair, into, size);
  if (n > 0) is_small_ = n <= kSmall;
  if (n > 0 && is_small_ && small_reads_++ % kSmallReads == 0) pair->in->acknowledge_less();
  if (!is_small_) is_soon_ = false;
  std::vector<std::shared_ptr<void>> dropped;
  lock.lock();
  reading_ = false;
  uint64_t got = 0;
  // Bytes of a pair that is given up do not count: the other end was told that they had not come.
  if (n > 0 && pair_ == pair) {
    got = static_cast<uint64_t>(n);
    if (size) received_ += got;
    if (for_later) {
      inbox_.emplace_back(into, into + got);
      held_ += got;
      if (held_ > kHeldMost) end_locked("it sent " + std::to_string(held_) + " bytes that nobody has asked for");
    }
  }
  if (n != Connection::kNotNow) heard_ = Clock::now();
  if (n == Connection::kOver) lose(pair);
  forget_counted(dropped);
  changed_.notify_all();
  if (got && !for_later) tell_taken();
  if (count_due_) push(lock);
  if (!dropped.empty()) {
    lock.unlock();
    dropped.clear();
    lock.lock();
  }
  return got;
}

// With the lock: the user has these bytes, so they may be counted.
void Link::tell_taken() {
  auto used = received_ - held_;
  if (used - told_ < kCountEvery) return;
  told_ = used;
  count_due_ = true;
}

// With the lock: the first of those bytes that nobody has taken.
uint64_t Link::copy_held(char* into, uint64_t size) const {
  uint64_t got = 0;
  auto taken = inbox_taken_;
  for (auto& each : inbox_) {
    if (got == size) break;
    auto n = std::min<uint64_t>(size - got, each.size() - taken);
    std::memcpy(into + got, each.data() + taken, n);
    got += n;
    taken = 0;
  }
  return got;
}

// With the lock: they are taken.
void Link::drop_held(Lock& lock, uint64_t size) {
  held_ -= size;
  while (size) {
    auto n = std::min<uint64_t>(size, inbox_.front().size() - inbox_taken_);
    size -= n;
    if ((inbox_taken_ += n) < inbox_.front().size()) break;
    inbox_.pop_front();
    inbox_taken_ = 0;
  }
  tell_taken();
  if (count_due_) push(lock);
}

uint64_t Link::receive(void* into, uint64_t size, int milliseconds) {
  auto now = Clock::now(), until = now + std::chrono::milliseconds(std::max(milliseconds, 0));
  auto* to = static_cast<char*>(into);
  Lock lock(mutex_);
  used_ = now;  // the keeper stops reading for later
  uint64_t got = 0;
  while (!got) {
    if (held_ && !reading_) {
      got = copy_held(to, size);
      drop_held(lock, got);
      break;
    }
    check();
    auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    auto wait = milliseconds < 0 ? kLookMilliseconds : static_cast<int>(std::clamp<long>(left, 0, kLookMilliseconds));
    if (pair_ && !reading_) got = take(lock, to, size, wait, false);
    else if (wait) changed_.wait_for(lock, std::chrono::milliseconds(wait));
    if (!got && milliseconds >= 0 && Clock::now() >= until) break;
  }
  used_ = Clock::now();
  lock.unlock();
  Keeper::instance().used();
  return got;
}

void Link::receive_all(void* into, uint64_t size) {
  for (uint64_t done = 0; done < size;) done += receive(static_cast<char*>(into) + done, size - done, -1);
}

bool Link::await_bytes(int milliseconds) {
  auto until = Clock::now() + std::chrono::milliseconds(milliseconds);
  Lock lock(mutex_);
  for (;;) {
    if (held_) return true;
    check();
    auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    if (left <= 0) return false;
    auto wait = static_cast<int>(std::min<long>(left, kLookMilliseconds));
    if (!pair_ || reading_) changed_.wait_for(lock, std::chrono::milliseconds(wait));
    else if (take(lock, nullptr, 0, wait, false)) return true;
  }
}

// The connections.

void Link::install(std::shared_ptr<Pair> pair) {
  Lock lock(mutex_);
  if (ended_ || pair->attempt < attempt_) return;
  attempt_ = pair->attempt;
  if (pair_) pair_->cut();
  if (pair->arrived < counted_ || pair->arrived > end_) {
    heard_count(pair->arrived);
    if (!ended_) end_locked("the other end has forgotten bytes that it had");
    return;
  }
  counted_ = sent_ = pair->arrived;
  told_ = received_ - held_;
  count_due_ = false;
  pair_ = std::move(pair);
  heard_ = beat_ = Clock::now();
  changed_.notify_all();
  push(lock);
  lock.unlock();
  Keeper::instance().wake();
}

int64_t Link::suspend(uint32_t attempt) {
  Lock lock(mutex_);
  if (ended_ || attempt < attempt_) return -1;
  if (attempt > attempt_) {
    attempt_ = attempt;
    if (pair_) {
      pair_->cut();
      pair_ = nullptr;
      lost_at_ = Clock::now();
      changed_.notify_all();
    }
  }
  return static_cast<int64_t>(received_);
}

void Link::reconnect() noexcept {
  Lock lock(mutex_);
  if (pair_) pair_->cut();
  lock.unlock();
  Keeper::instance().wake();
}

// With the lock: the pair has brought everything that it will bring.
void Link::lose(const std::shared_ptr<Pair>& pair) {
  pair->cut();
  if (pair_ != pair) return;
  pair_ = nullptr;
  lost_at_ = Clock::now();
  changed_.notify_all();
  if (!ended_) Keeper::instance().tell(this, Keeper::kLost);
}

void Link::end_locked(const std::string& why, bool told) noexcept {
  if (ended_) return;
  ended_ = true;
  why_ = why;
  if (pair_) pair_->cut();
  // Its sockets are closed once nobody uses them: until then the other end could go on sending.
  pair_ = nullptr;
  changed_.notify_all();
  if (told) Keeper::instance().tell(this, Keeper::kEnded);
}

void Link::end(const std::string& why, bool told) noexcept {
  Lock lock(mutex_);
  end_locked(why, told);
}

std::string Link::why() const {
  Lock lock(mutex_);
  return ended_ ? why_ : "";
}

bool Link::is_connected() const {
  Lock lock(mutex_);
  return pair_ && !pair_->broken;
}

bool Link::has_pair() const {
  Lock lock(mutex_);
  return pair_ != nullptr;
}

uint64_t Link::received() const {
  Lock lock(mutex_);
  return received_;
}

uint64_t Link::kept() const {
  Lock lock(mutex_);
  return end_ - counted_;
}

void Link::look(Clock::time_point now) {
  Lock lock(mutex_);
  if (ended_) return;
  if (!pair_) {
    if (patience_ >= 0 && now - lost_at_ > std::chrono::duration<double>(patience_))
      end_locked("its connection was lost, and " + other_ + " did not come back within " + number(patience_) + " s");
    return;
  }
  if (!is_of_calls_ && now - beat_ >= kBeat) {
    beat_ = now;
    count_due_ = true;
    if (now - heard_ > kSilence) pair_->cut();
  }
  if (pair_->broken && now - pair_->failed_at > kLastWords) pair_->cut();
  push(lock);
  // Nobody has read for a moment: counts may have come that a thread waits for, or the end. Somebody who only sends
  // uses the link all the time, and does not hear the other end's counts.
  while (!is_of_calls_ && !ended_ && pair_ && !reading_ &&
         (pair_->broken || now - used_ >= kSoon || now - heard_ >= kQuiet))
    if (!take(lock, nullptr, 0, 0, true)) break;
}

// The keeper.

namespace {

std::atomic<Keeper*> keeper = nullptr;

// The one that there is, or a new one. Never freed: links may end as late as the process does.
template <typename T>
T& only(std::atomic<T*>& place) {
  auto* found = place.load();
  if (!found) {
    auto made = std::make_unique<T>();
    if (place.compare_exchange_strong(found, made.get())) found = made.release();
  }
  return *found;
}

}  // namespace

Keeper& Keeper::instance() { return only(keeper); }

Keeper::Keeper() {
  if (::pipe(wake_)) throw std::runtime_error(std::strerror(errno));
  for (int end : wake_) {
    ::fcntl(end, F_SETFL, O_NONBLOCK);
    ::fcntl(end, F_SETFD, FD_CLOEXEC);
  }
}

Keeper::~Keeper() {
  for (int end : wake_) ::close(end);
}

void Keeper::add(const std::shared_ptr<Link>& link, uint64_t number) {
  std::lock_guard lock(mutex_);
  links_.push_back({number, link.get(), link});
}

void Keeper::remove(uint64_t number) {
  std::lock_guard lock(mutex_);
  std::erase_if(links_, [&](auto& each) { return each.number == number; });
}

void Keeper::wake() {
  char byte = 0;
  asleep_.store(false, std::memory_order_relaxed);
  [[maybe_unused]] auto written = ::write(wake_[1], &byte, 1);
}

void Keeper::tell(const Link* link, Event event) {
  {
    std::lock_guard lock(mutex_);
    for (auto& each : links_)
      if (each.link == link) events_.emplace_back(each.number, event);
  }
  wake();
}

Keeper::Event Keeper::run(uint64_t& number) {
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (!events_.empty()) {
        auto event = events_.front();
        events_.pop_front();
        number = event.first;
        return event.second;
      }
    }
    watch();
  }
}

// One look at all links, and then a wait for what any of them may need.
void Keeper::watch() {
  std::vector<std::shared_ptr<Link>> links;
  {
    std::lock_guard lock(mutex_);
    for (auto& each : links_)
      if (auto link = each.held.lock()) links.push_back(std::move(link));
  }
  auto now = Clock::now();
  auto next = now + (links.empty() ? std::chrono::hours(1) : std::chrono::hours(0)) + kBeat;
  std::vector<pollfd> watched{{wake_[0], POLLIN, 0}};
  std::vector<std::shared_ptr<Pair>> pairs;
  bool is_quiet = true;
  for (auto& link : links) {
    try {
      link->look(now);
    } catch (const std::exception& e) {
      link->end(e.what());
    }
    std::lock_guard lock(link->mutex_);
    if (link->ended_) continue;
    auto pair = link->pair_;
    if (!pair) continue;
    pairs.push_back(pair);
    // A large write has a thread that waits for it.
    bool writes =
        (link->sent_ < link->end_ || pair->joint_size) && !link->pushing_ && !pair->broken && !link->has_sender();
    if (writes) watched.push_back({pair->out->fd(), POLLOUT, 0});
    if (link->is_of_calls_) continue;
    if (now - link->used_ < kQuiet) is_quiet = false;
    next = std::min(next, link->beat_ + kBeat);
    if (now - link->used_ >= kSoon && !link->reading_) watched.push_back({pair->in->fd(), POLLIN, 0});
  }
  if (!is_quiet) next = std::min(next, now + kSoon);
  links.clear();
  auto wait = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
  asleep_.store(is_quiet);
  ::poll(watched.data(), watched.size(), static_cast<int>(std::clamp<long>(wait, 0, 3'600'000)));
  asleep_.store(false);
  char bytes[64];
  while (::read(wake_[0], bytes, sizeof bytes) > 0) continue;
}

// Stripes.

namespace {

std::atomic<Crew*> crew = nullptr;
std::atomic<uint32_t> forks_of_process = 0;
// A child has none of these threads: it gets others when it makes links of its own.
[[maybe_unused]] const int is_told_of_forks = ::pthread_atfork(nullptr, nullptr, [] {
  keeper = nullptr;
  crew = nullptr;
  ++forks_of_process;
});

// The parts of `size` bytes that each of several links carries.
template <typename Byte>
std::vector<std::vector<std::pair<Byte*, uint64_t>>> stripes(size_t links, Byte* data, uint64_t size, uint64_t done,
                                                             uint64_t stripe) {
  std::vector<std::vector<std::pair<Byte*, uint64_t>>> found(links);
  for (uint64_t at = 0; at < size;) {
    auto place = done + at;
    auto n = std::min(size - at, stripe - place % stripe);
    found[place / stripe % links].emplace_back(data ? data + at : nullptr, n);
    at += n;
  }
  return found;
}

}  // namespace

Crew& Crew::instance() { return only(crew); }

uint32_t forks() noexcept { return forks_of_process; }

void send_striped(const Links& links, const char* data, uint64_t size, uint64_t done, uint64_t stripe,
                  const std::shared_ptr<void>& owner) {
  auto parts = stripes(links.size(), data, size, done, stripe);
  std::vector<std::function<void()>> tasks;
  for (size_t i = 0; i < links.size(); ++i)
    if (!parts[i].empty()) tasks.push_back([&, i] { links[i]->send_large(parts[i], owner); });
  if (!tasks.empty()) Crew::instance().run(tasks);
}

bool receive_striped(const Links& links, char* into, uint64_t size, uint64_t done, uint64_t stripe, uint64_t* progress,
                     int milliseconds, const std::function<void(uint64_t)>& reached) {
  auto parts = stripes(links.size(), into, size, done, stripe);
  auto until = Clock::now() + std::chrono::milliseconds(milliseconds);
  auto came_over = [&](size_t which) { return std::atomic_ref(progress[which]); };
  // Of the first bytes, how many are all there.
  auto reach = [&] {
    auto reach = size;
    for (size_t i = 0; i < links.size(); ++i) {
      auto left = came_over(i).load(std::memory_order_acquire);
      for (auto [to, length] : parts[i]) {
        if (left < length) {
          reach = std::min(reach, static_cast<uint64_t>(to - into) + left);
          break;
        }
        left -= length;
      }
    }
    return reach;
  };
  // For one link: goes on where it was.
  auto receive = [&](size_t which, bool is_own_thread) {
    auto own = progress[which];
    std::vector<char> nowhere(into ? 0 : stripe);
    uint64_t before = 0;
    for (auto [to, length] : parts[which]) {
      while (own < before + length) {
        auto at = own - before;
        int left = -1;
        if (milliseconds >= 0) {
          auto time = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
          left = static_cast<int>(std::max<long>(time, 0));
        }
        auto got = links[which]->receive(to ? to + at : nowhere.data(), length - at, left);
        own += got;
        came_over(which).store(own, std::memory_order_release);
        if (!got && milliseconds >= 0) return;
      }
      before += length;
      if (is_own_thread && reached) reached(reach());
    }
  };
  std::vector<std::function<void()>> tasks;
  uint64_t had = 0, has = 0;
  for (size_t i = 0; i < links.size(); ++i) {
    had += progress[i];
    if (!parts[i].empty()) tasks.push_back([&, i, is_own_thread = tasks.empty()] { receive(i, is_own_thread); });
  }
  if (had < size && !tasks.empty()) Crew::instance().run(tasks);
  for (size_t i = 0; i < links.size(); ++i) has += progress[i];
  if (has == size && reached) reached(size);
  return has == size;
}

}  // namespace sky
