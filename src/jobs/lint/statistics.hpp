#pragma once

#include <cstdint>
#include <vector>

#include <fusedmoe/weights.hpp>

namespace fusedmoe::lint {

/// What the codes and scales of one matrix look like.
struct MatrixStatistics {
  int64_t blocks = 0;
  int64_t blocks_at_limit = 0;  ///< block scales that are the largest of their type
  int64_t codes = 0;
  int64_t codes_at_limit = 0;  ///< of one byte, of the largest magnitude; integers in groups from 128 on
  int64_t not_finite = 0;
  int64_t nonzero = 0;
  /// Groups along the columns whose largest code is below half of what a quantizer leaves there.
  int64_t groups = 0;
  int64_t slack_groups = 0;
  std::vector<double> row_power;  ///< mean square of the decoded values of each row
};

/// `matrix` must be valid (ValidateCanonical).
MatrixStatistics Measure(const CanonicalMatrix& matrix);

/// How strongly the mean squares of a vector of rows alternate (even against odd) and how strongly its halves
/// differ, each as |a - b| / (a + b).
struct RowPattern {
  double alternation = 0;
  double halves = 0;
  /// What chance alone leaves of each, one standard deviation.
  double alternation_noise = 0, halves_noise = 0;
};
RowPattern PatternOf(const std::vector<double>& row_power);

}  // namespace fusedmoe::lint
