#include "programs.h"

#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "../wire/values.h"

namespace sky {
namespace {

std::atomic<uint32_t> last_program{0};
std::mutex programs_mutex;
std::unordered_map<int64_t, std::shared_ptr<Program>> programs;

std::vector<uint32_t> read_numbers(Reader& r) {
  std::vector<uint32_t> numbers(r.u32());
  for (auto& each : numbers) each = r.u32();
  return numbers;
}

template <typename T>
void write_as(std::string& out, T value) {
  char bytes[16] = {};
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof bytes);
}

// As the number on the host would be: `write_as` fills what is left of an element.
void write_number(std::string& out, c10::ScalarType dtype, double value) {
  switch (dtype) {
    case c10::kDouble: return write_as(out, value);
    case c10::kFloat: return write_as(out, static_cast<float>(value));
    case c10::kHalf: return write_as(out, c10::Half(static_cast<float>(value)));
    case c10::kBFloat16: return write_as(out, c10::BFloat16(static_cast<float>(value)));
    default: fail("a number of this dtype cannot vary");
  }
}

void write_number(std::string& out, c10::ScalarType dtype, int64_t value) {
  switch (dtype) {
    case c10::kLong: return write_as(out, value);
    case c10::kInt: return write_as(out, static_cast<int32_t>(value));
    case c10::kShort: return write_as(out, static_cast<int16_t>(value));
    case c10::kChar: return write_as(out, static_cast<int8_t>(value));
    case c10::kByte: return write_as(out, static_cast<uint8_t>(value));
    default: fail("a number of this dtype cannot vary");
  }
}

}  // namespace

Program::Program(Session& session, Reader& r) : serial_(session.serial), id_(++last_program) {
  settings_before_ = r.u64();
  settings_after_ = r.u64();
  reserved_ = read_numbers(r);
  written_ = read_numbers(r);
  templates_ = read_numbers(r);
  std::vector<uint32_t> places;
  for (auto left = r.u32(); left; left--) {
    auto field = static_cast<char>(r.u8());
    varying_.push_back({field, checked_dtype(r.u8())});
    places.push_back(r.u32());
  }
  for (auto left = r.u32(); left; left--) {
    auto slot = r.u32();
    auto bytes = r.u64();
    inputs_.push_back({slot, bytes, r.u8() != 0});
  }
  for (auto left = r.u32(); left; left--) {
    auto slot = r.u32();
    results_.push_back({slot, r.u64()});
  }
  for (auto left = r.u32(); left; left--) {
    ResultTensor made{};
    made.result = r.u32();
    auto dtype = r.u8(), dim = r.u8();
    made.layout.dtype = checked_dtype(dtype);
    for (int i = 0; i < dim; i++) made.layout.sizes.push_back(r.i64());
    for (int i = 0; i < dim; i++) made.layout.strides.push_back(r.i64());
    made.offset = r.i64();
    SKY_CHECK(made.result < results_.size(), "a tensor over no result");
    tensors_.push_back(std::move(made));
  }
  Writer w;
  w.u32(id_);
  w.u32(static_cast<uint32_t>(places.size()));
  for (size_t i = 0; i < places.size(); i++) {
    w.u32(places[i]);
    w.u8(varying_[i].field == kNumberField ? 16 : 8);
  }
  w.raw(r.at(), r.left());
  Writer record;
  record.u32(kProgram);
  record.text(w.bytes());
  std::lock_guard lock(session.mutex);
  session.begin();
  session.put(record.bytes().data(), record.size());
  pin(1);
}

Program::~Program() {
  auto* session = session_by_serial(serial_);
  if (!session) return;
  {
    std::lock_guard lock(session->mutex);
    pin(-1);
    uint32_t record[] = {kForgetProgram, id_};
    try {
      session->check_open();
      session->put(record, sizeof record);
    } catch (const std::exception&) {
      // The worker that knew it is gone.
    }
  }
  session->give_back(reserved_);
}

// With the session's lock.
void Program::pin(int by) {
  auto* session = session_by_serial(serial_);
  std::unordered_set<uint32_t> wanted(templates_.begin(), templates_.end());
  for (auto& [hash, each] : session->templates)
    if (wanted.count(each->id)) each->programs += static_cast<uint32_t>(by);
}

std::string Program::written(const std::vector<double>& reals, const std::vector<int64_t>& integers) const {
  std::string out;
  size_t real = 0, integer = 0;
  for (auto& each : varying_) {
    bool is_number = each.field == kNumberField;
    bool is_real = is_number ? c10::isFloatingType(each.dtype) : each.field != kIntegerField;
    SKY_CHECK(is_real ? real < reals.size() : integer < integers.size(), "a program wants more numbers");
    if (is_number && is_real) write_number(out, each.dtype, reals[real++]);
    else if (is_number) write_number(out, each.dtype, integers[integer++]);
    else if (is_real) out.append(reinterpret_cast<const char*>(&reals[real++]), 8);
    else out.append(reinterpret_cast<const char*>(&integers[integer++]), 8);
  }
  return out;
}

std::vector<at::Tensor> Program::run(const std::vector<at::Tensor>& inputs, const std::vector<double>& reals,
                                     const std::vector<int64_t>& integers) {
  auto& session = *session_by_serial(serial_);
  SKY_CHECK(inputs.size() == inputs_.size(), "a program of ", inputs_.size(), " inputs was given ", inputs.size());
  Writer w;
  w.u32(id_);
  w.text(written(reals, integers));
  w.u32(static_cast<uint32_t>(inputs.size()));
  std::vector<uint32_t> changed = written_;
  for (size_t i = 0; i < inputs.size(); i++) {
    auto* impl = inputs[i].unsafeGetTensorImpl();
    if (inputs_[i].is_written) Session::unshare(impl);
    auto place = Session::place_of(impl);
    SKY_CHECK(&place.session == &session, "an input of another device than before");
    if (inputs_[i].is_written) changed.push_back(place.slot);
    w.u32(place.slot);
    w.u64(static_cast<uint64_t>(place.offset) * impl->itemsize());
    w.u32(inputs_[i].slot);
    w.u64(inputs_[i].bytes);
    w.u8(inputs_[i].is_written);
  }
  std::vector<c10::Storage> made;
  for (auto& each : results_) {
    made.push_back(session.new_storage(each.bytes, false));
    w.u32(each.slot);
    w.u32(Session::behind(made.back().data_ptr()).slot);
  }
  Writer record;
  record.u32(kReplay);
  record.text(w.bytes());
  {
    std::lock_guard lock(session.mutex);
    session.begin();
    if (session.settings != settings_before_) {
      Writer settings;
      settings.u32(kSettings);
      settings.u64(settings_before_);
      session.put(settings.bytes().data(), settings.size());
    }
    session.settings = settings_after_;
    for (auto slot : changed) session.wrote(slot);
    session.put(record.bytes().data(), record.size());
  }
  std::vector<at::Tensor> tensors;
  for (auto& each : tensors_) {
    auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(made[each.result]),
                                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                     c10::scalarTypeToTypeMeta(each.layout.dtype));
    impl->set_sizes_and_strides(each.layout.sizes, each.layout.strides, each.offset);
    tensors.emplace_back(std::move(impl));
  }
  return tensors;
}

void Program::watch(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& sharers_most) {
  SKY_CHECK(tensors.size() == sharers_most.size(), tensors.size(), " tensors and ", sharers_most.size(), " counts");
  watched_.clear();
  for (size_t i = 0; i < tensors.size(); i++) {
    auto* impl = tensors[i].unsafeGetTensorImpl();
    watched_.push_back({impl, impl->data(), impl->storage().nbytes(), impl->requires_grad(), impl->sizes().vec(),
                        impl->strides().vec(), sharers_most[i]});
  }
}

bool Program::finds_unchanged() const {
  return std::all_of(watched_.begin(), watched_.end(), [](auto& each) {
    return each.tensor->has_storage() && each.tensor->data() == each.data &&
           each.tensor->storage().nbytes() == each.bytes && each.tensor->requires_grad() == each.requires_grad &&
           each.tensor->sizes() == each.sizes && each.tensor->strides() == each.strides &&
           (each.sharers_most < 0 || each.tensor->storage().use_count() <= static_cast<size_t>(each.sharers_most));
  });
}

namespace {

std::shared_ptr<Program> program_at(int64_t number) noexcept {
  std::lock_guard lock(programs_mutex);
  auto found = programs.find(number);
  return found == programs.end() ? nullptr : found->second;
}

}  // namespace

int64_t add_program(Session& session, std::string_view content) {
  Reader r(content.data(), content.size());
  auto made = std::make_shared<Program>(session, r);
  std::lock_guard lock(programs_mutex);
  static int64_t last = 0;
  programs.emplace(++last, std::move(made));
  return last;
}

void drop_program(int64_t number) noexcept {
  std::shared_ptr<Program> gone;
  std::lock_guard lock(programs_mutex);
  if (auto found = programs.find(number); found != programs.end()) {
    gone = std::move(found->second);
    programs.erase(found);
  }
}

bool finds_unchanged(int64_t number) noexcept {
  auto program = program_at(number);
  return program && program->finds_unchanged();
}

namespace {

// skyward::replay(int program, Tensor[] inputs, float[] reals, int[] integers) -> Tensor[]
void replay(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto args = torch::jit::last(*stack, 4);
  auto program = program_at(args[0].toInt());
  SKY_CHECK(program, "no program has the number ", args[0].toInt());
  auto results = program->run(args[1].toTensorVector(), args[2].toDoubleVector(), args[3].toIntVector());
  torch::jit::drop(*stack, 4);
  torch::jit::push(*stack, c10::List<at::Tensor>(std::move(results)));
}

// skyward::watch(int program, Tensor[] tensors, int[] sharers_most) -> ()
void watch(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto args = torch::jit::last(*stack, 3);
  auto program = program_at(args[0].toInt());
  SKY_CHECK(program, "no program has the number ", args[0].toInt());
  program->watch(args[1].toTensorVector(), args[2].toIntVector());
  torch::jit::drop(*stack, 3);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(skyward, m) {
  m.def("watch(int program, Tensor[] tensors, int[] sharers_most) -> ()");
  m.impl("watch", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                                  torch::CppFunction::makeFromBoxedFunction<&watch>()));
  m.def("replay(int program, Tensor[] inputs, float[] reals, int[] integers) -> Tensor[]");
  m.impl("replay", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                                   torch::CppFunction::makeFromBoxedFunction<&replay>()));
}

}  // namespace sky
