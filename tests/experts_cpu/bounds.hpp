#pragma once

#include <algorithm>
#include <string>

#include "definition.hpp"
#include "experts/cpu/panel_packer.hpp"

/// Relative L2 errors that a layer may have, derived from how a level holds activations and weights.
namespace fusedmoe::cpu_test {

/// fp32: sums of n products carry at most about sqrt(n) * 2^-24, here n <= 300, in three GEMMs and an
/// activation whose slope is near one: 4 * 17 * 6e-8 = 4e-6.
constexpr double kFp32Bound = 4e-6;

/// 15 bits with a scale per 64: a value errs by a uniform +-d/2, d = amax/16256. At worst the amax of 64 is 8
/// times their rms, 8 / 16256 / sqrt(12) = 1.4e-4 a GEMM; gate and up err together (2x), down once: sqrt(5)
/// * 1.4e-4 = 3.2e-4.
constexpr double kA16Bound = 3.2e-4;

/// The same with d = amax/127.
constexpr double kA8Bound = kA16Bound * 128;

/// Sums good to fp32 (2e-7) before the intermediate is quantized again move about 1e-5 of its values across a
/// tie, each by one code step of at most a quarter of its size: sqrt(1e-5) / 4 = 8e-4 when all of them lie in
/// one place. Rows here have some 10^4 intermediate values.
constexpr double kRequantizedBound = 8e-4;

/// A unit for bf16 takes activations that the scheme leaves alone in bf16, each wrong by at most 2^-8 of
/// itself. The hidden states of these layers are bf16 already; the intermediate is rounded once, and its
/// errors pass the second GEMM like the values themselves. Weights and codes of activations enter the tiles
/// without loss.
constexpr double kBf16Bound = 0x1p-8;

/// But for weights whose groups have scales that bf16 does not hold (INT4, FP8 in blocks): in tiles they are
/// rounded together with the scale of their group, which is an f16 number there, to 11 bits and then to bf16,
/// by at most (2^-9 + 2 * 2^-12) of themselves, once in down and twice (gate and up are multiplied) before.
/// Those that are computed in fp32 (groups of 16, zero points that are numbers, two levels) by less.
constexpr double kRoundedTileBound = kBf16Bound + 3 * (0x1p-9 + 0x1p-11);

/// F16 layers: two planes of bf16 leave less than 2^-18 of a value (docs/accuracy.md).
constexpr double kBf16PairBound = kFp32Bound + 0x1p-17;

/// Sums of 64 k in f16: 6.6e-4 expected in each GEMM, gate and up and down: sqrt(3) times that, and four
/// times what is expected (docs/accuracy.md). Through requantization to e4m3: sqrt(6.6e-4 / 8), four times.
constexpr double kF16Bound = 4.6e-3;
constexpr double kF16RequantizedBound = 3.6e-2;

inline PanelFormat PanelOf(const LayerSpec& spec) {
  WeightFormat weight = ParseScheme(spec.scheme)->weight;
  weight.zero_point_dtype = spec.float_zeros ? DType::kF32 : DType::kU8;
  return *ChoosePanelFormat(weight, spec.zero_points);
}

/// The bound of one level; on `amx` of either unit, the tiles and the vectors beside them.
inline double BoundOf(const LayerSpec& spec, const std::string& isa) {
  const Scheme scheme = *ParseScheme(spec.scheme);
  const bool fp8 = scheme.weight.element == DType::kF8E4M3;
  if (scheme.activation.quantized() && spec.mode != ActivationMode::kWeightOnly) {
    return spec.mode == ActivationMode::kA8 ? kF16RequantizedBound : kRequantizedBound;
  }
  if (fp8 && spec.mode == ActivationMode::kA8) {
    return isa == "avx512_fp16" ? kF16Bound : kBf16Bound;
  }
  const PanelFormat panel = PanelOf(spec);
  const DType code = panel.code;
  if (isa == "amx") {
    const bool blocks = fp8 && (panel.scale == PanelScale::kF32 || panel.scale == PanelScale::kStripeF32);
    const bool rounded_bytes = code == DType::kU8 && (panel.group == 16 || panel.zeros == PanelZero::kFloats);
    return std::max(code == DType::kU4 || blocks || rounded_bytes ? kRoundedTileBound : kBf16Bound,
                    spec.mode == ActivationMode::kA8 ? kA8Bound : 0.0);
  }
  if (spec.mode == ActivationMode::kA8) {
    return kA8Bound;
  }
  if (DTypeBits(code) < 8 || code == DType::kU8) {
    return kA16Bound;
  }
  if (isa != "avx512_bf16" || code == DType::kF32 || code == DType::kF16 || spec.dtype == DType::kF32) {
    return kFp32Bound;
  }
  return spec.dtype == DType::kBF16 ? kBf16Bound : kBf16PairBound;
}

}  // namespace fusedmoe::cpu_test
