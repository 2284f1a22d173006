// Shapes known without asking: PyTorch's own structured kernels work them out before they compute, so what
// they say of tensors without memory is what the worker will find. For others there are rules of ours.
//
// Called directly, since the dispatcher's entries for such tensors are Python, slow and at times wrong in strides.
#include "shapes.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/_log_softmax_backward_data_meta_dispatch.h>
#include <ATen/ops/_log_softmax_meta_dispatch.h>
#include <ATen/ops/_softmax_backward_data_meta_dispatch.h>
#include <ATen/ops/_softmax_meta_dispatch.h>
#include <ATen/ops/add_meta_dispatch.h>
#include <ATen/ops/addcdiv_meta_dispatch.h>
#include <ATen/ops/addcmul_meta_dispatch.h>
#include <ATen/ops/addmm_meta_dispatch.h>
#include <ATen/ops/all_meta_dispatch.h>
#include <ATen/ops/amax_meta_dispatch.h>
#include <ATen/ops/amin_meta_dispatch.h>
#include <ATen/ops/any_meta_dispatch.h>
#include <ATen/ops/argmax_meta_dispatch.h>
#include <ATen/ops/avg_pool2d_meta_dispatch.h>
#include <ATen/ops/baddbmm_meta_dispatch.h>
#include <ATen/ops/bmm_meta_dispatch.h>
#include <ATen/ops/cat_meta_dispatch.h>
#include <ATen/ops/ceil_meta_dispatch.h>
#include <ATen/ops/clamp_meta_dispatch.h>
#include <ATen/ops/clamp_min_meta_dispatch.h>
#include <ATen/ops/cos_meta_dispatch.h>
#include <ATen/ops/cumsum_meta_dispatch.h>
#include <ATen/ops/elu_meta_dispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/eq_meta_dispatch.h>
#include <ATen/ops/erf_meta_dispatch.h>
#include <ATen/ops/exp_meta_dispatch.h>
#include <ATen/ops/expm1_meta_dispatch.h>
#include <ATen/ops/floor_meta_dispatch.h>
#include <ATen/ops/gather_meta_dispatch.h>
#include <ATen/ops/ge_meta_dispatch.h>
#include <ATen/ops/gelu_backward_meta_dispatch.h>
#include <ATen/ops/gelu_meta_dispatch.h>
#include <ATen/ops/gt_meta_dispatch.h>
#include <ATen/ops/le_meta_dispatch.h>
#include <ATen/ops/leaky_relu_backward_meta_dispatch.h>
#include <ATen/ops/leaky_relu_meta_dispatch.h>
#include <ATen/ops/lerp_meta_dispatch.h>
#include <ATen/ops/log1p_meta_dispatch.h>
#include <ATen/ops/log_meta_dispatch.h>
#include <ATen/ops/lt_meta_dispatch.h>
#include <ATen/ops/max_meta_dispatch.h>
#include <ATen/ops/max_pool2d_with_indices_backward_meta_dispatch.h>
#include <ATen/ops/max_pool2d_with_indices_meta_dispatch.h>
#include <ATen/ops/maximum_meta_dispatch.h>
#include <ATen/ops/mean_meta_dispatch.h>
#include <ATen/ops/min_meta_dispatch.h>
#include <ATen/ops/minimum_meta_dispatch.h>
#include <ATen/ops/mm_meta_dispatch.h>
#include <ATen/ops/mse_loss_meta_dispatch.h>
#include <ATen/ops/ne_meta_dispatch.h>
#include <ATen/ops/neg_meta_dispatch.h>
#include <ATen/ops/nll_loss_backward_meta_dispatch.h>
#include <ATen/ops/nll_loss_forward_meta_dispatch.h>
#include <ATen/ops/pow_meta_dispatch.h>
#include <ATen/ops/reciprocal_meta_dispatch.h>
#include <ATen/ops/round_meta_dispatch.h>
#include <ATen/ops/rsqrt_meta_dispatch.h>
#include <ATen/ops/sgn_meta_dispatch.h>
#include <ATen/ops/sigmoid_backward_meta_dispatch.h>
#include <ATen/ops/sigmoid_meta_dispatch.h>
#include <ATen/ops/sign_meta_dispatch.h>
#include <ATen/ops/silu_backward_meta_dispatch.h>
#include <ATen/ops/silu_meta_dispatch.h>
#include <ATen/ops/sin_meta_dispatch.h>
#include <ATen/ops/sqrt_meta_dispatch.h>
#include <ATen/ops/sub_meta_dispatch.h>
#include <ATen/ops/sum_meta_dispatch.h>
#include <ATen/ops/tanh_backward_meta_dispatch.h>
#include <ATen/ops/tanh_meta_dispatch.h>
#include <ATen/ops/threshold_backward_meta_dispatch.h>
#include <ATen/ops/tril_meta_dispatch.h>
#include <ATen/ops/triu_meta_dispatch.h>

#include <algorithm>
#include <cmath>

#include "../wire/silence.h"
#include "graphs.h"
#include "keys.h"
#include "rules.h"

namespace sky {
namespace {

using at::Scalar;
using at::Tensor;
using c10::IValue;
using c10::KernelFunction;
using OptInts = at::OptionalIntArrayRef;
using OptDtype = std::optional<at::ScalarType>;
using OptScalar = std::optional<Scalar>;
using Ints = at::IntArrayRef;

// clang-format takes a row of macros for one long expression.
// clang-format off
Rules rules() {
  Rules k;
  add_plain_rules(k);
  add_layer_rules(k);
  add_gpu_rules(k);
#define SKY_PLAIN(name) add(k, #name, &at::meta::name);
  SKY_PLAIN(_log_softmax) SKY_PLAIN(_log_softmax_backward_data) SKY_PLAIN(_softmax)
  SKY_PLAIN(_softmax_backward_data) SKY_PLAIN(addcdiv) SKY_PLAIN(addcmul) SKY_PLAIN(addmm)
  SKY_PLAIN(amax) SKY_PLAIN(amin) SKY_PLAIN(argmax) SKY_PLAIN(avg_pool2d) SKY_PLAIN(baddbmm)
  SKY_PLAIN(bmm) SKY_PLAIN(elu) SKY_PLAIN(gather) SKY_PLAIN(gelu) SKY_PLAIN(gelu_backward)
  SKY_PLAIN(leaky_relu) SKY_PLAIN(leaky_relu_backward) SKY_PLAIN(max_pool2d_with_indices)
  SKY_PLAIN(max_pool2d_with_indices_backward) SKY_PLAIN(maximum) SKY_PLAIN(minimum) SKY_PLAIN(mm)
  SKY_PLAIN(mse_loss) SKY_PLAIN(sigmoid_backward) SKY_PLAIN(silu_backward) SKY_PLAIN(tanh_backward)
  SKY_PLAIN(threshold_backward) SKY_PLAIN(addcdiv_) SKY_PLAIN(addcmul_) SKY_PLAIN(addmm_)
  SKY_PLAIN(baddbmm_) SKY_PLAIN(elu_) SKY_PLAIN(gelu_) SKY_PLAIN(leaky_relu_)
#undef SKY_PLAIN
#define SKY_UNARY(name)                            \
  add<Tensor(const Tensor&)>(k, #name, &at::meta::name); \
  add<Tensor&(Tensor&)>(k, #name "_", &at::meta::name##_);
  SKY_UNARY(neg) SKY_UNARY(exp) SKY_UNARY(log) SKY_UNARY(sqrt) SKY_UNARY(rsqrt) SKY_UNARY(tanh)
  SKY_UNARY(sigmoid) SKY_UNARY(silu) SKY_UNARY(sin) SKY_UNARY(cos) SKY_UNARY(erf) SKY_UNARY(log1p)
  SKY_UNARY(expm1) SKY_UNARY(reciprocal) SKY_UNARY(sign) SKY_UNARY(sgn) SKY_UNARY(floor)
  SKY_UNARY(ceil) SKY_UNARY(round)
#undef SKY_UNARY
#define SKY_COMPARED(name)                                                  \
  add<Tensor(const Tensor&, const Tensor&)>(k, #name ".Tensor", &at::meta::name); \
  add<Tensor(const Tensor&, const Scalar&)>(k, #name ".Scalar", &at::meta::name);
  SKY_COMPARED(eq) SKY_COMPARED(ne) SKY_COMPARED(lt) SKY_COMPARED(le) SKY_COMPARED(gt) SKY_COMPARED(ge)
#undef SKY_COMPARED
#define SKY_SCALED(name)                                                                   \
  add<Tensor(const Tensor&, const Tensor&, const Scalar&)>(k, #name ".Tensor", &at::meta::name); \
  add<Tensor&(Tensor&, const Tensor&, const Scalar&)>(k, #name "_.Tensor", &at::meta::name##_);
  SKY_SCALED(add) SKY_SCALED(sub)
#undef SKY_SCALED
  add<Tensor(const Tensor&, const Tensor&)>(k, "pow.Tensor_Tensor", &at::meta::pow);
  add<Tensor(const Tensor&, const Scalar&)>(k, "pow.Tensor_Scalar", &at::meta::pow);
  add<Tensor(const Tensor&, const Tensor&, const Scalar&)>(k, "lerp.Scalar", &at::meta::lerp);
  add<Tensor&(Tensor&, const Tensor&, const Scalar&)>(k, "lerp_.Scalar", &at::meta::lerp_);
  add<Tensor(const Tensor&, const OptScalar&, const OptScalar&)>(k, "clamp", &at::meta::clamp);
  add<Tensor(const Tensor&, const Scalar&)>(k, "clamp_min", &at::meta::clamp_min);
  add<Tensor(const Tensor&, OptInts, bool, OptDtype)>(k, "sum.dim_IntList", &at::meta::sum);
  add<Tensor(const Tensor&, OptInts, bool, OptDtype)>(k, "mean.dim", &at::meta::mean);
  add<std::tuple<Tensor, Tensor>(const Tensor&, int64_t, bool)>(k, "max.dim", &at::meta::max);
  add<std::tuple<Tensor, Tensor>(const Tensor&, int64_t, bool)>(k, "min.dim", &at::meta::min);
  add<Tensor(const Tensor&)>(k, "any", &at::meta::any);
  add<Tensor(const Tensor&)>(k, "all", &at::meta::all);
  add(k, "nll_loss_forward", &at::meta::nll_loss_forward);
  add(k, "nll_loss_backward", &at::meta::nll_loss_backward);
  add(k, "cat", &at::meta::cat);
  add(k, "tril", &at::meta::tril);
  add(k, "triu", &at::meta::triu);
  add(k, "cumsum", &at::meta::cumsum);
  return k;
}
// clang-format on

// It computes element by element as this one does, though it is not structured itself.
const std::unordered_map<std::string, std::string> shaped_like{{"aten::relu", "aten::neg"}};

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

std::string overload_of(const std::string& full) {
  auto point = full.find('.');
  return point == std::string::npos ? "" : full.substr(point + 1);
}

const KernelFunction* rule_of(std::string full) {
  static const Rules known = rules();
  if (auto other = shaped_like.find(full); other != shaped_like.end()) full = other->second;
  auto found = known.find(full);
  return found == known.end() ? nullptr : &found->second;
}

// A tensor like this one without memory; none if it cannot stand for it.
std::optional<Tensor> shadow(const Tensor& t, bool of_host = false) {
  if (!t.defined() || !(is_sky(t) || of_host)) return t;
  if (t.is_conj() || t.is_neg()) return std::nullopt;
  return at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
}

bool shadow(IValue& v, bool of_host = false) {
  if (v.isTensor()) {
    auto made = shadow(v.toTensor(), of_host);
    if (!made) return false;
    v = *made;
  } else if (v.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : v.toTensorVector()) {
      auto made = shadow(t, of_host);
      if (!made) return false;
      list.push_back(*made);
    }
    v = list;
  } else if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : v.toOptionalTensorVector()) {
      auto made = t ? shadow(*t, of_host) : std::nullopt;
      if (t && !made) return false;
      list.push_back(made);
    }
    v = list;
  }
  return true;
}

// Lists of one length, as operations on many tensors at once demand. An optimizer may have nothing to keep in some.
bool lists_fit(const c10::OperatorName& name, const IValue* args, size_t count) {
  bool is_fused = name.name.rfind("aten::_fused_", 0) == 0;
  std::optional<size_t> length;
  for (size_t i = 0; i < count; i++)
    if (args[i].isTensorList()) {
      auto n = args[i].toListRef().size();
      if (is_fused && !n) continue;
      if (length.value_or(n) != n) return false;
      length = n;
    }
  return true;
}

// Shapes alone do not say whether these fit: their kernels want numbers of one dtype.
bool dtypes_fit(const c10::OperatorName& name, const IValue* args, size_t count) {
  static const std::set<std::string> same{
      "aten::mm",      "aten::addmm",    "aten::addmm_",           "aten::bmm",
      "aten::baddbmm", "aten::baddbmm_", "aten::nll_loss_forward", "aten::nll_loss_backward"};
  if (!same.count(name.name)) return true;
  std::optional<at::ScalarType> dtype;
  for (size_t i = 0; i < count; i++) {
    if (!args[i].isTensor() || !args[i].toTensor().defined()) continue;
    auto its = args[i].toTensor().scalar_type();
    if (!c10::isFloatingType(its) && !c10::isComplexType(its)) continue;
    if (dtype.value_or(its) != its) return false;
    dtype = its;
  }
  return true;
}

OutInfo promise(const IValue& v, uint32_t& tensors) {
  OutInfo out;
  if (v.isTensorList()) {
    out.kind = kTensorList;
    for (const Tensor& t : v.toTensorVector()) out.items.push_back(promise(t, tensors));
    return out;
  }
  if (!v.isTensor()) {
    out.kind = kValue;
    out.value = v;
    return out;
  }
  const auto& t = v.toTensor();
  if (!t.defined()) {
    out.kind = kUndefinedTensor;
    return out;
  }
  out.kind = kNewTensor;
  tensors++;
  out.layout.dtype = t.scalar_type();
  out.layout.sizes.append(t.sizes().begin(), t.sizes().end());
  out.layout.strides.append(t.strides().begin(), t.strides().end());
  out.layout.contiguous = strictly_contiguous(t.sizes(), t.strides());
  out.layout.bytes = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize());
  return out;
}

}  // namespace

const KernelFunction* shape_kernel(const c10::OperatorName& name) { return rule_of(full_name(name)); }

bool only_writes(const c10::OperatorName& name) {
  static const std::set<std::string> plain{"aten::zero_", "aten::fill_.Scalar", "aten::relu_"};
  static const std::set<std::string> by_name{
      "aten::_fused_adam_",    "aten::_fused_adamw_",      "aten::_fused_sgd_",
      "aten::_fused_adagrad_", "aten::_amp_update_scale_", "aten::_amp_foreach_non_finite_check_and_unscale_"};
  return plain.count(full_name(name)) || by_name.count(name.name) ||
         (name.name.rfind("aten::_foreach_", 0) == 0 && name.name.back() == '_');
}

namespace {

Processor processor_of(Session& session) {
  if (session.on_cpu) return Processor::kCpu;
  return session.traits()[kIsCuda] ? Processor::kCuda : Processor::kOther;
}

// Of those that write to their first argument alone: whether these arguments are surely fine.
bool surely_writes(const std::string& name, const IValue* args) {
  static const std::set<std::string> known{"aten::copy_", "aten::uniform_", "aten::normal_",
                                           "aten::masked_fill_.Scalar"};
  if (!known.count(name)) return false;
  const auto& self = args[0].toTensor();
  auto dtype = self.scalar_type();
  if (name == "aten::copy_") {
    const auto& from = args[1].toTensor();
    if (c10::isComplexType(from.scalar_type()) != c10::isComplexType(dtype)) return false;
    return from.defined() && at::is_expandable_to(from.sizes(), self.sizes());
  }
  bool is_wide = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16;
  if (name == "aten::masked_fill_.Scalar") {
    const auto& mask = args[1].toTensor();
    bool fits = is_wide || (dtype == at::kLong && args[2].isInt());
    return fits && !args[2].isComplexDouble() && mask.scalar_type() == at::kBool &&
           at::is_expandable_to(mask.sizes(), self.sizes());
  }
  auto first = args[1].toDouble(), second = args[2].toDouble();
  constexpr double kMost = 1e30;
  if (!is_wide || !(std::abs(first) < kMost && std::abs(second) < kMost)) return false;
  return name == "aten::normal_" ? second >= 0 : first <= second;
}

// How often a worker confirms a rule that is not sure, before it is believed for arguments of that kind.
constexpr int kConfirmations = 2;

// What of the arguments may decide how a kernel lays out its results, but for sizes.
uint64_t kind_of(const OpInfo& info, const IValue* args) {
  std::vector<uint64_t> words;
  for (size_t i = 0; i < info.arguments; i++) {
    const auto& v = args[i];
    if (v.isTensor() && v.toTensor().defined()) {
      const auto& t = v.toTensor();
      words.insert(words.end(), {static_cast<uint64_t>(t.scalar_type()), static_cast<uint64_t>(t.dim()),
                                 static_cast<uint64_t>(t.suggest_memory_format())});
      bool is_dense = t.is_non_overlapping_and_dense(), is_plain = t.is_contiguous();
      words.insert(words.end(), {is_dense, is_plain, t.dim() > 1 && t.size(0) == 1, t.dim() > 1 && t.size(1) == 1});
    } else if (v.isBool()) {
      words.push_back(v.toBool());
    } else if (v.isBoolList()) {
      for (bool each : v.toBoolList()) words.push_back(each);
    } else if (v.isDouble()) {
      words.push_back(v.toDouble() != 0);
    } else {
      words.push_back(v.isNone() ? 2 : v.isTensor() ? 3 : 4);
    }
  }
  return hash(&info, words) | 1;
}

bool are_equal(const std::vector<OutInfo>& some, const std::vector<OutInfo>& others) {
  return std::equal(some.begin(), some.end(), others.begin(), others.end(), [](const OutInfo& a, const OutInfo& b) {
    if (a.kind != b.kind || !are_equal(a.items, b.items)) return false;
    if (a.kind == kValue) return a.value.isInt() && b.value.isInt() && a.value.toInt() == b.value.toInt();
    const auto &x = a.layout, &y = b.layout;
    return x.dtype == y.dtype && x.sizes == y.sizes && x.strides == y.strides && x.bits == y.bits;
  });
}

// What a functional operation on lists returns: for each of them, what its kin for one tensor does.
bool infer_lists(const std::string& name, const IValue* args, torch::jit::Stack& stack) {
  constexpr std::string_view kPrefix = "aten::_foreach_";
  bool is_norm = name == "aten::_foreach_norm.Scalar";
  auto kin = is_norm ? std::string("linalg_vector_norm") : name.substr(kPrefix.size());
  auto* rule = rule_of("aten::" + kin);
  if (!rule || !args[0].isTensorList()) return false;
  auto kin_op = c10::Dispatcher::singleton().findSchema({"aten::" + kin.substr(0, kin.find('.')), overload_of(kin)});
  auto kin_arguments = kin_op ? kin_op->schema().arguments().size() : 0;
  c10::List<Tensor> made;
  for (const Tensor& t : args[0].toTensorVector()) {
    auto one = shadow(t);
    if (!one) return false;
    torch::jit::Stack call{*one};
    if (is_norm) call.insert(call.end(), {args[1], IValue(), false, args[2]});
    else if (kin_arguments == 2) call.push_back(args[1]);
    else if (kin_arguments != 1) return false;
    rule->callBoxed(*kin_op, c10::DispatchKeySet(c10::DispatchKey::Meta), &call);
    made.push_back(call[0].toTensor());
  }
  stack = {made};
  return true;
}

}  // namespace

bool infer(Session& session, const c10::OperatorHandle& op, const OpInfo& info, const IValue* args, Template& t) {
  const auto& name = op.operator_name();
  if (info.only_writes) return lists_fit(name, args, info.arguments);
  if (info.names_graphs) {
    auto results = session.was_surprised || name.name != "skyward::run" ? std::nullopt : promised_results(args);
    if (results) t.outs = {promise(IValue(*results), t.new_tensors)};
    return results.has_value();
  }
  auto full = full_name(name);
  if (surely_writes(full, args)) return true;
  if (name.name == "aten::clone") {
    auto self = shadow(args[0].toTensor());
    if (!self) return false;
    auto format = args[1].isNone() ? at::MemoryFormat::Preserve : args[1].toMemoryFormat();
    t.outs = {promise(made_like(*self, {}, format), t.new_tensors)};
    return true;
  }
  bool takes_lists = full.rfind("aten::_foreach_", 0) == 0;
  if (!takes_lists && (!info.shape || !dtypes_fit(name, args, info.arguments))) return false;
  torch::jit::Stack stack(args, args + info.arguments);
  for (auto& v : stack)
    if (!shadow(v)) return false;
  ruled_for = processor_of(session);
  is_rule_unsure = false;
  // The worker warns, too, when it runs the operation; once is enough.
  Silence silence;
  try {
    if (!takes_lists) info.shape->callBoxed(op, c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    else if (!infer_lists(full, args, stack)) return false;
  } catch (const c10::Error&) {
    return false;  // the worker says what is wrong with it
  }
  for (size_t i = 0; i < info.returns.size(); i++)
    if (info.returns[i] < 0) t.outs.push_back(promise(stack[i], t.new_tensors));
  if (is_rule_unsure) t.kind = kind_of(info, args);
  return true;
}

bool guess_foreign(const c10::OperatorHandle& op, const OpInfo& info, const IValue* args, Template& t) {
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::Meta)) return false;
  torch::jit::Stack stack(args, args + info.arguments);
  for (auto& v : stack) {
    if (v.isDevice()) v = c10::Device(c10::kMeta);
    // A number on the host is data as well.
    if (!shadow(v, true)) return false;
  }
  Silence silence;
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const std::exception&) {
    return false;  // it wants the data, or the worker says what is wrong with the arguments
  }
  for (size_t i = 0; i < info.returns.size(); i++)
    if (info.returns[i] < 0) t.outs.push_back(promise(stack[i], t.new_tensors));
  t.kind = kind_of(info, args);
  return true;
}

void hold_guess(const Session& session, Template& t) {
  auto found = session.confirmations.find(t.kind);
  if (!t.known || !t.kind || (found != session.confirmations.end() && found->second >= kConfirmations)) return;
  t.guess = std::move(t.outs);
  t.outs.clear();
  t.new_tensors = 0;
  t.known = false;
}

void compare_guess(Session& session, Template& t) {
  if (!t.guess) return;
  auto& count = session.confirmations[t.kind];
  count = count >= 0 && t.resized.empty() && are_equal(*t.guess, t.outs) ? count + 1 : -1;
  t.guess.reset();
}

}  // namespace sky
