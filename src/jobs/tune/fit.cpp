#include "jobs/tune/fit.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <set>

namespace fusedmoe::tune {
namespace {

constexpr size_t kNumConstants = 5;  // fixed, read, decode, row, token
using Vector = std::array<double, kNumConstants>;

/// What the constants are multiplied with, relative to the time and weighted, so that the right side is the
/// weight. Points up to `read_tokens` are bound by reading, the others by arithmetic.
Vector Columns(const Point& point, int64_t read_tokens) {
  const double unit = point.weight / point.nanoseconds, block = point.blocks * unit;
  if (point.expert_tokens <= read_tokens) {
    return {unit, block, 0, 0, 0};
  }
  return {unit, 0, block * point.passes, block * point.rows, block * point.tokens};
}

/// Least squares over the columns of `mask`; nothing where they depend on one another.
std::optional<Vector> Solve(std::span<const Point> points, int64_t read_tokens, unsigned mask) {
  std::array<std::array<double, kNumConstants + 1>, kNumConstants> m{};
  for (const Point& point : points) {
    const Vector x = Columns(point, read_tokens);
    for (size_t i = 0; i < kNumConstants; ++i) {
      for (size_t j = 0; j < kNumConstants; ++j) {
        m[i][j] += x[i] * x[j];
      }
      m[i][kNumConstants] += x[i] * point.weight;
    }
  }
  for (size_t i = 0; i < kNumConstants; ++i) {
    if ((mask >> i & 1U) == 0) {
      for (size_t j = 0; j < kNumConstants; ++j) {
        m[i][j] = m[j][i] = 0;
      }
      m[i][i] = 1;
      m[i][kNumConstants] = 0;
    }
  }
  for (size_t i = 0; i < kNumConstants; ++i) {  // positive definite: no pivots needed
    if (!(m[i][i] > 0)) {
      return std::nullopt;
    }
    for (size_t row = i + 1; row < kNumConstants; ++row) {
      const double factor = m[row][i] / m[i][i], before = m[row][row];
      for (size_t j = i; j <= kNumConstants; ++j) {
        m[row][j] -= factor * m[i][j];
      }
      if (m[row][row] < 1e-9 * before) {
        return std::nullopt;
      }
    }
  }
  Vector solution{};
  for (size_t i = kNumConstants; i-- > 0;) {
    double sum = m[i][kNumConstants];
    for (size_t j = i + 1; j < kNumConstants; ++j) {
      sum -= m[i][j] * solution[j];
    }
    solution[i] = sum / m[i][i];
  }
  return solution;
}

double TimeOf(const Vector& constants, const Point& point) {
  const double arithmetic =
      point.passes * constants[2] + point.rows * constants[3] + point.tokens * constants[4];
  return constants[0] + point.blocks * std::max(constants[1], arithmetic);
}

}  // namespace

Fit FitPath(std::span<const Point> points) {
  // Where reading ends is not known, so every end is tried, with every subset of constants that may be zero:
  // some 300 small systems.
  std::set<int64_t> ends = {0};
  for (const Point& point : points) {
    ends.insert(point.expert_tokens);
  }
  Fit best;
  double least = std::numeric_limits<double>::infinity();
  for (const int64_t end : ends) {
    for (unsigned mask = 1; mask < 1U << kNumConstants && !points.empty(); ++mask) {
      const std::optional<Vector> solution = Solve(points, end, mask);
      if (!solution || *std::min_element(solution->begin(), solution->end()) < 0) {
        continue;
      }
      double squares = 0, misfit = 0;
      for (const Point& point : points) {
        const double off = TimeOf(*solution, point) / point.nanoseconds - 1;
        squares += off * off * point.weight * point.weight;
        misfit = std::max(misfit, std::fabs(off) * point.weight);
      }
      if (squares < least) {
        least = squares;
        best = {{(*solution)[0], (*solution)[1], (*solution)[2], (*solution)[3], (*solution)[4]}, misfit};
      }
    }
  }
  return best;
}

void WeighByNearness(std::span<Point> one, std::span<Point> other) {
  constexpr double kAlone = 0.1;
  for (const std::span<Point> path : {one, other}) {
    for (Point& point : path) {
      point.weight = kAlone;
    }
  }
  for (Point& a : one) {
    for (Point& b : other) {
      if (a.blocks == b.blocks && a.expert_tokens == b.expert_tokens) {
        const double ratio = a.nanoseconds / b.nanoseconds;
        a.weight = b.weight = std::pow(std::min(ratio, 1 / ratio), 2);
      }
    }
  }
}

}  // namespace fusedmoe::tune
