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
  kDefine = 0x7fffff01u,     // u32 length, template, u8 promised, then if so its outputs
  kAsk = 0x7fffff02u,        // u32 length, u32 template, payload; replied: metadata of the outputs
  kBind = 0x7fffff03u,       // u32 count, slots for the outputs of the last kAsk
  kNew = 0x7fffff04u,        // u32 slot, u64 bytes
  kResize = 0x7fffff05u,     // u32 slot, u64 bytes
  kUpload = 0x7fffff06u,     // u32 slot, u64 offset, u64 bytes, u8 inline, then the bytes if inline
  kFetch = 0x7fffff07u,      // u32 length, u8 later, u32 slot, layout, u64 offset; replied: the bytes, contiguous
  kSync = 0x7fffff08u,       // u32 stream or kAllStreams; replied when everything before it is done
  kGenerator = 0x7fffff09u,  // u32 length, u32 generator, u8 action, text; some actions are replied
  kStream = 0x7fffff0au,     // u32 stream: what follows runs on it
  kUsedOn = 0x7fffff0bu,     // u32 slot, u32 stream: its memory is not free before that stream is done with it
  kEvent = 0x7fffff0cu,      // u32 event, u8 action, u32 stream or other event; some actions are replied
  kMemory = 0x7fffff0du,     // u8 action; replied: how much is in use
  kExport = 0x7fffff0eu,  // u32 length, slots; replied for each: text, how others on its node open its memory, or none
  kSettings = 0x7fffff0fu,  // u64 settings, for everything after it
  kTraits = 0x7fffff10u,    // replied: what of the worker's device decides how PyTorch computes, each a u64
  kProfile = 0x7fffff11u,   // u8 action; each is replied
  kShare = 0x7fffff12u,     // u32 area, u64 bytes: memory of the client's, whose descriptor is on the bulk socket
  kUnshare = 0x7fffff13u,   // u32 area
  kCopyIn = 0x7fffff14u,    // u32 slot, u64 offset, u64 bytes, u32 area, u64 offset in it
  kLose = 0x7fffff30u,      // u32 length, u32 slot, text: the tensor was lost with another worker, and says so
  kNumbered = 0x7fffff31u,  // u32 length, slots; replied for each: u64 number of its memory or 0, text as for kExport
  kAdopt = 0x7fffff32u,     // u32 length, for each: u32 slot, u64 number, u64 bytes; replied when all have that memory
  kCopyOut = 0x7fffff15u,   // u32 length, u32 slot, layout, u64 offset, u32 area, u64 offset in it
  // Between two devices. A link has a number, and so has each passage over it, in each direction.
  kSend = 0x7fffff20u,      // u32 slot, u64 offset, u64 bytes, u64 link, u64 passage
  kReceive = 0x7fffff21u,   // as kSend
  kLink = 0x7fffff22u,      // u32 length, how to reach the other device, as JSON; replied when there is a link
  kUnlink = 0x7fffff23u,    // u32 length, u64 link, text: it is used no more, and why
  kMark = 0x7fffff28u,      // replied with kMarked when everything before it has been read
  kRedefine = 0x7fffff29u,  // u32 length, u32 template that is used no more, then as kDefine
  // Records that the worker keeps, and carries out again when it is told to.
  // kProgram: u32 length, u32 program, u32 count, for each number that varies: u32 place, u8 size; the records.
  // kReplay: u32 length, u32 program, text of the numbers; u32 count, for each input: u32 slot, u64 offset, u32 slot in
  // the program, u64 bytes, u8 whether it is copied back; for each result: u32 slot in the program, u32 slot.
  kProgram = 0x7fffff2au,
  kReplay = 0x7fffff2bu,
  kForgetProgram = 0x7fffff2cu,  // u32 program
  kRanks = 0x7fffff2du,   // u32 length, the ranks of a mesh from this one on, as JSON; replied when all are there
  kGroups = 0x7fffff2eu,  // u32 length, process groups of the mesh, as JSON; replied when there are all of them
};
constexpr uint32_t kFree = 0x80000000u;

// Collectives, which are PyTorch's: the ranks of a mesh carry them out like any other operation. What begins with an
// underscore is no collective, and Python's.
inline bool is_collective(std::string_view name) {
  constexpr std::string_view kFunctional = "_c10d_functional::";
  if (!name.starts_with(kFunctional)) return name.starts_with("_dtensor::");
  return !name.substr(kFunctional.size()).starts_with('_');
}
// The client's `_c10d_functional::wait_tensor`, which returns what it was given.
constexpr const char* kWait = "skyward_mesh::wait";

// At the end of an error that is told at a later call than its own.
constexpr std::string_view kNoticedLate = "; it was noticed late: SKYWARD_DEVICE_SYNC=1 finds its line";

// What is fetched comes in the reply up to this size, and above it the way of uploads.
constexpr uint64_t kInlineFetch = 64 << 10;

// What a template says of an argument after its kind, or what the payload carries for it.
enum class Content : uint8_t {
  kNothing,
  kByte,
  kId,       // u32
  kInteger,  // i64
  kReal,     // f64
  kPair,     // 2 f64
  kText,     // u32 length, bytes
  kScalar,   // 16 bytes: an element of any dtype
  kDtype,    // u8 dtype, u8 whether it is a wrapped number
  kLayout,   // u8 dtype, u8 dim, u8 bits, u8 has offset, sizes, strides
  kPlace,    // u32 slot [, i64 offset]
  kItems,    // in a template: u8 element type, u32 length, elements; in a payload: what the elements carry
};

// The kinds of arguments, in the order of their numbers: name, content of the template, content of the payload.
// The client's keys and records and the worker's reading and checking of them all follow this table.
// kUndefined is an undefined tensor, kHostScalar a CPU tensor without dimensions, kNumber an integer that does not
// decide a shape, kDevice the worker's device, kUnsigned an integer above those that an i64 holds, as the same bits.
#define SKY_ARGUMENTS(row)                                                                              \
  row(kNone, kNothing, kNothing) row(kUndefined, kNothing, kNothing) row(kTensor, kLayout, kPlace)      \
      row(kHostScalar, kDtype, kScalar) row(kInt, kInteger, kNothing) row(kNumber, kNothing, kInteger)  \
          row(kDouble, kNothing, kReal) row(kComplex, kNothing, kPair) row(kBool, kByte, kNothing)      \
              row(kString, kText, kNothing) row(kList, kItems, kItems) row(kDevice, kNothing, kNothing) \
                  row(kHostDevice, kNothing, kNothing) row(kGeneratorArg, kNothing, kId)                \
                      row(kUnsigned, kInteger, kNothing)

#define SKY_NAME(name, said, sent) name,
enum Argument : uint8_t { SKY_ARGUMENTS(SKY_NAME) kArguments };
#undef SKY_NAME

struct ArgumentKind {
  Content said;  // by the template
  Content sent;  // in the payload
};
#define SKY_KIND(name, said, sent) ArgumentKind{Content::said, Content::sent},
constexpr ArgumentKind kArgumentKinds[] = {SKY_ARGUMENTS(SKY_KIND)};
#undef SKY_KIND

constexpr const ArgumentKind& row_of(Argument argument) { return kArgumentKinds[argument]; }

enum ListOf : uint8_t { kTensors, kOptionalTensors, kInts, kDoubles, kBools, kScalars, kStrings, kLists };

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

// A recording (recording.h) is told in parts: it may be larger than a reply can be.
constexpr size_t kRecordingPart = 16 << 20;

enum ProfileAction : uint8_t {
  kStartProfile,  // replied when everything before it is done; what follows is recorded
  kTellClock,     // replied: u64, the worker's clock in nanoseconds
  kStopProfile,   // replied when everything before it is done; nothing more is recorded
  kTellProfile,   // replied: the next part of the recording, or nothing after the last
};

// What PyTorch keeps for the whole process and operations depend on: a default dtype in the low byte, and flags.
enum Setting : uint64_t {
  kDeterministic = 1u << 8,
  kDeterministicWarns = 1u << 9,
  kFillsMemory = 1u << 10,
  kCudnnBenchmarks = 1u << 11,
  kCudnnDeterministic = 1u << 12,
  kCudnn = 1u << 13,
  // Attention: the kernels that may be chosen.
  kFlashAttention = 1u << 14,
  kEfficientAttention = 1u << 15,
  kMathAttention = 1u << 16,
  kCudnnAttention = 1u << 17,
  kReducedMathAttention = 1u << 18,
  // Products of half precision on a GPU.
  kHalfAccumulates = 1u << 19,
  kWarnsAlways = uint64_t{1} << 39,
  kNeverCaptures = uint64_t{1} << 54,  // not PyTorch's: records are to be carried out one by one
};
// Fields of more than a bit, each at its place. A reduction is a CuBLASReductionOption, a priority five kernels.
constexpr int kHalfReductionAt = 20, kBrainReductionAt = 22, kAttentionPriorityAt = 24, kPriorityBits = 3;
constexpr int kPriorities = 5;
constexpr int kBenchmarkLimitAt = 40, kBenchmarkLimitBits = 8;
// Internal precision of float32: two bits for each kind of product; for a GPU, whether TF32 may be used.
constexpr int kMatmulPrecisionAt = 48, kConvolutionPrecisionAt = 50, kRecurrentPrecisionAt = 52;
constexpr uint64_t kPrecisionMask = 3;

// What of the worker's device decides how PyTorch computes, in this order.
enum Trait { kIsCuda, kCudnnVersion, kCudnnRecurrentBrain, kTraitCount };

// A reply: u32 length of the content, u8 status, content.
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
  kMarked,      // no answer: how far the worker has come
  kSurprised,   // as kFailed: a result was another than the client had promised
  kRankLost,    // a rank of the mesh has no connection any more, and the mesh is lost with it
  kRankAbsent,  // a rank of the mesh does not come to where the others are
};
// Added to the status if PyTorch has warned in the worker since the last reply. The content then begins with a text
// of all the warnings: u8 flags, text of the source file, u32 line, text of the warning, for each.
constexpr uint8_t kWarned = 0x80;
// Added if links were lost since the last reply. Before the rest of the content, after any warnings, comes a text of
// their numbers, each a u64. The client ends them at both ends, and makes others when there is something to copy.
constexpr uint8_t kLinksLost = 0x40;
// Added if the worker has changed its mind about a loop since the last reply: whether graphs run in place of its
// records. Next in the content comes a text that says so.
constexpr uint8_t kCaptureTold = 0x20;
enum WarningFlag : uint8_t { kDeprecation = 1, kVerbatim = 2 };

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

// The value of an argument that is neither a tensor nor a list: which member counts is said by its content.
struct Value {
  int64_t integer = 0;
  double real = 0, imaginary = 0;
  std::string_view text;
};

// How many bytes a content takes in a payload; 0 for those whose length depends on the template.
constexpr size_t size_of(Content content) {
  switch (content) {
    case Content::kByte: return 1;
    case Content::kId: return 4;
    case Content::kInteger:
    case Content::kReal: return 8;
    case Content::kPair:
    case Content::kScalar: return 16;
    default: return 0;
  }
}

template <typename Sink>
void write(Sink& sink, Content content, const Value& value) {
  switch (content) {
    case Content::kByte: {
      auto byte = static_cast<uint8_t>(value.integer);
      return sink.raw(&byte, sizeof byte);
    }
    case Content::kId: {
      auto id = static_cast<uint32_t>(value.integer);
      return sink.raw(&id, sizeof id);
    }
    case Content::kInteger: return sink.raw(&value.integer, sizeof value.integer);
    case Content::kReal: return sink.raw(&value.real, sizeof value.real);
    case Content::kPair:
      sink.raw(&value.real, sizeof value.real);
      return sink.raw(&value.imaginary, sizeof value.imaginary);
    case Content::kText: {
      auto length = static_cast<uint32_t>(value.text.size());
      sink.raw(&length, sizeof length);
      return sink.raw(value.text.data(), value.text.size());
    }
    default: return;
  }
}

inline Value read(Reader& r, Content content) {
  Value value;
  switch (content) {
    case Content::kByte: value.integer = r.u8(); break;
    case Content::kId: value.integer = r.u32(); break;
    case Content::kInteger: value.integer = r.i64(); break;
    case Content::kReal: value.real = r.f64(); break;
    case Content::kPair:
      value.real = r.f64();
      value.imaginary = r.f64();
      break;
    case Content::kText: {
      auto length = r.u32();
      value.text = {r.bytes(length), length};
      break;
    }
    default: break;
  }
  return value;
}

inline Argument read_kind(Reader& r) {
  auto kind = r.u8();
  if (kind >= kArguments) throw Malformed("an argument of unknown kind");
  return static_cast<Argument>(kind);
}

}  // namespace sky
