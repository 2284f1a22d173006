// Python's lock, let go of while the core waits.
//
// Some of PyTorch's bindings call operations with it held (`x[i]` reads a tensor `i`; so does freeing), and
// the bytes we wait for may be carried by a Python thread: waiting with it held would be for ever.
#pragma once

#include <memory>
#include <mutex>

namespace sky {

// Python's own functions, given to us so that no header of it is needed; null without a Python.
struct Interpreter {
  int (*is_running)() = nullptr;
  int (*holds_lock)() = nullptr;
  void* (*leave)() = nullptr;
  void (*enter)(void*) = nullptr;
};
inline Interpreter interpreter;

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

// A recursive mutex that is never waited for with Python's lock held.
class Mutex {
 public:
  void lock() {
    if (held_.try_lock()) return;
    OutsidePython outside;
    held_.lock();
  }
  void unlock() { held_.unlock(); }
  // In a forked child: whoever held it does not exist there.
  void forget_holder() noexcept { std::construct_at(&held_); }

 private:
  std::recursive_mutex held_;
};

}  // namespace sky
