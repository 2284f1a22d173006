#include "programs.h"

#include <algorithm>
#include <map>

#include "session.h"

namespace sky {
namespace {

// A program first runs so often as it is: what PyTorch makes at the first call of an operation is there then.
constexpr uint64_t kRunsBefore = 1;
// Graphs are made anew so often when what they were made for lies elsewhere.
constexpr int kDivisionsMost = 3;
// Starting a graph costs as much as issuing a few operations.
constexpr size_t kOperationsLeast = 8;
constexpr size_t kFreeSize = 4, kNewSize = 16, kSettingsSize = 12, kUploadHead = 25;

template <typename F>
void each_slot(Reader& r, const Spec& s, F&& f) {
  if (s.constant) return;
  auto sent = row_of(s.kind).sent;
  if (sent == Content::kPlace) {
    f(r.u32());
    if (s.flag) r.i64();
  } else if (sent == Content::kItems) {
    for (auto& e : s.items) each_slot(r, e, f);
  } else {
    r.bytes(size_of(sent));
  }
}

// How many items of at least that size follow.
size_t checked_count(Reader& r, size_t size) {
  size_t count = r.u32();
  if (count > r.left() / size) throw Malformed("a count beyond a record's end");
  return count;
}

bool is_in(const std::vector<uint32_t>& slots, uint32_t number) {
  return std::find(slots.begin(), slots.end(), number) != slots.end();
}

}  // namespace

Program::~Program() { forget_graphs(); }

void Program::forget_graphs() {
  for (auto& part : parts)
    if (part.graph && captures.drop) captures.drop(part.graph);
  parts.clear();
}

void Session::define_program(Reader& r) {
  auto number = r.u32();
  Program program;
  program.varying.resize(checked_count(r, 5));
  for (auto& each : program.varying) {
    each.at = r.u32();
    each.size = r.u8();
  }
  program.records.assign(r.at(), r.left());
  for (auto& each : program.varying)
    if (each.at > program.records.size() || each.size > program.records.size() - each.at)
      throw Malformed("a number beyond the records of a program");
  programs_.insert_or_assign(number, std::move(program));
}

void Session::forget_program(Reader& r) { programs_.erase(r.u32()); }

// One record of a program: what a client may say in one, and nothing that is replied or that waits.
size_t Session::program_step(const char* data, size_t size) {
  Reader r(data, size);
  auto head = r.u32();
  bool fits = head & kFree || head < kFirstRecord || head == kNew || head == kSettings;
  if (head == kUpload) {
    r.bytes(kUploadHead - 5);
    fits = r.u8();  // its bytes are with it
  }
  if (!fits) throw Malformed("a record that cannot be in a program");
  auto used = step(data, size);
  if (!used) throw Malformed("a program ends in the middle of a record");
  return used;
}

void Session::run_records(const Program& program, size_t begin, size_t end) {
  for (size_t at = begin; at < end;) at += program_step(program.records.data() + at, end - at);
}

// How long the record is, what slots it is about, and whether it can be in a graph.
size_t Session::look_at(const char* data, size_t size, Touched& touched, bool& may_be_graph) {
  Reader r(data, size);
  auto head = r.u32();
  may_be_graph = true;
  if (head & kFree) {
    touched.freed.push_back(head & ~kFree);
    return kFreeSize;
  }
  if (head < kFirstRecord) {
    if (head >= templates_.size()) throw Malformed("an undefined template");
    auto& t = templates_[head];
    may_be_graph = !t.is_graph && !t.uses_generator;
    Reader payload(r.bytes(t.payload), t.payload);
    for (auto& arg : t.args) each_slot(payload, arg, [&](uint32_t slot) { touched.used.push_back(slot); });
    for (uint32_t i = 0; i < t.new_slots; i++) touched.made.push_back(r.u32());
    return 4 + t.payload + 4 * size_t(t.new_slots);
  }
  if (head == kNew) {
    touched.made.push_back(r.u32());
    return kNewSize;
  }
  may_be_graph = false;
  if (head == kSettings) return kSettingsSize;
  touched.used.push_back(r.u32());
  r.u64();
  return kUploadHead + r.u64();
}

// Parts that may be graphs, and what is between them.
void Session::divide(Program& program) {
  std::vector<Part> parts;
  size_t operations = 0;
  auto join = [&] {
    // Two neighbours that are no graphs are one part.
    if (parts.empty()) return;
    if (parts.back().may_be_graph && operations < kOperationsLeast) parts.back().may_be_graph = false;
    if (parts.size() < 2 || parts.back().may_be_graph || parts[parts.size() - 2].may_be_graph) return;
    parts[parts.size() - 2].end = parts.back().end;
    parts.pop_back();
  };
  auto varies = [&](size_t begin, size_t end) {
    return std::any_of(program.varying.begin(), program.varying.end(),
                       [&](auto& each) { return each.at >= begin && each.at < end; });
  };
  for (size_t at = 0; at < program.records.size();) {
    Touched touched;
    bool may_be = true;
    auto end = at + look_at(program.records.data() + at, program.records.size() - at, touched, may_be);
    program.own.insert(program.own.end(), touched.made.begin(), touched.made.end());
    may_be = may_be && !varies(at, end);
    if (parts.empty() || parts.back().may_be_graph != may_be) {
      join();
      parts.push_back({at, end, may_be});
      operations = 0;
    }
    parts.back().end = end;
    uint32_t head;
    std::memcpy(&head, program.records.data() + at, sizeof head);
    operations += head < kFirstRecord;
    at = end;
  }
  join();
  std::sort(program.own.begin(), program.own.end());
  program.parts = std::move(parts);
  program.divisions++;
}

// The slots of a part, as they are before it. None if one of them cannot be in a graph now.
std::optional<std::vector<Lying>> Session::lying(const std::vector<uint32_t>& slots) {
  std::vector<Lying> found;
  for (auto number : slots) {
    auto& held = slots_[number];
    if (held.needs_a_look()) return std::nullopt;
    if (held.has_memory()) found.emplace_back(number, held.memory());
  }
  return found;
}

void Session::put_back(const std::vector<uint32_t>& slots, const std::vector<Lying>& before) {
  std::map<uint32_t, c10::Storage> lay(before.begin(), before.end());
  for (auto number : slots) {
    auto found = lay.find(number);
    if (found == lay.end()) slots_.clear(slots_[number]);
    else lay_down(slots_[number], found->second);
  }
}

// Has a slot lie where a graph expects it, or has left it.
void Session::lay_down(Slot& held, const c10::Storage& storage) {
  if (!held.poison && held.has_memory() && held.memory().is_alias_of(storage)) return;
  slots_.clear(held);
  slots_.hold(held, storage);
  // What keeps the tensor longer than until the next run has to take a copy.
  held.is_of_graph = true;
}

// Makes a graph of a part, which is not run by that; returns whether it could.
bool Session::capture(Program& program, Part& part) {
  Touched touched;
  bool may_be;
  for (size_t at = part.begin; at < part.end;)
    at += look_at(program.records.data() + at, part.end - at, touched, may_be);
  std::vector<uint32_t> all;
  for (auto* some : {&touched.used, &touched.made, &touched.freed}) all.insert(all.end(), some->begin(), some->end());
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  auto before = lying(all);
  if (!before) return false;
  // What lies on the host is read when a graph is made, and not when it runs.
  for (auto& [number, storage] : *before)
    if (storage.device().type() != device_.type() && is_in(touched.used, number) && !is_in(touched.made, number))
      return false;
  if (!captures.begin || !captures.begin()) return false;
  auto earlier = std::exchange(first_error_, nullptr);
  auto operations = count_;
  try {
    run_records(program, part.begin, part.end);
  } catch (...) {
    captures.end(0);
    throw;
  }
  bool is_whole = !std::exchange(first_error_, earlier);
  auto graph = captures.end(is_whole);
  auto after = graph ? lying(all) : std::nullopt;
  count_ = operations;
  put_back(all, *before);
  if (!after) {
    if (graph) captures.drop(graph);
    return false;
  }
  part.graph = graph;
  std::map<uint32_t, c10::Storage> lay(before->begin(), before->end()), lies(after->begin(), after->end());
  std::sort(touched.used.begin(), touched.used.end());
  for (auto& [number, storage] : lay)
    if (std::binary_search(touched.used.begin(), touched.used.end(), number)) part.used.emplace_back(number, storage);
  for (auto& [number, storage] : lies) {
    auto found = lay.find(number);
    if (found != lay.end() && found->second.is_alias_of(storage)) continue;
    part.left.emplace_back(number, storage);
  }
  for (auto& [number, storage] : lay)
    if (!lies.count(number)) part.gone.push_back(number);
  return true;
}

// Whether what a graph reads lies where it lay; what another part of the program has made is brought there.
bool Session::bring(const Program& program, const Part& part) {
  for (auto& [number, storage] : part.used) {
    auto& held = slots_[number];
    if (held.needs_a_look() || !held.has_memory()) return false;
    if (C10_LIKELY(held.memory().is_alias_of(storage))) continue;
    if (!std::binary_search(program.own.begin(), program.own.end(), number) ||
        held.memory().nbytes() != storage.nbytes())
      return false;
    byte_view(storage, 0, storage.nbytes()).copy_(byte_view(held.memory(), 0, storage.nbytes()));
    lay_down(held, storage);
  }
  return true;
}

// Returns false if its records have to be carried out.
bool Session::run_as_graph(Program& program, Part& part) {
  if (part.may_be_graph && !part.graph) part.may_be_graph = capture(program, part);
  if (!part.may_be_graph) return false;
  if (!bring(program, part)) {
    program.is_stale = true;
    return false;
  }
  if (!captures.run(part.graph)) {
    note({"a CUDA graph cannot be run; the worker's log says why", kFailed, "running a program"});
    return true;
  }
  for (auto& [number, storage] : part.left) lay_down(slots_[number], storage);
  for (auto number : part.gone) slots_.clear(slots_[number]);
  return true;
}

// Copies bytes from one slot to another that has memory, and what went wrong.
void Session::copy_bytes(Slot& from, uint64_t offset, Slot& to, uint64_t into, uint64_t bytes) {
  settle(from, false);
  settle(to, true);
  if (from.poison || !from.has_memory() || !to.has_memory()) {
    to.poison = from.poison ? from.poison : note({"it has no memory", kFailed, "copying what a program is given"});
    return;
  }
  to.poison = attempt("copying what a program is given", [&] {
    TORCH_CHECK(offset <= from.memory().nbytes() && bytes <= from.memory().nbytes() - offset &&
                    into <= to.memory().nbytes() && bytes <= to.memory().nbytes() - into,
                bytes, " bytes are not there");
    if (bytes) byte_view(to.memory(), into, bytes).copy_(byte_view(from.memory(), offset, bytes));
  });
}

// Gives a result away. What a graph has left there is its own.
void Session::hand_out(Slot& from, Slot& to) {
  slots_.clear(to);
  if (from.poison || !from.has_memory()) {
    to.poison = from.poison ? from.poison : note({"it was not made", kFailed, "running a program"});
    return;
  }
  auto storage = from.memory();
  if (!from.is_of_graph) {
    slots_.clear(from);
    slots_.hold(to, std::move(storage));
    return;
  }
  to.poison = attempt("copying a program's result", [&] {
    auto own = new_storage(storage.nbytes());
    if (storage.nbytes()) byte_view(own, 0, storage.nbytes()).copy_(byte_view(storage, 0, storage.nbytes()));
    slots_.hold(to, std::move(own));
  });
}

void Session::replay(Reader& r) {
  auto found = programs_.find(r.u32());
  if (found == programs_.end()) throw Malformed("an unknown program");
  auto& program = found->second;
  size_t left = r.u32();
  Reader numbers(r.bytes(left), left);
  for (auto& each : program.varying) std::memcpy(program.records.data() + each.at, numbers.bytes(each.size), each.size);
  struct Input {
    uint32_t from, to;
    uint64_t offset, bytes;
    bool is_written;
  };
  std::vector<Input> inputs(checked_count(r, 25));
  for (auto& each : inputs) {
    each.from = r.u32();
    each.offset = r.u64();
    each.to = r.u32();
    each.bytes = r.u64();
    each.is_written = r.u8();
    copy_bytes(slots_[each.from], each.offset, slots_[each.to], 0, each.bytes);
  }
  if (program.parts.empty() || recording_.is_on()) {
    run_records(program, 0, program.records.size());
    program.runs++;
  } else {
    for (auto& part : program.parts)
      if (!run_as_graph(program, part)) run_records(program, part.begin, part.end);
  }
  if (std::exchange(program.is_stale, false)) {
    program.forget_graphs();
    program.runs = 0;
  }
  if (program.runs == kRunsBefore && program.parts.empty() && program.divisions < kDivisionsMost && captures.begin)
    divide(program);
  for (auto& each : inputs)
    if (each.is_written) copy_bytes(slots_[each.to], 0, slots_[each.from], each.offset, each.bytes);
  while (r.left()) {
    auto from = r.u32();
    hand_out(slots_[from], slots_[r.u32()]);
  }
}

}  // namespace sky
