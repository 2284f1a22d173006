// The op stream: compact records from the client to the worker, framed replies the other way.
//
// A record starts with a u32. Its top bit set means FREE of that slot; a value below kFirstRecord is the
// template of an operation, whose payload length both ends know; the rest are the kinds below.
// All numbers are little-endian. The worker checks every length before it reads.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace sky {

enum Record : uint32_t {
  kFirstRecord = 0x7fffff00u,
  kDefine = 0x7fffff01u,    // u32 length, template, u8 promised, then if so its outputs
  kAsk = 0x7fffff02u,       // u32 length, u32 template, payload; replied: metadata of the outputs
  kBind = 0x7fffff03u,      // u32 count, slots for the outputs of the last kAsk
  kNew = 0x7fffff04u,       // u32 slot, u64 bytes
  kResize = 0x7fffff05u,    // u32 slot, u64 bytes
  kUpload = 0x7fffff06u,    // u32 slot, u64 offset, u64 bytes, u8 inline, then the bytes if inline
  kFetch = 0x7fffff07u,     // u32 length, u8 later, u32 slot, layout, u64 offset; replied: the bytes, contiguous
  kSync = 0x7fffff08u,      // u32 stream or kAllStreams; replied when everything before it is done
  kGenerator = 0x7fffff09u, // u32 length, u32 generator, u8 action, text; some actions are replied
  kStream = 0x7fffff0au,    // u32 stream: what follows runs on it
  kUsedOn = 0x7fffff0bu,    // u32 slot, u32 stream: its memory is not free before that stream is done with it
  kEvent = 0x7fffff0cu,     // u32 event, u8 action, u32 stream or other event; some actions are replied
  kMemory = 0x7fffff0du,    // u8 action; replied: how much is in use
  kExport = 0x7fffff0eu,    // u32 length, slots; replied for each: text, how others on its node open its memory, or none
  kSettings = 0x7fffff0fu,  // u32 settings, for everything after it
};
constexpr uint32_t kFree = 0x80000000u;

// What is fetched comes in the reply up to this size, and above it the way of uploads.
constexpr uint64_t kInlineFetch = 64 << 10;

// How an argument is written in a template.
enum Argument : uint8_t {
  kNone,
  kUndefined,    // an undefined tensor
  kTensor,       // u8 dtype, u8 dim, u8 bits, u8 has offset, sizes, strides; payload: u32 slot [, i64 offset]
  kHostScalar,   // a zero-dimensional CPU tensor: u8 dtype, u8 wrapped; payload: 16 bytes
  kInt,          // i64
  kNumber,       // an integer scalar; payload: i64
  kDouble,       // payload: f64
  kComplex,      // payload: 2 f64
  kBool,         // u8
  kString,       // u32 length, bytes
  kList,         // u8 element type, u32 length, elements
  kDevice,       // the worker's device
  kHostDevice,   // cpu
  kGeneratorArg, // payload: u32 generator
};

enum ListOf : uint8_t { kTensors, kOptionalTensors, kInts, kDoubles, kBools, kScalars, kStrings };

// A tensor's lazy conjugation and negation: part of what it is, like its strides.
enum Bits : uint8_t { kConjugated = 1, kNegated = 2 };

// How an output is described, in replies to kAsk.
enum Output : uint8_t { kNewTensor, kAliasOfArgument, kUndefinedTensor, kTensorList, kValue, kNothing };

enum GeneratorAction : uint8_t { kSeed, kGetState, kSetState, kForget };

// Streams are numbered by the client: 0 is the device's own, above kUrgentStreams they have priority.
constexpr uint32_t kUrgentStreams = 1u << 16;
constexpr uint32_t kAllStreams = ~0u;

enum EventAction : uint8_t {
  kRecordTimed,  // on a stream
  kRecord,       // without taking the time
  kBlock,        // a stream, until the event has happened
  kQuery,        // replied: u8 whether it has happened
  kQueryStream,  // replied: u8 whether all of the stream is done
  kAwait,        // replied when it has happened
  kElapsed,      // replied: f64 milliseconds from the event to the other
  kForgetEvent,
};

enum MemoryAction : uint8_t { kTellMemory, kResetPeak, kEmptyCache };

// What of memory is told, in this order, each a u64.
enum MemoryFigure { kAllocated, kAllocatedPeak, kReserved, kReservedPeak, kFreeMemory, kTotalMemory, kMemoryFigures };

// What PyTorch keeps for the whole process and operations depend on: a default dtype in the low byte, and flags.
enum Setting : uint32_t {
  kDeterministic = 1u << 8,
  kDeterministicWarns = 1u << 9,
  kFillsMemory = 1u << 10,
  kCudnnBenchmarks = 1u << 11,
  kCudnnDeterministic = 1u << 12,
};

// A reply: u32 length of what follows, u8 status, content.
// A failure keeps its kind, so that Python raises the class it would raise locally.
enum Status : uint8_t {
  kOk,
  kFailed,
  kIndexError,
  kValueError,
  kTypeError,
  kNotImplemented,
  kLinearAlgebra,
  kOutOfMemory,
};

class Writer {
 public:
  void u8(uint8_t v) { bytes_.push_back(static_cast<char>(v)); }
  void u32(uint32_t v) { raw(&v, sizeof v); }
  void u64(uint64_t v) { raw(&v, sizeof v); }
  void i64(int64_t v) { raw(&v, sizeof v); }
  void f64(double v) { raw(&v, sizeof v); }
  void text(std::string_view s) {
    u32(static_cast<uint32_t>(s.size()));
    raw(s.data(), s.size());
  }
  void raw(const void* p, size_t n) { bytes_.append(static_cast<const char*>(p), n); }
  const std::string& bytes() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  void clear() { bytes_.clear(); }

 private:
  std::string bytes_;
};

class Malformed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Reads within bounds; anything beyond throws Malformed.
class Reader {
 public:
  Reader(const void* data, size_t size) : at_(static_cast<const char*>(data)), end_(at_ + size) {}
  uint8_t u8() { return take<uint8_t>(); }
  uint32_t u32() { return take<uint32_t>(); }
  uint64_t u64() { return take<uint64_t>(); }
  int64_t i64() { return take<int64_t>(); }
  double f64() { return take<double>(); }
  std::string text() {
    auto n = u32();
    return std::string(bytes(n), n);
  }
  const char* bytes(size_t n) {
    if (n > left()) throw Malformed("a record ends in the middle");
    auto* p = at_;
    at_ += n;
    return p;
  }
  size_t left() const { return static_cast<size_t>(end_ - at_); }
  const char* at() const { return at_; }

 private:
  template <typename T>
  T take() {
    T v;
    std::memcpy(&v, bytes(sizeof v), sizeof v);
    return v;
  }
  const char* at_;
  const char* end_;
};

}  // namespace sky
