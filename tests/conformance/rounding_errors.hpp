#pragma once

#include <vector>

#include <fusedmoe/plan.hpp>

#include "conformance/drawn_case.hpp"

namespace fusedmoe::conformance {

using Row = std::vector<float>;

inline constexpr double kReach = 4.0;    ///< deviations that a value between the GEMMs may be away
inline constexpr double kUlp = 0x1p-24;  ///< of fp32, relative

inline double Square(double value) {
  return value * value;
}

/// Relative errors of a backend's arithmetic, root mean squares, from the terms of BoundOf.
struct Arithmetic {
  double sums = 0;    ///< of a sum, relative to the root of the sum of squares of its products
  double input = 0;   ///< of an input, relative to itself
  double middle = 0;  ///< of a value between the GEMMs
  double step = 0;    ///< of a kernel's own integers, relative to the largest value of 64 columns
  // Cards:
  double argument = 0;  ///< of what an activation's exponential is given
  double least = 0;     ///< of a value between the GEMMs, not relative: where its type ends
  double row = 0;       ///< of an expert's output before those of a token are added up
};
bool IsOnCard(const Plan& plan);
/// `quantized`: the plan follows a scheme that quantizes activations.
Arithmetic ArithmeticOf(const DrawnCase& drawn, const Plan& plan, bool quantized);

/// Deviations of the values of a row: `relative` to each, and `step` of the largest of 64 columns, of the row
/// where columns are reordered.
Row Deviations(const Row& row, double relative, double step, bool reordered);

/// The square of the deviation of a sum of products from those of one factor. `scratch` is overwritten.
double VarianceOfDot(const float* weights, const Row& deviations, Row& scratch);

}  // namespace fusedmoe::conformance
