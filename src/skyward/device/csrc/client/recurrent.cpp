// Recurrent cells: PyTorch picks the fused CUDA cells for us, which other workers do not have.
//
// They are written out in plain operations above autograd, so that their gradients are PyTorch's own.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/chunk.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <torch/library.h>

namespace sky {
namespace {

using Optional = std::optional<at::Tensor>;

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

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

}  // namespace
}  // namespace sky
