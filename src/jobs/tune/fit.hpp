#pragma once

#include <cstdint>
#include <span>

#include <fusedmoe/cpu_costs.hpp>

namespace fusedmoe::tune {

/// The time of an expert, and how often the constants of its path count in it.
struct Point {
  double blocks = 0;
  int64_t expert_tokens = 0;
  double passes = 0, rows = 0, tokens = 0;  ///< of a block
  double nanoseconds = 0;
  double weight = 1;  ///< of its relative difference in the fit
};

struct Fit {
  CpuPathCost cost;
  double misfit = 0;  ///< largest weighted relative difference
};

/// The constants, none of them negative, whose times differ least from the points, in squares of weighted
/// relative differences. Zeros without points.
Fit FitPath(std::span<const Point> points);

/// Weights for two paths: where both have a point of the same blocks and tokens, the square of the faster
/// time over the slower one, since only where paths meet do the constants decide anything. A point of one
/// path alone counts a tenth.
void WeighByNearness(std::span<Point> one, std::span<Point> other);

}  // namespace fusedmoe::tune
