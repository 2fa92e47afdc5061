#include <fusedmoe/jobs/verify.hpp>

#include <algorithm>
#include <cmath>

#include <fusedmoe/problems.hpp>

#include "moe/backend.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe {
namespace {

// Expected relative error of one rounding to nearest with p significant bits: 2^(1 - p) / sqrt(12) over the
// mantissa, which is 0.42 * 2^-p for values uniform in their logarithm (docs/accuracy.md); rounded up to
// 2^-(p + 1).
double RoundingOf(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return 0x1p-9;
    case DType::kF16:
      return 0x1p-12;
    default:
      return 0x1p-25;
  }
}

// What normal numbers have: the largest value of a group is some four root mean squares. Steps of int8 are
// alike for all values of a group; that of a token with long rows may be sixteen root mean squares of all.
constexpr double kGroupPeak = 4, kPeakOfInt8 = 16;

// The step of a quantized element relative to the values that matter: those near the root mean square of a
// group.
double StepOf(DType element, const ComparedValues& values) {
  switch (element) {
    case DType::kF4E2M1:
      return 0.5;
    case DType::kF6E3M2:
    case DType::kF8E5M2:
      return 0.25;
    case DType::kF8E4M3:
    case DType::kF6E2M3:
      return 0.125;
    default:
      return values.group_peak.value_or(kGroupPeak) / 127.0;  // int8: the largest value is 127 steps
  }
}

// Where a scale is the largest value over a number that ends in one half, that value stands on a threshold
// itself: below zero its code is -127 or -128 by one rounding of the value, for about half of the groups a
// step, in a group of so many columns.
double LargestOnThreshold(const ActivationFormat& activation, int64_t columns, const ComparedValues& values) {
  const double divisor = activation.rule.amax_divisor;
  if (activation.element != DType::kI8 || activation.static_tensor_scale ||
      divisor != std::floor(divisor) + 0.5) {
    return 0;
  }
  const int64_t group =
      activation.group.col > 0 ? std::min(activation.group.col, columns) : std::max<int64_t>(columns, 1);
  return values.group_peak.value_or(kGroupPeak) / divisor / std::sqrt(2.0 * static_cast<double>(group));
}

// One value that two kernels see on either side of a threshold, among `count`. Floats: the largest of its
// group, wrong by a step of itself, and where `share` of all values move, so many that the largest of all may
// be one, that. Where it decides a scale that is stored in few bits, the others of its group are rounded
// anew. Integers: any of a group, by a step of the largest.
double OneEvent(const ActivationFormat& activation, const ComparedValues& values, double share,
                double count) {
  constexpr double kRare = 1e-3;
  const DType element = *activation.element;
  if (element == DType::kI8) {
    return values.peak.value_or(kPeakOfInt8) / 127.0 / std::sqrt(count);
  }
  const double step = StepOf(element, values);
  const int64_t others =
      activation.scale_dtype == DType::kF32 ? 0 : std::max<int64_t>(activation.group.col, 1) - 1;
  const double peak = share < kRare ? kGroupPeak : std::max(kGroupPeak, values.peak.value_or(kGroupPeak));
  return step * std::sqrt((peak * peak + static_cast<double>(others)) / count);
}

constexpr double ErrorBound::*kTerms[] = {&ErrorBound::output_rounding, &ErrorBound::input_rounding,
                                          &ErrorBound::mid_rounding,    &ErrorBound::accumulation,
                                          &ErrorBound::requantization,  &ErrorBound::activation_rounding,
                                          &ErrorBound::layout};

}  // namespace

double ErrorBound::value() const {
  double sum = 0;
  for (double ErrorBound::*term : kTerms) {
    sum += this->*term * (this->*term);
  }
  return std::hypot(factor * std::sqrt(sum), one_event);
}

bool RanksScaleApart(int64_t intermediate, const ParallelConfig& parallel, const Scheme& scheme) {
  const ActivationFormat& activation = scheme.activation;
  if (parallel.ep_size > 1 && NeedsDynamicTensorScale(activation)) {
    return true;
  }
  if (parallel.tp_size <= 1 || !activation.quantized()) {
    return false;
  }
  if (activation.group.col < 0) {  // a scale over whole rows
    return !activation.static_tensor_scale;
  }
  ParallelConfig place = parallel;
  for (place.tp_rank = 1; place.tp_rank < place.tp_size; ++place.tp_rank) {
    const Result<IntermediateRange> range = IntermediateShare(intermediate, place, scheme);
    if (range.ok() && range->begin % std::max<int64_t>(activation.group.col, 1) != 0) {
      return true;
    }
  }
  return false;
}

ErrorBound BoundOf(const Plan& plan, const Scheme& scheme, DType output, int64_t hidden, int64_t intermediate,
                   const ComparedValues& values) {
  ErrorBound bound;
  bound.output_rounding = std::hypot(RoundingOf(output), plan.rows_dtype == "BF16" ? 0x1p-9 : 0.0);
  // Partial sums walk like sqrt(K) roundings of 2^-25 expected each, in two kernels and two GEMMs.
  // The 8-bit units of Hopper hold sums of 128 products with 13 bits behind the point (docs/accuracy.md).
  // Sums of 64 products in f16 lose 6.6e-4 (ditto).
  const double short_sums = plan.arithmetic == "tensor_fp8" ? 0x1p-12
                            : plan.arithmetic == "f16_fma"  ? 6.6e-4
                                                            : 0.0;
  const double gemm1 = std::hypot(std::sqrt(static_cast<double>(hidden)) * 0x1p-24, short_sums);
  const double gemm2 = std::hypot(std::sqrt(static_cast<double>(intermediate)) * 0x1p-24, short_sums);
  bound.accumulation = std::sqrt(gemm1 * gemm1 + gemm2 * gemm2);
  const bool mid_is_short = plan.intermediate_dtype == "BF16" || plan.intermediate_dtype == "F16";
  const double two_planes = plan.arithmetic == "bf16_dot" ? 0x1p-18 : 0.0;  // of bf16
  double mid =
      mid_is_short ? RoundingOf(plan.intermediate_dtype == "F16" ? DType::kF16 : DType::kBF16) : two_planes;
  if (plan.backend == "EMULATION") {
    mid *= std::sqrt(7.0);  // weights, inputs and sums of gate and up are rounded as well
  }

  bound.layout = plan.layout_error;
  const bool a8 = plan.activation == ActivationMode::kA8 && !scheme.activation.quantized();
  if (!a8 && (!scheme.activation.quantized() || plan.activation == ActivationMode::kWeightOnly)) {
    bound.mid_rounding = mid;
    // Weight-only kernels hold activations in 15 bits under a scale (BF16 inputs keep all but the smallest)
    // or in bf16 (which loses bits of F16 and F32). Unquantized weights meet activations of their own dtype.
    if (scheme.weight.quantized()) {
      bound.input_rounding = output == DType::kBF16 ? 0x1p-12 : 0x1p-9;
      bound.mid_rounding = std::max(mid, 0x1p-12);
    }
    return bound;
  }
  const ActivationFormat activation = a8 ? A8Format() : scheme.activation;
  // The same rule quantizes the same input to the same codes in both kernels; what differs is the input of
  // the second GEMM. A value moves to the next code when it lies closer to a threshold than the two kernels
  // are apart: a share delta / step of all values, each of which then is wrong by one step.
  const double delta = std::max({mid, gemm1, plan.layout_error});
  const double step = StepOf(*activation.element, values);
  bound.requantization =
      std::hypot(std::sqrt(delta * step), LargestOnThreshold(activation, intermediate, values));
  if (values.rows > 0) {
    bound.one_event = OneEvent(activation, values, delta / step,
                               static_cast<double>(values.rows) * static_cast<double>(intermediate));
  }
  if (a8) {
    // Compared with the scheme, which does not round. Measured, twice that is enough for slices of ranks,
    // whose groups are others (tests/jobs/a8_groups_test.cpp); beside float weights activations are bf16.
    // Normal numbers: a step is 1/127 of four root mean squares. In front of both GEMMs.
    bound.activation_rounding = values.a8 ? std::hypot(2 * *values.a8 / bound.factor, 0x1p-9, 0x1p-9)
                                          : std::sqrt(2.0) * kGroupPeak / 127.0 / std::sqrt(12.0);
  } else if (values.scales_apart) {
    // A rank takes the scale of a row, a group, or of all rows over its slice of the columns or the slots of
    // its experts: other codes than those of the whole, each wrong by a rounding of its own.
    bound.activation_rounding = std::sqrt(2.0) * step / std::sqrt(12.0);
  }
  return bound;
}

namespace {

// Units for bf16 take rows of a BF16 layer in one plane, whatever they came in.
void RoundRows(const Plan& plan, const Scheme& scheme, DType layer, DType rows, ErrorBound& bound) {
  if (layer == DType::kBF16 && rows != DType::kBF16 && !scheme.activation.quantized() &&
      plan.arithmetic.find("bf16") != std::string::npos) {
    bound.input_rounding = std::max(bound.input_rounding, 0x1p-9);
  }
}

}  // namespace

ErrorBound BoundOfLayer(const MoeLayer& layer, DType output, int64_t intermediate, int64_t tokens,
                        ComparedValues routed) {
  const MoeConfig& config = layer.config();
  routed.rows = tokens * config.top_k();
  routed.scales_apart = RanksScaleApart(intermediate, config.parallel, layer.scheme());
  // Latent experts read the same rows in all kernels (moe/latent_projections.hpp), and projecting back leaves
  // the relative error of their sums as it is, unless these lie where it has small singular values.
  ErrorBound bound =
      BoundOf(layer.plan(), layer.scheme(), output, config.expert_hidden(), config.intermediate, routed);
  RoundRows(layer.plan(), layer.scheme(), config.dtype, output, bound);
  if (layer.shared_scheme() == nullptr || layer.plan().shared == nullptr) {
    return bound;
  }
  ErrorBound shared = BoundOf(*layer.plan().shared, *layer.shared_scheme(), output, config.hidden,
                              config.shared.intermediate, {.rows = tokens, .a8 = routed.a8});
  RoundRows(*layer.plan().shared, *layer.shared_scheme(), config.dtype, output, shared);
  for (double ErrorBound::*term : kTerms) {
    bound.*term = std::max(bound.*term, shared.*term);
  }
  bound.one_event = std::max(bound.one_event, shared.one_event);
  return bound;
}

}  // namespace fusedmoe
