#include "operations.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <set>

#include "shapes.h"

namespace sky {

bool strictly_contiguous(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (strides[i] != expected) return false;
    // What a worker says of a tensor without elements may be beyond any number.
    if (__builtin_mul_overflow(expected, std::max<int64_t>(sizes[i], 1), &expected)) return false;
  }
  return true;
}

namespace {

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

// By parts of names: an operation too many costs it a look at the precision, one too few computes with another.
Product product_of(const std::string& name) {
  auto has = [&](std::initializer_list<const char*> parts) {
    return std::any_of(parts.begin(), parts.end(), [&](auto* part) { return name.find(part) != std::string::npos; });
  };
  if (has({"conv"})) return Product::kConvolution;
  if (has({"_rnn", "lstm", "gru"})) return Product::kRecurrent;
  if (has({"mm", "mv", "dot", "matmul", "linear", "attention", "attn", "multi_head", "transformer", "linalg", "solve",
           "cholesky", "qr", "lu_", "svd", "matrix", "cdist", "ger"}))
    return Product::kMatmul;
  return Product::kNone;
}

bool is_tensors(const c10::Type& type) {
  auto list = type.cast<c10::ListType>();
  return (list ? *list->getElementType() : type).kind() == c10::TypeKind::TensorType;
}

std::unique_ptr<OpInfo> study(const c10::OperatorHandle& op) {
  auto info = std::make_unique<OpInfo>();
  const auto& schema = op.schema();
  info->own_name = op.operator_name();
  const auto& name = info->name->name;
  bool is_pytorchs = name.rfind("aten::", 0) == 0 || is_collective(name) || name == kWait;
  info->arguments = schema.arguments().size();
  for (auto& a : schema.arguments()) {
    auto type = a.type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    info->number.push_back(type->kind() == c10::TypeKind::NumberType);
    info->written.push_back(a.alias_info() && a.alias_info()->isWrite());
    if (info->written.back() && a.kwarg_only()) info->outs.push_back(info->written.size() - 1);
    if (is_pytorchs && a.name() == "device" && schema.arguments()[0].type()->kind() == c10::TypeKind::TensorType)
      info->device = static_cast<int>(info->number.size() - 1);
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
  info->asks_always = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  static const std::set<std::string> indexing{"aten::index", "aten::index_put", "aten::index_put_",
                                              "aten::_index_put_impl_", "aten::_unsafe_index"};
  static const std::set<std::string> by_scalars{"aten::arange", "aten::range", "aten::linspace", "aten::logspace",
                                                "aten::_fused_sdp_choice"};  // not with dropout
  // Their scalars are checked first of all: a wrong one is an error of the call elsewhere, so it is one here.
  static const std::set<std::string> checks_scalars{
      "aten::uniform_",       "aten::normal_",           "aten::exponential_",   "aten::cauchy_",
      "aten::log_normal_",    "aten::geometric_",        "aten::bernoulli_",     "aten::bernoulli",
      "aten::renorm",         "aten::renorm_",           "aten::softshrink",     "aten::celu",
      "aten::celu_",          "aten::huber_loss",        "aten::smooth_l1_loss", "aten::_cdist_forward",
      "aten::_pdist_forward", "aten::multi_margin_loss", "aten::native_dropout"};
  info->indexes = indexing.count(name);
  info->scalars_shape = by_scalars.count(name) || checks_scalars.count(name) ||
                        (name == "aten::pow" && info->name->overload_name == "Tensor_Scalar");
  if (info->indexes) info->asks_always = false;
  // A number or a truth is about the data; which attention kernel fits is about the shapes.
  if (!returns_tensors && name != "aten::_fused_sdp_choice") info->asks_always = true;
  info->product = product_of(name);
  info->shape = shape_kernel(*info->name);
  info->only_writes = only_writes(*info->name) || name == kWait;
  // The worker's tables are sized by the longest target.
  if (name == "aten::_ctc_loss") info->asks_always = true;
  // On a GPU, too, it waits for the range of the data, and refuses one that is not finite.
  if (name == "aten::histc") info->asks_always = true;
  // Its only result is the error, which callers catch where they call.
  if (name == "aten::_linalg_check_errors") info->asks_always = true;
  // What the worker says of a graph is as long as it is; of one that is dropped there is nothing to say.
  if (name == "skyward::ship") info->asks_always = true;
  if (name == "skyward::drop") {
    info->asks_always = false;
    info->only_writes = true;
    info->drops_graph = true;
  }
  info->names_graphs = name.rfind("skyward::", 0) == 0;
  info->is_foreign = !info->names_graphs && !is_pytorchs;
  if (!info->is_foreign) return info;
  info->schema = schema;
  info->scalars_shape = true;
  for (auto& r : schema.returns()) {
    // What a fake kernel says of a number is not what the data says.
    if (!is_tensors(*r.type())) info->asks_always = true;
    if (r.alias_info() && !r.alias_info()->isWrite()) info->is_view = true;
  }
  return info;
}

// Whether an operation is the one that was studied. A library of the user's may take its operations back, and define
// others of the same name, or at the same address.
bool is_of(const OpInfo& info, const c10::OperatorHandle& op) {
  return C10_LIKELY(!info.is_foreign) || (info.own_name == op.operator_name() && *info.schema == op.schema());
}

}  // namespace

const OpInfo& info_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<const void*, std::unique_ptr<OpInfo>> known;
  static std::vector<std::unique_ptr<OpInfo>> former;  // templates name them by their addresses
  thread_local std::unordered_map<const void*, const OpInfo*> mine;
  const void* id = &op.operator_name();
  auto& found = mine[id];
  if (C10_UNLIKELY(!found || !is_of(*found, op))) {
    std::lock_guard lock(mutex);
    auto& shared = known[id];
    if (shared && !is_of(*shared, op)) former.push_back(std::move(shared));
    if (!shared) shared = study(op);
    found = shared.get();
  }
  return *found;
}

}  // namespace sky
