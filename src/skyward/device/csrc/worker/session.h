// One client's session: what it has defined, what it holds, and how its records are carried out.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../wire/coding.h"
#include "../wire/records.h"
#include "../wire/shared_memory.h"
#include "../wire/stream.h"
#include "../wire/stripes.h"
#include "arrivals.h"
#include "copies.h"
#include "failures.h"
#include "layouts.h"
#include "programs.h"
#include "ranks.h"
#include "recording.h"
#include "repeating.h"
#include "slots.h"
#include "streams.h"
#include "warnings.h"

namespace sky {

// The import of torch that has not been done yet.
struct LaterImport {
  void (*run)() = nullptr;                // null when it has been done
  std::unordered_set<std::string> names;  // of operators for which Python may have a kernel of its own

  bool is_pythons(const std::string& name, const std::string& overload) const;
};
LaterImport& later_import();

// Has Python import the modules that register an operation of another library: `wanted` has its name, its overload and
// the modules, a line each. Returns 0, or 1 with a message.
inline int (*import_operator)(const char* wanted, char* message, size_t size) = nullptr;

// How an argument is made from a template and a payload.
struct Spec {
  Argument kind = kNone;
  ListOf list = kTensors;
  c10::ScalarType dtype{};
  bool flag = false;  // has offset, or is a wrapped number
  int layout = -1;
  bool constant = true;
  bool written = false;
  c10::IValue value;
  std::vector<Spec> items;
  // The number on the host that came last, and its bytes: it is mostly the same again.
  at::Tensor number;
  std::array<char, 16> bytes{};
};

struct OutSpec {
  Output kind = kNothing;
  int layout = -1;
  std::vector<OutSpec> items;
};

struct Template {
  std::string name;
  std::optional<c10::OperatorHandle> op;  // none: this worker does not know it
  std::string why_not;                    // why it does not, after the name
  std::vector<Spec> args;
  size_t payload = 0;  // bytes of the arguments
  bool known = false;  // outputs are known, from an earlier kAsk or promised by the client
  std::vector<OutSpec> outs;
  uint32_t new_slots = 0;
  bool resizes = false;   // its `out=` arguments
  bool is_graph = false;  // it runs a compiled graph
  bool is_collective = false;
  bool uses_generator = false;
  bool is_own = false;  // PyTorch's: it does what it says, and nothing else
  // Its results stay where they are: a collective may still be writing to them.
  bool stays() const { return is_graph || is_collective; }
  std::vector<bool> alias;  // which returns are arguments written to
  // What the dispatcher would find for arguments on the device, the same every time; empty if it is to look.
  c10::DispatchKeySet keys;
  bool has_keys = false;  // whether that was worked out
};

c10::DispatchKeySet plain_keys(const torch::jit::Stack& stack, c10::Device device);

// How Python makes a link to another device, and ends one; and how it joins a mesh, or makes process groups in it.
struct Links {
  int (*make)(const char* description, char* message, size_t size) = nullptr;  // returns 0, or 1 with a message
  void (*end)(uint64_t link) = nullptr;
  int (*join)(const char* description, char* message, size_t size) = nullptr;
};

class Session {
 public:
  // The first way is for records, the others are for the bytes of tensors. `links` makes links to other devices.
  Session(const std::vector<Way>& ways, bool shares_memory, c10::Device device, Links links = {});
  ~Session();

  // Until the client leaves.
  void serve();

  // probe.cpp, for tests: what arguments are after they were read from a template and a payload.
  std::string probe(Reader& r, Reader& payload, uint32_t count);

 private:
  // session.cpp: records in, replies out.
  void carry_out();
  size_t step(const char* data, size_t size);
  template <typename F>
  size_t fixed(const char* data, size_t size, size_t length, F&& f);
  template <typename F>
  size_t sized(const char* data, size_t size, F&& f);
  void synchronize(Reader& r);
  void use_stream(uint32_t stream);
  void used_on(Reader& r);
  void tell_traits();
  void tell_mark();
  at::Generator generator_of(uint32_t id);
  void generator(Reader& r);
  void memory(Reader& r);
  void event(Reader& r);
  void export_slots(Reader& r);
  void numbered(Reader& r);
  void adopt(Reader& r);
  void lose(Reader& r);
  void reply(const Failure& failure) { reply(failure.kind, failure.told()); }
  void reply(Status status, std::string_view content) { reply(status, content, content, Agreement::kSame); }
  // Of a mesh, all ranks answer; what they say besides is compared with `mark`. Returns whether all is well.
  bool reply(Status status, std::string_view content, std::string_view mark, Agreement agreement);
  void reply_done();
  template <typename F>
  void reply_with(F&& f, Agreement agreement = Agreement::kSame);
  void reply_exports(Writer& w, const Reason& poison);
  Reason note(const Template& t, const std::string& what, Status kind = kFailed);
  Reason note(Failure failure);
  // Runs `f`; returns the reason if it failed.
  template <typename F>
  Reason attempt(const char* what, F&& f) {
    try {
      f();
      return nullptr;
    } catch (const Malformed&) {
      throw;
    } catch (const Disconnected&) {
      throw;
    } catch (const std::exception& e) {
      return note({text_of(e), kind_of(e), what});
    }
  }

  // recording.cpp: what the client's profile wants to know.
  void profile(Reader& r);
  size_t recorded_step(const char* data, size_t size);

  // templates.cpp: definitions.
  void define(Reader& r);
  void redefine(Reader& r);
  Template read_template(Reader& r);
  Spec read_spec(Reader& r, bool is_item);
  std::vector<Spec> read_specs(Reader& r, uint32_t count);
  OutSpec read_out(Reader& r, uint32_t& tensors, bool is_item);

  void show(std::string& out, Reader& payload, Spec& s);

  // operations.cpp: running them.
  size_t operation(uint32_t id, const char* data, size_t size);
  void ask(Reader& r);
  void bind_asked(Reader& r);
  at::Tensor tensor(Reader& r, const Spec& s);
  c10::IValue build(Reader& r, Spec& s);
  c10::IValue build_list(Spec& s, Reader& r);
  void before_graph();
  Reason run(Template& t, Reader& r);
  void take_part(Template& t, Reader& r);
  void fail_written(const Template& t, const char* payload, const Reason& reason);
  void bind(Reader& slots, const Template& t, const OutSpec& out, c10::IValue value, const Reason& reason,
            size_t references);
  OutSpec describe(Writer& w, Template& t, c10::IValue value, size_t references);
  void describe_written(Writer& w, Template& t, const char* payload);
  bool describe_resized(Writer& w, const Spec& s, uint32_t number, int64_t offset, uint32_t index);

  // programs.cpp: records that are carried out again.
  void define_program(Reader& r);
  void forget_program(Reader& r);
  void replay(Reader& r);
  size_t program_step(const char* data, size_t size);
  void run_records(const Program& program, size_t begin, size_t end);
  bool run_as_graph(Program& program, Part& part);
  size_t look_at(const char* data, size_t size, Touched& touched, bool& may_be_graph);
  void divide(Program& program);
  std::optional<std::vector<Lying>> lying(const std::vector<uint32_t>& slots);
  void lay_down(Slot& held, const c10::Storage& storage);
  void put_back(const std::vector<uint32_t>& slots, const std::vector<Lying>& before);
  bool capture(Program& program, Part& part);
  bool bring(const Program& program, const Part& part);
  void copy_bytes(Slot& from, uint64_t offset, Slot& to, uint64_t into, uint64_t bytes);
  void hand_out(Slot& from, Slot& to);

  // repeating.cpp: loops that are recognised, and run as graphs without being told to.
  bool may_repeat() const;
  size_t repeating_step(const char* data, size_t size);
  size_t repeat(const char* data, size_t size);
  bool run_stretch(Stretch& stretch);
  void notice(const char* data, size_t size);
  void try_loop();
  void passed(size_t records, bool as_graph);
  void next_phase();
  void forget_loop(const char* why);
  void give_up(const char* why);
  void keep_loop();
  void end_repeating(const char* why);
  void wait_no_longer();

  // bytes.cpp: memory and what is in it.
  c10::Storage new_storage(uint64_t bytes);
  void allocate(Reader& r);
  void resize(Reader& r);
  size_t upload(const char* data, size_t size);
  bool accepts(Slot& held, uint64_t offset, uint64_t bytes);
  void put(Slot& held, uint64_t offset, const char* from, uint64_t bytes);
  void receive_bulk(Slot& held, uint64_t offset, uint64_t bytes, bool drop);
  // Others are about to see memory of this session.
  void show_memory() {
    arrivals_.await_all();
    is_seen_ = true;
    end_repeating("others see memory of the device");
  }
  void receive_and_pass(Slot& held, uint64_t offset, uint64_t bytes, bool drop);
  void receive_from_ring(Slot& held, uint64_t offset, uint64_t bytes, bool drop);
  void fetch(Reader& r);
  void send_bulk(const void* data, uint64_t size, uint64_t done, uint64_t total);
  void send_tensor(const at::Tensor& dense);
  at::Tensor& staging(int which, uint64_t bytes);
  at::Tensor dense(Slot& held, const Layout& layout, int64_t offset);
  std::string small(const at::Tensor& dense);

  // shared.cpp: memory of the client's that is mapped here as well.
  void check_shares() const;
  void share(Reader& r);
  void unshare(Reader& r);
  void copy_in(Reader& r);
  void copy_out(Reader& r);
  char* shared(uint32_t area, uint64_t offset, uint64_t bytes);

  // passages.cpp: what comes from other devices, and goes to them.
  void join(Reader& r);
  void link(Reader& r);
  void unlink(Reader& r);
  void send_to_peer(Reader& r);
  void receive_from_peer(Reader& r);
  void await_arrivals(Slot& held);
  void await_passages_of_graphs();
  // Before a slot is read, or also written to: waits for what is on its way.
  void settle(Slot& held, bool written) {
    if (C10_UNLIKELY(held.traffic != nullptr)) settle_traffic(held, written);
  }
  void settle_traffic(Slot& held, bool written);
  void track(std::shared_ptr<Passage> passage);
  bool has_passages();
  void finish_passages();

  Stripes bulk_;
  std::unique_ptr<SharedRings> rings_;
  Stream ops_;
  const std::unique_ptr<Decoder> decoder_;  // over a network only
  std::vector<char> buffer_;                // of records
  size_t have_ = 0;                         // in it
  c10::Device device_;
  Links links_;
  Slots slots_;
  Layouts layouts_;
  std::vector<Template> templates_;
  std::vector<std::pair<at::Tensor, int>> asked_;
  bool asked_of_graph_ = false;
  std::unordered_map<uint32_t, at::Generator> generators_;
  std::unordered_map<uint32_t, Program> programs_;
  Streams streams_;
  Recording recording_;
  Copies copies_;
  std::array<at::Tensor, 2> staging_;
  int turn_ = 0;                                     // of the two, for what comes next
  std::array<std::optional<c10::Event>, 2> staged_;  // when a GPU has copied from it
  std::unordered_map<uint32_t, std::unique_ptr<SharedMemory>> areas_;
  torch::jit::Stack stack_;
  bool uses_host_ = false;  // whether an argument on it lies in the host's memory, though the device is another
  std::vector<std::shared_ptr<Passage>> passages_;  // under way, or over and not yet looked after
  Warnings warnings_;
  Reason first_error_;
  uint64_t count_ = 0;
  Arrivals arrivals_;
  Ranks& ranks_ = Ranks::all();
  uint64_t settings_ = 0;
  Repeating repeating_;
  bool stands_in_ = false;  // what cannot be read is taken as zeros
  bool is_seen_ = false;    // whether others see memory of this session
};

}  // namespace sky
