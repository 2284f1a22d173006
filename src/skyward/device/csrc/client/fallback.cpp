// The fallback: every operation on sky tensors becomes one compact record.
//
// An exact key (operation, dtypes, sizes, strides, flags, ints, bools) names a template, which knows what
// the operation returns. Floating scalars, host scalars and storage offsets go in the payload. The first
// time, and always where the result's shape depends on data, the worker is asked.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>
#include <torch/library.h>

#include <set>

#include "shapes.h"

namespace sky {

using c10::IValue;
using torch::jit::Stack;

bool strictly_contiguous(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (strides[i] != expected) return false;
    expected *= std::max<int64_t>(sizes[i], 1);
  }
  return true;
}

namespace {

struct Key {
  std::vector<uint64_t> words;
  std::string payload;
  std::vector<at::Tensor> tensors;  // sky tensors in order, for what is resized
  std::vector<at::Tensor> moved;    // host indices brought over, alive until the record is out
  Session* session = nullptr;
  bool masked = false;
  void clear() {
    words.clear();
    payload.clear();
    tensors.clear();
    moved.clear();
    session = nullptr;
    masked = false;
  }
  uint32_t settings = kUsualSettings;
  void word(uint64_t v) { words.push_back(v); }
  void raw(const void* p, size_t n) { payload.append(static_cast<const char*>(p), n); }
};

uint32_t settings_now() {
  auto& context = at::globalContext();
  auto flag = [](bool on, uint32_t bit) { return on ? bit : 0; };
  return static_cast<uint32_t>(c10::get_default_dtype_as_scalartype()) |
         flag(context.deterministicAlgorithms(), kDeterministic) |
         flag(context.deterministicAlgorithmsWarnOnly(), kDeterministicWarns) |
         flag(context.deterministicFillUninitializedMemory(), kFillsMemory) |
         flag(context.benchmarkCuDNN(), kCudnnBenchmarks) |
         flag(context.deterministicCuDNN(), kCudnnDeterministic);
}

// Settings decide results, so they are part of the key; the usual ones are left out of it.
void key_settings(Key& key) {
  key.settings = settings_now();
  if (C10_UNLIKELY(key.settings != kUsualSettings)) key.word(0xff | uint64_t{key.settings} << 8);
}

void tell_settings(Session& session, uint32_t settings) {
  if (C10_LIKELY(session.settings == settings)) return;
  uint32_t record[] = {kSettings, settings};
  session.put(record, sizeof record);
  session.settings = settings;
}

ListOf list_of(const c10::Type& element) {
  switch (element.kind()) {
    case c10::TypeKind::TensorType: return kTensors;
    case c10::TypeKind::OptionalType: return kOptionalTensors;
    case c10::TypeKind::FloatType: return kDoubles;
    case c10::TypeKind::BoolType: return kBools;
    case c10::TypeKind::NumberType: return kScalars;
    case c10::TypeKind::StringType: return kStrings;
    default: return kInts;
  }
}

std::unique_ptr<OpInfo> study(const c10::OperatorHandle& op) {
  auto info = std::make_unique<OpInfo>();
  const auto& schema = op.schema();
  info->name = &op.operator_name();
  info->arguments = schema.arguments().size();
  for (auto& a : schema.arguments()) {
    auto type = a.type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    info->number.push_back(type->kind() == c10::TypeKind::NumberType);
    info->written.push_back(a.alias_info() && a.alias_info()->isWrite());
    auto list = type->cast<c10::ListType>();
    info->list.push_back(list ? list_of(*list->getElementType()) : kInts);
  }
  bool returns_tensors = schema.returns().empty();
  for (auto& r : schema.returns()) {
    if (r.type()->str().find("Tensor") != std::string::npos) returns_tensors = true;
    int found = -1;
    if (r.alias_info() && r.alias_info()->isWrite())
      for (size_t i = 0; i < info->arguments; i++) {
        auto* a = schema.arguments()[i].alias_info();
        if (a && a->beforeSets() == r.alias_info()->beforeSets()) found = static_cast<int>(i);
      }
    info->returns.push_back(found);
  }
  const auto& name = info->name->name;
  info->asks_always = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  static const std::set<std::string> indexing{"aten::index", "aten::index_put", "aten::index_put_",
                                              "aten::_index_put_impl_", "aten::_unsafe_index"};
  static const std::set<std::string> by_scalars{"aten::arange", "aten::range", "aten::linspace", "aten::logspace",
                                                "aten::_fused_sdp_choice"};  // not with dropout
  info->indexes = indexing.count(name);
  info->scalars_shape = by_scalars.count(name);
  if (info->indexes) info->asks_always = false;
  // A number or a truth is about the data; which attention kernel fits is about the shapes.
  if (!returns_tensors && name != "aten::_fused_sdp_choice") info->asks_always = true;
  info->shape = shape_kernel(*info->name);
  info->only_writes = only_writes(*info->name);
  // The worker's tables are sized by the longest target.
  if (name == "aten::_ctc_loss") info->asks_always = true;
  // Its only result is the error, which callers catch where they call.
  if (name == "aten::_linalg_check_errors") info->asks_always = true;
  return info;
}

const OpInfo& info_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<const void*, std::unique_ptr<OpInfo>> known;
  thread_local std::unordered_map<const void*, const OpInfo*> mine;
  const void* id = &op.operator_name();
  auto& found = mine[id];
  if (!found) {
    std::lock_guard lock(mutex);
    auto& shared = known[id];
    if (!shared) shared = study(op);
    found = shared.get();
  }
  return *found;
}

uint8_t bits_of(const at::Tensor& t) { return (t.is_conj() ? kConjugated : 0) | (t.is_neg() ? kNegated : 0); }

void join(Key& key, Session& session) {
  if (!key.session) key.session = &session;
  TORCH_CHECK(key.session == &session, "Expected all tensors to be on the same device, but found sky:",
              key.session->index, " and sky:", session.index, "; move one with .to()");
}

// The first sky tensor or device among the arguments decides where an operation runs.
Session* find_session(const IValue& v) {
  if (v.isTensor()) {
    auto& t = v.toTensor();
    return t.defined() && is_sky(t) ? &Session::of(t.unsafeGetTensorImpl()) : nullptr;
  }
  if (v.isDevice()) return v.toDevice().type() == kSky ? &session_at(v.toDevice().index()) : nullptr;
  if (v.isList())
    for (const IValue& e : v.toListRef())
      if (auto* s = find_session(e)) return s;
  return nullptr;
}

void key_tensor(Key& key, const at::Tensor& given, bool is_index, bool written) {
  if (!given.defined()) {
    key.word(kUndefined);
    return;
  }
  at::Tensor tensor = given;
  if (!is_sky(tensor)) {
    // A number on the host may go along, but nothing comes back into it.
    if (tensor.dim() == 0 && !is_index && !written && tensor.device().is_cpu()) {
      key.word(kHostScalar | uint64_t(tensor.scalar_type()) << 16 |
               uint64_t(tensor.unsafeGetTensorImpl()->is_wrapped_number()) << 24);
      char value[16] = {};
      std::memcpy(value, tensor.const_data_ptr(), tensor.itemsize());
      key.raw(value, sizeof value);
      return;
    }
    TORCH_CHECK(is_index && tensor.device().is_cpu(),
                "Expected all tensors to be on the same device, but found ", tensor.device(), " and sky:",
                key.session ? key.session->index : 0, "; move it with .to()");
    tensor = tensor.to(c10::Device(kSky, static_cast<c10::DeviceIndex>(key.session->index)));
    key.moved.push_back(tensor);
  }
  auto* impl = tensor.unsafeGetTensorImpl();
  TORCH_CHECK(impl->has_storage() && impl->unsafe_storage().unsafeGetStorageImpl(),
              "a tensor without storage reached the sky device; this transform is not supported on it");
  join(key, Session::of(impl));
  auto sizes = impl->sizes();
  auto offset = impl->storage_offset();
  bool contiguous = strictly_contiguous(sizes, impl->strides());
  auto dtype = impl->dtype().toScalarType();
  if (is_index && (dtype == c10::kBool || dtype == c10::kByte)) key.masked = true;
  key.word(kTensor | uint64_t(sizes.size()) << 8 | uint64_t(dtype) << 16 | uint64_t(offset != 0) << 24 |
           uint64_t(contiguous) << 25 | uint64_t(bits_of(tensor)) << 26);
  for (auto s : sizes) key.word(static_cast<uint64_t>(s));
  if (!contiguous)
    for (auto s : impl->strides()) key.word(static_cast<uint64_t>(s));
  auto slot = Session::slot_of(impl);
  key.raw(&slot, 4);
  if (offset) key.raw(&offset, 8);
  key.tensors.push_back(std::move(tensor));
}

void key_value(Key& key, const OpInfo& op, const IValue& v, bool number, ListOf list, bool is_index, bool written) {
  if (v.isTensor()) {
    key_tensor(key, v.toTensor(), is_index, written);
  } else if (v.isNone()) {
    key.word(kNone);
  } else if (v.isInt() && number && !op.scalars_shape) {
    auto n = v.toInt();
    key.word(kNumber);
    key.raw(&n, 8);
  } else if (v.isInt()) {
    key.word(kInt);
    key.word(static_cast<uint64_t>(v.toInt()));
  } else if (v.isDouble()) {
    double d = v.toDouble();
    key.word(kDouble);
    if (op.scalars_shape) {
      uint64_t bits;
      std::memcpy(&bits, &d, 8);
      key.word(bits);
    }
    key.raw(&d, 8);
  } else if (v.isComplexDouble()) {
    auto c = v.toComplexDouble();
    double parts[2] = {c.real(), c.imag()};
    key.word(kComplex);
    key.raw(parts, 16);
  } else if (v.isBool()) {
    key.word(kBool | uint64_t(v.toBool()) << 8);
  } else if (v.isString()) {
    const auto& s = v.toStringRef();
    key.word(kString | uint64_t(s.size()) << 8);
    for (size_t i = 0; i < s.size(); i += 8) {
      uint64_t w = 0;
      std::memcpy(&w, s.data() + i, std::min<size_t>(8, s.size() - i));
      key.word(w);
    }
  } else if (v.isDevice()) {
    key.word((v.toDevice().type() == kSky ? kDevice : kHostDevice));
    if (v.toDevice().type() == kSky) join(key, session_at(v.toDevice().index()));
  } else if (v.isGenerator()) {
    auto generator = v.toGenerator();
    TORCH_CHECK(generator.device().type() == kSky, "Expected a 'sky' device type for generator but found '",
                generator.device().type(), "'");
    auto id = static_cast<uint32_t>(generator.unsafeGetGeneratorImpl()->get_offset());
    key.word(kGeneratorArg);
    key.raw(&id, 4);
  } else if (v.isList()) {
    auto items = v.toListRef();
    key.word(kList | uint64_t(list) << 8 | uint64_t(items.size()) << 16);
    for (const IValue& e : items) {
      // A list of floats may be scale factors, which decide a shape.
      if (list == kDoubles) {
        double d = e.toDouble();
        uint64_t bits;
        std::memcpy(&bits, &d, 8);
        key.word(bits);
      }
      key_value(key, op, e, list == kScalars, kInts, list == kOptionalTensors, written);
    }
  } else {
    TORCH_CHECK(false, op.name->name, " has an argument of kind ", v.tagKind(), ", which cannot travel");
  }
}

uint64_t hash(const OpInfo* op, const std::vector<uint64_t>& words) {
  uint64_t h = reinterpret_cast<uintptr_t>(op);
  for (auto w : words) {
    __uint128_t m = static_cast<__uint128_t>(h ^ w) * 0x9E3779B97F4A7C15ull;
    h = static_cast<uint64_t>(m) ^ static_cast<uint64_t>(m >> 64);
  }
  return h;
}

// Definitions.

void write_value(Writer& w, const Key& key, size_t& tensor, const IValue& v, bool number, ListOf list,
                 bool is_index) {
  if (v.isTensor()) {
    auto& given = v.toTensor();
    if (!given.defined()) {
      w.u8(kUndefined);
      return;
    }
    if (!is_sky(given) && given.dim() == 0 && !is_index) {
      w.u8(kHostScalar);
      w.u8(static_cast<uint8_t>(given.scalar_type()));
      w.u8(given.unsafeGetTensorImpl()->is_wrapped_number());
      return;
    }
    auto& t = key.tensors[tensor++];
    w.u8(kTensor);
    w.u8(static_cast<uint8_t>(t.scalar_type()));
    w.u8(static_cast<uint8_t>(t.dim()));
    w.u8(bits_of(t));
    w.u8(t.storage_offset() != 0);
    for (auto s : t.sizes()) w.i64(s);
    for (auto s : t.strides()) w.i64(s);
  } else if (v.isNone()) {
    w.u8(kNone);
  } else if (v.isInt() && number) {
    w.u8(kNumber);
  } else if (v.isInt()) {
    w.u8(kInt);
    w.i64(v.toInt());
  } else if (v.isDouble()) {
    w.u8(kDouble);
  } else if (v.isComplexDouble()) {
    w.u8(kComplex);
  } else if (v.isBool()) {
    w.u8(kBool);
    w.u8(v.toBool());
  } else if (v.isString()) {
    w.u8(kString);
    w.text(v.toStringRef());
  } else if (v.isDevice()) {
    w.u8(v.toDevice().type() == kSky ? kDevice : kHostDevice);
  } else if (v.isGenerator()) {
    w.u8(kGeneratorArg);
  } else {
    auto items = v.toListRef();
    w.u8(kList);
    w.u8(list);
    w.u32(static_cast<uint32_t>(items.size()));
    for (const IValue& e : items) write_value(w, key, tensor, e, list == kScalars, kInts, list == kOptionalTensors);
  }
}

void write_promise(Writer& w, const Template& t) {
  w.u8(t.known);
  for (auto& out : t.outs) {
    w.u8(out.kind);
    w.u8(static_cast<uint8_t>(out.layout.dtype));
    w.u8(static_cast<uint8_t>(out.layout.sizes.size()));
    w.u8(out.layout.bits);
    for (auto n : out.layout.sizes) w.i64(n);
    for (auto n : out.layout.strides) w.i64(n);
  }
}

Template* define(Session& session, std::unique_ptr<Template> made, const Key& key, const IValue* args, uint64_t h) {
  const auto& op = *made->op;
  made->id = session.template_count++;
  made->key = key.words;
  Writer w;
  w.text(op.name->name);
  w.text(op.name->overload_name);
  w.u32(static_cast<uint32_t>(key.payload.size()));
  w.u32(static_cast<uint32_t>(op.arguments));
  size_t tensor = 0;
  for (size_t i = 0; i < op.arguments; i++) write_value(w, key, tensor, args[i], op.number[i] && !op.scalars_shape, op.list[i], false);
  write_promise(w, *made);
  Writer record;
  record.u32(kDefine);
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
  layout.dtype = static_cast<c10::ScalarType>(r.u8());
  auto dim = r.u8();
  layout.bits = r.u8();
  for (int i = 0; i < dim; i++) layout.sizes.push_back(r.i64());
  for (int i = 0; i < dim; i++) layout.strides.push_back(r.i64());
  layout.bytes = r.u64();
  layout.contiguous = strictly_contiguous(layout.sizes, layout.strides);
  return layout;
}

IValue read_plain(Reader& r) {
  switch (r.u8()) {
    case kInt: return r.i64();
    case kDouble: return r.f64();
    case kBool: return static_cast<bool>(r.u8());
    case kComplex: {
      double real = r.f64(), imaginary = r.f64();
      return c10::complex<double>(real, imaginary);
    }
    case kString: return r.text();
    default: return IValue();
  }
}

OutInfo read_out(Reader& r, uint32_t& tensors) {
  OutInfo out;
  out.kind = static_cast<Output>(r.u8());
  switch (out.kind) {
    case kNewTensor:
      out.layout = read_layout(r);
      tensors++;
      break;
    case kTensorList: {
      auto n = r.u32();
      for (uint32_t i = 0; i < n; i++) out.items.push_back(read_out(r, tensors));
      break;
    }
    case kValue: out.value = read_plain(r); break;
    default: break;
  }
  return out;
}

at::Tensor new_tensor(Session& session, const Layout& layout, std::string& slots) {
  auto storage = session.new_storage(layout.bytes, false);
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::scalarTypeToTypeMeta(layout.dtype));
  if (layout.contiguous) impl->set_sizes_contiguous(layout.sizes);
  else impl->set_sizes_and_strides(layout.sizes, layout.strides);
  if (C10_UNLIKELY(layout.bits)) {
    if (layout.bits & kConjugated) impl->_set_conj(true);
    if (layout.bits & kNegated) impl->_set_neg(true);
  }
  auto slot = Session::slot_of(impl.get());
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
  impl->set_sizes_and_strides(change.layout.sizes, change.layout.strides);
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  // Its offset is not part of the template, so the storage may have grown by more than the first time.
  auto bytes = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), impl->itemsize(),
                                                static_cast<size_t>(impl->storage_offset()));
  if (storage->nbytes() < bytes) storage->set_nbytes(bytes);
}

}  // namespace

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  // A backward pass only issues operations, which a thread of its own does not make faster: handing over to one
  // costs 50 us. Nor is there one for a device that came after the process's first backward pass.
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  const auto& info = info_of(op);
  const IValue* args = stack->data() + stack->size() - info.arguments;
  // One per depth of nesting: moving a host index over runs operations of its own.
  thread_local std::vector<std::unique_ptr<Key>> keys;
  thread_local size_t depth = 0;
  if (keys.size() <= depth) keys.push_back(std::make_unique<Key>());
  Key& key = *keys[depth];
  struct Depth {
    size_t& d;
    Key& k;
    Depth(size_t& d, Key& k) : d(d), k(k) { d++; }
    ~Depth() { d--; k.clear(); }
  } nested(depth, key);
  key.clear();
  key_settings(key);
  for (size_t i = 0; i < info.arguments && !key.session; i++) key.session = find_session(args[i]);
  if (!key.session) key.session = &session_at(-1);
  for (size_t i = 0; i < info.arguments; i++)
    key_value(key, info, args[i], info.number[i], info.list[i], false, info.written[i]);

  auto& session = *key.session;
  c10::SmallVector<IValue, 4> results;
  {
    std::unique_lock lock(session.mutex);
    session.begin();
    session.stats.operations++;
    tell_settings(session, key.settings);
    Template* t = session.last ? session.last->next : nullptr;
    if (!t || t->op != &info || t->key != key.words) {
      auto h = hash(&info, key.words);
      t = find(session, info, key, h);
      if (!t) {
        auto made = std::make_unique<Template>();
        made->op = &info;
        // Without the lock: PyTorch's code may want Python's, whose holder may be freeing a tensor of ours.
        lock.unlock();
        made->known = infer(op, info, args, *made);
        lock.lock();
        session.begin();
        tell_settings(session, key.settings);
        t = find(session, info, key, h);
        if (!t) t = define(session, std::move(made), key, args, h);
      }
      if (session.last) session.last->next = t;
    }
    session.last = t;
    std::string slots;
    bool asks = !t->known || info.asks_always || (info.indexes && key.masked);
    if (asks) {
      session.stats.asks++;
      Writer w;
      w.u32(kAsk);
      w.u32(static_cast<uint32_t>(4 + key.payload.size()));
      w.u32(t->id);
      w.raw(key.payload.data(), key.payload.size());
      auto answer = session.ask(w.bytes().data(), w.size());
      Reader r(answer.data(), answer.size());
      t->outs.clear();
      t->resized.clear();
      t->new_tensors = 0;
      for (auto returned : info.returns)
        if (returned < 0) t->outs.push_back(read_out(r, t->new_tensors));
      auto changed = r.u32();
      for (uint32_t i = 0; i < changed; i++) {
        auto tensor = r.u32();
        t->resized.push_back({tensor, read_layout(r)});
      }
      t->known = true;
    } else {
      session.stats.hits++;
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
      key.payload.append(slots);
      session.put(&t->id, 4);
      session.put(key.payload.data(), key.payload.size());
    }
    for (auto& change : t->resized) apply(change, key);
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
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    auto plain = name.name.substr(6);
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
    registrations.push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::PrivateUse1, c10::KernelFunction::makeFromBoxedFunction<&fallback>(),
        std::nullopt, nullptr, "skyward"));
    count++;
  }
  return count;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace sky
