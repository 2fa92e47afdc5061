#include <fusedmoe/jobs/verify.hpp>

#include <algorithm>
#include <cmath>

#include <fusedmoe/problems.hpp>

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

// The step of a quantized element relative to the values that matter: those near the root mean square of a
// group.
double StepOf(DType element) {
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
      return 0x1p-5;  // int8: the largest value is 127 steps and about four deviations
  }
}

// Where a scale is the largest value over a number that ends in one half, that value stands on a threshold
// itself: below zero its code is -127 or -128 by one rounding of the value, for about half of the groups a
// step of four root mean squares in 127.5, in a group of so many columns.
double LargestOnThreshold(const ActivationFormat& activation, int64_t columns) {
  const double divisor = activation.rule.amax_divisor;
  if (activation.element != DType::kI8 || activation.static_tensor_scale ||
      divisor != std::floor(divisor) + 0.5) {
    return 0;
  }
  const int64_t group =
      activation.group.col > 0 ? std::min(activation.group.col, columns) : std::max<int64_t>(columns, 1);
  return 4.0 / divisor / std::sqrt(2.0 * static_cast<double>(group));
}

// One value that two kernels see on either side of a threshold. Floats: the largest of its group, some four
// root mean squares, wrong by a step of itself. Where it decides a scale that is stored in few bits, the
// others of its group are rounded anew. Integers: any of a group whose largest value, 127 steps, is sixteen
// root mean squares of all, as of a token with long rows. `values` are compared.
double OneEvent(const ActivationFormat& activation, double values) {
  const DType element = *activation.element;
  if (element == DType::kI8) {
    return 16.0 / 127.0 / std::sqrt(values);
  }
  const double step = StepOf(element);
  const int64_t others =
      activation.scale_dtype == DType::kF32 ? 0 : std::max<int64_t>(activation.group.col, 1) - 1;
  return step * std::sqrt((16.0 + static_cast<double>(others)) / values);
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
                   bool scales_apart, int64_t rows) {
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
  if (plan.activation == ActivationMode::kA8) {
    // A step is 1/127 of the largest value of a group of 64, about four times its root mean square; twice.
    bound.activation_rounding = std::sqrt(2.0) * 4.0 / 127.0 / std::sqrt(12.0);
    return bound;
  }
  if (!scheme.activation.quantized() || plan.activation == ActivationMode::kWeightOnly) {
    bound.mid_rounding = mid;
    // Weight-only kernels hold activations in 15 bits under a scale (BF16 inputs keep all but the smallest)
    // or in bf16 (which loses bits of F16 and F32). Unquantized weights meet activations of their own dtype.
    if (scheme.weight.quantized()) {
      bound.input_rounding = output == DType::kBF16 ? 0x1p-12 : 0x1p-9;
      bound.mid_rounding = std::max(mid, 0x1p-12);
    }
    return bound;
  }
  // The same rule quantizes the same input to the same codes in both kernels; what differs is the input of
  // the second GEMM. A value moves to the next code when it lies closer to a threshold than the two kernels
  // are apart: a share delta / step of all values, each of which then is wrong by one step.
  const double delta = std::max({mid, gemm1, plan.layout_error});
  bound.requantization = std::hypot(std::sqrt(delta * StepOf(*scheme.activation.element)),
                                    LargestOnThreshold(scheme.activation, intermediate));
  if (rows > 0) {
    bound.one_event =
        OneEvent(scheme.activation, static_cast<double>(rows) * static_cast<double>(intermediate));
  }
  if (scales_apart) {
    // A rank takes the scale of a row, a group, or of all rows over its slice of the columns or the slots of
    // its experts: other codes than those of the whole, each wrong by a rounding of its own.
    bound.activation_rounding = std::sqrt(2.0) * StepOf(*scheme.activation.element) / std::sqrt(12.0);
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

ErrorBound BoundOfLayer(const MoeLayer& layer, DType output, int64_t intermediate, int64_t tokens) {
  const MoeConfig& config = layer.config();
  // Latent experts read the same rows in all kernels (moe/latent_projections.hpp), and projecting back leaves
  // the relative error of their sums as it is, unless these lie where it has small singular values.
  ErrorBound bound =
      BoundOf(layer.plan(), layer.scheme(), output, config.expert_hidden(), config.intermediate,
              RanksScaleApart(intermediate, config.parallel, layer.scheme()), tokens * config.top_k());
  RoundRows(layer.plan(), layer.scheme(), config.dtype, output, bound);
  if (layer.shared_scheme() == nullptr || layer.plan().shared == nullptr) {
    return bound;
  }
  ErrorBound shared = BoundOf(*layer.plan().shared, *layer.shared_scheme(), output, config.hidden,
                              config.shared.intermediate, false, tokens);
  RoundRows(*layer.plan().shared, *layer.shared_scheme(), config.dtype, output, shared);
  for (double ErrorBound::*term : kTerms) {
    bound.*term = std::max(bound.*term, shared.*term);
  }
  bound.one_event = std::max(bound.one_event, shared.one_event);
  return bound;
}

}  // namespace fusedmoe
