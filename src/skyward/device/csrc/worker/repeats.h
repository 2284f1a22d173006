// What a client issues again and again, byte for byte: stretches of records, which a GPU can run as graphs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sky {

// The records that were carried out, of which a loop repeats the last ones. A client's loop in steady state writes the
// same bytes each time around, but for batches that lie elsewhere and numbers that change.
class Repeats {
 public:
  // `may_be_graph`: whether it can be in a graph. Of those that cannot, the first bytes are enough.
  void note(std::string_view record, bool may_be_graph, bool is_operation);
  // Some that come again with the same bytes, one after another.
  struct Stretch {
    std::string_view records;
    size_t count, operations;
  };
  // Once around the loop that the last records repeat: all of it, and of that what can be a graph.
  struct Period {
    std::vector<std::string_view> records;
    std::vector<Stretch> stretches;
  };
  // Looked for when twice as many records have been noted as the time before.
  bool wants_a_look() const { return noted_.size() >= next_look_; }
  std::optional<Period> look();
  // What was noted is no sign of what will come.
  void forget();
  // Nothing came of it: so many times as many records as are kept pass unseen at least, and each time twice as many.
  void rest(size_t least);

 private:
  struct Noted {
    uint64_t hash;
    size_t at;
    uint32_t size, head;
    bool may_be_graph, is_operation;

    bool is_like(const Noted& other) const;
  };
  size_t period() const;
  bool repeats(size_t period) const;

  std::vector<Noted> noted_;
  std::string bytes_;
  size_t next_look_ = kFirstLook;
  size_t skips_ = 0, skipped_ = 0;

  static constexpr size_t kFirstLook = 512;
};

}  // namespace sky
