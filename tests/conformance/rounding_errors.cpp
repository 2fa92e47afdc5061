#include "conformance/rounding_errors.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

#include <fusedmoe/jobs/verify.hpp>

#include "numerics/row_math.hpp"

namespace fusedmoe::conformance {
namespace {

/// Whether kernels round rows to BF16 that the first GEMM reads as they are, and which are no such numbers.
bool RoundsInput(const DrawnCase& drawn, const Plan& plan) {
  const bool to_bf16 = plan.input_dtype == "BF16" || plan.input_dtype.ends_with("BF16 on tiles");
  const bool exact = drawn.dtype == DType::kBF16 && !drawn.config.apply_router_weight_on_input &&
                     (*drawn.source.load(0)).up.pre_quant_scale.empty();
  return to_bf16 && !exact;
}

/// What docs/accuracy.md derives of cards ("The sweep"). Sums over `columns`.
Arithmetic ArithmeticOfCard(const Plan& plan, const ErrorBound& bound, int64_t columns) {
  Arithmetic arithmetic;
  // A step of the tensor cores adds 16 products and cuts the sum below its last bit.
  const bool cut = plan.arithmetic.starts_with("tensor");
  const double steps = cut ? static_cast<double>(columns) / 16 : 0.0;
  arithmetic.sums =
      std::hypot(std::hypot(bound.layout, 2 * kUlp), std::hypot(bound.accumulation, steps * kUlp / 2));
  const bool f16 = plan.intermediate_dtype == "F16";
  arithmetic.middle = plan.intermediate_dtype == "BF16" ? 0x1p-9 : f16 ? 0x1p-12 : 4 * kUlp;
  arithmetic.least = f16 ? 0x1p-26 : 0.0;
  arithmetic.argument = 2 * kUlp;
  arithmetic.row = plan.rows_dtype == "BF16" ? 0x1p-9 : 0.0;
  return arithmetic;
}

}  // namespace

bool IsOnCard(const Plan& plan) {
  return plan.backend == "CUDA_FUSED";
}

Arithmetic ArithmeticOf(const DrawnCase& drawn, const Plan& plan, bool quantized) {
  const MoeConfig& config = drawn.config;
  const ErrorBound bound =
      BoundOf(plan, drawn.source.scheme, drawn.dtype, config.hidden, config.intermediate);
  if (IsOnCard(plan)) {
    return ArithmeticOfCard(plan, bound, std::max(config.hidden, config.intermediate));
  }
  Arithmetic arithmetic;
  arithmetic.sums = std::hypot(bound.layout, 2 * kUlp);  // scales and biases are in fp32 everywhere
  arithmetic.middle = 4 * kUlp;
  if (plan.arithmetic.empty()) {
    return arithmetic;  // REFERENCE and the contracts: sums of fp64, nothing in between in fewer bits
  }
  arithmetic.sums = std::hypot(arithmetic.sums, bound.accumulation);
  arithmetic.middle = std::hypot(arithmetic.middle, bound.mid_rounding);
  arithmetic.input = bound.input_rounding;
  if (RoundsInput(drawn, plan)) {
    arithmetic.input = std::max(arithmetic.input, 0x1p-9);
  }
  if (!quantized && plan.intermediate_dtype == "BF16") {  // `a8`, too
    arithmetic.middle = std::max(arithmetic.middle, 0x1p-9);
  }
  if (drawn.source.scheme.weight.quantized()) {
    // Integers of 7 bits and a sign, 15 bits, or 22 for what the scheme has quantized.
    const double largest_code = quantized ? 0x1p21 : plan.activation == ActivationMode::kA8 ? 127.0 : 0x1p14;
    arithmetic.step = 1 / largest_code / std::sqrt(12.0);
  }
  return arithmetic;
}

Row Deviations(const Row& row, double relative, double step, bool reordered) {
  Row deviations(row.size());
  const auto columns = static_cast<int64_t>(row.size());
  const int64_t group = reordered ? columns : std::min<int64_t>(64, columns);
  for (int64_t begin = 0; begin < columns; begin += group) {
    const int64_t end = std::min(begin + group, columns);
    const double rounding = step * static_cast<double>(RowAmax(row.data() + begin, end - begin));
    for (auto k = static_cast<size_t>(begin); k < static_cast<size_t>(end); ++k) {
      deviations[k] = static_cast<float>(std::hypot(rounding, relative * static_cast<double>(row[k])));
    }
  }
  return deviations;
}

double VarianceOfDot(const float* weights, const Row& deviations, Row& scratch) {
  scratch.resize(deviations.size());
  std::transform(deviations.begin(), deviations.end(), weights, scratch.begin(), std::multiplies<>());
  return DotRows(scratch.data(), scratch.data(), static_cast<int64_t>(scratch.size()));
}

}  // namespace fusedmoe::conformance
