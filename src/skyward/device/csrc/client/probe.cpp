// A probe for tests: random arguments as the client writes them, and the text that the worker's probe must give.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <cmath>
#include <limits>
#include <random>

#include "keys.h"

namespace sky {
namespace {

using c10::IValue;

std::string exactly(double number) {
  char text[64];
  snprintf(text, sizeof text, "%a", number);
  return text;
}

class Arguments {
 public:
  Arguments(uint64_t seed, c10::Device device) : random_(seed), device_(device) {}

  void make(size_t count) {
    op_.arguments = count;
    op_.name = &name_;
    op_.scalars_shape = below(4) == 0;
    for (size_t i = 0; i < count; i++) {
      op_.number.push_back(below(2));
      op_.written.push_back(false);
      op_.list.push_back(static_cast<ListOf>(below(kLists)));
      args.push_back(below(4) ? single(op_.number[i]) : list(op_.list[i]));
      text += ";";
    }
  }

  void write(Key& key, Writer& w) const {
    key_arguments(key, op_, args.data());
    write_arguments(w, key, op_, args.data());
  }

  std::vector<IValue> args;
  std::string text;

 private:
  uint64_t below(uint64_t n) { return random_() % n; }
  int64_t integer() {
    static constexpr int64_t edges[] = {0, 1, -1, std::numeric_limits<int64_t>::min(),
                                        std::numeric_limits<int64_t>::max()};
    return below(2) ? edges[below(5)] : static_cast<int64_t>(random_());
  }
  double real() {
    static constexpr double edges[] = {0.0, -0.0, std::numeric_limits<double>::infinity(), 5e-324, 1.5};
    return below(2) ? edges[below(5)] : std::ldexp(static_cast<double>(below(1 << 20)), int(below(100)) - 50);
  }
  std::string word() {
    std::string made;
    for (auto n = below(20); n; n--) made += static_cast<char>('a' + below(26));
    return made;
  }

  void say(Argument kind, const std::string& what) { text += std::to_string(kind) + ":" + what; }

  IValue integer(bool number) {
    auto n = integer();
    say(number && !op_.scalars_shape ? kNumber : kInt, std::to_string(n));
    return n;
  }
  IValue unsigned_integer() {
    auto n = random_() | uint64_t{1} << 63;
    say(kUnsigned, std::to_string(n));
    return c10::Scalar(n);
  }
  IValue floating() {
    auto d = real();
    say(kDouble, exactly(d));
    return d;
  }
  IValue boolean() {
    bool b = below(2);
    say(kBool, b ? "true" : "false");
    return b;
  }
  IValue string() {
    auto s = word();
    say(kString, s);
    return s;
  }
  IValue complex() {
    c10::complex<double> c(real(), real());
    say(kComplex, exactly(c.real()) + "i" + exactly(c.imag()));
    return c;
  }
  IValue none() {
    say(kNone, "");
    return IValue();
  }
  IValue undefined() {
    say(kUndefined, "undefined");
    return at::Tensor();
  }

  IValue tensor() {
    static constexpr c10::ScalarType dtypes[] = {at::kFloat, at::kLong, at::kByte, at::kComplexDouble, at::kBFloat16};
    auto t = at::empty({int64_t(below(4)), 1 + int64_t(below(3)), 2},
                       at::TensorOptions().dtype(dtypes[below(5)]).device(device_));
    if (below(2)) t = t.transpose(0, below(3));
    if (below(2)) t = t.narrow(2, t.size(2) ? below(t.size(2)) : 0, t.size(2) ? 1 : 0);
    if (t.is_complex() && below(2)) t = t.conj();
    auto place = Session::place_of(t.unsafeGetTensorImpl());
    say(kTensor, c10::str(int(t.scalar_type()), t.sizes(), t.strides(), t.is_conj() ? int(kConjugated) : 0, "@",
                          place.slot, "+", place.offset));
    return t;
  }
  IValue host_scalar() {
    static constexpr c10::ScalarType dtypes[] = {at::kFloat, at::kLong, at::kByte, at::kComplexDouble, at::kBool};
    auto t = at::empty({}, at::TensorOptions().dtype(dtypes[below(5)]));
    bool wrapped = below(2);
    t.unsafeGetTensorImpl()->set_wrapped_number(wrapped);
    auto* bytes = static_cast<unsigned char*>(t.mutable_data_ptr());
    std::string shown;
    for (size_t i = 0; i < t.itemsize(); i++) {
      bytes[i] = static_cast<unsigned char>(t.scalar_type() == at::kBool ? below(2) : below(256));
      shown += c10::str(int(bytes[i]), ",");
    }
    say(kHostScalar, c10::str(int(t.scalar_type()), int(wrapped), "=", shown));
    return t;
  }

  IValue single(bool number) {
    switch (below(13)) {
      case 0: return none();
      case 1: return undefined();
      case 2: return host_scalar();
      case 3: return integer(number);
      case 4: return floating();
      case 5: return complex();
      case 6: return boolean();
      case 7: return string();
      case 8: say(kDevice, ""); return device_;
      case 9: say(kHostDevice, ""); return c10::Device(c10::kCPU);
      case 10: {
        auto generator = at::detail::getPrivateUse1Hooks().getDefaultGenerator(device_.index());
        say(kGeneratorArg, std::to_string(generator.unsafeGetGeneratorImpl()->get_offset()));
        return generator;
      }
      case 11: return unsigned_integer();
      default: return tensor();
    }
  }

  template <typename T, typename F>
  IValue list_with(F&& item) {
    c10::List<T> made;
    for (auto n = below(5); n; n--) {
      made.push_back(item());
      text += ";";
    }
    text += "]";
    return made;
  }

  IValue list(ListOf of) {
    say(kList, std::to_string(of) + "[");
    switch (of) {
      case kTensors: return list_with<at::Tensor>([&] { return (below(4) ? tensor() : undefined()).toTensor(); });
      case kOptionalTensors:
        return list_with<std::optional<at::Tensor>>([&]() -> std::optional<at::Tensor> {
          if (below(2)) return tensor().toTensor();
          none();
          return std::nullopt;
        });
      case kInts: return list_with<int64_t>([&] { return integer(false).toInt(); });
      case kDoubles: return list_with<double>([&] { return floating().toDouble(); });
      case kBools: return list_with<bool>([&] { return boolean().toBool(); });
      case kStrings: return list_with<std::string>([&] { return string().toStringRef(); });
      default: return list_with<at::Scalar>([&] { return (below(2) ? integer(true) : floating()).toScalar(); });
    }
  }

  std::mt19937_64 random_;
  c10::Device device_;
  c10::OperatorName name_{"aten::probe", ""};
  OpInfo op_;
};

}  // namespace

void probe(uint64_t seed, int index, uint32_t count, std::string& definition, std::string& payload, std::string& text) {
  c10::Device device(kSky, static_cast<c10::DeviceIndex>(index));
  c10::DeviceGuard current(device);  // arguments that name no device are of the current one
  Arguments arguments(seed, device);
  arguments.make(count);
  Key key;
  Writer w;
  arguments.write(key, w);
  definition = w.bytes();
  payload = key.payload;
  text = arguments.text;
}

}  // namespace sky
