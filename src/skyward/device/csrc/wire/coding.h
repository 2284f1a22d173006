// The coding of the op stream over a network: what was sent before goes as a reference.
//
// A training loop writes the same records every time around. Both ends keep what has passed last; the sender looks
// for long stretches of it in what comes next. A token is a number whose two low bits are its kind and whose rest is
// a length: that many bytes follow (kLiteral), or they are those of `distance` bytes ago, a second number (kMatch),
// or those of as many bytes ago as at the last match (kAgain). Numbers are written seven bits to a byte, low first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "records.h"

namespace sky {

// How far back a reference may reach: twenty steps of a transformer, with what is read at their end.
constexpr size_t kHistory = 2 << 20;
// The longest stretch of one token.
constexpr size_t kLongestToken = 1 << 20;

enum Token : uint8_t { kLiteral, kMatch, kAgain, kTokens };

// The bytes that have passed last: at least kHistory of them, in one piece.
class History {
 public:
  const char* data() const { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }
  // Positions count from the beginning of the stream: this is the first that is still here.
  uint64_t first() const { return first_; }
  uint64_t end() const { return first_ + bytes_.size(); }

  void append(const char* data, size_t size) {
    if (bytes_.size() + size > 2 * kHistory && bytes_.size() > kHistory) {
      auto old = bytes_.size() - kHistory;
      bytes_.erase(0, old);
      first_ += old;
    }
    bytes_.append(data, size);
  }
  // In pieces: a reference may overlap what it makes.
  void repeat(uint64_t distance, size_t size) {
    append("", 0);
    auto at = bytes_.size();
    bytes_.resize(at + size);
    for (size_t done = 0; done < size;) {
      auto n = std::min<size_t>(size - done, distance);
      std::memcpy(bytes_.data() + at + done, bytes_.data() + at + done - distance, n);
      done += n;
    }
  }

 private:
  std::string bytes_;
  uint64_t first_ = 0;
};

class Encoder {
 public:
  Encoder() : places_(kPlaces) {}

  // Adds the tokens for these bytes.
  void encode(std::string_view raw, std::string& out) {
    history_.append(raw.data(), raw.size());
    auto end = history_.end(), at = end - raw.size(), literal = at;
    for (; noted_ < at; noted_++) note(noted_);
    while (at < end) {
      auto [distance, length] = longest(at, end);
      if (!length) {
        if (at + kContext <= end) note(at);
        at++;
        continue;
      }
      write_literal(out, literal, at);
      write_match(out, distance, length);
      for (auto i = at; i < at + length; i += kContext) note(i);
      at += length;
      literal = at;
    }
    write_literal(out, literal, end);
    noted_ = std::max(at, end) - std::min<uint64_t>(kContext - 1, raw.size());
  }

 private:
  // A stretch is found by its first bytes: enough that it is hardly found in the wrong place.
  static constexpr size_t kContext = 32, kShortestAgain = 8, kPlaces = 1 << 16;

  struct Found {
    uint64_t distance = 0;
    size_t length = 0;
  };

  const char* at(uint64_t position) const { return history_.data() + (position - history_.first()); }

  size_t place_of(uint64_t position) const {
    uint64_t hash = 0, word;
    for (size_t i = 0; i < kContext; i += sizeof word) {
      std::memcpy(&word, at(position) + i, sizeof word);
      hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 29;
    }
    return hash % kPlaces;
  }
  void note(uint64_t position) {
    if (position >= history_.first() && position + kContext <= history_.end())
      places_[place_of(position)] = position + 1;
  }

  size_t equal(uint64_t position, uint64_t distance, uint64_t end) const {
    if (!distance || distance > kHistory || position < history_.first() + distance) return 0;
    auto *here = at(position), *there = here - distance;
    size_t most = std::min<uint64_t>(end - position, kLongestToken), n = 0;
    for (uint64_t a, b; n + sizeof a <= most; n += sizeof a) {
      std::memcpy(&a, here + n, sizeof a);
      std::memcpy(&b, there + n, sizeof b);
      if (a != b) break;
    }
    while (n < most && here[n] == there[n]) n++;
    return n;
  }

  Found longest(uint64_t position, uint64_t end) const {
    Found best;
    auto again = equal(position, last_, end);
    // At the end of what there is, the rest of it is enough.
    if (again >= kShortestAgain || (again && position + again == end)) best = {last_, again};
    if (position + kContext > end) return best;
    auto known = places_[place_of(position)];
    if (!known || known > position || position - (known - 1) == best.distance) return best;
    auto distance = position - (known - 1);
    auto length = equal(position, distance, end);
    return length >= kContext && length > best.length + kContext ? Found{distance, length} : best;
  }

  static void write_number(std::string& out, uint64_t number) {
    for (; number >= 128; number >>= 7) out.push_back(static_cast<char>(number | 128));
    out.push_back(static_cast<char>(number));
  }
  void write_literal(std::string& out, uint64_t from, uint64_t to) const {
    while (from < to) {
      auto n = std::min<uint64_t>(to - from, kLongestToken);
      write_number(out, n << 2 | kLiteral);
      out.append(at(from), n);
      from += n;
    }
  }
  void write_match(std::string& out, uint64_t distance, size_t length) {
    write_number(out, length << 2 | (distance == last_ ? kAgain : kMatch));
    if (distance != last_) write_number(out, distance);
    last_ = distance;
  }

  History history_;
  std::vector<uint64_t> places_;  // by the context's hash: one more than where it was last
  uint64_t last_ = 0;             // distance
  uint64_t noted_ = 0;            // the first position that is not in `places_` yet
};

// What comes back is the same whatever the pieces in which tokens arrive. Any input is either decoded or Malformed.
class Decoder {
 public:
  void take(const char* data, size_t size) {
    coded_.erase(0, used_);
    used_ = 0;
    coded_.append(data, size);
  }

  // At most so many bytes into the place given; 0 when more tokens are needed.
  size_t give(char* into, size_t room) {
    size_t given = 0;
    while (given < room) {
      if (!left_ && !next()) break;
      auto n = std::min(room - given, left_);
      if (kind_ == kLiteral) {
        n = std::min(n, coded_.size() - used_);
        if (!n) break;
        history_.append(coded_.data() + used_, n);
        used_ += n;
      } else {
        history_.repeat(distance_, n);
      }
      std::memcpy(into + given, history_.data() + history_.size() - n, n);
      given += n;
      left_ -= n;
    }
    return given;
  }

 private:
  // The next token, if all of it is there.
  bool next() {
    auto at = used_;
    uint64_t head, distance = distance_;
    if (!number(at, head)) return false;
    auto kind = static_cast<Token>(head & 3);
    auto length = head >> 2;
    if (kind >= kTokens || !length || length > kLongestToken) throw Malformed("a token of unknown kind or length");
    if (kind == kMatch && !number(at, distance)) return false;
    if (kind != kLiteral && (!distance || distance > std::min(history_.size(), kHistory)))
      throw Malformed("a reference to what was not sent");
    used_ = at;
    kind_ = kind;
    left_ = length;
    distance_ = distance;
    return true;
  }
  bool number(size_t& at, uint64_t& value) const {
    value = 0;
    for (int shift = 0; at < coded_.size(); shift += 7) {
      auto byte = static_cast<uint8_t>(coded_[at++]);
      if (shift > 35) throw Malformed("a number of too many bytes");
      value |= static_cast<uint64_t>(byte & 127) << shift;
      if (byte < 128) return true;
    }
    return false;
  }

  History history_;
  std::string coded_;
  size_t used_ = 0;  // of it
  Token kind_ = kLiteral;
  size_t left_ = 0;  // of the token's length
  uint64_t distance_ = 0;
};

}  // namespace sky
