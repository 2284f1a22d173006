// The worker core: decodes the op stream and runs every operation on the real device.
//
// One call of `sky_worker_serve` is one client's session. It never touches Python, and a failing
// operation never ends it: the first error is kept for the client, and what depends on it is poisoned.
#include <ATen/Context.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <map>
#include <memory>
#include <optional>
#include <unordered_map>

#include "../wire/records.h"
#include "../wire/socket.h"

namespace sky {
namespace {

using c10::IValue;
using torch::jit::Stack;

constexpr uint32_t kSlots = 1u << 18;
constexpr size_t kInlineFetch = 64 << 10;
constexpr size_t kStage = 8 << 20;

struct Layout {
  c10::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
  uint8_t bits = 0;
  bool operator<(const Layout& o) const {
    return std::tie(dtype, bits, sizes, strides) < std::tie(o.dtype, o.bits, o.sizes, o.strides);
  }
  // Bytes from the start of a storage that a tensor so laid out may touch.
  uint64_t extent(int64_t offset) const {
    int64_t last = offset;
    for (size_t i = 0; i < sizes.size(); i++) {
      if (!sizes[i]) return 0;
      last += (sizes[i] - 1) * strides[i];
    }
    return (static_cast<uint64_t>(last) + 1) * c10::elementSize(dtype);
  }
  size_t items() const {
    size_t n = 1;
    for (auto s : sizes) n *= static_cast<size_t>(s);
    return n;
  }
};

struct Failure {
  std::string text;
  Status kind;
};
using Reason = std::shared_ptr<const Failure>;

Status kind_of(const std::exception& e) {
  if (dynamic_cast<const c10::IndexError*>(&e)) return kIndexError;
  if (dynamic_cast<const c10::ValueError*>(&e)) return kValueError;
  if (dynamic_cast<const c10::TypeError*>(&e)) return kTypeError;
  if (dynamic_cast<const c10::NotImplementedError*>(&e)) return kNotImplemented;
  if (dynamic_cast<const c10::LinAlgError*>(&e)) return kLinearAlgebra;
  if (dynamic_cast<const c10::OutOfMemoryError*>(&e)) return kOutOfMemory;
  return kFailed;
}

// Without C++ stack traces, which say nothing to a user of Python.
std::string text_of(const std::exception& e) {
  auto* ours = dynamic_cast<const c10::Error*>(&e);
  return ours ? ours->what_without_backtrace() : e.what();
}

uint8_t bits_of(const at::Tensor& t) { return (t.is_conj() ? kConjugated : 0) | (t.is_neg() ? kNegated : 0); }

void set_bits(const at::Tensor& t, uint8_t bits) {
  if (bits & kConjugated) t.unsafeGetTensorImpl()->_set_conj(true);
  if (bits & kNegated) t.unsafeGetTensorImpl()->_set_neg(true);
}

// A storage with the views of it that were asked for last, so that they are not made again.
struct Slot {
  c10::Storage storage;
  at::Tensor view[2];
  int layout[2] = {-1, -1};
  int64_t offset[2] = {0, 0};
  Reason poison;
};

struct Spec {
  Argument kind = kNone;
  ListOf list = kTensors;
  c10::ScalarType dtype{};
  bool flag = false;  // has offset, or is a wrapped number
  int layout = -1;
  bool constant = true;
  bool written = false;
  IValue value;
  std::vector<Spec> items;
};

struct OutSpec {
  Output kind = kNothing;
  int layout = -1;
  std::vector<OutSpec> items;
};

struct Template {
  std::string name;
  std::optional<c10::OperatorHandle> op;  // none: this worker's torch does not know it
  std::vector<Spec> args;
  size_t payload = 0;  // bytes of the arguments
  bool known = false;  // outputs are known from an earlier kAsk
  std::vector<OutSpec> outs;
  uint32_t new_slots = 0;
  bool resizes = false;     // its `out=` arguments
  std::vector<bool> alias;  // which returns are arguments written to
};

class Session {
 public:
  Session(int ops, int bulk, c10::Device device) : ops_(ops), bulk_(bulk), device_(device) {}

  void serve() {
    std::vector<char> buffer(1 << 20);
    size_t have = 0;
    for (;;) {
      if (have == buffer.size()) buffer.resize(2 * buffer.size());
      size_t n = receive_some(ops_, buffer.data() + have, buffer.size() - have);
      if (!n) return;
      have += n;
      size_t at = 0;
      while (size_t used = step(buffer.data() + at, have - at)) at += used;
      std::memmove(buffer.data(), buffer.data() + at, have - at);
      have -= at;
    }
  }

 private:
  // One record; returns its length, or 0 if it has not all arrived.
  size_t step(const char* data, size_t size) {
    if (size < 4) return 0;
    uint32_t head;
    std::memcpy(&head, data, 4);
    if (head & kFree) {
      slot(head & ~kFree) = Slot();
      return 4;
    }
    if (head < kFirstRecord) return operation(head, data, size);
    switch (head) {
      case kDefine: return sized(data, size, [&](Reader& r) { define(r); });
      case kAsk: return sized(data, size, [&](Reader& r) { ask(r); });
      case kBind: return sized(data, size, [&](Reader& r) { bind_asked(r); });
      case kNew: return fixed(data, size, 16, [&](Reader& r) { allocate(r); });
      case kResize: return fixed(data, size, 16, [&](Reader& r) { resize(r); });
      case kUpload: return upload(data, size);
      case kFetch: return sized(data, size, [&](Reader& r) { fetch(r); });
      case kSync: synchronize(); return 4;
      case kGenerator: return sized(data, size, [&](Reader& r) { generator(r); });
      case kSettings: return fixed(data, size, 8, [&](Reader& r) { settle(r.u32()); });
      default: throw Malformed("a record of unknown kind");
    }
  }

  template <typename F>
  size_t fixed(const char* data, size_t size, size_t length, F&& f) {
    if (size < length) return 0;
    Reader r(data + 4, length - 4);
    f(r);
    return length;
  }

  template <typename F>
  size_t sized(const char* data, size_t size, F&& f) {
    if (size < 8) return 0;
    uint32_t length;
    std::memcpy(&length, data + 4, 4);
    if (size < 8 + size_t(length)) return 0;
    Reader r(data + 8, length);
    f(r);
    return 8 + size_t(length);
  }

  Slot& slot(uint32_t number) {
    if (number >= kSlots) throw Malformed("a slot out of range");
    return slots_[number];
  }

  // Templates.

  int intern(Layout layout) {
    auto [it, added] = layout_ids_.try_emplace(layout, static_cast<int>(layouts_.size()));
    if (added) layouts_.push_back(std::move(layout));
    return it->second;
  }

  Layout read_layout(Reader& r, uint8_t dtype, uint8_t dim, uint8_t bits) {
    if (dtype >= static_cast<uint8_t>(c10::ScalarType::NumOptions)) throw Malformed("an unknown dtype");
    Layout layout{static_cast<c10::ScalarType>(dtype), {}, {}, bits};
    for (int i = 0; i < dim; i++) layout.sizes.push_back(r.i64());
    for (int i = 0; i < dim; i++) layout.strides.push_back(r.i64());
    for (int i = 0; i < dim; i++)
      if (layout.sizes[i] < 0 || layout.strides[i] < 0) throw Malformed("a negative size or stride");
    return layout;
  }

  Spec read_spec(Reader& r) {
    Spec s;
    s.kind = static_cast<Argument>(r.u8());
    switch (s.kind) {
      case kNone: break;
      case kUndefined: s.value = at::Tensor(); break;
      case kTensor: {
        auto dtype = r.u8(), dim = r.u8(), bits = r.u8();
        s.flag = r.u8();
        s.layout = intern(read_layout(r, dtype, dim, bits));
        s.constant = false;
        break;
      }
      case kHostScalar:
        s.dtype = static_cast<c10::ScalarType>(r.u8());
        s.flag = r.u8();
        s.constant = false;
        break;
      case kInt: s.value = r.i64(); break;
      case kNumber: case kDouble: case kComplex: case kGeneratorArg: s.constant = false; break;
      case kBool: s.value = static_cast<bool>(r.u8()); break;
      case kString: s.value = r.text(); break;
      case kDevice: s.value = device_; break;
      case kHostDevice: s.value = c10::Device(c10::kCPU); break;
      case kList: {
        s.list = static_cast<ListOf>(r.u8());
        auto n = r.u32();
        for (uint32_t i = 0; i < n; i++) {
          s.items.push_back(read_spec(r));
          s.constant = s.constant && s.items.back().constant;
        }
        if (s.constant) {
          Reader empty(nullptr, 0);
          s.value = build_list(s, empty);
        }
        break;
      }
      default: throw Malformed("an argument of unknown kind");
    }
    return s;
  }

  void define(Reader& r) {
    auto name = r.text(), overload = r.text();
    Template t{overload.empty() ? name : name + "." + overload,
               c10::Dispatcher::singleton().findSchema({name, overload})};
    t.payload = r.u32();
    auto n = r.u32();
    if (!t.op) {
      templates_.push_back(std::move(t));
      return;
    }
    const auto& schema = t.op->schema();
    if (n != schema.arguments().size()) throw Malformed("arguments that do not fit " + name);
    for (uint32_t i = 0; i < n; i++) {
      t.args.push_back(read_spec(r));
      auto* alias = schema.arguments()[i].alias_info();
      t.args.back().written = alias && alias->isWrite();
    }
    for (auto& ret : schema.returns()) t.alias.push_back(ret.alias_info() && ret.alias_info()->isWrite());
    templates_.push_back(std::move(t));
  }

  // Arguments.

  at::Tensor make_view(const c10::Storage& storage, const Layout& layout, int64_t offset) {
    // Not always our device: the seeds of fused attention stay on the host, and go back in from there.
    auto type = storage.device_type();
    auto keys = type == c10::kCPU  ? c10::DispatchKeySet(c10::DispatchKey::CPU)
              : type == c10::kCUDA ? c10::DispatchKeySet(c10::DispatchKey::CUDA)
                                   : c10::DispatchKeySet(c10::DispatchKey::MPS);
    TORCH_CHECK(layout.extent(offset) <= storage.nbytes(), "a tensor needs ", layout.extent(offset),
                " bytes of a storage of ", storage.nbytes());
    auto t = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(layout.dtype));
    t.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides, offset);
    set_bits(t, layout.bits);
    return t;
  }

  at::Tensor tensor(Reader& r, const Spec& s) {
    auto& held = slot(r.u32());
    int64_t offset = s.flag ? r.i64() : 0;
    if (C10_UNLIKELY(held.poison != nullptr)) throw Poisoned{held.poison};
    for (int i = 0; i < 2; i++)
      if (held.layout[i] == s.layout && held.offset[i] == offset) return held.view[i];
    if (!held.storage) throw Malformed("an empty slot used as a tensor");
    auto view = make_view(held.storage, layouts_[s.layout], offset);
    int i = held.layout[0] < 0 ? 0 : 1;
    held.view[i] = view;
    held.layout[i] = s.layout;
    held.offset[i] = offset;
    return view;
  }

  IValue build(Reader& r, const Spec& s) {
    if (s.constant) return s.value;
    switch (s.kind) {
      case kTensor: return tensor(r, s);
      case kNumber: return r.i64();
      case kDouble: return r.f64();
      case kComplex: {
        double real = r.f64(), imaginary = r.f64();
        return c10::complex<double>(real, imaginary);
      }
      case kHostScalar: {
        auto t = at::empty({}, at::TensorOptions().dtype(s.dtype));
        std::memcpy(t.mutable_data_ptr(), r.bytes(16), t.itemsize());
        if (s.flag) t.unsafeGetTensorImpl()->set_wrapped_number(true);
        return t;
      }
      case kGeneratorArg: return generator_of(r.u32());
      case kList: return build_list(s, r);
      default: throw Malformed("an argument without a value");
    }
  }

  IValue build_list(const Spec& s, Reader& r) {
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
    }
    throw Malformed("a list of unknown elements");
  }

  // Running.

  struct Poisoned {
    Reason reason;
  };

  // Runs the template's operation on the stack; returns the reason if it failed.
  Reason run(Template& t, Reader& r) {
    try {
      stack_.clear();
      for (auto& arg : t.args) stack_.push_back(build(r, arg));
      t.op->callBoxed(&stack_);
      return nullptr;
    } catch (const Poisoned& p) {
      return p.reason;
    } catch (const Malformed&) {
      throw;
    } catch (const std::exception& e) {
      return note(t, text_of(e), kind_of(e));
    }
  }

  Reason note(const Template& t, const std::string& what, Status kind = kFailed) {
    return note(t.name + " (operation " + std::to_string(count_) + "): " + what, kind);
  }

  Reason note(std::string text, Status kind) {
    auto reason = std::make_shared<const Failure>(Failure{std::move(text), kind});
    if (!first_error_) first_error_ = reason;
    return reason;
  }

  // What a failed operation should have written to is not to be read either.
  void fail_written(const Template& t, const char* start, const Reason& reason) {
    Reader r(start, t.payload);
    for (auto& arg : t.args) poison_written(r, arg, arg.written, reason);
  }

  void poison_written(Reader& r, const Spec& s, bool written, const Reason& reason) {
    if (s.constant) return;
    switch (s.kind) {
      case kTensor: {
        auto& held = slot(r.u32());
        if (s.flag) r.i64();
        if (written && !held.poison) held.poison = reason;
        break;
      }
      case kGeneratorArg: r.bytes(4); break;
      case kNumber: case kDouble: r.bytes(8); break;
      case kComplex: case kHostScalar: r.bytes(16); break;
      case kList:
        for (auto& e : s.items) poison_written(r, e, written, reason);
        break;
      default: break;
    }
  }

  size_t operation(uint32_t id, const char* data, size_t size) {
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
      bind(outs, t, t.outs[next++], reason ? IValue() : stack_[i], reason);
    }
    stack_.clear();
    return length;
  }

  // An output that owns its memory from the first byte, as the client believes.
  at::Tensor own(const at::Tensor& t) {
    if (t.storage_offset() == 0 && t.storage().use_count() <= 1) return t;
    return copy_as({t.scalar_type(), t.sizes().vec(), t.strides().vec(), bits_of(t)}, t);
  }

  at::Tensor copy_as(const Layout& layout, const at::Tensor& from) {
    auto copy = at::empty_strided(layout.sizes, layout.strides, from.options());
    set_bits(copy, layout.bits);
    copy.copy_(from);
    return copy;
  }

  void bind(Reader& slots, const Template& t, const OutSpec& out, const IValue& value, const Reason& reason) {
    if (out.kind == kTensorList) {
      if (reason) {
        for (auto& e : out.items) bind(slots, t, e, IValue(), reason);
        return;
      }
      auto list = value.toListRef();
      for (size_t i = 0; i < out.items.size(); i++) bind(slots, t, out.items[i], i < list.size() ? list[i] : IValue(), reason);
      return;
    }
    if (out.kind != kNewTensor) return;
    auto& held = slot(slots.u32());
    held = Slot();
    if (reason) {
      held.poison = reason;
      return;
    }
    const auto& promised = layouts_[out.layout];
    auto got = value.isTensor() ? value.toTensor() : at::Tensor();
    if (!got.defined() || got.scalar_type() != promised.dtype || got.sizes() != c10::IntArrayRef(promised.sizes)) {
      held.poison = note(t, "its result has another size than it had before with the same arguments");
      return;
    }
    if (got.strides() != c10::IntArrayRef(promised.strides) || bits_of(got) != promised.bits)
      got = copy_as(promised, got);
    keep(held, own(got), out.layout);
  }

  void keep(Slot& held, at::Tensor t, int layout) {
    held.storage = t.storage();
    held.view[0] = std::move(t);
    held.layout[0] = layout;
  }

  // A template's first run: the client waits for what its outputs are.
  void ask(Reader& r) {
    auto id = r.u32();
    if (id >= templates_.size()) throw Malformed("an undefined template");
    auto& t = templates_[id];
    count_++;
    asked_.clear();
    Reader args(r.at(), t.payload);
    if (r.left() != t.payload) throw Malformed("a payload of another length");
    if (!t.op) {
      reply(kNotImplemented, t.name + " is not known to the worker; only operations of PyTorch itself travel");
      return;
    }
    auto earlier = first_error_;
    auto reason = run(t, args);
    if (reason) {
      // The client hears of this one now, so what it would have written is as it would be locally.
      first_error_ = reason == earlier ? nullptr : earlier;
      reply(*reason);
      return;
    }
    t.outs.clear();
    t.new_slots = 0;
    Writer w;
    try {
      for (size_t i = 0; i < t.alias.size(); i++)
        if (!t.alias[i]) t.outs.push_back(describe(w, t, stack_[i]));
      describe_written(w, t, r.at());
    } catch (const std::exception& e) {
      asked_.clear();
      stack_.clear();
      reply(kind_of(e), text_of(e));
      return;
    }
    t.known = true;
    stack_.clear();
    reply(kOk, w.bytes());
  }

  OutSpec describe(Writer& w, Template& t, const IValue& value) {
    OutSpec out;
    if (value.isTensor() && !value.toTensor().defined()) {
      out.kind = kUndefinedTensor;
      w.u8(out.kind);
    } else if (value.isTensor()) {
      auto tensor = value.toTensor();
      bool lives_here = tensor.device().type() == device_.type() || tensor.device().is_cpu();
      TORCH_CHECK(tensor.layout() == c10::kStrided && lives_here,
                  t.name, " returns a tensor that cannot live on a sky device; call .cpu() first");
      tensor = own(tensor);
      out.kind = kNewTensor;
      out.layout = intern({tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec(), bits_of(tensor)});
      t.new_slots++;
      w.u8(out.kind);
      write_tensor(w, tensor);
      asked_.emplace_back(tensor, out.layout);
    } else if (value.isTensorList()) {
      out.kind = kTensorList;
      w.u8(out.kind);
      auto list = value.toListRef();
      w.u32(static_cast<uint32_t>(list.size()));
      for (auto& e : list) out.items.push_back(describe(w, t, e));
    } else {
      out.kind = kValue;
      w.u8(out.kind);
      write_value(w, value);
    }
    return out;
  }

  static void write_tensor(Writer& w, const at::Tensor& t) {
    w.u8(static_cast<uint8_t>(t.scalar_type()));
    w.u8(static_cast<uint8_t>(t.dim()));
    w.u8(bits_of(t));
    for (auto s : t.sizes()) w.i64(s);
    for (auto s : t.strides()) w.i64(s);
    w.u64(t.storage().nbytes());
  }

  static void write_value(Writer& w, const IValue& v) {
    if (v.isInt()) { w.u8(kInt); w.i64(v.toInt()); }
    else if (v.isDouble()) { w.u8(kDouble); w.f64(v.toDouble()); }
    else if (v.isBool()) { w.u8(kBool); w.u8(v.toBool()); }
    else if (v.isComplexDouble()) { w.u8(kComplex); w.f64(v.toComplexDouble().real()); w.f64(v.toComplexDouble().imag()); }
    else if (v.isString()) { w.u8(kString); w.text(v.toStringRef()); }
    else if (v.isNone()) w.u8(kNone);
    else TORCH_CHECK(false, "an operation returns a ", v.tagKind(), ", which cannot travel");
  }

  // Written arguments that `out=` has resized.
  void describe_written(Writer& w, Template& t, const char* payload) {
    Writer changes;
    uint32_t changed = 0, index = 0;
    Reader r(payload, t.payload);
    for (auto& arg : t.args) describe_written(changes, arg, arg.written, r, index, changed);
    t.resizes = changed > 0;
    w.u32(changed);
    w.raw(changes.bytes().data(), changes.size());
  }

  void describe_written(Writer& w, const Spec& s, bool written, Reader& r, uint32_t& index, uint32_t& changed) {
    if (s.constant) return;
    switch (s.kind) {
      case kTensor: {
        auto number = r.u32();
        int64_t offset = s.flag ? r.i64() : 0;
        auto at = index++;
        if (!written) return;
        auto& held = slot(number);
        for (int i = 0; i < 2; i++) {
          if (held.layout[i] != s.layout || held.offset[i] != offset) continue;
          auto& view = held.view[i];
          const auto& before = layouts_[s.layout];
          if (view.sizes() == c10::IntArrayRef(before.sizes) && view.strides() == c10::IntArrayRef(before.strides)) return;
          w.u32(at);
          write_tensor(w, view);
          changed++;
          // The cached view is no longer what its layout says.
          held.layout[i] = -1;
          held.view[i] = at::Tensor();
          return;
        }
        return;
      }
      case kGeneratorArg: r.bytes(4); break;
      case kNumber: case kDouble: r.bytes(8); break;
      case kComplex: case kHostScalar: r.bytes(16); break;
      case kList:
        for (auto& e : s.items) describe_written(w, e, written, r, index, changed);
        break;
      default: break;
    }
  }

  void bind_asked(Reader& r) {
    auto n = r.u32();
    if (n != asked_.size()) throw Malformed("slots that do not fit the outputs");
    for (auto& [tensor, layout] : asked_) {
      auto& held = slot(r.u32());
      held = Slot();
      keep(held, std::move(tensor), layout);
    }
    asked_.clear();
  }

  // Memory and bytes.

  c10::Storage new_storage(uint64_t bytes) {
    return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device_)).storage();
  }

  void allocate(Reader& r) {
    auto& held = slot(r.u32());
    auto bytes = r.u64();
    held = Slot();
    guarded("allocating memory", held, [&] { held.storage = new_storage(bytes); });
  }

  void resize(Reader& r) {
    auto& held = slot(r.u32());
    auto bytes = r.u64();
    guarded("resizing memory", held, [&] {
      auto bigger = new_storage(bytes);
      auto kept = std::min<uint64_t>(bytes, held.storage ? held.storage.nbytes() : 0);
      if (kept) byte_view(bigger, 0, kept).copy_(byte_view(held.storage, 0, kept));
      held = Slot();
      held.storage = bigger;
    });
  }

  template <typename F>
  void guarded(const char* what, Slot& held, F&& f) {
    try {
      f();
    } catch (const std::exception& e) {
      held.poison = note(std::string(what) + ": " + text_of(e), kind_of(e));
    }
  }

  at::Tensor byte_view(const c10::Storage& storage, uint64_t offset, uint64_t bytes) {
    Layout layout{at::kByte, {static_cast<int64_t>(bytes)}, {1}, 0};
    return make_view(storage, layout, static_cast<int64_t>(offset));
  }

  size_t upload(const char* data, size_t size) {
    constexpr size_t head = 4 + 4 + 8 + 8 + 1;
    if (size < head) return 0;
    Reader r(data + 4, head - 4);
    auto& held = slot(r.u32());
    auto offset = r.u64(), bytes = r.u64();
    bool is_inline = r.u8();
    if (is_inline && size < head + bytes) return 0;
    if (!held.poison && (!held.storage || bytes > held.storage.nbytes() || offset > held.storage.nbytes() - bytes))
      throw Malformed("an upload beyond its storage");
    if (is_inline) {
      if (!held.poison) put(held, offset, data + head, bytes);
      return head + bytes;
    }
    receive_bulk(held, offset, bytes);
    return head;
  }

  void put(Slot& held, uint64_t offset, const char* from, uint64_t bytes) {
    if (device_.is_cpu()) {
      std::memcpy(static_cast<char*>(held.storage.mutable_data()) + offset, from, bytes);
      return;
    }
    auto host = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
    std::memcpy(host.mutable_data_ptr(), from, bytes);
    byte_view(held.storage, offset, bytes).copy_(host);
  }

  void receive_bulk(Slot& held, uint64_t offset, uint64_t bytes) {
    if (device_.is_cpu() && !held.poison) {
      receive_all(bulk_, static_cast<char*>(held.storage.mutable_data()) + offset, bytes);
      return;
    }
    auto* stage = static_cast<char*>(staging().mutable_data_ptr());
    for (uint64_t done = 0; done < bytes;) {
      auto n = std::min<uint64_t>(kStage, bytes - done);
      receive_all(bulk_, stage, n);
      if (!held.poison) byte_view(held.storage, offset + done, n).copy_(staging().narrow(0, 0, static_cast<int64_t>(n)));
      done += n;
    }
  }

  // Page-locked where the device can copy from it directly.
  at::Tensor& staging() {
    if (!staging_.defined())
      staging_ = at::empty({static_cast<int64_t>(kStage)}, at::TensorOptions().dtype(at::kByte).pinned_memory(device_.is_cuda()));
    return staging_;
  }

  void fetch(Reader& r) {
    auto& held = slot(r.u32());
    auto dtype = r.u8(), dim = r.u8();
    auto layout = read_layout(r, dtype, dim, 0);
    auto offset = r.i64();
    if (first_error_ || held.poison) {
      reply(first_error_ ? *first_error_ : *held.poison);
      first_error_ = nullptr;
      return;
    }
    at::Tensor dense;
    try {
      TORCH_CHECK(held.storage, "the tensor has no memory");
      dense = make_view(held.storage, layout, offset).contiguous();
      if (dense.nbytes() <= kInlineFetch) dense = dense.cpu();
    } catch (const std::exception& e) {
      reply(kind_of(e), "copying to the host: " + text_of(e));
      return;
    }
    size_t bytes = dense.nbytes();
    if (bytes <= kInlineFetch) {
      reply(kOk, std::string_view(static_cast<const char*>(dense.const_data_ptr()), bytes));
      return;
    }
    reply(kOk, "");
    if (device_.is_cpu()) {
      send_all(bulk_, dense.const_data_ptr(), bytes);
      return;
    }
    // Through page-locked memory: a copy into fresh pages runs at the speed of their page faults.
    auto start = static_cast<uint64_t>(dense.storage_offset()) * dense.itemsize();
    for (uint64_t done = 0; done < bytes;) {
      auto n = std::min<uint64_t>(kStage, bytes - done);
      auto part = staging().narrow(0, 0, static_cast<int64_t>(n));
      part.copy_(byte_view(dense.storage(), start + done, n));
      send_all(bulk_, part.const_data_ptr(), n);
      done += n;
    }
  }

  void synchronize() {
    if (device_.is_cuda()) at::detail::getCUDAHooks().deviceSynchronize(device_.index());
    if (first_error_) {
      reply(*first_error_);
      first_error_ = nullptr;
    } else {
      reply(kOk, "");
    }
  }

  void settle(uint32_t settings) {
    auto dtype = static_cast<c10::ScalarType>(settings & 0xff);
    if (dtype >= c10::ScalarType::NumOptions) throw Malformed("an unknown dtype");
    auto& context = at::globalContext();
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
    context.setDeterministicAlgorithms(settings & kDeterministic, settings & kDeterministicWarns);
    context.setDeterministicFillUninitializedMemory(settings & kFillsMemory);
    context.setBenchmarkCuDNN(settings & kCudnnBenchmarks);
    context.setDeterministicCuDNN(settings & kCudnnDeterministic);
  }

  // Random numbers: generator 0 is the device's own.

  at::Generator generator_of(uint32_t id) {
    if (id == 0) return at::globalContext().defaultGenerator(device_);
    auto it = generators_.find(id);
    if (it == generators_.end()) {
      auto made = device_.is_cuda() ? at::detail::getCUDAHooks().getNewGenerator(device_.index())
                                    : at::detail::createCPUGenerator();
      it = generators_.emplace(id, std::move(made)).first;
    }
    return it->second;
  }

  void generator(Reader& r) {
    auto id = r.u32();
    auto action = static_cast<GeneratorAction>(r.u8());
    auto content = r.text();
    if (action == kForget) {
      generators_.erase(id);
      return;
    }
    auto g = generator_of(id);
    std::lock_guard<std::mutex> lock(g.mutex());
    if (action == kSeed) {
      if (content.size() != 8) throw Malformed("a seed of another length");
      uint64_t seed;
      std::memcpy(&seed, content.data(), 8);
      g.set_current_seed(seed);
    } else if (action == kGetState) {
      auto state = g.get_state();
      reply(kOk, std::string_view(static_cast<const char*>(state.const_data_ptr()), state.nbytes()));
    } else if (action == kSetState) {
      auto state = at::empty({static_cast<int64_t>(content.size())}, at::TensorOptions().dtype(at::kByte));
      std::memcpy(state.mutable_data_ptr(), content.data(), content.size());
      try {
        g.set_state(state);
        reply(kOk, "");
      } catch (const std::exception& e) {
        reply(kind_of(e), text_of(e));
      }
    }
  }

  void reply(const Failure& failure) { reply(failure.kind, failure.text); }

  void reply(Status status, std::string_view content) {
    Writer w;
    w.u32(static_cast<uint32_t>(content.size()));
    w.u8(status);
    w.raw(content.data(), content.size());
    send_all(ops_, w.bytes().data(), w.size());
  }

  int ops_, bulk_;
  c10::Device device_;
  std::vector<Slot> slots_ = std::vector<Slot>(kSlots);
  std::map<Layout, int> layout_ids_;
  std::vector<Layout> layouts_;
  std::vector<Template> templates_;
  std::vector<std::pair<at::Tensor, int>> asked_;
  std::unordered_map<uint32_t, at::Generator> generators_;
  at::Tensor staging_;
  Stack stack_;
  Reason first_error_;
  uint64_t count_ = 0;
};

}  // namespace
}  // namespace sky

// Serves one client until it leaves. Returns 0, or 1 with a message for the log.
extern "C" int sky_worker_serve(int ops, int bulk, const char* device, char* message, size_t size) {
  try {
    c10::Device real{std::string(device)};
    if (real.is_cuda() && !real.has_index()) real = c10::Device(c10::kCUDA, 0);
    c10::OptionalDeviceGuard guard;
    if (!real.is_cpu()) guard.reset_device(real);
    at::AutoDispatchBelowADInplaceOrView below;
    at::NoGradGuard no_grad;
    sky::Session(ops, bulk, real).serve();
    return 0;
  } catch (const std::exception& e) {
    snprintf(message, size, "%s", e.what());
    return 1;
  }
}
