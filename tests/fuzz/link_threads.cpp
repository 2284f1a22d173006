// Two ends of a link in one process, used by many threads while its connections are cut: for the thread sanitizer.
//
// Arguments: for how many seconds, and a seed.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "../../src/skyward/wire/csrc/link.h"

namespace {

using sky::Connection;
using sky::Link;
using Ends = std::array<std::shared_ptr<Connection>, 2>;

Ends connect() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) std::abort();
  return {std::make_shared<Connection>(ends[0], nullptr, nullptr),
          std::make_shared<Connection>(ends[1], nullptr, nullptr)};
}

constexpr uint64_t kFrameMost = 16 << 20, kTurns = 4096;

// The bytes of a frame begin somewhere in these.
const std::string& pattern() {
  static const std::string made = [] {
    std::mt19937_64 random(1);
    std::string bytes;
    while (bytes.size() < kFrameMost + kTurns) bytes.push_back(static_cast<char>(random()));
    return bytes;
  }();
  return made;
}
const char* frame(uint64_t number) { return pattern().data() + number * 31 % kTurns; }

class Both {
 public:
  Both(bool of_calls, uint64_t seed) : of_calls_(of_calls), random_(seed) {
    for (auto& end : ends_) {
      end = std::make_shared<Link>(1 << 20, -1, "the other", of_calls);
      sky::Keeper::instance().add(end, ++numbers);
    }
    connect_again();
  }

  // As Python does when the keeper tells of a loss: the server is suspended, and then both get the new pair.
  void connect_again() {
    auto attempt = ++attempt_;
    std::array<int64_t, 2> arrived{};
    for (int i : {1, 0})
      if ((arrived[i] = ends_[i]->suspend(attempt)) < 0) return;
    auto there = connect(), back = connect();
    ends_[1]->install(std::make_shared<sky::Pair>(back[0], there[1], arrived[0], attempt));
    ends_[0]->install(std::make_shared<sky::Pair>(there[0], back[1], arrived[1], attempt));
    if (!of_calls_) return;
    for (uint32_t number : {1, 2, 3}) {
      auto stripe = connect();
      ends_[1]->add_stripe(attempt, number, stripe[1], false);
      ends_[0]->add_stripe(attempt, number, stripe[0], true);
    }
  }

  void run(std::chrono::seconds time) {
    std::atomic<bool> is_over = false;
    auto seed = random_();
    std::vector<std::thread> threads;
    for (int i : {0, 1}) {
      threads.emplace_back([&, i, seed] { guarded([&] { send(*ends_[i], is_over, seed + i); }); });
      threads.emplace_back([&, i] { guarded([&] { receive(*ends_[i]); }); });
      threads.emplace_back([&, i] {
        while (!is_over) {
          look(*ends_[i]);
          std::this_thread::yield();
        }
      });
    }
    auto until = sky::Clock::now() + time;
    while (sky::Clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(random_() % 1000));
      if (random_() % 2) ends_[random_() % 2]->reconnect();
      connect_again();
    }
    is_over = true;
    for (auto& end : ends_) end->end("it is over");
    for (auto& thread : threads) thread.join();
    std::printf("%s: %s and %s bytes over %s pairs, %s of them over stripes\n", of_calls_ ? "calls" : "device",
                std::to_string(ends_[0]->received()).c_str(), std::to_string(ends_[1]->received()).c_str(),
                std::to_string(attempt_).c_str(), std::to_string(ends_[0]->striped()).c_str());
  }

  static inline std::atomic<uint64_t> numbers = 0;

 private:
  template <typename F>
  static void guarded(F&& f) {
    try {
      f();
    } catch (const sky::LinkEnded& e) {
      if (std::string(e.what()) != "it is over") std::printf("it has ended: %s\n", e.what()), std::exit(1);
    }
  }

  // Frames: how many bytes follow, and these.
  void send(Link& link, const std::atomic<bool>& is_over, uint64_t seed) {
    std::mt19937_64 random(seed);
    for (uint64_t number = 0; !is_over; ++number) {
      uint64_t size = random() % 4 ? random() % 3000 : random() % kFrameMost;
      std::string bytes(reinterpret_cast<const char*>(&size), 8);
      bytes.append(frame(number), size);
      if (size < 3000) {
        if (of_calls_) link.send_call(bytes.data(), bytes.size(), random() % 2);
        else link.send(bytes.data(), bytes.size(), false);
      } else if (!of_calls_) {
        link.send_large({{bytes.data(), bytes.size()}}, nullptr);
      } else {
        uint64_t first = ~uint64_t{0}, last = 0;
        struct Finish {
          Link& link;
          uint64_t &first, &last;
          ~Finish() { link.finish_large(first, last); }
        } finish{link, first, last};
        last = link.begin_large({{bytes.data(), 8}, {bytes.data() + 8, size}}, first);
        while (!link.await_large(last, 50)) continue;
      }
    }
  }

  void receive(Link& link) {
    std::vector<char> room(kFrameMost);
    auto fill = [&](char* into, uint64_t size, bool is_head) {
      for (uint64_t done = 0; done < size;) {
        if (!of_calls_) {
          done += link.receive(into + done, size - done, 20);
        } else if (is_head) {
          auto n = link.receive_call(into + done, size - done, 20);
          if (n > 0) done += static_cast<uint64_t>(n);
        } else {
          link.receive_large({{into, size / 2}, {into + size / 2, size - size / 2}}, done, 20);
        }
      }
    };
    for (uint64_t number = 0, size;; ++number) {
      fill(reinterpret_cast<char*>(&size), 8, true);
      if (size > room.size()) std::printf("a frame of %s bytes\n", std::to_string(size).c_str()), std::exit(1);
      fill(room.data(), size, false);
      if (std::memcmp(room.data(), frame(number), size)) std::printf("another byte in a frame\n"), std::exit(1);
    }
  }

  void look(Link& link) {
    link.is_connected();
    link.has_pair();
    link.kept();
    link.on_wire();
    link.why();
    link.takes_stripes(attempt_);
  }

  const bool of_calls_;
  std::mt19937_64 random_;
  std::array<std::shared_ptr<Link>, 2> ends_;
  std::atomic<uint32_t> attempt_ = 0;
};

}  // namespace

int main(int count, char** given) {
  std::chrono::seconds time(count > 1 ? std::atoi(given[1]) : 10);
  uint64_t seed = count > 2 ? std::strtoull(given[2], nullptr, 10) : 1;
  pattern();
  std::thread([] {
    for (uint64_t number;;) sky::Keeper::instance().run(number);
  }).detach();
  std::thread calls([&] { Both(true, seed).run(time); });
  Both(false, seed).run(time);
  calls.join();
  return 0;
}
