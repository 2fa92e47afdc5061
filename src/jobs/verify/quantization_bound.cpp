#include <cmath>

#include <fusedmoe/jobs/verify.hpp>

namespace fusedmoe {
namespace {

// Relative root-mean-square error of rounding normal numbers to a format (docs/accuracy.md, "Two
// checkpoints").
double ExpectedError(DType element, bool small_groups) {
  switch (element) {
    case DType::kF4E2M1:
      return small_groups ? 0.095 : 0.12;
    case DType::kF6E2M3:
    case DType::kF6E3M2:
      return 0.06;
    case DType::kF8E4M3:
      return 0.0295;
    case DType::kF8E5M2:
      return 0.059;
    case DType::kI4:
    case DType::kU4:
      return 0.125;
    case DType::kI8:
    case DType::kU8:
      return 0.0125;
    case DType::kBF16:
      return 0x1p-9;
    case DType::kF16:
      return 0x1p-12;
    default:
      return 0x1p-25;
  }
}

double SchemeVariance(const Scheme& scheme) {
  const double weight = ExpectedError(scheme.weight.element, scheme.weight.block.col == 16);
  const double input = scheme.activation.quantized()
                           ? ExpectedError(*scheme.activation.element, scheme.activation.group.col == 16)
                           : 0.0;
  // Gate and up are multiplied, so the errors of the first GEMM count twice, those of the second once.
  return 3 * (weight * weight + input * input);
}

}  // namespace

double QuantizationBound(const Scheme& scheme, const Scheme& against) {
  constexpr double kFactor = 2;
  return kFactor * std::sqrt(SchemeVariance(scheme) + SchemeVariance(against));
}

}  // namespace fusedmoe
