#pragma once

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

/// The larger of two errors; NaN is larger than all.
inline double Larger(double a, double b) {
  return std::isnan(a) || b <= a ? a : b;
}

/// Squared differences and norms, summed.
struct Distance {
  double difference = 0, norm = 0;
  int64_t values = 0;      // of which norm is the sum
  int64_t not_finite = 0;  // values that are NaN, or the same infinity, on both sides
  int64_t overflowed = 0;  // values that are infinite because their dtype ends before them

  // Values that are not finite must be so on both sides, or lie at or beyond the end of the output's dtype (a
  // sixteenth less, for the error that a right kernel may have); they carry no distance.
  void Take(float actual, float expected, const OutputRange& range = {}) {
    if (!std::isfinite(expected) && (actual == expected || (std::isnan(actual) && std::isnan(expected)))) {
      ++not_finite;
      return;
    }
    ++values;
    norm += static_cast<double>(expected) * expected;
    if (std::isinf(actual) && std::signbit(actual) == std::signbit(expected) &&
        std::fabs(expected) >= range.overflow * 0.9375F) {
      ++overflowed;
      return;
    }
    const double delta = static_cast<double>(actual) - expected;
    difference += delta * delta;
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
};

/// Rows of outputs beside those that are expected, and the largest error of one. A row in which some overflow
/// is held against its own norm: in that of all rows, its large values would hide what is wrong in others.
class RowsDistance {
 public:
  explicit RowsDistance(DType output) : range_(RangeOf(output)) {}

  void AddRow(const Distance& row) {
    not_finite_ += row.not_finite;
    overflowed_ += row.overflowed;
    largest_ = Larger(largest_, row.relative());
    if (row.overflowed > 0) {
      alone_ = Larger(alone_, row.relative());
    } else {
      whole_.Add(row);
    }
  }
  const OutputRange& range() const { return range_; }
  double relative() const { return Larger(whole_.relative(), alone_); }
  double largest() const { return largest_; }
  int64_t not_finite() const { return not_finite_; }
  int64_t overflowed() const { return overflowed_; }
  // What rounding to multiples of the smallest step does to values like these.
  double step_rounding() const {
    return whole_.norm > 0
               ? range_.step / std::sqrt(12.0) * std::sqrt(static_cast<double>(whole_.values) / whole_.norm)
               : 0.0;
  }

 private:
  OutputRange range_;
  Distance whole_;
  double alone_ = 0, largest_ = 0;
  int64_t not_finite_ = 0, overflowed_ = 0;
};

}  // namespace fusedmoe
