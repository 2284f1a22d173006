// Definitions: what an operation's arguments are made of, and what it returns.
#include <algorithm>

#include "../wire/values.h"
#include "session.h"

namespace sky {

LaterImport& later_import() {
  static LaterImport later;
  return later;
}

namespace {

// Importing torch takes long: not before an operator is named that is Python's.
void find_operator(Template& t, const std::string& name, const std::string& overload, const std::string& modules) {
  t.why_not = " is not known to the worker";
  auto& later = later_import();
  auto find = [&] { t.op = c10::Dispatcher::singleton().findSchema({name, overload}); };
  find();
  if (later.run && (!t.op || later.is_pythons(name, overload))) {
    std::exchange(later.run, nullptr)();
    find();
  }
  if (t.op || !import_operator) return;
  if (name.rfind("aten::", 0) == 0) {
    t.why_not += ": its PyTorch may be of another version than the client's";
    return;
  }
  std::vector<char> message(4 << 10);
  auto wanted = name + "\n" + overload + "\n" + modules;
  if (import_operator(wanted.c_str(), message.data(), message.size())) t.why_not += std::string(": ") + message.data();
  find();
}

// How many dtypes, layouts or memory formats there are, if an argument is one of them: an integer that PyTorch looks up
// without a check.
int64_t choices_of(const c10::Argument& argument) {
  auto type = argument.real_type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  switch (type->kind()) {
    case c10::TypeKind::ScalarTypeType: return static_cast<int64_t>(c10::ScalarType::NumOptions);
    case c10::TypeKind::LayoutType: return static_cast<int64_t>(c10::Layout::NumOptions);
    case c10::TypeKind::MemoryFormatType: return static_cast<int64_t>(c10::MemoryFormat::NumOptions);
    default: return 0;
  }
}

bool has_generator(const Spec& s) {
  return s.kind == kGeneratorArg || std::any_of(s.items.begin(), s.items.end(), has_generator);
}

void check_choice(const c10::Argument& argument, const Spec& s) {
  auto choices = choices_of(argument);
  if (!choices || s.kind == kNone) return;
  if (s.kind != kInt || s.value.toInt() < 0 || s.value.toInt() >= choices)
    throw Malformed("an unknown " + argument.name());
}

}  // namespace

bool LaterImport::is_pythons(const std::string& name, const std::string& overload) const {
  if (names.empty()) return false;
  auto bare = name.substr(name.find("::") == std::string::npos ? 0 : name.find("::") + 2);
  return names.count(bare) || names.count(name) || names.count(bare + "." + overload);
}

Spec Session::read_spec(Reader& r, bool is_item) {
  Spec s;
  s.kind = read_kind(r);
  const auto& row = row_of(s.kind);
  s.constant = row.sent == Content::kNothing;
  switch (row.said) {
    case Content::kLayout: {
      auto dtype = r.u8(), dim = r.u8(), bits = r.u8();
      s.flag = r.u8();
      s.layout = layouts_.number(Layout::read(r, dtype, dim, bits));
      break;
    }
    case Content::kDtype:
      s.dtype = checked_dtype(r.u8());
      s.flag = r.u8();
      break;
    case Content::kItems: {
      if (is_item) throw Malformed("a list in a list");
      s.list = static_cast<ListOf>(r.u8());
      if (s.list >= kLists) throw Malformed("a list of unknown elements");
      auto n = r.u32();
      s.constant = true;
      for (uint32_t i = 0; i < n; i++) {
        s.items.push_back(read_spec(r, true));
        s.constant = s.constant && s.items.back().constant;
      }
      Reader empty(nullptr, 0);
      if (s.constant) s.value = build_list(s, empty);
      break;
    }
    default: {
      auto value = read(r, row.said);
      if (s.kind == kDevice) s.value = device_;
      else if (s.kind == kHostDevice) s.value = c10::Device(c10::kCPU);
      else if (s.constant) s.value = from_plain(s.kind, value);
    }
  }
  return s;
}

std::vector<Spec> Session::read_specs(Reader& r, uint32_t count) {
  std::vector<Spec> specs;
  for (uint32_t i = 0; i < count; i++) specs.push_back(read_spec(r, false));
  return specs;
}

// What the client has worked out itself; checked against every result, as what we told it is.
OutSpec Session::read_out(Reader& r, uint32_t& tensors, bool is_item) {
  OutSpec out;
  out.kind = static_cast<Output>(r.u8());
  if (out.kind == kUndefinedTensor || out.kind == kValue) return out;
  if (out.kind == kTensorList && !is_item) {
    auto count = r.u32();
    for (uint32_t i = 0; i < count; i++) out.items.push_back(read_out(r, tensors, true));
    return out;
  }
  if (out.kind != kNewTensor) throw Malformed("a promised output of unknown kind");
  auto dtype = r.u8(), dim = r.u8(), bits = r.u8();
  out.layout = layouts_.number(Layout::read(r, dtype, dim, bits));
  tensors++;
  return out;
}

void Session::define(Reader& r) { templates_.push_back(read_template(r)); }

void Session::redefine(Reader& r) {
  auto id = r.u32();
  if (id >= templates_.size()) throw Malformed("an undefined template");
  forget_loop("an operation was forgotten");
  templates_[id] = read_template(r);
}

Template Session::read_template(Reader& r) {
  auto name = r.text(), overload = r.text(), origin = r.text();
  auto signature = origin.substr(0, origin.find('\n'));
  Template t;
  t.name = overload.empty() ? name : name + "." + overload;
  t.is_graph = name == "skyward::run";
  t.is_own = name.starts_with("aten::");
  t.is_collective = ranks_.is_mesh() && (t.is_graph || is_collective(name));
  find_operator(t, name, overload, origin.substr(std::min(origin.size(), signature.size() + 1)));
  t.payload = r.u32();
  auto n = r.u32();
  if (!t.op) return t;
  const auto& schema = t.op->schema();
  // Of another library, the node may have another version: an error of the calls that use it, and of no other.
  auto own_signature = signature.empty() ? "" : signature_of(schema);
  if (signature != own_signature) {
    t.why_not = " is " + own_signature + " on the node and " + signature +
                " in the client; install the version of its library that the client has";
    t.op = std::nullopt;
    return t;
  }
  if (n != schema.arguments().size()) throw Malformed("arguments that do not fit " + name);
  try {
    t.args = read_specs(r, n);
  } catch (const c10::Error& e) {
    // Elements that do not fit their list are as malformed as bytes that end early.
    if (signature.empty()) throw Malformed(e.what_without_backtrace());
    t.why_not = std::string(" has an argument that cannot travel: ") + e.what_without_backtrace();
    t.op = std::nullopt;
    return t;
  }
  t.uses_generator = std::any_of(t.args.begin(), t.args.end(), has_generator);
  for (uint32_t i = 0; i < n; i++) {
    check_choice(schema.arguments()[i], t.args[i]);
    auto* alias = schema.arguments()[i].alias_info();
    t.args[i].written = alias && alias->isWrite();
    for (auto& item : t.args[i].items) item.written = t.args[i].written;
  }
  for (auto& ret : schema.returns()) t.alias.push_back(ret.alias_info() && ret.alias_info()->isWrite());
  if (r.u8()) {
    t.known = true;
    for (auto written : t.alias)
      if (!written) t.outs.push_back(read_out(r, t.new_slots, false));
  }
  return t;
}

}  // namespace sky
