#pragma once

#include <cmath>
#include <limits>
#include <vector>

namespace fusedmoe::test {

/// |actual - expected| / |expected|; where nothing but zeros is expected, |actual|. Infinity for vectors of
/// different lengths, NaN where a value is one.
template <typename Actual, typename Expected>
double RelativeL2(const std::vector<Actual>& actual, const std::vector<Expected>& expected) {
  if (actual.size() != expected.size()) {
    return std::numeric_limits<double>::infinity();
  }
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double value = static_cast<double>(expected[i]);
    const double delta = static_cast<double>(actual[i]) - value;
    difference += delta * delta;
    norm += value * value;
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

}  // namespace fusedmoe::test
