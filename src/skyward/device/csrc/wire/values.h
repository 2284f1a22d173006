// Values of arguments and results as PyTorch has them, to and from what travels.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <utility>

#include "records.h"

namespace sky {

// What client and worker must agree on about an operation of another library: the types of its arguments and results,
// and which of them it writes to. Names and defaults are the client's alone.
inline std::string signature_of(const c10::FunctionSchema& schema) {
  auto listed = [](const std::vector<c10::Argument>& all) {
    std::string text;
    for (auto& each : all) {
      text += (text.empty() ? "" : ", ") + each.type()->str();
      if (each.alias_info() && each.alias_info()->isWrite()) text += "!";
    }
    return "(" + text + ")";
  };
  return listed(schema.arguments()) + " -> " + listed(schema.returns());
}

// Undefined is a dtype too, but no tensor has it.
inline c10::ScalarType checked_dtype(uint8_t number) {
  auto dtype = static_cast<c10::ScalarType>(number);
  if (number >= static_cast<uint8_t>(c10::ScalarType::NumOptions) || dtype == c10::ScalarType::Undefined)
    throw Malformed("an unknown dtype");
  return dtype;
}

inline void check_layout(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  for (size_t i = 0; i < sizes.size(); i++)
    if (sizes[i] < 0 || strides[i] < 0) throw Malformed("a negative size or stride");
}

// Bytes from the start of a storage that a tensor so laid out may touch; throws where no storage has as many.
inline uint64_t extent_of(c10::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  if (offset < 0) throw Malformed("a negative offset");
  auto last = offset;
  bool is_beyond = false;
  for (size_t i = 0; i < sizes.size(); i++) {
    if (!sizes[i]) return 0;
    int64_t span;
    is_beyond |= __builtin_mul_overflow(sizes[i] - 1, strides[i], &span);
    is_beyond |= __builtin_add_overflow(last, span, &last);
  }
  uint64_t bytes;
  is_beyond |= __builtin_mul_overflow(static_cast<uint64_t>(last) + 1, c10::elementSize(dtype), &bytes);
  if (is_beyond) throw Malformed("a tensor larger than any memory");
  return bytes;
}

// The kind and value of what stands for itself: no tensor, list, device or generator.
inline std::optional<std::pair<Argument, Value>> plain(const c10::IValue& v) {
  Value value;
  if (v.isInt()) {
    value.integer = v.toInt();
    return std::pair(kInt, value);
  }
  // Only numbers that an i64 does not hold are kept so.
  if (v.isUnsigned()) {
    value.integer = static_cast<int64_t>(v.toUInt());
    return std::pair(kUnsigned, value);
  }
  if (v.isDouble()) {
    value.real = v.toDouble();
    return std::pair(kDouble, value);
  }
  if (v.isBool()) {
    value.integer = v.toBool();
    return std::pair(kBool, value);
  }
  if (v.isNone()) return std::pair(kNone, value);
  if (v.isString()) {
    value.text = v.toStringRef();
    return std::pair(kString, value);
  }
  if (v.isComplexDouble()) {
    auto number = v.toComplexDouble();
    value.real = number.real();
    value.imaginary = number.imag();
    return std::pair(kComplex, value);
  }
  return std::nullopt;
}

inline c10::IValue from_plain(Argument kind, const Value& value) {
  switch (kind) {
    case kNone: return c10::IValue();
    case kUndefined: return at::Tensor();
    case kInt:
    case kNumber: return value.integer;
    case kUnsigned: return c10::Scalar(static_cast<uint64_t>(value.integer));
    case kDouble: return value.real;
    case kComplex: return c10::complex<double>(value.real, value.imaginary);
    case kBool: return value.integer != 0;
    case kString: return std::string(value.text);
    default: throw Malformed("an argument without a value");
  }
}

// A result that is a value: its kind, and all there is of it.
inline void write_plain(Writer& w, Argument kind, const Value& value) {
  w.u8(kind);
  write(w, row_of(kind).said, value);
  write(w, row_of(kind).sent, value);
}

inline c10::IValue read_plain(Reader& r) {
  auto kind = read_kind(r);
  auto row = row_of(kind);
  auto value = read(r, row.said == Content::kNothing ? row.sent : row.said);
  return from_plain(kind, value);
}

}  // namespace sky
