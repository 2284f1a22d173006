// What one thread issues on a device, noted operation by operation, so that the worker can be told to do it again.
#pragma once

#include <c10/macros/Macros.h>

#include <atomic>
#include <string>
#include <string_view>
#include <thread>

#include "../wire/records.h"

namespace sky {

// How many sessions are taped: all that an operation looks at while there are none.
inline std::atomic<int> tapes{0};

// The serial of the session that this thread is taped on, or 0.
inline thread_local uint32_t taped_on = 0;

// Python's: the number of the line of the user's that runs now.
inline int (*line_now)() = nullptr;

inline uint32_t line_of_tape() {
  return C10_UNLIKELY(tapes.load(std::memory_order_relaxed)) && line_now ? static_cast<uint32_t>(line_now()) : 0;
}

// What the payload of an operation consists of, a letter each. A slot's is followed by the bytes of an element, and
// `kNumberField` by the number's dtype.
enum Field : char {
  kSlotField = 's',         // 4 bytes
  kWrittenSlotField = 'w',  // the same, and the operation writes to it
  kOffsetField = 'o',       // 8 bytes, of the slot before it
  kNumberField = 'h',       // 16 bytes
  kGeneratorField = 'g',    // 4 bytes
  kIntegerField = 'i',      // 8 bytes
  kRealField = 'r',         // 8 bytes
  kComplexField = 'c',      // 16 bytes
};

// Guarded by the session's mutex.
class Tape {
 public:
  bool is_mine() const { return std::this_thread::get_id() == thread_; }
  void operation(uint32_t line, uint32_t id, std::string_view name, std::string_view fields, std::string_view payload,
                 std::string_view slots);
  void made(uint32_t slot, uint64_t bytes);
  void freed(uint32_t slot);
  // With the bytes where they are few.
  void uploaded(uint32_t slot, uint64_t offset, const void* from, uint64_t size, bool with_bytes);
  void read(uint32_t line, std::string_view located, const void* into);
  void settings(uint64_t settings);
  void streamed(uint32_t stream);
  void event(uint32_t event, EventAction action, uint32_t stream);
  void resized(uint32_t slot, uint64_t before, uint64_t bytes);
  // Something that cannot be done again.
  void blocked(std::string_view what, uint32_t line = 0);

  const std::string& content() const { return w_.bytes(); }

 private:
  const std::thread::id thread_ = std::this_thread::get_id();
  Writer w_;
};

}  // namespace sky
