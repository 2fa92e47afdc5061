#include <sys/resource.h>

#include <algorithm>
#include <chrono>

#include <fusedmoe/machine.hpp>

#include "platform/ceilings.hpp"
#include "platform/cpu_features.hpp"
#include "platform/peak_kernels.hpp"

namespace fusedmoe {
namespace {

constexpr ComputeUnitInfo kUnits[] = {
#define FMOE_COMPUTE_UNIT_INFO(id, name, ceiling, isa, instruction) \
  {ComputeUnit::id, name, ceiling, Isa::isa, instruction},
    FMOE_COMPUTE_UNIT_TABLE(FMOE_COMPUTE_UNIT_INFO)
#undef FMOE_COMPUTE_UNIT_INFO
};

/// A loop, the operations of one of its rounds, and rounds that take about two milliseconds at 4 GHz.
struct Loop {
  void (*spin)(int64_t rounds) = nullptr;
  double operations = 0;
  int64_t rounds = 0;
};

Loop LoopOf(ComputeUnit unit) {
#if defined(__x86_64__)
  switch (unit) {
    case ComputeUnit::kVnniInt8:
      return {&SpinVnniAvx512Vnni, 128.0 * kPeakChains, 1'200'000};
    case ComputeUnit::kF16Fma:
      return {&SpinFmaAvx512Fp16, 64.0 * kPeakChains, 1'200'000};
    case ComputeUnit::kBf16Dot:
      return {&SpinDotAvx512Bf16, 64.0 * kPeakChains, 1'200'000};
    case ComputeUnit::kF32Fma:
      return {&SpinFmaAvx512, 32.0 * kPeakChains, 1'200'000};
    case ComputeUnit::kAmxInt8:
      return {&SpinInt8Amx, 32768.0 * kAmxPeakTiles, 120'000};
    case ComputeUnit::kAmxBf16:
      return {&SpinBf16Amx, 16384.0 * kAmxPeakTiles, 120'000};
    case ComputeUnit::kAvx512Int8:
      return {&SpinInt8Avx512, 128.0 * kPeakChains, 400'000};
    case ComputeUnit::kAvx2Fma:
      return {&SpinFmaAvx2, 16.0 * kPeakChains, 1'200'000};
    case ComputeUnit::kAvx2Int8:
      return {&SpinInt8Avx2, 64.0 * kPeakChains, 400'000};
    case ComputeUnit::kAvx2VnniInt8:
      return {&SpinVnniAvx2Vnni, 64.0 * kPeakChains, 1'200'000};
    default:
      return {};
  }
#elif defined(__aarch64__)
  switch (unit) {
    case ComputeUnit::kNeonFma:
      return {&SpinFmaNeon, 8.0 * kPeakChains, 1'200'000};
    case ComputeUnit::kNeonInt8:
      return {&SpinDotNeon, 32.0 * kPeakChains, 1'200'000};
    default:
      return {};
  }
#else
  static_cast<void>(unit);
  return {};
#endif
}

}  // namespace

std::span<const ComputeUnitInfo> ComputeUnits() {
  return kUnits;
}

std::optional<ComputeUnit> ParseComputeUnit(std::string_view name) {
  for (const ComputeUnitInfo& info : kUnits) {
    if (info.name == name) {
      return info.unit;
    }
  }
  return std::nullopt;
}

int64_t TimesPreempted() {
  rusage usage{};
  return getrusage(RUSAGE_SELF, &usage) == 0 ? usage.ru_nivcsw : 0;
}

double SamplePeak(ComputeUnit unit, const Executor& executor) {
  const Isa isa = kUnits[static_cast<int>(unit)].isa;
  const Loop loop = LoopOf(unit);
  if (loop.spin == nullptr || !HostMachine().Has(isa) || (isa == Isa::kAmx && !RequestAmxPermission().ok())) {
    return 0;
  }
  const int threads = std::max(executor.num_threads, 1);
  const auto begin = std::chrono::steady_clock::now();
  ParallelFor(executor, threads, [&](int64_t) { loop.spin(loop.rounds); });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  return loop.operations * static_cast<double>(loop.rounds) * threads / std::max(seconds.count(), 1e-9);
}

double MeasurePeak(ComputeUnit unit, const Executor& executor) {
  double best = 0;
  for (int sample = 0; sample < 7; ++sample) {
    best = std::max(best, SamplePeak(unit, executor));
  }
  return best;
}

}  // namespace fusedmoe
