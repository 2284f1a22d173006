#include "settings.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>

#include <vector>

#include "../wire/records.h"
#include "../wire/silence.h"

namespace sky {
namespace {

uint64_t field(uint64_t settings, int at, int bits) { return settings >> at & ((1u << bits) - 1); }

// Whether lower precision is allowed within a sum, and whether a sum may be split.
template <typename F>
void settle_reduction(uint64_t option, F&& set) {
  set(option == static_cast<uint64_t>(at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK),
      option != static_cast<uint64_t>(at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK));
}

void settle_attention(at::Context& context, uint64_t settings) {
  context.setSDPUseFlash(settings & kFlashAttention);
  context.setSDPUseMemEfficient(settings & kEfficientAttention);
  context.setSDPUseMath(settings & kMathAttention);
  context.setSDPUseCuDNN(settings & kCudnnAttention);
  context.setAllowFP16BF16ReductionMathSDP(settings & kReducedMathAttention);
  std::vector<int64_t> order;
  for (int i = 0; i < kPriorities && i < at::num_sdp_backends; i++)
    order.push_back(static_cast<int64_t>(field(settings, kAttentionPriorityAt + i * kPriorityBits, kPriorityBits)));
  context.setSDPPriorityOrder(order);
}

void settle_precision(at::Context& context, uint64_t settings, bool on_cpu) {
  auto of = [&](int at) { return settings >> at & kPrecisionMask; };
  if (on_cpu) {
    auto set = [&](at::Float32Op op, int at) {
      context.setFloat32Precision(at::Float32Backend::MKLDNN, op, static_cast<at::Float32Precision>(of(at)));
    };
    set(at::Float32Op::MATMUL, kMatmulPrecisionAt);
    set(at::Float32Op::CONV, kConvolutionPrecisionAt);
    set(at::Float32Op::RNN, kRecurrentPrecisionAt);
    return;
  }
  auto precision = [&](int at) { return of(at) ? at::Float32Precision::TF32 : at::Float32Precision::IEEE; };
  context.setAllowTF32CuBLAS(of(kMatmulPrecisionAt));
  context.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV, precision(kConvolutionPrecisionAt));
  context.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::RNN, precision(kRecurrentPrecisionAt));
}

}  // namespace

void settle(uint64_t settings, c10::Device device) {
  auto dtype = static_cast<c10::ScalarType>(settings & 0xff);
  if (dtype >= c10::ScalarType::NumOptions) throw Malformed("an unknown dtype");
  // PyTorch has warned of them in the client.
  Silence silence;
  c10::WarningUtils::set_warnAlways(settings & kWarnsAlways);
  auto& context = at::globalContext();
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
  context.setDeterministicAlgorithms(settings & kDeterministic, settings & kDeterministicWarns);
  context.setDeterministicFillUninitializedMemory(settings & kFillsMemory);
  context.setUserEnabledCuDNN(settings & kCudnn);
  context.setBenchmarkCuDNN(settings & kCudnnBenchmarks);
  context.setDeterministicCuDNN(settings & kCudnnDeterministic);
  context.setBenchmarkLimitCuDNN(static_cast<int>(field(settings, kBenchmarkLimitAt, kBenchmarkLimitBits)));
  context.setAllowFP16AccumulationCuBLAS(settings & kHalfAccumulates);
  settle_reduction(field(settings, kHalfReductionAt, 2),
                   [&](bool allowed, bool split) { context.setAllowFP16ReductionCuBLAS(allowed, split); });
  settle_reduction(field(settings, kBrainReductionAt, 2),
                   [&](bool allowed, bool split) { context.setAllowBF16ReductionCuBLAS(allowed, split); });
  settle_attention(context, settings);
  settle_precision(context, settings, device.is_cpu());
}

}  // namespace sky
