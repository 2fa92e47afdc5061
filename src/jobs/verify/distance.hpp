#pragma once

#include <cmath>

namespace fusedmoe {

/// Squared differences and norms, summed.
struct Distance {
  double difference = 0, norm = 0;
  // Values that are not finite must be so on both sides; they carry no distance.
  void Take(float actual, float expected) {
    if (actual == expected || (std::isnan(actual) && std::isnan(expected))) {
      if (std::isfinite(expected)) {
        norm += static_cast<double>(expected) * expected;
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
  }
  // Against an expected zero every difference is infinitely large.
  double relative() const { return difference == 0 ? 0.0 : std::sqrt(difference / norm); }
};

}  // namespace fusedmoe
