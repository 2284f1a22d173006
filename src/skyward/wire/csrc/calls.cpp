// What a link of calls adds: small writes that never wait, large ones that several threads encrypt, and a reader that
// watches a socket.
#include <poll.h>

#include <algorithm>
#include <cstring>

#include "crew.h"
#include "link.h"

namespace sky {
namespace {

// The shortest write that goes over stripes, how much of it goes over the main connection first, how much over one
// stripe at a time, and how much until new stripes are looked for.
constexpr uint64_t kStripedLeast = 8 << 20, kStripedHead = 4 << 20, kStripePart = 1 << 20, kStripedMost = 64 << 20;
// How much is read before it is counted.
constexpr uint64_t kReadMost = 32 << 20;
constexpr auto kStripeWait = std::chrono::seconds(10);

}  // namespace

// Out.

void Link::send_call(const void* data, uint64_t size, bool patient) {
  Lock lock(mutex_);
  check();
  append(static_cast<const char*>(data), size);
  auto last = end_;
  push(lock);
  if (patient) await(lock, [&] { return sent_ >= last || !pair_ || pair_->broken; });
}

uint64_t Link::begin_large(const std::vector<std::pair<const char*, uint64_t>>& parts, uint64_t& first) {
  Lock lock(mutex_);
  check();
  first = end_;
  for (auto [data, size] : parts) {
    if (!size) continue;
    pieces_.push_back({data, end_, size, nullptr});
    end_ += size;
  }
  // A reader expects the head of a frame on the main connection.
  bool has_short_head = !parts.empty() && parts.front().second <= kStripePart;
  if (has_short_head && end_ - first >= kStripedLeast) striped_.emplace_back(first + kStripedHead, end_);
  return end_;
}

bool Link::await_large(uint64_t last, int milliseconds) {
  Lock lock(mutex_);
  auto ready = [&] { return sent_ >= last && last - std::min(last, counted_) <= window_; };
  return await(lock, ready, milliseconds, true);
}

void Link::finish_large(uint64_t first, uint64_t last) {
  Lock lock(mutex_);
  while (pushing_) changed_.wait(lock);
  if (ended_) {
    pieces_.clear();
    striped_.clear();
    return;
  }
  std::erase_if(striped_, [&](auto& range) { return range.first == first + kStripedHead; });
  own(first, last);
  // What others have written meanwhile.
  push(lock);
}

bool Link::await_room(uint64_t most, int milliseconds) {
  Lock lock(mutex_);
  return await(lock, [&] { return end_ - counted_ <= most; }, milliseconds);
}

// With the lock: up to where stripes carry what is to be sent next; 0 if they do not.
uint64_t Link::stripes_until() const {
  if (!pair_ || pair_->more_out.empty()) return 0;
  for (auto [from, to] : striped_)
    if (sent_ >= from && sent_ < to) return std::min(to, sent_ + kStripedMost);
  return 0;
}

// With the lock: whether what is to be sent next is memory of a thread that waits for that, and sends it.
bool Link::has_sender() const {
  if (!is_of_calls_ || !pair_ || pair_->joint_size || pair_->part_left || sent_ >= end_) return false;
  uint64_t size = 0;
  std::shared_ptr<void> owner;
  unsent(sent_, size, owner);
  return !owner;
}

struct Striping {
  const std::shared_ptr<Pair> pair;
  uint64_t next;
  const uint64_t until;
  size_t carriers;
  bool failed = false;
  std::string heads = {};
};

// Has the stream sent up to there over the stripes, each by a thread of its own, which takes the next part when it is
// done with one. The main connection announces each part. The last thread that is done lets others push again.
void Link::push_striped(Lock& lock, uint64_t until) {
  auto work = std::make_shared<Striping>(Striping{pair_, sent_, until, pair_->more_out.size()});
  auto stripes = pair_->more_out;
  auto self = shared_from_this();
  lock.unlock();
  for (auto& [number, connection] : stripes)
    Crew::instance().start([self, work, n = number, c = connection] { self->carry(*work, n, *c); });
  lock.lock();
}

void Link::carry(Striping& work, uint32_t number, Connection& to) {
  auto& pair = *work.pair;
  try {
    while (carry_one(work, number, to)) continue;
  } catch (const std::exception&) {
    Lock lock(mutex_);
    work.failed = true;
  }
  Lock lock(mutex_);
  if (--work.carriers) return;
  while (!work.failed && !work.heads.empty() && pair_ == work.pair && !pair.broken && !ended_) {
    work.failed = !push_heads(pair, work.heads);
    if (work.heads.empty()) break;
    lock.unlock();
    pair.out->await(false, kLookMilliseconds);
    lock.lock();
  }
  if (work.failed && !pair.broken) {
    // What the other end has sent before it went is still read, for a moment.
    pair.failed_at = Clock::now();
    pair.broken = true;
    pair.out->shut();
    for (auto& [_, connection] : pair.more_out) connection->shut();
  }
  if (!work.failed && !pair.broken && !ended_ && pair_ == work.pair) sent_ = work.next;
  pushing_ = false;
  changed_.notify_all();
}

// Sends one part; false if there is none left, or the pair is lost.
bool Link::carry_one(Striping& work, uint32_t number, Connection& to) {
  auto& pair = *work.pair;
  std::vector<std::pair<const char*, uint64_t>> parts;
  {
    Lock lock(mutex_);
    if (work.failed || pair.broken || ended_ || pair_ != work.pair || work.next >= work.until) return false;
    auto size = std::min(kStripePart, work.until - work.next);
    for (uint64_t done = 0; done < size;) {
      uint64_t part = 0;
      std::shared_ptr<void> owner;
      auto* data = unsent(work.next + done, part, owner);
      parts.emplace_back(data, std::min(part, size - done));
      done += parts.back().second;
    }
    work.next += size;
    uint64_t head = size | uint64_t{number} << kStripeBit;
    work.heads.append(reinterpret_cast<const char*>(&head), 8);
    on_wire_ += size_on_wire(size);
    striped_bytes_ += size;
    work.failed = !push_heads(pair, work.heads);
  }
  for (auto [data, size] : parts)
    while (size) {
      auto moved = to.write(data, size);
      if (moved == Connection::kNotNow) {
        // The other end reads a stripe only once its part is announced.
        Lock lock(mutex_);
        if (!push_heads(pair, work.heads)) work.failed = true;
        lock.unlock();
        to.await(false, kLookMilliseconds);
      }
      if (moved == Connection::kOver || pair.broken) {
        Lock lock(mutex_);
        work.failed = true;
        return false;
      }
      data += moved;
      size -= static_cast<uint64_t>(moved);
    }
  return true;
}

// With the lock: sends what announces parts, and the count if it is due; false if the connection is lost. A count that
// is due on a new pair is not for one that has been replaced.
bool Link::push_heads(Pair& pair, std::string& heads) {
  if (count_due_ && pair_.get() == &pair) {
    count_due_ = false;
    auto count = (received_ - held_) | kIsCount;
    heads.append(reinterpret_cast<const char*>(&count), 8);
  }
  while (!heads.empty()) {
    auto moved = pair.out->write(heads.data(), heads.size());
    if (moved == Connection::kOver) return false;
    if (moved == Connection::kNotNow) break;
    heads.erase(0, static_cast<size_t>(moved));
  }
  return true;
}

// In.

// Waits for a pair that the reader may read; false if the time has passed before.
bool Link::await_pair(Lock& lock, Clock::time_point until) {
  for (;;) {
    check();
    if (pair_) adopted_ = pair_;
    if (pair_) return true;
    auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    if (left <= 0) return false;
    changed_.wait_for(lock, std::chrono::milliseconds(std::min<long>(left, kLookMilliseconds)));
  }
}

uint64_t Link::peek(void* into, uint64_t size) {
  Lock lock(mutex_);
  if (!held_ && !ended_ && pair_ && pair_ == adopted_) take(lock, nullptr, 0, 0, true);
  return copy_held(static_cast<char*>(into), size);
}

void Link::skip(uint64_t size) {
  Lock lock(mutex_);
  drop_held(lock, std::min(size, held_));
}

int64_t Link::receive_call(void* into, uint64_t size, int milliseconds) {
  auto until = Clock::now() + std::chrono::milliseconds(std::max(milliseconds, 0));
  Lock lock(mutex_);
  if (auto got = copy_held(static_cast<char*>(into), size)) {
    drop_held(lock, got);
    // TLS may have more that no poll sees.
    if (got < size && pair_ && pair_ == adopted_ && pair_->in->has_pending())
      got += take(lock, static_cast<char*>(into) + got, size - got, 0, false);
    return static_cast<int64_t>(got);
  }
  for (;;) {
    check();
    if (!adopted_) adopted_ = pair_;
    // Who does not wait, watches the socket of the pair that it knows.
    if (!milliseconds && (!pair_ || pair_ != adopted_)) return kNotConnected;
    if (milliseconds && !await_pair(lock, until)) return 0;
    auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    auto wait = static_cast<int>(std::clamp<long>(left, 0, kLookMilliseconds));
    auto got = take(lock, static_cast<char*>(into), size, wait, false);
    if (got) return static_cast<int64_t>(got);
    if (milliseconds ? Clock::now() >= until : pair_ && pair_ == adopted_) return 0;
  }
}

void Link::receive_large(const std::vector<Place>& places, uint64_t& done, int milliseconds) {
  auto until = Clock::now() + std::chrono::milliseconds(milliseconds);
  uint64_t size = 0;
  for (auto& place : places) size += place.size;
  Lock lock(mutex_);
  uint64_t before = 0;
  for (auto& place : places) {
    // What was looked at comes first.
    if (held_ && done < before + place.size) {
      auto got = copy_held(place.data + (done - before), before + place.size - done);
      drop_held(lock, got);
      done += got;
    }
    before += place.size;
  }
  while (done < size && await_pair(lock, until)) {
    auto pair = pair_;
    reading_ = true;
    lock.unlock();
    bool over = false;
    auto now = read_places(*pair, places, done, until, over);
    std::vector<std::shared_ptr<void>> dropped;
    lock.lock();
    reading_ = false;
    // Bytes of a pair that is given up do not count: the other end was told that they had not come.
    if (pair_ == pair) {
      received_ += now - done;
      done = now;
    }
    if (over) lose(pair);
    forget_counted(dropped);
    changed_.notify_all();
    tell_taken();
    if (count_due_) push(lock);
    if (Clock::now() >= until) return;
  }
}

// Reads the stream on to these places from `from` on, and returns up to where all of it is there. Parts that come over
// stripes are read by other threads, side by side. `over`: the pair has brought everything that it will bring.
uint64_t Link::read_places(Pair& pair, const std::vector<Place>& places, uint64_t from, Clock::time_point until,
                           bool& over) {
  struct Part {
    uint64_t start, size;
    bool is_done;
  };
  struct Reader {
    std::shared_ptr<Connection> connection;
    std::deque<size_t> parts;
    bool is_running = false;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Part> parts;
  std::map<uint32_t, Reader> readers;
  bool failed = false;
  uint64_t total = 0;
  for (auto& place : places) total += place.size;
  // The memory from there on, at most so much.
  auto room = [&](uint64_t at, uint64_t most) {
    for (auto& place : places) {
      if (at < place.size) return Place{place.data + at, std::min(most, place.size - at)};
      at -= place.size;
    }
    return Place{nullptr, 0};
  };
  auto fill = [&](Connection& connection, Part& part) {
    for (uint64_t done = 0; done < part.size;) {
      auto to = room(part.start + done, part.size - done);
      auto n = connection.read(to.data, to.size);
      if (n == Connection::kNotNow) connection.await(true, kLookMilliseconds);
      if (n == Connection::kOver || (n == Connection::kNotNow && pair.broken)) return false;
      done += static_cast<uint64_t>(n);
    }
    return true;
  };
  auto run = [&](Reader& reader) {
    std::unique_lock lock(mutex);
    while (!reader.parts.empty() && !failed) {
      auto& part = parts[reader.parts.front()];
      reader.parts.pop_front();
      lock.unlock();
      bool good = fill(*reader.connection, part);
      lock.lock();
      part.is_done = good;
      if (!good) failed = true;
    }
    reader.is_running = false;
    changed.notify_all();
  };
  auto at = from;
  while (at < total && at - from < kReadMost) {
    auto n = read_head(pair);
    if (n > 0 && pair.left > total - at && pair.stripe) {
      end("a part on stripe " + std::to_string(pair.stripe) + " is longer than its frame");
      n = Connection::kOver;
    }
    if (n > 0 && pair.stripe) {
      std::unique_lock lock(mutex);
      auto& reader = readers[pair.stripe];
      if (!reader.connection) {
        lock.unlock();
        auto found = stripe(pair, pair.stripe);
        lock.lock();
        reader.connection = found;
      }
      if (!reader.connection || failed) {
        over = true;
        break;
      }
      parts.push_back({at, pair.left, false});
      reader.parts.push_back(parts.size() - 1);
      at += pair.left;
      pair.left = 0;
      if (reader.is_running) continue;
      reader.is_running = true;
      lock.unlock();
      Crew::instance().start([&run, &reader] { run(reader); });
      continue;
    }
    if (n > 0) {
      auto to = room(at, pair.left);
      n = pair.in->read(to.data, to.size);
    }
    if (n > 0) {
      std::lock_guard lock(mutex);
      parts.push_back({at, static_cast<uint64_t>(n), true});
      at += static_cast<uint64_t>(n);
      pair.left -= static_cast<uint64_t>(n);
    } else if (n == Connection::kOver) {
      over = true;
      break;
    } else {
      {
        std::lock_guard lock(mutex);
        if (failed) break;
      }
      auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
      if (left <= 0) break;
      pair.in->await(true, static_cast<int>(std::min<long>(left, kLookMilliseconds)));
    }
  }
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return std::ranges::none_of(readers, [](auto& each) { return each.second.is_running; }); });
  if (failed) over = true;
  for (auto& part : parts)
    if (!part.is_done) return part.start;
  return at;
}

// The stripe to read from; waits until it has joined the pair, null if it does not.
std::shared_ptr<Connection> Link::stripe(Pair& pair, uint32_t number) {
  auto until = Clock::now() + kStripeWait;
  Lock lock(mutex_);
  while (!pair.more_in.contains(number)) {
    if (ended_ || pair.broken || Clock::now() >= until) return nullptr;
    changed_.wait_for(lock, std::chrono::milliseconds(kLookMilliseconds));
  }
  return pair.more_in[number];
}

int Link::adopt() {
  Lock lock(mutex_);
  if (pair_) adopted_ = pair_;
  else if (!ended_) return -1;
  return adopted_ ? adopted_->in->fd() : -1;
}

bool Link::takes_stripes(uint32_t attempt) const {
  Lock lock(mutex_);
  return is_of_calls_ && attempt == attempt_ && pair_ && !pair_->broken;
}

void Link::add_stripe(uint32_t attempt, uint32_t number, std::shared_ptr<Connection> connection, bool to_send) {
  Lock lock(mutex_);
  if (attempt != attempt_ || !pair_ || pair_->broken || !number) return;
  (to_send ? pair_->more_out : pair_->more_in).emplace(number, std::move(connection));
  changed_.notify_all();
}

}  // namespace sky
