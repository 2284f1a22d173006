// Recurrent layers as the worker's device computes them.
//
// On a GPU, PyTorch runs a whole layer in one call of cuDNN, and single cells in fused kernels; where the worker's
// device is one, so do we. PyTorch asks `cudnn_is_acceptable` and then calls what is registered for our device.
// Elsewhere the cells are written out in plain operations above autograd, so that their gradients are PyTorch's own.
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/RNN.h>
#include <ATen/ops/_cudnn_init_dropout_state.h>
#include <ATen/ops/_cudnn_rnn.h>
#include <ATen/ops/chunk.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <torch/library.h>

#include <map>

#include "composites.h"

namespace sky {
namespace {

using Optional = std::optional<at::Tensor>;

// Cells.

at::Tensor biased(const at::Tensor& gates, const Optional& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input, const at::Tensor& hidden,
                                                         const at::Tensor& cell, const Optional& input_bias,
                                                         const Optional& hidden_bias) {
  auto gates = (biased(hidden, hidden_bias) + biased(input, input_bias)).chunk(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), out = gates[3].sigmoid();
  auto next = forget * cell + in * gates[2].tanh();
  return {out * next.tanh(), next, at::empty({0}, cell.options())};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& state,
                                            const Optional& input_bias, const Optional& hidden_bias) {
  auto in = biased(input, input_bias).chunk(3, 1), from = biased(hidden, hidden_bias).chunk(3, 1);
  auto reset = (from[0] + in[0]).sigmoid(), update = (from[1] + in[1]).sigmoid();
  auto fresh = (in[2] + from[2] * reset).tanh();
  return {(state - fresh) * update + fresh, at::empty({0}, state.options())};
}

// A cell of cuDNN's kind where there is a GPU, else `written_out`.
template <c10::DispatchKey key, auto written_out>
void cell(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& input = (*stack)[stack->size() - op.schema().arguments().size()].toTensor();
  if (on_gpu(input)) return run_as_registered<key>(op, stack);
  auto made = c10::KernelFunction::makeFromUnboxedRuntimeFunction(written_out);
  made.callBoxed(op, c10::DispatchKeySet(), stack);
}

// Layers.

// The sizes that cuDNN's layout of the weights depends on.
struct Shape {
  int64_t mode, input, hidden, projection, layers, per_layer;
  bool bidirectional;
  c10::ScalarType dtype;
  auto operator<=>(const Shape&) const = default;
};

// Where each weight is in one buffer of all, in elements.
struct WeightLayout {
  int64_t elements = 0;
  std::vector<int64_t> offsets;
};

at::Tensor flattened(at::TensorList weights, const Shape& shape) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_cudnn_rnn_flatten_weight", "");
  torch::jit::Stack stack{weights,          shape.per_layer, shape.input, shape.mode,         shape.hidden,
                          shape.projection, shape.layers,    false,       shape.bidirectional};
  fallback(op, &stack);
  return stack.back().toTensor();
}

// cuDNN decides the layout. It is found out with weights that are zero but for their first elements.
WeightLayout find_layout(at::TensorList weights, const Shape& shape) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> marked;
  for (size_t i = 0; i < weights.size(); i++) {
    marked.push_back(weights[i].detach().new_zeros(weights[i].sizes()));
    marked.back().view({-1}).narrow(0, 0, 1).fill_(static_cast<int64_t>(i + 1));
  }
  auto flat = flattened(marked, shape);
  auto places = flat.nonzero().view({-1});
  auto numbers = flat.index_select(0, places).to(at::kLong).cpu();
  places = places.cpu();
  WeightLayout layout{flat.numel(), std::vector<int64_t>(weights.size(), -1)};
  for (int64_t i = 0; i < places.numel(); i++)
    layout.offsets.at(static_cast<size_t>(numbers[i].item<int64_t>() - 1)) = places[i].item<int64_t>();
  return layout;
}

// Numbers of weights are told apart in the dtype with the fewest bits.
constexpr size_t kWeightsMost = 256;

const WeightLayout* layout_of(at::TensorList weights, const Shape& shape) {
  static std::mutex mutex;
  static std::map<std::pair<uint32_t, Shape>, WeightLayout> known;
  if (weights.empty() || weights.size() > kWeightsMost) return nullptr;
  auto serial = Session::of(weights[0].unsafeGetTensorImpl()).serial;
  std::lock_guard lock(mutex);
  auto found = known.find({serial, shape});
  if (found == known.end()) found = known.emplace(std::pair(serial, shape), find_layout(weights, shape)).first;
  auto& layout = found->second;
  return layout.offsets.size() == weights.size() ? &layout : nullptr;
}

at::Tensor whole_buffer(const at::Tensor& weight, int64_t offset, int64_t elements) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(weight.storage()),
                                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), weight.dtype());
  impl->set_sizes_and_strides(c10::IntArrayRef{elements}, c10::IntArrayRef{1}, offset);
  return at::Tensor(std::move(impl));
}

// The buffer that the weights lie in as cuDNN wants them; undefined if they do not.
at::Tensor buffer_of(at::TensorList weights, const Shape& shape) {
  auto* layout = layout_of(weights, shape);
  if (!layout) return {};
  auto* storage = weights[0].storage().unsafeGetStorageImpl();
  auto start = weights[0].storage_offset() - layout->offsets[0];
  auto size = static_cast<int64_t>(storage->nbytes() / weights[0].itemsize());
  if (start < 0 || start + layout->elements > size) return {};
  for (size_t i = 0; i < weights.size(); i++)
    if (weights[i].storage().unsafeGetStorageImpl() != storage || !weights[i].is_contiguous() ||
        weights[i].storage_offset() != start + layout->offsets[i])
      return {};
  return whole_buffer(weights[0], start, layout->elements);
}

// Copies the weights into one buffer, and returns where each is in it.
std::vector<at::Tensor> copy_to_buffer(at::TensorList weights, const WeightLayout& layout, at::Tensor& buffer) {
  buffer = weights[0].detach().new_zeros({layout.elements});
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < weights.size(); i++) {
    parts.push_back(buffer.narrow(0, layout.offsets[i], weights[i].numel()).view(weights[i].sizes()));
    parts.back().copy_(weights[i]);
  }
  return parts;
}

// As on a GPU: the weights become views of one buffer, which is returned.
at::Tensor flatten_weights(at::TensorList weights, int64_t per_layer, int64_t input, int64_t mode, int64_t hidden,
                           int64_t projection, int64_t layers, bool /*batch_first*/, bool bidirectional) {
  SKY_CHECK(!weights.empty(), "_cudnn_rnn_flatten_weight_: cannot flatten empty weight list");
  at::NoGradGuard no_grad;
  Shape shape{mode, input, hidden, projection, layers, per_layer, bidirectional, weights[0].scalar_type()};
  auto* layout = layout_of(weights, shape);
  SKY_CHECK(layout, weights.size(), " weights of a recurrent layer are too many to lie in one buffer");
  at::Tensor buffer;
  auto parts = copy_to_buffer(weights, *layout, buffer);
  for (size_t i = 0; i < weights.size(); i++) weights[i].set_(parts[i].detach());
  return buffer;
}

// The GPU's state for dropout, drawn anew after the device's generator was seeded, as PyTorch does.
at::Tensor dropout_state(const at::Tensor& input, double dropout, bool train) {
  struct State {
    at::Tensor buffer;
    uint64_t seedings = 0;
  };
  static std::mutex mutex;
  static auto& states = *std::make_unique<std::map<uint32_t, State>>().release();
  auto& session = Session::of(input.unsafeGetTensorImpl());
  std::lock_guard lock(mutex);
  auto& state = states[session.serial];
  if (!train || dropout <= 0) return state.buffer;
  if (!state.buffer.defined() || state.seedings != session.seedings) {
    at::NoGradGuard no_grad;
    state.seedings = session.seedings;
    auto seed = at::empty({}, input.options().dtype(at::kLong)).random_().item<int64_t>();
    state.buffer = at::_cudnn_init_dropout_state(dropout, train, seed, input.options().dtype(at::kByte));
  }
  return state.buffer;
}

// As cuDNN numbers them.
enum Mode : int64_t { kRelu, kTanh, kLstm, kGru };

struct Layers {
  at::TensorList weights;
  bool has_biases;
  int64_t count;
  double dropout;
  bool train, bidirectional, batch_first;
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> run(Mode mode, const at::Tensor& input, at::IntArrayRef batch_sizes,
                                                   const at::Tensor& hidden, const at::Tensor& cell,
                                                   const Layers& layers) {
  auto width = hidden.size(2), projection = int64_t{0};
  if (cell.defined() && cell.size(2) != width) {
    projection = width;
    width = cell.size(2);
  }
  int64_t per_layer = (layers.has_biases ? 4 : 2) + (projection ? 1 : 0);
  Shape shape{mode,
              input.size(-1),
              width,
              projection,
              layers.count,
              per_layer,
              layers.bidirectional,
              layers.weights[0].scalar_type()};
  auto out = at::_cudnn_rnn(input, layers.weights, per_layer, buffer_of(layers.weights, shape), hidden, cell, mode,
                            width, projection, layers.count, layers.batch_first, layers.dropout, layers.train,
                            layers.bidirectional, batch_sizes, dropout_state(input, layers.dropout, layers.train));
  return {std::get<0>(out), std::get<1>(out), std::get<2>(out)};
}

at::IntArrayRef sizes_in(const at::Tensor& batch_sizes) {
  SKY_CHECK(batch_sizes.dim() == 1 && batch_sizes.device().is_cpu(),
            "batch_sizes tensor should be 1D and on CPU, but got ", batch_sizes.dim(), "D on ", batch_sizes.device());
  return {static_cast<const int64_t*>(batch_sizes.const_data_ptr()), static_cast<size_t>(batch_sizes.numel())};
}

void lstm(at::Tensor& output, at::Tensor& hy, at::Tensor& cy, const at::Tensor& input, at::TensorList hx,
          at::TensorList weights, bool biases, int64_t count, double dropout, bool train, bool bidirectional,
          bool batch_first) {
  Layers layers{weights, biases, count, dropout, train, bidirectional, batch_first};
  std::tie(output, hy, cy) = run(kLstm, input, {}, hx[0], hx[1], layers);
}

void packed_lstm(at::Tensor& output, at::Tensor& hy, at::Tensor& cy, const at::Tensor& data,
                 const at::Tensor& batch_sizes, at::TensorList hx, at::TensorList weights, bool biases, int64_t count,
                 double dropout, bool train, bool bidirectional) {
  Layers layers{weights, biases, count, dropout, train, bidirectional, false};
  std::tie(output, hy, cy) = run(kLstm, data, sizes_in(batch_sizes), hx[0], hx[1], layers);
}

template <Mode mode>
void rnn(at::Tensor& output, at::Tensor& hy, const at::Tensor& input, const at::Tensor& hx, at::TensorList weights,
         bool biases, int64_t count, double dropout, bool train, bool bidirectional, bool batch_first) {
  Layers layers{weights, biases, count, dropout, train, bidirectional, batch_first};
  std::tie(output, hy, std::ignore) = run(mode, input, {}, hx, {}, layers);
}

template <Mode mode>
void packed_rnn(at::Tensor& output, at::Tensor& hy, const at::Tensor& data, const at::Tensor& batch_sizes,
                const at::Tensor& hx, at::TensorList weights, bool biases, int64_t count, double dropout, bool train,
                bool bidirectional) {
  Layers layers{weights, biases, count, dropout, train, bidirectional, false};
  std::tie(output, hy, std::ignore) = run(mode, data, sizes_in(batch_sizes), hx, {}, layers);
}

// Under autocast cuDNN gets all in the lower precision. The weights are cast above autograd, and lie in one buffer.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> lower_precision_rnn(
    const at::Tensor& input, at::TensorList weights, int64_t per_layer, const Optional& buffer,
    const at::Tensor& hidden, const Optional& cell, int64_t mode, int64_t width, int64_t projection, int64_t layers,
    bool batch_first, double dropout, bool train, bool bidirectional, at::IntArrayRef batch_sizes,
    const Optional& state) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(kSky));
  auto dtype = at::autocast::get_autocast_dtype(kSky);
  auto lowered = [&](const at::Tensor& t) { return t.is_floating_point() ? t.to(dtype) : t; };
  std::vector<at::Tensor> cast;
  for (const auto& weight : weights) cast.push_back(lowered(weight));
  auto flat = buffer;
  if (!weights.empty() && weights[0].scalar_type() != dtype) {
    flat.reset();
    Shape shape{mode, input.size(-1), width, projection, layers, per_layer, bidirectional, dtype};
    if (auto* layout = layout_of(cast, shape)) {
      at::NoGradGuard no_grad;
      at::Tensor made;
      copy_to_buffer(cast, *layout, made);
      flat = made;
    }
  }
  return at::_cudnn_rnn(lowered(input), cast, per_layer, flat, lowered(hidden),
                        cell && cell->defined() ? Optional(lowered(*cell)) : cell, mode, width, projection, layers,
                        batch_first, dropout, train, bidirectional, batch_sizes, state);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("cudnn_is_acceptable", takes_cudnn);
  m.impl("_thnn_fused_lstm_cell",
         torch::CppFunction::makeFromBoxedFunction<&cell<c10::DispatchKey::Autograd, &lstm_cell>>());
  m.impl("_thnn_fused_gru_cell",
         torch::CppFunction::makeFromBoxedFunction<&cell<c10::DispatchKey::Autograd, &gru_cell>>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("cudnn_is_acceptable", takes_cudnn);
  m.impl("_cudnn_rnn_flatten_weight", flatten_weights);
  m.impl("_thnn_fused_lstm_cell",
         torch::CppFunction::makeFromBoxedFunction<&cell<c10::DispatchKey::PrivateUse1, &lstm_cell>>());
  m.impl("_thnn_fused_gru_cell",
         torch::CppFunction::makeFromBoxedFunction<&cell<c10::DispatchKey::PrivateUse1, &gru_cell>>());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) { m.impl("_cudnn_rnn", lower_precision_rnn); }

}  // namespace
}  // namespace sky

namespace at::native {

REGISTER_PRIVATEUSE1_DISPATCH(lstm_cudnn_stub, &sky::lstm)
REGISTER_PRIVATEUSE1_DISPATCH(lstm_packed_cudnn_stub, &sky::packed_lstm)
REGISTER_PRIVATEUSE1_DISPATCH(gru_cudnn_stub, &sky::rnn<sky::kGru>)
REGISTER_PRIVATEUSE1_DISPATCH(gru_packed_cudnn_stub, &sky::packed_rnn<sky::kGru>)
REGISTER_PRIVATEUSE1_DISPATCH(rnn_tanh_cudnn_stub, &sky::rnn<sky::kTanh>)
REGISTER_PRIVATEUSE1_DISPATCH(rnn_tanh_packed_cudnn_stub, &sky::packed_rnn<sky::kTanh>)
REGISTER_PRIVATEUSE1_DISPATCH(rnn_relu_cudnn_stub, &sky::rnn<sky::kRelu>)
REGISTER_PRIVATEUSE1_DISPATCH(rnn_relu_packed_cudnn_stub, &sky::packed_rnn<sky::kRelu>)

}  // namespace at::native
