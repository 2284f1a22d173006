// Running operations: arguments from a payload, results into slots.
#include "../wire/values.h"
#include "session.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>

namespace sky {

using c10::IValue;

namespace {

at::Tensor copy_as(const Layout& layout, const at::Tensor& from) {
  auto copy = at::empty_strided(layout.sizes, layout.strides, from.options());
  set_bits(copy, layout.bits);
  copy.copy_(from);
  return copy;
}

// An output that owns its memory from the first byte, as the client believes. An operation may have returned an
// argument, or a view of one: then there are more references to it than the caller's.
at::Tensor own(at::Tensor t, size_t references) {
  if (t.storage_offset() == 0 && t.use_count() <= references && t.storage().use_count() <= 1) return t;
  return copy_as(Layout::of(t), t);
}

at::Tensor zeros(const Layout& layout, c10::Device device) {
  return at::empty_strided(layout.sizes, layout.strides, at::TensorOptions().dtype(layout.dtype).device(device))
      .zero_();
}

void let_go(void* kept) noexcept { std::unique_ptr<c10::Storage>(static_cast<c10::Storage*>(kept)).reset(); }

// A compiled graph's result, as it is: graphs return views of their inputs on purpose, and say so to the client where
// it matters. Its memory begins at its first element, as the client believes.
at::Tensor adopted(const at::Tensor& t) {
  auto layout = Layout::of(t);
  auto storage = t.storage();
  if (t.storage_offset() && t.numel()) {
    auto* kept = std::make_unique<c10::Storage>(t.storage()).release();
    storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), layout.extent(0),
        c10::DataPtr(t.mutable_data_ptr(), kept, &let_go, t.device()), nullptr, /*resizable=*/false));
  }
  return make_view(storage, layout, 0);
}

void write_tensor(Writer& w, const at::Tensor& t) {
  w.u8(static_cast<uint8_t>(t.scalar_type()));
  w.u8(static_cast<uint8_t>(t.dim()));
  w.u8(bits_of(t));
  for (auto s : t.sizes()) w.i64(s);
  for (auto s : t.strides()) w.i64(s);
  w.u64(t.storage().nbytes());
}

void write_value(Writer& w, const IValue& v) {
  auto seen = plain(v);
  TORCH_CHECK(seen, "an operation returns a ", v.tagKind(), ", which cannot travel");
  write_plain(w, seen->first, seen->second);
}

// Calls `f` with every tensor of a payload: its spec, slot, offset, and whether the operation writes to it.
template <typename F>
void each_tensor(Reader& r, const Spec& s, bool written, F&& f) {
  if (s.constant) return;
  auto sent = row_of(s.kind).sent;
  if (sent == Content::kPlace) {
    auto slot = r.u32();
    int64_t offset = s.flag ? r.i64() : 0;
    f(s, slot, offset, written);
  } else if (sent == Content::kItems) {
    for (auto& e : s.items) each_tensor(r, e, written, f);
  } else {
    r.bytes(size_of(sent));
  }
}

template <typename F>
void each_tensor(const Template& t, const char* payload, F&& f) {
  Reader r(payload, t.payload);
  for (auto& arg : t.args) each_tensor(r, arg, arg.written, f);
}

}  // namespace

at::Tensor Session::tensor(Reader& r, const Spec& s) {
  auto& held = slots_[r.u32()];
  int64_t offset = s.flag ? r.i64() : 0;
  if (C10_UNLIKELY(held.needs_a_look())) {
    settle(held, s.written);
    if (held.poison && stands_in_) return zeros(layouts_[s.layout], device_);
    if (held.poison) throw Poisoned{held.poison};
  }
  for (int i = 0; i < 2; i++)
    if (held.layout[i] == s.layout && held.offset[i] == offset) {
      uses_host_ |= held.view[i].device().type() != device_.type();
      return held.view[i];
    }
  if (!held.has_memory()) throw Malformed("an empty slot used as a tensor");
  held.keep_memory();
  auto view = make_view(held.storage, layouts_[s.layout], offset);
  int i = held.layout[0] < 0 ? 0 : 1;
  held.view[i] = view;
  held.layout[i] = s.layout;
  held.offset[i] = offset;
  uses_host_ |= view.device().type() != device_.type();
  return view;
}

IValue Session::build(Reader& r, Spec& s) {
  if (s.constant) return s.value;
  auto sent = row_of(s.kind).sent;
  switch (sent) {
    case Content::kPlace: return tensor(r, s);
    case Content::kItems: return build_list(s, r);
    case Content::kId: return generator_of(r.u32());
    case Content::kScalar: {
      auto* bytes = r.bytes(s.bytes.size());
      if (s.number.defined() && !std::memcmp(s.bytes.data(), bytes, s.bytes.size())) return s.number;
      s.number = at::detail::empty_cpu({}, at::TensorOptions().dtype(s.dtype));
      std::memcpy(s.bytes.data(), bytes, s.bytes.size());
      std::memcpy(s.number.mutable_data_ptr(), bytes, s.number.itemsize());
      if (s.flag) s.number.unsafeGetTensorImpl()->set_wrapped_number(true);
      return s.number;
    }
    default: return from_plain(s.kind, read(r, sent));
  }
}

IValue Session::build_list(Spec& s, Reader& r) {
  switch (s.list) {
    case kTensors: {
      c10::List<at::Tensor> l;
      l.reserve(s.items.size());
      for (auto& e : s.items) l.push_back(build(r, e).toTensor());
      return l;
    }
    case kOptionalTensors: {
      c10::List<std::optional<at::Tensor>> l;
      for (auto& e : s.items) {
        auto v = build(r, e);
        l.push_back(v.isNone() ? std::nullopt : std::optional<at::Tensor>(v.toTensor()));
      }
      return l;
    }
    case kInts: {
      c10::List<int64_t> l;
      for (auto& e : s.items) l.push_back(build(r, e).toInt());
      return l;
    }
    case kDoubles: {
      c10::List<double> l;
      for (auto& e : s.items) l.push_back(build(r, e).toDouble());
      return l;
    }
    case kBools: {
      c10::List<bool> l;
      for (auto& e : s.items) l.push_back(build(r, e).toBool());
      return l;
    }
    case kScalars: {
      c10::List<at::Scalar> l;
      for (auto& e : s.items) l.push_back(build(r, e).toScalar());
      return l;
    }
    case kStrings: {
      c10::List<std::string> l;
      for (auto& e : s.items) l.push_back(build(r, e).toStringRef());
      return l;
    }
    default: throw Malformed("a list of unknown elements");
  }
}

// The keys of plain tensors on the device, for which the dispatcher need not be asked: that takes 50 ns.
c10::DispatchKeySet plain_keys(const torch::jit::Stack& stack, c10::Device device) {
  const auto cpu = c10::DispatchKeySet(c10::DispatchKey::CPU);
  const auto own = device.is_cuda() ? c10::DispatchKeySet(c10::DispatchKey::CUDA) : cpu;
  bool is_plain = true, is_there = false;
  auto look = [&](const at::Tensor& t) {
    if (!t.defined()) return;
    // Neither gradients nor autocast are for the worker: the client has seen to both.
    auto keys = t.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::autocast_dispatch_keyset;
    is_there = is_there || keys == own;
    is_plain = is_plain && (keys == own || keys == cpu);
  };
  for (auto& v : stack) {
    if (v.isTensor()) look(v.toTensor());
    else if (v.isList())
      for (const IValue& e : v.toListRef())
        if (e.isTensor()) look(e.toTensor());
  }
  return is_plain && is_there ? own : c10::DispatchKeySet();
}

// A graph that was recorded (the client then counts its calls) writes to the same memory at each run, without being
// given it. What the last run left there may still be on its way.
void Session::before_graph() {
  // It may return memory that it was given.
  end_repeating("the session runs compiled graphs");
  constexpr size_t kGeneration = 2;
  if (stack_[kGeneration].toScalar().toLong()) await_passages_of_graphs();
}

// Runs the template's operation on the stack; returns the reason if it failed.
Reason Session::run(Template& t, Reader& r) {
  auto again = r;
  try {
    stack_.clear();
    uses_host_ = false;
    for (auto& arg : t.args) stack_.push_back(build(r, arg));
    if (C10_UNLIKELY(t.is_graph)) before_graph();
    if (C10_UNLIKELY(uses_host_)) {
      // The seeds of fused attention: another time the same template may get tensors of the device.
      t.op->callBoxed(&stack_);
      return nullptr;
    }
    if (C10_UNLIKELY(!t.has_keys)) {
      t.keys = plain_keys(stack_, device_);
      t.has_keys = true;
    }
    if (C10_LIKELY(!t.keys.empty())) t.op->redispatchBoxed(t.keys, &stack_);
    else t.op->callBoxed(&stack_);
    return nullptr;
  } catch (const Poisoned& p) {
    if (t.is_collective) take_part(t, again);
    return p.reason;
  } catch (const Malformed&) {
    throw;
  } catch (const std::exception& e) {
    return note(t, text_of(e), kind_of(e));
  }
}

// In a collective whose arguments this rank lacks: the others would wait for it. They get zeros from it, and the client
// is told of the failure before it reads anything that came of them.
void Session::take_part(Template& t, Reader& r) {
  stands_in_ = true;
  try {
    stack_.clear();
    for (auto& arg : t.args) stack_.push_back(build(r, arg));
    t.op->callBoxed(&stack_);
  } catch (const std::exception&) {
    // The others have failed as well, or will.
  }
  stands_in_ = false;
  stack_.clear();
}

// What a failed operation should have written to is not to be read either.
void Session::fail_written(const Template& t, const char* payload, const Reason& reason) {
  each_tensor(t, payload, [&](const Spec&, uint32_t slot, int64_t, bool written) {
    auto& held = slots_[slot];
    if (written && !held.poison) held.poison = reason;
  });
}

size_t Session::operation(uint32_t id, const char* data, size_t size) {
  if (id >= templates_.size()) throw Malformed("an undefined template");
  auto& t = templates_[id];
  if (!t.known) throw Malformed("a template whose outputs are not known");
  size_t length = 4 + t.payload + 4 * size_t(t.new_slots);
  if (size < length) return 0;
  count_++;
  Reader args(data + 4, t.payload);
  Reader outs(data + 4 + t.payload, 4 * size_t(t.new_slots));
  auto reason = run(t, args);
  if (C10_UNLIKELY(reason != nullptr)) {
    fail_written(t, data + 4, reason);
  } else if (C10_UNLIKELY(t.resizes)) {
    Writer told_before;
    describe_written(told_before, t, data + 4);
  }
  size_t next = 0;
  for (size_t i = 0; i < t.alias.size(); i++) {
    if (t.alias[i]) continue;
    bind(outs, t, t.outs[next++], reason ? IValue() : std::move(stack_[i]), reason, 1);
  }
  stack_.clear();
  return length;
}

// There are `references` to a tensor that is the operation's own: this one, and that of the list that it is in.
void Session::bind(Reader& slots, const Template& t, const OutSpec& out, IValue value, const Reason& reason,
                   size_t references) {
  if (out.kind == kTensorList) {
    if (reason) {
      for (auto& e : out.items) bind(slots, t, e, IValue(), reason, references);
      return;
    }
    auto list = value.toListRef();
    for (size_t i = 0; i < out.items.size(); i++)
      bind(slots, t, out.items[i], i < list.size() ? list[i] : IValue(), reason, references + 1);
    return;
  }
  if (out.kind != kNewTensor) return;
  auto& held = slots_[slots.u32()];
  slots_.clear(held);
  if (reason) {
    held.poison = reason;
    return;
  }
  const auto& promised = layouts_[out.layout];
  auto got = value.isTensor() ? std::move(value).toTensor() : at::Tensor();
  if (!got.defined() || got.scalar_type() != promised.dtype || got.sizes() != c10::IntArrayRef(promised.sizes)) {
    held.poison = note(t,
                       "its result has another size than it had before with the same arguments: " +
                           (got.defined() ? c10::str(got.sizes(), " of ", got.scalar_type()) : "none") + " and not " +
                           c10::str(c10::IntArrayRef(promised.sizes), " of ", promised.dtype),
                       kSurprised);
    return;
  }
  if (got.strides() != c10::IntArrayRef(promised.strides) || bits_of(got) != promised.bits) try {
      got = copy_as(promised, got);
    } catch (const std::exception& e) {
      // Elements that share their memory as promised cannot be written one by one.
      held.poison = note(t, "its result cannot be laid out as the client expects it: " + text_of(e), kSurprised);
      return;
    }
  slots_.hold(held, t.stays() ? adopted(got) : own(std::move(got), references), out.layout, t.is_graph);
}

// A template's first run: the client waits for what its outputs are.
void Session::ask(Reader& r) {
  auto id = r.u32();
  if (id >= templates_.size()) throw Malformed("an undefined template");
  auto& t = templates_[id];
  count_++;
  asked_.clear();
  asked_of_graph_ = t.is_graph;
  Reader args(r.at(), t.payload);
  if (r.left() != t.payload) throw Malformed("a payload of another length");
  if (!t.op) {
    reply(kNotImplemented, t.name + t.why_not);
    return;
  }
  auto earlier = first_error_;
  auto reason = run(t, args);
  if (reason) {
    // The client hears of this one now, so what it would have written is as it would be locally.
    first_error_ = reason == earlier ? nullptr : earlier;
    if (reason->operation == count_) reply(reason->kind, reason->text);
    else reply(*reason);
    return;
  }
  t.known = false;  // until all outputs are told: an operation finds as many as the template has
  t.outs.clear();
  t.new_slots = 0;
  Writer w;
  try {
    for (size_t i = 0; i < t.alias.size(); i++)
      if (!t.alias[i]) t.outs.push_back(describe(w, t, std::move(stack_[i]), 1));
    describe_written(w, t, r.at());
  } catch (const std::exception& e) {
    asked_.clear();
    stack_.clear();
    reply(kind_of(e), text_of(e));
    return;
  }
  t.known = true;
  stack_.clear();
  // What compiling a graph has told may differ from rank to rank.
  reply(kOk, w.bytes(), w.bytes(), t.name == "skyward::ship" ? Agreement::kFirst : Agreement::kSame);
}

// `references` as for `bind`.
OutSpec Session::describe(Writer& w, Template& t, IValue value, size_t references) {
  OutSpec out;
  if (value.isTensor() && !value.toTensor().defined()) {
    out.kind = kUndefinedTensor;
    w.u8(out.kind);
  } else if (value.isTensor()) {
    auto tensor = std::move(value).toTensor();
    bool lives_here = tensor.device().type() == device_.type() || tensor.device().is_cpu();
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.layout() == c10::kStrided && !tensor.is_nested() && !tensor.is_quantized() && lives_here, t.name,
        " returns a tensor that is not dense and cannot live on a sky device; call .cpu() on its "
        "arguments first");
    tensor = t.stays() ? adopted(tensor) : own(std::move(tensor), references);
    out.kind = kNewTensor;
    out.layout = layouts_.number(Layout::of(tensor));
    t.new_slots++;
    w.u8(out.kind);
    write_tensor(w, tensor);
    asked_.emplace_back(tensor, out.layout);
  } else if (value.isTensorList()) {
    out.kind = kTensorList;
    w.u8(out.kind);
    auto list = value.toListRef();
    w.u32(static_cast<uint32_t>(list.size()));
    for (auto& e : list) out.items.push_back(describe(w, t, e, references + 1));
  } else {
    out.kind = kValue;
    w.u8(out.kind);
    write_value(w, value);
  }
  return out;
}

// Written arguments that `out=` has resized.
void Session::describe_written(Writer& w, Template& t, const char* payload) {
  Writer changes;
  uint32_t changed = 0, index = 0;
  each_tensor(t, payload, [&](const Spec& s, uint32_t slot, int64_t offset, bool written) {
    if (written && describe_resized(changes, s, slot, offset, index)) changed++;
    index++;
  });
  t.resizes = changed > 0;
  w.u32(changed);
  w.raw(changes.bytes().data(), changes.size());
}

bool Session::describe_resized(Writer& w, const Spec& s, uint32_t number, int64_t offset, uint32_t index) {
  auto& held = slots_[number];
  for (int i = 0; i < 2; i++) {
    if (held.layout[i] != s.layout || held.offset[i] != offset) continue;
    auto& view = held.view[i];
    const auto& before = layouts_[s.layout];
    if (view.sizes() == c10::IntArrayRef(before.sizes) && view.strides() == c10::IntArrayRef(before.strides))
      return false;
    forget_loop("memory that it uses was changed");
    w.u32(index);
    write_tensor(w, view);
    held.keep_memory();
    slots_.count(held);
    // The cached view is no longer what its layout says.
    held.layout[i] = -1;
    held.view[i] = at::Tensor();
    return true;
  }
  return false;
}

void Session::bind_asked(Reader& r) {
  auto n = r.u32();
  if (n != asked_.size()) throw Malformed("slots that do not fit the outputs");
  for (auto& [tensor, layout] : asked_) {
    auto& held = slots_[r.u32()];
    slots_.clear(held);
    slots_.hold(held, std::move(tensor), layout, asked_of_graph_);
  }
  asked_.clear();
}

}  // namespace sky
