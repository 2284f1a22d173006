// The fallback: every operation on sky tensors becomes one compact record.
//
// An exact key (operation, dtypes, sizes, strides, flags, ints, bools) names a template, which knows what
// the operation returns. Floating scalars, host scalars and storage offsets go in the payload. The first
// time, and always where the result's shape depends on data, the worker is asked.
#include <ATen/EmptyTensor.h>
#include <c10/core/AutogradState.h>
#include <torch/library.h>

#include <set>

#include "../wire/values.h"
#include "keys.h"
#include "settings.h"
#include "shapes.h"

namespace sky {

using c10::IValue;
using torch::jit::Stack;

namespace {

void tell_settings(Session& session, const Key& key, const OpInfo& info) {
  if (C10_UNLIKELY(info.drops_graph)) return;
  auto settings = with_precision(key.settings, session.settings, info.product, session.on_cpu);
  if (C10_LIKELY(session.settings == settings)) return;
  struct __attribute__((packed)) {
    uint32_t kind;
    uint64_t settings;
  } record{kSettings, settings};
  session.put(&record, sizeof record);
  session.settings = settings;
  if (auto* noted = session.tape()) noted->settings(settings);
}

// Whether a tensor is to be made like another, but on another device.
bool is_made_elsewhere(const OpInfo& info, const IValue* args) {
  if (C10_LIKELY(info.device < 0) || !args[info.device].isDevice() || !args[0].toTensor().defined()) return false;
  auto device = args[info.device].toDevice();
  if (device.type() == kSky && !device.has_index()) device.set_index(current_device());
  return device != args[0].toTensor().device();
}

void note_written(Session& session, const IValue& v) {
  if (v.isList())
    for (const IValue& e : v.toListRef()) note_written(session, e);
  else if (v.isTensor() && v.toTensor().defined() && is_sky(v.toTensor()))
    session.wrote(Session::place_of(v.toTensor().unsafeGetTensorImpl()).slot);
}

void write_promised(Writer& w, const OutInfo& out) {
  w.u8(out.kind);
  if (out.kind == kTensorList) {
    w.u32(static_cast<uint32_t>(out.items.size()));
    for (auto& item : out.items) write_promised(w, item);
  }
  if (out.kind != kNewTensor) return;
  w.u8(static_cast<uint8_t>(out.layout.dtype));
  w.u8(static_cast<uint8_t>(out.layout.sizes.size()));
  w.u8(out.layout.bits);
  for (auto n : out.layout.sizes) w.i64(n);
  for (auto n : out.layout.strides) w.i64(n);
}

void write_promise(Writer& w, const Template& t) {
  w.u8(t.known);
  for (auto& out : t.outs) write_promised(w, out);
}

Template* define(Session& session, std::unique_ptr<Template> made, const Key& key, const IValue* args, uint64_t h) {
  const auto& op = *made->op;
  auto given = session.template_count;
  made->id = session.new_template();
  made->used = session.stats.operations;
  made->key = key.words;
  bool is_reused = session.template_count == given;
  Writer w;
  if (is_reused) w.u32(made->id);
  w.text(op.name->name);
  w.text(op.name->overload_name);
  w.text(made->origin);
  w.u32(static_cast<uint32_t>(key.payload.size()));
  w.u32(static_cast<uint32_t>(op.arguments));
  write_arguments(w, key, op, args);
  write_promise(w, *made);
  Writer record;
  record.u32(is_reused ? kRedefine : kDefine);
  record.text(w.bytes());
  session.put(record.bytes().data(), record.size());
  return session.templates.emplace(h, std::move(made))->second.get();
}

Template* find(Session& session, const OpInfo& op, const Key& key, uint64_t h) {
  auto range = session.templates.equal_range(h);
  for (auto it = range.first; it != range.second; ++it)
    if (it->second->op == &op && it->second->key == key.words) return it->second.get();
  return nullptr;
}

// Outputs.

Layout read_layout(Reader& r) {
  Layout layout;
  layout.dtype = checked_dtype(r.u8());
  auto dim = r.u8();
  layout.bits = r.u8();
  for (int i = 0; i < dim; i++) layout.sizes.push_back(r.i64());
  for (int i = 0; i < dim; i++) layout.strides.push_back(r.i64());
  layout.bytes = r.u64();
  check_layout(layout.sizes, layout.strides);
  if (extent_of(layout.dtype, layout.sizes, layout.strides, 0) > layout.bytes)
    throw Malformed("a tensor larger than its memory");
  layout.contiguous = strictly_contiguous(layout.sizes, layout.strides);
  return layout;
}

OutInfo read_out(Reader& r, uint32_t& tensors, bool is_item) {
  OutInfo out;
  out.kind = static_cast<Output>(r.u8());
  switch (out.kind) {
    case kNewTensor:
      out.layout = read_layout(r);
      tensors++;
      break;
    case kTensorList: {
      if (is_item) throw Malformed("a list in a list");
      auto n = r.u32();
      for (uint32_t i = 0; i < n; i++) out.items.push_back(read_out(r, tensors, true));
      break;
    }
    case kValue: out.value = read_plain(r); break;
    case kUndefinedTensor: break;
    default: throw Malformed("an output of unknown kind");
  }
  return out;
}

// What the worker found the outputs to be, and which arguments it resized; throws Malformed.
void read_answer(const std::string& answer, const OpInfo& info, Template& t) {
  Reader r(answer.data(), answer.size());
  t.known = false;  // until all of it is read
  t.outs.clear();
  t.resized.clear();
  t.new_tensors = 0;
  for (auto returned : info.returns)
    if (returned < 0) t.outs.push_back(read_out(r, t.new_tensors, false));
  auto changed = r.u32();
  for (uint32_t i = 0; i < changed; i++) {
    auto tensor = r.u32();
    t.resized.push_back({tensor, read_layout(r)});
  }
}

// What an earlier session was told of the same; the worker checks it as it checks what is worked out here.
bool recall(Session& session, const OpInfo& info, const std::string& key, Template& t) {
  auto answer = session.remembered->find(key);
  if (!answer) return false;
  try {
    read_answer(*answer, info, t);
  } catch (const Malformed&) {
    t.outs.clear();
    t.resized.clear();
    t.new_tensors = 0;
    return false;  // the worker is asked instead
  }
  return true;
}

std::string remembered_key(const OpInfo& info, const Key& key) {
  return Remembered::key_of(info.name->name, info.name->overload_name, key.settings, key.words);
}

// What depends on the data or on this process, or is told of more than results, is not remembered.
bool may_remember(const Session& session, const OpInfo& info, const Key& key) {
  return session.remembered && !info.asks_always && !info.names_graphs && !info.is_foreign &&
         !(info.indexes && key.masked) && info.outs.empty();
}

// Where the worker finds an operation of another library. What it returns is asked every time, unless the library says
// what that is without looking at data.
void learn_foreign(const c10::OperatorHandle& op, const OpInfo& info, const IValue* args, Template& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !info.is_view, info.name->name,
      " returns a view of an argument, and views by operators of other libraries are not known "
      "to a sky device; clone the result in the operator, and take the alias out of its schema");
  std::vector<char> text(4 << 10);
  if (modules_of) {
    auto failed = modules_of(info.name->name.c_str(), text.data(), text.size());
    SKY_CHECK(!failed, info.name->name, ": ", text.data());
    t.origin = signature_of(*info.schema) + "\n" + text.data();
  }
  if (t.asks_always || (t.known = guess_foreign(op, info, args, t))) return;
  t.asks_always = std::any_of(info.returns.begin(), info.returns.end(), [](int each) { return each < 0; });
}

// An operation of another library that could not be run may be found by the next call: by then the library may have
// been installed, or imported here from elsewhere.
std::string ask(Session& session, const Writer& w, const OpInfo& info, const Template& t) try {
  return session.ask(w.bytes().data(), w.size());
} catch (const c10::NotImplementedError&) {
  if (info.is_foreign && !t.told) session.forget_template(t);
  throw;
}

at::Tensor new_tensor(Session& session, const Layout& layout, std::string& slots) {
  auto storage = session.new_storage(layout.bytes, false);
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(layout.dtype));
  if (layout.contiguous) impl->set_sizes_contiguous(layout.sizes);
  else impl->set_sizes_and_strides(layout.sizes, layout.strides);
  if (C10_UNLIKELY(layout.bits)) {
    if (layout.bits & kConjugated) impl->_set_conj(true);
    if (layout.bits & kNegated) impl->_set_neg(true);
  }
  auto slot = Session::place_of(impl.get()).slot;
  slots.append(reinterpret_cast<const char*>(&slot), 4);
  return at::Tensor(std::move(impl));
}

IValue make_out(Session& session, const OutInfo& out, std::string& slots) {
  switch (out.kind) {
    case kNewTensor: return new_tensor(session, out.layout, slots);
    case kTensorList: {
      c10::List<at::Tensor> list;
      list.reserve(out.items.size());
      for (auto& e : out.items) list.push_back(make_out(session, e, slots).toTensor());
      return list;
    }
    case kUndefinedTensor: return at::Tensor();
    default: return out.value;
  }
}

void apply(const Resized& change, const Key& key) {
  auto* impl = key.tensors.at(change.tensor).unsafeGetTensorImpl();
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  // Its offset is not part of the template, so the storage may have grown by more than the first time.
  auto bytes = at::detail::computeStorageNbytes(change.layout.sizes, change.layout.strides, impl->itemsize(),
                                                static_cast<size_t>(impl->storage_offset()));
  if (storage->nbytes() < bytes) Session::of(impl).set_size(storage, bytes);
  impl->set_sizes_and_strides(change.layout.sizes, change.layout.strides);
}

void note_taped(Tape& tape, uint32_t line, const Template& t, const Key& key, const IValue* args,
                const std::string& slots) {
  const auto& info = *t.op;
  auto name = info.name->overload_name.empty() ? info.name->name : info.name->name + "." + info.name->overload_name;
  auto fields = payload_fields(key, info, args);
  tape.operation(line, t.id, name, fields, key.payload, slots);
  if (t.asks_always || (info.indexes && key.masked)) tape.blocked(name + ", whose result depends on data");
  if (info.names_graphs) tape.blocked("a call of what torch.compile has made; replay the function without it");
  if (!t.resized.empty()) tape.blocked(name + ", which resizes a tensor");
}

}  // namespace

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto began = issue_began();
  // A backward pass only issues operations, which a thread of its own does not make faster: handing over to one
  // costs 50 us. Nor is there one for a device that came after the process's first backward pass.
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  const auto& info = info_of(op);
  const IValue* args = stack->data() + stack->size() - info.arguments;
  if (C10_UNLIKELY(is_made_elsewhere(info, args))) {
    // What PyTorch does on every device: it makes an empty tensor there, and fills it.
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return;
  }
  // One per depth of nesting: moving a host index over runs operations of its own.
  thread_local std::vector<std::unique_ptr<Key>> keys;
  thread_local size_t depth = 0;
  if (keys.size() <= depth) keys.push_back(std::make_unique<Key>());
  Key& key = *keys[depth];
  struct Depth {
    size_t& d;
    Key& k;
    Depth(size_t& d, Key& k) : d(d), k(k) { d++; }
    ~Depth() {
      d--;
      k.clear();
    }
  } nested(depth, key);
  key.clear();
  key_settings(key);
  key_arguments(key, info, args);

  auto& session = *key.session;
  c10::SmallVector<IValue, 4> results;
  const auto line = line_of_tape();
  {
    std::unique_lock lock(session.mutex);
    session.begin();
    session.stats.operations += !info.drops_graph;
    if (C10_UNLIKELY(session.counts_writes()))
      for (size_t i = 0; i < info.arguments; i++)
        if (info.written[i]) note_written(session, args[i]);
    tell_settings(session, key, info);
    Template* t = session.last ? session.last->next : nullptr;
    if (!t || t->op != &info || t->key != key.words) {
      auto h = hash(&info, key.words);
      t = find(session, info, key, h);
      if (!t) {
        auto made = std::make_unique<Template>();
        made->op = &info;
        made->asks_always = info.asks_always;
        // Without the lock: PyTorch's code may want Python's, whose holder may be freeing a tensor of ours.
        lock.unlock();
        if (C10_UNLIKELY(info.is_foreign)) learn_foreign(op, info, args, *made);
        else made->known = infer(session, op, info, args, *made);
        lock.lock();
        session.begin();
        tell_settings(session, key, info);
        t = find(session, info, key, h);
        hold_guess(session, *made);
        if (!t && !made->known && may_remember(session, info, key))
          made->known = made->recalled = recall(session, info, remembered_key(info, key), *made);
        if (!t) t = define(session, std::move(made), key, args, h);
      }
      if (session.last) session.last->next = t;
    }
    session.last = t;
    t->used = session.stats.operations;
    auto* issue = session.recorded(t->id, began);
    std::string slots;
    bool asks = !t->known || t->asks_always || (info.indexes && key.masked);
    if (asks) {
      session.stats.asks++;
      Writer w;
      w.u32(kAsk);
      w.u32(static_cast<uint32_t>(4 + key.payload.size()));
      w.u32(t->id);
      w.raw(key.payload.data(), key.payload.size());
      auto answer = ask(session, w, info, *t);
      try {
        read_answer(answer, info, *t);
      } catch (const Malformed& e) {
        fail(std::string("an answer of the worker cannot be read: ") + e.what());
      }
      compare_guess(session, *t);
      // What warned may warn again, and is asked again, so that the warning has its own line.
      t->known = !session.warned;
      t->told = true;
      t->recalled = false;
      if (t->known && t->resized.empty() && may_remember(session, info, key))
        session.remembered->learn(remembered_key(info, key), answer);
    } else {
      session.stats.hits += !info.drops_graph;
    }
    size_t next = 0;
    for (auto returned : info.returns)
      results.push_back(returned < 0 ? make_out(session, t->outs[next++], slots) : args[returned]);
    if (asks) {
      Writer w;
      w.u32(kBind);
      w.u32(static_cast<uint32_t>(4 + slots.size()));
      w.u32(static_cast<uint32_t>(slots.size() / 4));
      w.raw(slots.data(), slots.size());
      session.put(w.bytes().data(), w.size());
    } else {
      auto payload = key.payload.size();
      key.payload.append(slots);
      session.put(&t->id, 4);
      session.put(key.payload.data(), key.payload.size());
      key.payload.resize(payload);
    }
    for (auto& change : t->resized) apply(change, key);
    if (auto* noted = session.tape(); noted && !info.drops_graph) note_taped(*noted, line, *t, key, args, slots);
    if (C10_UNLIKELY(issue != nullptr)) issue->end = nanoseconds();
  }
  if (C10_UNLIKELY(synchronous())) session.synchronize(kAllStreams);
  torch::jit::drop(*stack, info.arguments);
  for (auto& r : results) stack->push_back(std::move(r));
}

namespace {
std::vector<c10::RegistrationHandleRAII> registrations;
}

// The fallback for every operation whose composite kernel would otherwise win; views are left to it.
int register_widely(const std::set<std::string>& left) {
  auto& dispatcher = c10::Dispatcher::singleton();
  int count = 0;
  for (auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 && !is_collective(name.name)) continue;
    auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    auto plain = name.name.substr(name.name.find("::") + 2);
    auto full = name.overload_name.empty() ? plain : plain + "." + name.overload_name;
    if (left.count(plain) || left.count(full)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional))
      continue;
    bool is_view = false, has_tensor = op->schema().returns().empty();
    for (auto& a : op->schema().arguments())
      if (a.alias_info() && !a.alias_info()->isWrite()) is_view = true;
    for (auto& r : op->schema().returns())
      if (r.type()->str().find("Tensor") != std::string::npos) has_tensor = true;
    if (is_view || !has_tensor) continue;
    registrations.push_back(dispatcher.registerImpl(name, c10::DispatchKey::PrivateUse1,
                                                    c10::KernelFunction::makeFromBoxedFunction<&fallback>(),
                                                    std::nullopt, nullptr, "skyward"));
    count++;
  }
  return count;
}

// The worker waits for a collective; here nobody does.
namespace {
at::Tensor wait_tensor(const at::Tensor& tensor) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(kWait, "");
  Stack stack{tensor};
  fallback(op, &stack);
  return tensor;
}
}  // namespace

TORCH_LIBRARY(skyward_mesh, m) { m.def("wait(Tensor(a!) tensor) -> Tensor(a!)"); }
TORCH_LIBRARY_IMPL(_c10d_functional, PrivateUse1, m) { m.impl("wait_tensor", wait_tensor); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace sky
