// Python's lock, let go of while the core waits.
//
// Some of PyTorch's bindings call operations with it held (`x[i]` reads a tensor `i`; so does freeing), and
// the bytes we wait for may be carried by a Python thread: waiting with it held would be for ever.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <memory>
#include <mutex>

#include "errors.h"

namespace sky {

// Python's own functions, given to us so that no header of it is needed; null without a Python.
struct Interpreter {
  int (*is_running)() = nullptr;
  int (*holds_lock)() = nullptr;
  void* (*leave)() = nullptr;
  void (*enter)(void*) = nullptr;
};
inline Interpreter interpreter;

// How to ask Python whether the user has pressed Ctrl-C, and whether that is to raise KeyboardInterrupt.
struct Interrupts {
  int (*lock)() = nullptr;
  void (*unlock)(int) = nullptr;
  int (*occurred)() = nullptr;  // and it is forgotten then
  _object* (*call)(_object*, _object*) = nullptr;
  void (*release)(_object*) = nullptr;
  _object *handler_of = nullptr, *arguments = nullptr, *raises = nullptr;
  pthread_t main_thread{};
};
inline Interrupts interrupts;

// How long a wait goes on before it looks.
constexpr auto kLooksAfter = std::chrono::milliseconds(100);
constexpr timespec kMoment{0, std::chrono::nanoseconds(kLooksAfter).count()};

// Throws if the user has pressed Ctrl-C, on the main thread. A handler of the program's own runs when the wait is over,
// as everywhere in PyTorch: it may use the device, which is in the middle of something here.
inline void check_interrupts() {
  auto& i = interrupts;
  if (!i.call || !::pthread_equal(::pthread_self(), i.main_thread) || !interpreter.is_running()) return;
  auto state = i.lock();
  auto* handler = i.call(i.handler_of, i.arguments);
  bool is_interrupted = handler == i.raises && i.occurred();
  i.release(handler);
  i.unlock(state);
  if (is_interrupted) throw Interrupted();
}

class OutsidePython {
 public:
  OutsidePython() {
    if (interpreter.leave && interpreter.is_running() && interpreter.holds_lock()) inside_ = interpreter.leave();
  }
  ~OutsidePython() {
    if (inside_) interpreter.enter(inside_);
  }
  OutsidePython(const OutsidePython&) = delete;

 private:
  void* inside_ = nullptr;
};

// A recursive mutex that is never waited for with Python's lock held, and that nobody takes while another waits: a
// thread that reads values in a loop would otherwise have it again before any other has woken up.
class Mutex {
 public:
  void lock() {
    auto me = ::pthread_self();
    if (depth_.load(std::memory_order_acquire) && ::pthread_equal(owner_.load(std::memory_order_relaxed), me)) {
      depth_.store(depth_ + 1, std::memory_order_relaxed);
      return;
    }
    if (waiting_.load() || !held_.try_lock()) {
      OutsidePython outside;
      waiting_++;
      {
        std::lock_guard first(turn_);
        held_.lock();
      }
      waiting_--;
    }
    owner_.store(me, std::memory_order_relaxed);
    depth_.store(1, std::memory_order_release);  // who sees this sees whose it is
  }
  void unlock() {
    auto depth = depth_.load(std::memory_order_relaxed) - 1;
    depth_.store(depth, std::memory_order_relaxed);
    if (!depth) held_.unlock();
  }
  // In a forked child: whoever held it does not exist there.
  void forget_holder() noexcept {
    std::construct_at(&held_);
    std::construct_at(&turn_);
    depth_ = 0;
    waiting_ = 0;
  }

 private:
  std::mutex held_, turn_;
  std::atomic<int> waiting_{0}, depth_{0};
  std::atomic<pthread_t> owner_{};
};

}  // namespace sky
