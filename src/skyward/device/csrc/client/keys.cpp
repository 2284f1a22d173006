#include "keys.h"

#include "../wire/values.h"
#include "settings.h"

namespace sky {

using c10::IValue;

namespace {

uint8_t bits_of(const at::Tensor& t) { return (t.is_conj() ? kConjugated : 0) | (t.is_neg() ? kNegated : 0); }

void join(Key& key, Session& session) {
  if (!key.session) key.session = &session;
  SKY_CHECK(key.session == &session,
            "Expected all tensors to be on the same device, but found sky:", key.session->index,
            " and sky:", session.index, "; move one with .to()");
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
    SKY_CHECK(is_index && tensor.device().is_cpu(), "Expected all tensors to be on the same device, but found ",
              tensor.device(), " and sky:", key.session ? key.session->index : 0, "; move the tensor or the model on ",
              tensor.device(), " with .to()");
    tensor = tensor.to(c10::Device(kSky, static_cast<c10::DeviceIndex>(key.session->index)));
    key.moved.push_back(tensor);
  }
  auto* impl = tensor.unsafeGetTensorImpl();
  SKY_CHECK(impl->has_storage() && impl->unsafe_storage().unsafeGetStorageImpl(),
            "a tensor without storage reached the sky device; this transform is not supported on it");
  if (written) Session::unshare(impl);
  auto place = Session::place_of(impl);
  join(key, place.session);
  auto sizes = impl->sizes();
  auto offset = place.offset;
  bool contiguous = strictly_contiguous(sizes, impl->strides());
  auto dtype = impl->dtype().toScalarType();
  if (is_index && (dtype == c10::kBool || dtype == c10::kByte)) key.masked = true;
  key.word(kTensor | uint64_t(sizes.size()) << 8 | uint64_t(dtype) << 16 | uint64_t(offset != 0) << 24 |
           uint64_t(contiguous) << 25 | uint64_t(bits_of(tensor)) << 26);
  for (auto s : sizes) key.word(static_cast<uint64_t>(s));
  if (!contiguous)
    for (auto s : impl->strides()) key.word(static_cast<uint64_t>(s));
  key.raw(&place.slot, 4);
  if (offset) key.raw(&offset, 8);
  key.tensors.push_back(std::move(tensor));
}

// The worker knows no slices: it would resize the storage that the slice is of.
void check_resizable(const IValue& v) {
  if (v.isList())
    for (const IValue& e : v.toListRef()) check_resizable(e);
  if (!v.isTensor() || !v.toTensor().defined() || !is_sky(v.toTensor())) return;
  SKY_CHECK(
      v.toTensor().unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->resizable(),
      "a slice of a storage cannot be resized, so it cannot be given as out=; copy the result to it with copy_()");
}

// An argument that is neither a tensor nor a list.
struct Seen {
  Argument kind;
  Value value;
};

Seen see(const OpInfo& op, const IValue& v, bool number) {
  if (auto found = plain(v)) {
    bool shapes = found->first == kInt && number && !op.scalars_shape;
    return {shapes ? kNumber : found->first, found->second};
  }
  Seen seen{kNone, {}};
  if (v.isDevice()) {
    seen.kind = v.toDevice().type() == kSky ? kDevice : kHostDevice;
    return seen;
  }
  SKY_CHECK(v.isGenerator(), op.name->name, " has an argument of kind ", v.tagKind(), ", which cannot travel");
  auto generator = v.toGenerator();
  SKY_CHECK(generator.device().type() == kSky, "Expected a 'sky' device type for generator but found '",
            generator.device().type(), "'");
  seen.kind = kGeneratorArg;
  seen.value.integer = static_cast<int64_t>(generator.unsafeGetGeneratorImpl()->get_offset());
  return seen;
}

void key_bits(Key& key, double number) {
  uint64_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  key.word(bits);
}

// What the template says is the key, word by word; what it does not say is the payload.
void key_seen(Key& key, const Seen& seen) {
  const auto& row = row_of(seen.kind);
  switch (row.said) {
    case Content::kInteger:
      key.word(seen.kind);
      key.word(static_cast<uint64_t>(seen.value.integer));
      break;
    case Content::kText: {
      auto text = seen.value.text;
      key.word(seen.kind | uint64_t(text.size()) << 8);
      for (size_t i = 0; i < text.size(); i += 8) {
        uint64_t w = 0;
        std::memcpy(&w, text.data() + i, std::min<size_t>(8, text.size() - i));
        key.word(w);
      }
      break;
    }
    case Content::kByte: key.word(seen.kind | static_cast<uint64_t>(seen.value.integer) << 8); break;
    default: key.word(seen.kind);
  }
  write(key, row.sent, seen.value);
}

void key_value(Key& key, const OpInfo& op, const IValue& v, bool number, ListOf list, bool is_index, bool written) {
  if (v.isTensor()) {
    key_tensor(key, v.toTensor(), is_index, written);
  } else if (v.isList()) {
    auto items = v.toListRef();
    key.word(kList | uint64_t(list) << 8 | uint64_t(items.size()) << 16);
    for (const IValue& e : items) {
      SKY_CHECK(!e.isList(), op.name->name, " has a list of lists among its arguments, which cannot travel");
      // A list of floats may be scale factors, which decide a shape.
      if (list == kDoubles) key_bits(key, e.toDouble());
      key_value(key, op, e, list == kScalars, kInts, list == kOptionalTensors, written);
    }
  } else {
    auto seen = see(op, v, number);
    if (seen.kind == kDevice) join(key, session_at(v.toDevice().index()));
    if (seen.kind == kDouble && op.scalars_shape) key_bits(key, seen.value.real);
    key_seen(key, seen);
  }
}

void write_tensor(Writer& w, const Key& key, size_t& tensor, const at::Tensor& given, bool is_index) {
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
  w.u8(Session::place_of(t.unsafeGetTensorImpl()).offset != 0);
  for (auto s : t.sizes()) w.i64(s);
  for (auto s : t.strides()) w.i64(s);
}

void write_value(Writer& w, const Key& key, const OpInfo& op, size_t& tensor, const IValue& v, bool number, ListOf list,
                 bool is_index) {
  if (v.isTensor()) {
    write_tensor(w, key, tensor, v.toTensor(), is_index);
  } else if (v.isList()) {
    auto items = v.toListRef();
    w.u8(kList);
    w.u8(list);
    w.u32(static_cast<uint32_t>(items.size()));
    for (const IValue& e : items) write_value(w, key, op, tensor, e, list == kScalars, kInts, list == kOptionalTensors);
  } else {
    auto seen = see(op, v, number);
    w.u8(seen.kind);
    write(w, row_of(seen.kind).said, seen.value);
  }
}

void add_fields(std::string& out, const Key& key, const OpInfo& op, size_t& tensor, const IValue& v, bool written,
                bool number, bool is_index) {
  if (v.isList()) {
    for (const IValue& e : v.toListRef())
      add_fields(out, key, op, tensor, e, written, number, v.isOptionalTensorList() || is_index);
  } else if (!v.isTensor()) {
    switch (row_of(see(op, v, number).kind).sent) {
      case Content::kId: out += kGeneratorField; break;
      case Content::kInteger: out += kIntegerField; break;
      case Content::kReal: out += kRealField; break;
      case Content::kPair: out += kComplexField; break;
      default: break;
    }
  } else if (auto& given = v.toTensor(); given.defined()) {
    if (!is_sky(given) && given.dim() == 0 && !is_index) {
      out += kNumberField;
      out += static_cast<char>(given.scalar_type());
      return;
    }
    out += written ? kWrittenSlotField : kSlotField;
    out += static_cast<char>(given.itemsize());
    if (Session::place_of(key.tensors[tensor++].unsafeGetTensorImpl()).offset) out += kOffsetField;
  }
}

}  // namespace

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

void key_settings(Key& key) {
  static const uint64_t usual = settings_now();
  key.settings = settings_now();
  if (C10_UNLIKELY(key.settings != usual)) {
    key.word(0xff);
    key.word(key.settings);
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

void key_arguments(Key& key, const OpInfo& op, const IValue* args) {
  for (auto i : op.outs) check_resizable(args[i]);
  SKY_CHECK(!op.indexes || is_sky(args[0].toTensor()) || !find_session(args[1]),
            "indices should be either on cpu or on the same device as the indexed tensor (",
            args[0].toTensor().device(), ")");
  for (size_t i = 0; i < op.arguments && !key.session; i++) key.session = find_session(args[i]);
  if (!key.session) key.session = &session_at(-1);
  for (size_t i = 0; i < op.arguments; i++) key_value(key, op, args[i], op.number[i], op.list[i], false, op.written[i]);
}

void write_arguments(Writer& w, const Key& key, const OpInfo& op, const IValue* args) {
  size_t tensor = 0;
  for (size_t i = 0; i < op.arguments; i++) write_value(w, key, op, tensor, args[i], op.number[i], op.list[i], false);
}

std::string payload_fields(const Key& key, const OpInfo& op, const IValue* args) {
  std::string fields;
  size_t tensor = 0;
  for (size_t i = 0; i < op.arguments; i++)
    add_fields(fields, key, op, tensor, args[i], op.written[i], op.list[i] == kScalars || op.number[i],
               op.list[i] == kOptionalTensors);
  return fields;
}

}  // namespace sky
