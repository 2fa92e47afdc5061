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
};

struct Fit {
  CpuPathCost cost;
  double misfit = 0;  ///< largest relative difference
};

/// The constants, none of them negative, whose times differ least from the points, in squares of relative
/// differences. Zeros without points.
Fit FitPath(std::span<const Point> points);

}  // namespace fusedmoe::tune
