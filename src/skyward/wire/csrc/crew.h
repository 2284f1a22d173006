// Threads for work that takes several processors.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace sky {

// Threads that help with long transfers; they stay.
class Crew {
 public:
  static Crew& instance();

  // Runs it on another thread, or on this one where no more threads can be had.
  void start(std::function<void()> task) { give(std::move(task)); }

  // Runs all of them, the first one on this thread; throws what the first of them throws.
  void run(const std::vector<std::function<void()>>& tasks) {
    struct Shared {
      std::mutex mutex;
      std::condition_variable done;
      size_t left;
      std::exception_ptr failure;
    };
    Shared shared{{}, {}, tasks.size() - 1, nullptr};
    auto finish = [&](const std::function<void()>& task, bool is_own) {
      std::exception_ptr failure;
      try {
        task();
      } catch (...) {
        failure = std::current_exception();
      }
      std::lock_guard lock(shared.mutex);
      if (failure && !shared.failure) shared.failure = failure;
      if (!is_own && !--shared.left) shared.done.notify_all();
    };
    for (size_t i = 1; i < tasks.size(); ++i) give([&, i] { finish(tasks[i], false); });
    finish(tasks.front(), true);
    std::unique_lock lock(shared.mutex);
    shared.done.wait(lock, [&] { return !shared.left; });
    if (shared.failure) std::rethrow_exception(shared.failure);
  }

 private:
  void give(std::function<void()> task) {
    std::unique_lock lock(mutex_);
    tasks_.push_back(std::move(task));
    if (tasks_.size() <= idle_) return changed_.notify_one();
    try {
      std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
      // No more threads: this one does it.
      auto own = std::move(tasks_.back());
      tasks_.pop_back();
      lock.unlock();
      own();
    }
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      while (tasks_.empty()) {
        ++idle_;
        changed_.wait(lock);
        --idle_;
      }
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;
};

}  // namespace sky
