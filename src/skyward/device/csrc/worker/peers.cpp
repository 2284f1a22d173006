#include "peers.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <optional>
#include <utility>

#include "copies.h"
#include "layouts.h"

namespace sky {
namespace {

// How much is passed on before whoever waits for it is told: a relay sends it on from there.
constexpr uint64_t kPassedOn = 1 << 20;
constexpr size_t kLongestText = 16 << 10;
constexpr timespec kPatience{10, 0};
// Shorter passages go with their heads, without a detour.
constexpr uint64_t kLong = Stripes::kLong;

// Before the bytes of a passage: its number, and how many they are, which is none where there is a reason after them.
struct PassageHead {
  uint64_t number, bytes;
};

std::string short_of(const std::string& text) { return text.substr(0, kLongestText); }

}  // namespace

// The one who dialed tells its name and waits for a byte: from then on the other end knows the link.
Peer::Peer(uint64_t link, const std::vector<Way>& ways, bool shares_memory, const char* own, std::string name)
    : link_(link),
      socket_(shares_memory ? std::make_unique<OwnSocket>(ways.front().socket()) : nullptr),
      way_(socket_ ? Way(static_cast<uint64_t>(int{*socket_}), true) : ways.front()),
      long_({ways.begin() + 1, ways.end()}),
      name_(std::move(name)) {
  if (socket_) {
    int socket = *socket_;
    rings_ = own ? make_rings<PeerRings>(socket, socket, true) : join_rings<PeerRings>(socket, socket, false);
  }
  if (own) {
    Writer w;
    w.text(short_of(own));
    way_.send(w.bytes().data(), w.size());
    return;
  }
  uint32_t length;
  way_.receive(&length, sizeof length);
  if (length > kLongestText) throw Disconnected("a name of impossible length");
  name_.resize(length);
  way_.receive(name_.data(), length);
}

Peer::~Peer() {
  close("the link was closed", false);
  if (sender_.joinable()) sender_.join();
  if (receiver_.joinable()) receiver_.join();
}

void Peer::start(c10::Device device) {
  std::lock_guard lock(mutex_);
  if (is_closed_ || sender_.joinable()) return;
  device_ = device;
  sender_ = std::thread([this] { carry_out(); });
  receiver_ = std::thread([this] { carry_in(); });
}

void Peer::close(const std::string& why, bool is_lost) noexcept {
  Queue left, missing;
  {
    std::lock_guard lock(mutex_);
    // Once: their numbers may be those of other connections afterwards.
    if (is_closed_) return;
    is_closed_ = true;
    way_.close();
    long_.close();
    if (rings_) {
      rings_->out.wake();
      rings_->in.wake();
    }
    lost_ = std::make_shared<const Failure>(
        Failure{name_ + " cannot be reached any more: " + why + "; copy again what was to come from it", kFailed,
                "copying between devices"});
    // Before a passage ends: the reply that tells of its failure tells of the link, too.
    if (is_lost) Peers::all().note_lost(link_, lost_);
    // The first of each may be in a thread's hands, which ends it.
    auto take_rest = [](Queue& queue, Queue& into, bool has_thread) {
      for (; queue.size() > has_thread; queue.pop_back()) into.push_back(std::move(queue.back()));
    };
    take_rest(leaving_, left, sender_.joinable());
    take_rest(arriving_, missing, receiver_.joinable());
    changed_.notify_all();
  }
  // What was to leave is here as it was: that it did not arrive is for the other end to tell.
  for (auto& passage : left) passage->end(nullptr);
  for (auto& passage : missing) passage->end(lost_);
}

void Peer::hand_over(Queue& queue, std::shared_ptr<Passage> passage) {
  {
    std::lock_guard lock(mutex_);
    if (!is_closed_) {
      queue.push_back(std::move(passage));
      changed_.notify_all();
      return;
    }
  }
  passage->end(&queue == &arriving_ ? lost_ : nullptr);
}

// Waits for one; null when the link is closed.
std::shared_ptr<Passage> Peer::first(Queue& queue) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_closed_ || !queue.empty(); });
  return is_closed_ ? nullptr : queue.front();
}

void Peer::drop_first(Queue& queue, Reason failure) {
  std::shared_ptr<Passage> passage;
  {
    std::lock_guard lock(mutex_);
    if (queue.empty()) return;
    passage = std::move(queue.front());
    queue.pop_front();
  }
  passage->end(std::move(failure));
}

void Peer::write(const void* data, uint64_t size, uint64_t done, uint64_t total) {
  if (rings_) rings_->out.write(data, size);
  else if (total < kLong) way_.send(data, size);
  else long_.send(data, size, done, total);
}

// `reached` hears how many of them are there, now and then and at the end.
template <typename F>
void Peer::read(void* into, uint64_t size, uint64_t done, uint64_t total, F&& reached) {
  if (!rings_ && total >= kLong) return long_.receive(into, size, done, total, reached);
  if (rings_) rings_->in.read(into, size);
  else way_.receive(into, size);
  reached(size);
}

void Peer::read(void* into, uint64_t size, uint64_t done, uint64_t total) {
  read(into, size, done, total, [](uint64_t) {});
}

// As the session's own thread: neither gradients nor warnings are for these.
#define SKY_LIKE_THE_SESSION                          \
  c10::OptionalDeviceGuard guard;                     \
  if (!device_.is_cpu()) guard.reset_device(device_); \
  at::AutoDispatchBelowADInplaceOrView below;         \
  at::NoGradGuard no_grad

void Peer::carry_out() {
  SKY_LIKE_THE_SESSION;
  while (auto passage = first(leaving_)) try {
      give(*passage);
      drop_first(leaving_, nullptr);
    } catch (const std::exception& e) {
      close(e.what(), true);
    }
  drop_first(leaving_, nullptr);
}

void Peer::carry_in() {
  SKY_LIKE_THE_SESSION;
  try {
    for (;;) {
      PassageHead head;
      read(&head, sizeof head, 0, sizeof head);
      auto passage = first(arriving_);
      if (!passage) break;
      if (head.number != passage->number || (head.bytes && head.bytes != passage->bytes))
        throw Disconnected("it sent another tensor than was to come");
      if (head.bytes) take(*passage);
      uint32_t length;
      read(&length, sizeof length, 0, sizeof length);
      if (length > kLongestText || (!length && !head.bytes))
        throw Disconnected("it sent a reason of impossible length");
      std::string text(length, '\0');
      if (length) read(text.data(), length, 0, length);
      drop_first(arriving_,
                 length ? std::make_shared<const Failure>(Failure{text, kFailed, "copying from " + name_}) : nullptr);
    }
  } catch (const std::exception& e) {
    close(e.what(), true);
  }
  drop_first(arriving_, lost_);
}

// Where what goes out stops coming in half-way, the rest is sent all the same, and then the reason.
void Peer::give(Passage& passage) {
  auto refused = passage.refused;
  PassageHead head{passage.number, refused ? 0 : passage.bytes};
  write(&head, sizeof head, 0, sizeof head);
  if (!refused) try {
      if (passage.memory.device_type() == c10::kCPU) give_from_host(passage);
      else give_from_device(passage);
    } catch (const Poisoned& p) {
      refused = p.reason;
    }
  auto text = refused ? short_of(refused->text) : "";
  Writer w;
  w.text(text);
  write(w.bytes().data(), w.size(), 0, w.size());
}

void Peer::give_from_host(Passage& passage) {
  auto* from = static_cast<const char*>(passage.memory.data()) + passage.offset;
  auto skipped = passage.source ? passage.offset - passage.source->offset : 0;
  uint64_t known = passage.source ? 0 : passage.bytes;
  Reason failure;
  for (uint64_t done = 0; done < passage.bytes;) {
    if (known <= done && !failure) try {
        known = std::min(passage.source->wait_beyond(skipped + done) - skipped, passage.bytes);
      } catch (const Poisoned& p) {
        failure = p.reason;
        known = passage.bytes;
      }
    write(from + done, known - done, done, passage.bytes);
    done = known;
  }
  if (failure) throw Poisoned{failure};
}

void Peer::take(Passage& passage) {
  if (!passage.memory) return drop(passage.bytes);
  if (passage.memory.device_type() == c10::kCPU) take_to_host(passage);
  else take_to_device(passage);
}

void Peer::take_to_host(Passage& passage) {
  auto* into = static_cast<char*>(passage.memory.mutable_data()) + passage.offset;
  uint64_t known = 0;
  auto pass_on = [&](uint64_t done) {
    if (done - known < kPassedOn || done == passage.bytes) return;
    passage.advance(done);
    known = done;
  };
  auto most = rings_ ? kPassedOn : passage.bytes;
  for (uint64_t done = 0; done < passage.bytes; done += std::min(passage.bytes - done, most))
    read(into + done, std::min(passage.bytes - done, most), done, passage.bytes,
         [&](uint64_t there) { pass_on(done + there); });
}

void Peer::drop(uint64_t bytes) {
  std::vector<char> dropped(std::min(bytes, kPassedOn));
  for (uint64_t done = 0; done < bytes; done += std::min(bytes - done, kPassedOn))
    read(dropped.data(), std::min(bytes - done, kPassedOn), done, bytes);
}

struct Peer::Staging {
  explicit Staging(Passage& passage) : device(passage.memory.device()) {
    for (auto& half : halves)
      half = at::empty({static_cast<int64_t>(std::min(kStage, passage.bytes))},
                       at::TensorOptions().dtype(at::kByte).pinned_memory(device.is_cuda()));
    if (!device.is_cuda()) return;
    // A stream of its own: the session's goes on meanwhile.
    real.emplace(device.type());
    before.emplace(real->exchangeStream(real->getNewStream(device, 0)));
    if (passage.may_begin) passage.may_begin->block(real->getStream(device));
  }
  ~Staging() {
    if (!before) return;
    try {
      real->synchronizeStream(real->getStream(device));
    } catch (const std::exception&) {
      // The GPU has failed; what uses the memory says so.
    }
    real->exchangeStream(*before);
  }
  Staging(const Staging&) = delete;

  char* bytes(int which) { return static_cast<char*>(halves[which].mutable_data_ptr()); }
  at::Tensor part(int which, uint64_t at, uint64_t n) {
    return halves[which].narrow(0, static_cast<int64_t>(at), static_cast<int64_t>(n));
  }
  void mark(int which) {
    if (!real) return;
    if (!events[which]) events[which].emplace(device.type());
    events[which]->record(real->getStream(device));
  }
  void await(int which) {
    if (events[which]) events[which]->synchronize();
  }

  c10::Device device;
  std::array<at::Tensor, 2> halves;
  std::array<std::optional<c10::Event>, 2> events;
  std::optional<c10::impl::VirtualGuardImpl> real;
  std::optional<c10::Stream> before;
};

void Peer::give_from_device(Passage& passage) {
  if (passage.source)
    if (auto failure = passage.source->wait()) {
      std::vector<char> nothing(std::min(passage.bytes, kPassedOn));
      for (uint64_t done = 0; done < passage.bytes; done += std::min(passage.bytes - done, kPassedOn))
        write(nothing.data(), std::min(passage.bytes - done, kPassedOn), done, passage.bytes);
      throw Poisoned{failure};
    }
  Staging staging(passage);
  // The first part is small, as nothing is sent while the GPU copies it.
  auto part_at = [&](uint64_t at) { return std::min(at ? kStage : 2 * kCopied, passage.bytes - at); };
  auto begin = [&](uint64_t at, int which) {
    auto n = part_at(at);
    staging.part(which, 0, n)
        .copy_(byte_view(passage.memory, passage.offset + at, n), /*non_blocking=*/device_.is_cuda());
    staging.mark(which);
  };
  int turn = 0;
  begin(0, turn);
  for (uint64_t done = 0, n; done < passage.bytes; done += n, turn ^= 1) {
    n = part_at(done);
    if (done + n < passage.bytes) begin(done + n, turn ^ 1);
    staging.await(turn);
    write(staging.bytes(turn), n, done, passage.bytes);
  }
}

void Peer::take_to_device(Passage& passage) {
  Staging staging(passage);
  int turn = 0;
  for (uint64_t done = 0; done < passage.bytes; turn ^= 1) {
    auto n = std::min(kStage, passage.bytes - done);
    staging.await(turn);
    uint64_t copied = 0;
    auto copy = [&](uint64_t there) {
      if (there - copied < (there == n ? 1 : kCopied)) return;
      byte_view(passage.memory, passage.offset + done + copied, there - copied)
          .copy_(staging.part(turn, copied, there - copied), /*non_blocking=*/device_.is_cuda());
      copied = there;
    };
    read(staging.bytes(turn), n, done, passage.bytes, copy);
    staging.mark(turn);
    done += n;
  }
}

Peers& Peers::all() {
  // Never destroyed: threads of Python's may use it until the process ends.
  static Peers& peers = *std::make_unique<Peers>().release();
  return peers;
}

void Peers::add(uint64_t link, const std::vector<Way>& ways, bool shares_memory, const char* own, std::string name) {
  auto& way = ways.front();
  auto peer = std::make_shared<Peer>(link, ways, shares_memory, own, std::move(name));
  {
    std::lock_guard lock(mutex_);
    if (!peers_.emplace(link, peer).second) throw Disconnected("a link that there is already");
  }
  char known = 1;
  try {
    if (!own) {
      way.send(&known, 1);
    } else if (!way.is_readable(kPatience)) {
      throw Disconnected("it did not answer within 10 s");
    } else {
      way.receive(&known, 1);
    }
  } catch (const Disconnected& problem) {
    // The other device may be tried at another address, for the same link.
    peer->close(problem.what(), false);
    std::lock_guard lock(mutex_);
    peers_.erase(link);
    throw;
  }
}

std::shared_ptr<Peer> Peers::find(uint64_t link) {
  std::lock_guard lock(mutex_);
  auto found = peers_.find(link);
  return found == peers_.end() ? nullptr : found->second;
}

Reason Peers::why_lost(uint64_t link) {
  std::lock_guard lock(mutex_);
  auto found = lost_.find(link);
  if (found == lost_.end()) throw Malformed("an unknown link");
  return found->second;
}

void Peers::send(std::shared_ptr<Passage> passage, c10::Device device) {
  auto peer = find(passage->link);
  if (!peer) {
    why_lost(passage->link);
    passage->end(nullptr);
    return;
  }
  peer->start(device);
  peer->send(std::move(passage));
}

void Peers::expect(std::shared_ptr<Passage> passage, c10::Device device) {
  auto peer = find(passage->link);
  if (!peer) {
    passage->end(why_lost(passage->link));
    return;
  }
  peer->start(device);
  peer->expect(std::move(passage));
}

void Peers::lose(uint64_t link, const std::string& why) noexcept {
  if (auto peer = find(link)) peer->close(why, true);
}

void Peers::end(uint64_t link, const std::string& why) {
  if (auto peer = find(link)) peer->close(why, false);
  std::lock_guard lock(mutex_);
  lost_.erase(link);
}

void Peers::free(uint64_t link) noexcept {
  std::shared_ptr<Peer> freed;
  std::lock_guard lock(mutex_);
  auto found = peers_.find(link);
  if (found == peers_.end()) return;
  freed = std::move(found->second);
  peers_.erase(found);
}

void Peers::note_lost(uint64_t link, Reason reason) {
  std::lock_guard lock(mutex_);
  lost_[link] = std::move(reason);
  untold_.append(reinterpret_cast<const char*>(&link), sizeof link);
  has_untold_ = true;
}

std::string Peers::take_lost() {
  if (!has_untold_.load(std::memory_order_relaxed)) return "";
  std::lock_guard lock(mutex_);
  has_untold_ = false;
  return std::exchange(untold_, "");
}

void Peers::end_all() noexcept {
  std::map<uint64_t, std::shared_ptr<Peer>> ended;
  {
    std::lock_guard lock(mutex_);
    ended.swap(peers_);
  }
  // All before the first one's threads are awaited: one may wait for what comes over another.
  for (auto& [link, peer] : ended) peer->close("the client has left", false);
  ended.clear();
  // The next client does not know these links.
  std::lock_guard lock(mutex_);
  lost_.clear();
  untold_.clear();
  has_untold_ = false;
}

}  // namespace sky
