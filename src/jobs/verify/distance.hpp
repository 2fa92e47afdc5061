#pragma once

#include <cmath>
#include <cstdint>

namespace fusedmoe {

/// Squared differences and norms, summed.
struct Distance {
  double difference = 0, norm = 0;
  int64_t not_finite = 0;  // values that are NaN, or the same infinity, on both sides
  // Values that are not finite must be so on both sides; they carry no distance.
  void Take(float actual, float expected) {
    if (actual == expected || (std::isnan(actual) && std::isnan(expected))) {
      if (std::isfinite(expected)) {
        norm += static_cast<double>(expected) * expected;
      } else {
        ++not_finite;
      }
      return;
    }
    const double delta = static_cast<double>(actual) - expected;
    difference += delta * delta;
    norm += static_cast<double>(expected) * expected;
  }
  void Add(const Distance& other) {
    difference += other.difference;
    norm += other.norm;
    not_finite += other.not_finite;
  }
  // Against an expected zero every difference is infinitely large.
  double relative() const { return difference == 0 ? 0.0 : std::sqrt(difference / norm); }
};

/// The larger of two errors; NaN is larger than all.
inline double Larger(double a, double b) {
  return b <= a ? a : b;
}

}  // namespace fusedmoe
