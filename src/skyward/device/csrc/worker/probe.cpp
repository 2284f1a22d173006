// A probe for tests: the arguments of a record as text, read by the code that runs operations.
//
// Any bytes are either read within their bounds or Malformed.
#include <c10/util/StringUtil.h>

#include "../wire/values.h"
#include "session.h"

namespace sky {
namespace {

std::string exactly(double number) {
  char text[64];
  snprintf(text, sizeof text, "%a", number);
  return text;
}

}  // namespace

void Session::show(std::string& out, Reader& payload, Spec& s) {
  auto sent = row_of(s.kind).sent;
  out += std::to_string(s.kind) + ":";
  if (sent == Content::kItems) {
    out += std::to_string(s.list) + "[";
    for (auto& e : s.items) show(out, payload, e);
    out += "]";
    if (s.constant && s.value.toListRef().size() != s.items.size()) out += "lost";
  } else if (sent == Content::kPlace) {
    const auto& layout = layouts_[s.layout];
    auto slot = payload.u32();
    auto offset = s.flag ? payload.i64() : 0;
    out += c10::str(int(layout.dtype), c10::IntArrayRef(layout.sizes), c10::IntArrayRef(layout.strides),
                    int(layout.bits), "@", slot, "+", offset);
  } else if (sent == Content::kId) {
    out += std::to_string(payload.u32());
  } else if (s.kind == kHostScalar) {
    auto number = build(payload, s).toTensor();
    auto* bytes = static_cast<const unsigned char*>(number.const_data_ptr());
    out += c10::str(int(number.scalar_type()), int(number.unsafeGetTensorImpl()->is_wrapped_number()), "=");
    for (size_t i = 0; i < number.itemsize(); i++) out += c10::str(int(bytes[i]), ",");
  } else {
    auto v = build(payload, s);
    if (v.isInt()) out += std::to_string(v.toInt());
    else if (v.isUnsigned()) out += std::to_string(v.toUInt());
    if (v.isDouble()) out += exactly(v.toDouble());
    if (v.isComplexDouble()) out += exactly(v.toComplexDouble().real()) + "i" + exactly(v.toComplexDouble().imag());
    if (v.isBool()) out += v.toBool() ? "true" : "false";
    if (v.isString()) out += v.toStringRef();
    if (v.isTensor()) out += v.toTensor().defined() ? "tensor" : "undefined";
  }
  out += ";";
}

std::string Session::probe(Reader& r, Reader& payload, uint32_t count) {
  auto specs = read_specs(r, count);
  std::string out;
  for (auto& s : specs) show(out, payload, s);
  if (r.left() || payload.left()) throw Malformed("bytes after the last argument");
  return out;
}

}  // namespace sky

// 0: `text` holds the arguments; 1: they are malformed; 2: something else went wrong, which is a defect.
extern "C" int sky_worker_probe(const char* data, size_t size, const char* sent, size_t sent_size, uint32_t count,
                                char* text, size_t capacity) {
  static sky::Session session({sky::Way(0, false), sky::Way(0, false)}, false, c10::Device(c10::kCPU));
  try {
    sky::Reader r(data, size), payload(sent, sent_size);
    snprintf(text, capacity, "%s", session.probe(r, payload, count).c_str());
    return 0;
  } catch (const sky::Malformed& e) {
    snprintf(text, capacity, "%s", e.what());
    return 1;
  } catch (const c10::Error& e) {
    snprintf(text, capacity, "%s", e.what_without_backtrace());
    return 1;
  } catch (const std::exception& e) {
    snprintf(text, capacity, "%s", e.what());
    return 2;
  }
}

// Whether an operation on plain tensors, alone or in a list, goes around the dispatcher.
extern "C" int sky_worker_probe_keys() {
  const c10::Device cpu(c10::kCPU);
  torch::jit::Stack alone{at::empty({2})}, listed{c10::List<at::Tensor>({at::empty({2}), at::empty({3})})};
  return !sky::plain_keys(alone, cpu).empty() && !sky::plain_keys(listed, cpu).empty();
}
