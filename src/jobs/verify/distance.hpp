#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include <fusedmoe/dtype.hpp>

namespace fusedmoe {

/// What a result can hold once it is rounded to its dtype: from `overflow` on a value becomes infinite, and
/// small values are multiples of `step`. F16 leaves little room on both sides of ordinary hidden states.
struct OutputRange {
  float overflow = std::numeric_limits<float>::infinity();
  double step = 0x1p-149;
};

inline OutputRange RangeOf(DType output) {
  switch (output) {
    case DType::kF16:
      return {65520.0F, 0x1p-24};
    case DType::kBF16:
      return {0x1.FFp127F, 0x1p-133};
    default:
      return {};
  }
}

/// Squared differences and norms, summed.
struct Distance {
  double difference = 0, norm = 0;
  int64_t values = 0;
  int64_t not_finite = 0;  // values that are NaN, or the same infinity, on both sides
  int64_t overflowed = 0;  // values that are infinite only because their dtype ends before them

  // Values that are not finite must be so on both sides; they carry no distance. An infinite output stands
  // for all numbers that round to it, of which the nearest counts.
  void Take(float actual, float expected, const OutputRange& range = {}) {
    ++values;
    if (actual == expected || (std::isnan(actual) && std::isnan(expected))) {
      if (std::isfinite(expected)) {
        norm += static_cast<double>(expected) * expected;
      } else {
        ++not_finite;
      }
      return;
    }
    if (std::isinf(actual) && std::isfinite(expected) && std::isfinite(range.overflow)) {
      ++overflowed;
      actual = std::copysign(std::max(range.overflow, std::fabs(expected)), actual);
    }
    const double delta = static_cast<double>(actual) - expected;
    difference += delta * delta;
    norm += static_cast<double>(expected) * expected;
  }
  void Add(const Distance& other) {
    difference += other.difference;
    norm += other.norm;
    values += other.values;
    not_finite += other.not_finite;
    overflowed += other.overflowed;
  }
  // Against an expected zero every difference is infinitely large.
  double relative() const { return difference == 0 ? 0.0 : std::sqrt(difference / norm); }
  // What rounding to multiples of the smallest step does to values like these: half a step at most.
  double step_rounding(const OutputRange& range) const {
    return norm > 0 ? range.step / 2 * std::sqrt(static_cast<double>(values) / norm) : 0.0;
  }
};

/// The larger of two errors; NaN is larger than all.
inline double Larger(double a, double b) {
  return b <= a ? a : b;
}

}  // namespace fusedmoe
