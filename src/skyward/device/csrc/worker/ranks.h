// Ranks: the processes of a mesh, which all carry out the same records. The client sends them to the first rank, and
// each rank passes them on to those below it in a tree. Answers come back the same way, as one.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "../wire/coding.h"
#include "../wire/records.h"
#include "../wire/shared_memory.h"
#include "../wire/stream.h"
#include "../wire/stripes.h"

namespace sky {

// What the ranks have to answer for their answer to be one.
enum class Agreement {
  kSame,   // all of them the same
  kFirst,  // the first rank's answer counts
  kEach,   // the answers of all, one after the other: u32 rank, text
};

struct Answer {
  Status status;
  std::string content;
};

// A rank below this one.
class RankBelow {
 public:
  // The ways stay the caller's. `tree` is what its process is told of itself and of those below it.
  RankBelow(std::string name, const std::vector<Way>& ways, bool shares_memory, std::string_view tree);
  ~RankBelow();
  RankBelow(const RankBelow&) = delete;

  // Records, which a thread sends.
  void pass(const char* records, size_t size);
  // A part of `total` bytes of a tensor, of which `done` went before it.
  void pass_bytes(const void* data, uint64_t size, uint64_t done, uint64_t total) noexcept;
  // Whether an answer is there, or comes within that time; also where there will be none.
  bool has_answered(const timespec& most);
  Answer answer();
  void lose(const std::string& why);
  const std::string& name() const { return name_; }

 private:
  void send_queued();
  bool is_lost();

  const std::string name_;
  const std::unique_ptr<SharedRings> rings_;  // none over a network
  Stream ops_;
  const Stripes bulk_;
  const std::unique_ptr<Encoder> encoder_;  // over a network only
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string queued_;
  std::string lost_;  // why it is gone
  bool ending_ = false;
  std::thread sender_;
};

// This process's place among the ranks. A process without a mesh has none, and none of this applies.
class Ranks {
 public:
  static Ranks& all();

  // From Python, while the session joins a mesh.
  // Where one rank has failed, the others' answers are awaited for so long.
  void begin(uint32_t number, std::string name, double patience);
  void add(std::string name, const std::vector<Way>& ways, bool shares_memory, std::string_view tree);
  void end();

  bool is_mesh() const { return !name_.empty(); }
  bool is_first() const { return !number_; }
  bool passes_on() const { return !below_.empty(); }

  void pass(const char* records, size_t size) {
    for (auto& rank : below_) rank->pass(records, size);
  }
  void pass_bytes(const void* data, uint64_t size, uint64_t done, uint64_t total) {
    for (auto& rank : below_) rank->pass_bytes(data, size, done, total);
  }
  // An answer of this rank's, as those of `kEach` are.
  std::string tagged(std::string_view content) const;
  // The answer of this rank and of all below it. `mark` is what the others' answers are compared with.
  Answer together(Answer own, std::string_view mark, Agreement agreement);

 private:
  uint32_t number_ = 0;
  std::string name_;
  std::chrono::duration<double> patience_{};
  std::vector<std::unique_ptr<RankBelow>> below_;
};

// Tells contents apart; not for strangers.
std::string mark_of(const void* data, uint64_t size);

}  // namespace sky
