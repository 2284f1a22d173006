// Answers of workers about the results of operations, remembered from one session to the next.
//
// A file of them is, for each, the text of its key and the text of the answer. The key says everything that decides
// the answer but the worker itself: the operation, the settings, and the arguments but for their numbers and places.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "../wire/records.h"

namespace sky {

class Remembered {
 public:
  static std::string key_of(const std::string& operation, const std::string& overload, uint64_t settings,
                            const std::vector<uint64_t>& words) {
    Writer w;
    w.text(operation);
    w.text(overload);
    w.u64(settings);
    w.raw(words.data(), words.size() * sizeof words[0]);
    return w.bytes();
  }

  // What an earlier session has written; throws Malformed, and then knows nothing.
  void read(const char* data, size_t size) {
    std::unordered_map<std::string, std::string> read;
    Reader r(data, size);
    while (r.left()) {
      auto key = r.text();
      read[std::move(key)] = r.text();
    }
    std::lock_guard lock(mutex_);
    known_ = std::move(read);
  }

  std::optional<std::string> find(const std::string& key) const {
    std::lock_guard lock(mutex_);
    auto found = known_.find(key);
    return found == known_.end() ? std::nullopt : std::optional(found->second);
  }
  void learn(const std::string& key, const std::string& answer) {
    std::lock_guard lock(mutex_);
    known_[key] = answer;
    learned_.text(key);
    learned_.text(answer);
  }

  // No answer of an earlier session is to be trusted. Those of this one are in the templates.
  void forget() {
    std::lock_guard lock(mutex_);
    known_.clear();
    is_wrong = true;
  }

  // Those of this session.
  std::string learned() const {
    std::lock_guard lock(mutex_);
    return learned_.bytes();
  }

  // A worker found a result to be another than it was remembered to be: no answer is to be trusted.
  std::atomic<bool> is_wrong{false};

 private:
  mutable std::mutex mutex_;  // its own: who ends a session cannot wait for whoever waits for the worker
  std::unordered_map<std::string, std::string> known_;
  Writer learned_;
};

}  // namespace sky
