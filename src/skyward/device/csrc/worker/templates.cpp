// Definitions: what an operation's arguments are made of, and what it returns.
#include "session.h"

namespace sky {

Spec Session::read_spec(Reader& r) {
  Spec s;
  s.kind = static_cast<Argument>(r.u8());
  switch (s.kind) {
    case kNone: break;
    case kUndefined: s.value = at::Tensor(); break;
    case kTensor: {
      auto dtype = r.u8(), dim = r.u8(), bits = r.u8();
      s.flag = r.u8();
      s.layout = layouts_.number(Layout::read(r, dtype, dim, bits));
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

// What the client has worked out itself; checked against every result, as what we told it is.
OutSpec Session::read_out(Reader& r, uint32_t& tensors) {
  OutSpec out;
  out.kind = static_cast<Output>(r.u8());
  if (out.kind != kNewTensor) throw Malformed("a promised output of unknown kind");
  auto dtype = r.u8(), dim = r.u8(), bits = r.u8();
  out.layout = layouts_.number(Layout::read(r, dtype, dim, bits));
  tensors++;
  return out;
}

void Session::define(Reader& r) {
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
  if (r.u8()) {
    t.known = true;
    for (auto written : t.alias)
      if (!written) t.outs.push_back(read_out(r, t.new_slots));
  }
  templates_.push_back(std::move(t));
}

}  // namespace sky
