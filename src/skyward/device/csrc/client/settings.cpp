#include "settings.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace sky {
namespace {

uint64_t flag(bool on, uint64_t bit) { return on ? bit : 0; }

uint64_t read_settings(at::Context& context) {
  uint64_t settings =
      flag(context.deterministicAlgorithms(), kDeterministic) |
      flag(context.deterministicAlgorithmsWarnOnly(), kDeterministicWarns) |
      flag(context.deterministicFillUninitializedMemory(), kFillsMemory) |
      flag(context.benchmarkCuDNN(), kCudnnBenchmarks) | flag(context.deterministicCuDNN(), kCudnnDeterministic) |
      flag(context.userEnabledCuDNN(), kCudnn) | flag(context.userEnabledFlashSDP(), kFlashAttention) |
      flag(context.userEnabledMemEfficientSDP(), kEfficientAttention) |
      flag(context.userEnabledMathSDP(), kMathAttention) | flag(context.userEnabledCuDNNSDP(), kCudnnAttention) |
      flag(context.allowFP16BF16ReductionMathSDP(), kReducedMathAttention) |
      flag(context.allowFP16AccumulationCuBLAS(), kHalfAccumulates);
  settings |= static_cast<uint64_t>(context.allowFP16ReductionCuBLAS()) << kHalfReductionAt;
  settings |= static_cast<uint64_t>(context.allowBF16ReductionCuBLAS()) << kBrainReductionAt;
  int at = kAttentionPriorityAt;
  for (auto kernel : context.sDPPriorityOrder()) {
    settings |= (static_cast<uint64_t>(kernel) & ((1u << kPriorityBits) - 1)) << at;
    at += kPriorityBits;
  }
  auto limit = std::clamp(context.benchmarkLimitCuDNN(), 0, (1 << kBenchmarkLimitBits) - 1);
  return settings | static_cast<uint64_t>(limit) << kBenchmarkLimitAt;
}

uint64_t captures() {
  auto* said = std::getenv("SKYWARD_CAPTURE");
  return flag(said && !std::strcmp(said, "0"), kNeverCaptures);
}

}  // namespace

uint64_t settings_now() {
  static const auto captured = captures();
  // All of these are members of one object. Comparing its bytes takes as long as asking for two of them.
  struct Last {
    char bytes[sizeof(at::Context)];
    uint64_t settings = 0;
  };
  thread_local Last last;
  auto& context = at::globalContext();
  if (C10_UNLIKELY(std::memcmp(last.bytes, static_cast<void*>(&context), sizeof last.bytes) != 0)) {
    last.settings = read_settings(context);
    std::memcpy(last.bytes, static_cast<void*>(&context), sizeof last.bytes);
  }
  return last.settings | static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) |
         flag(c10::WarningUtils::get_warnAlways(), kWarnsAlways) | captured;
}

uint64_t with_precision(uint64_t settings, uint64_t known, Product product, bool on_cpu) {
  constexpr auto kAll = kPrecisionMask << kMatmulPrecisionAt | kPrecisionMask << kConvolutionPrecisionAt |
                        kPrecisionMask << kRecurrentPrecisionAt;
  settings |= known & kAll;
  if (C10_LIKELY(product == Product::kNone)) return settings;
  auto& context = at::globalContext();
  auto op = product == Product::kMatmul        ? at::Float32Op::MATMUL
            : product == Product::kConvolution ? at::Float32Op::CONV
                                               : at::Float32Op::RNN;
  auto at = product == Product::kMatmul        ? kMatmulPrecisionAt
            : product == Product::kConvolution ? kConvolutionPrecisionAt
                                               : kRecurrentPrecisionAt;
  uint64_t precision = on_cpu ? static_cast<uint64_t>(context.float32Precision(at::Float32Backend::MKLDNN, op))
                       : product == Product::kMatmul
                           ? context.float32Precision(at::Float32Backend::CUDA, op) == at::Float32Precision::TF32
                           : context.allowTF32CuDNN(op);
  return (settings & ~(kPrecisionMask << at)) | (precision & kPrecisionMask) << at;
}

}  // namespace sky
