#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

/// Scales of two levels (WeightFormat::super_cols): what stands in a matrix are the numbers that they come
/// to, and the units of which these are integers.
namespace fusedmoe {

/// `scale * code - minimum` as `(code - zero) * scale`. A group whose scale is zero and whose minimum is not
/// has one value: codes in steps so small that they vanish beside the zero point, by which the same formula
/// gives that value.
struct GroupNumbers {
  float scale, zero;
};
inline GroupNumbers NumbersOf(float scale, float minimum) {
  const bool one_value = scale == 0.0F && minimum != 0.0F && std::isfinite(minimum);
  const float step = one_value ? std::ldexp(1.0F, std::ilogb(minimum) - 30) : scale;
  return {step, minimum == 0.0F ? 0.0F : minimum / step};
}

/// Integers of the scales in rows of blocks, and of the minima where there are zero points.
class SuperRow {
 public:
  explicit SuperRow(const CanonicalMatrix& matrix);

  /// Finds the integers of a row of scales. False: a scale, or its zero point, is no 8-bit integer of its
  /// unit.
  bool Take(int64_t scale_row);
  /// The integers that belong to a scale column of that row.
  int8_t scale(int64_t col) const { return scales_[static_cast<size_t>(col)]; }
  int8_t minimum(int64_t col) const { return minima_[static_cast<size_t>(col)]; }
  /// The units of its super-block, F16.
  uint16_t scale_unit(int64_t col) const { return UnitOf(matrix_.super_scale, col); }
  uint16_t minimum_unit(int64_t col) const { return UnitOf(matrix_.super_minimum, col); }

 private:
  uint16_t UnitOf(const Tensor& units, int64_t col) const {
    uint16_t unit = 0;
    std::memcpy(&unit, units.view().data() + row_ * units.view().stride_bytes(0) + col / groups_ * 2, 2);
    return unit;
  }
  bool TakeSuperBlock(int64_t first, int64_t count);
  bool TakeOneValues(int64_t first, int64_t count);

  const CanonicalMatrix& matrix_;
  int64_t row_ = 0;
  int64_t groups_;  ///< of a super-block
  std::vector<int8_t> scales_, minima_;
};

/// Shapes and units of a matrix with super_cols, and that its scales are integers of them.
Status CheckSuperScales(const CanonicalMatrix& matrix);

}  // namespace fusedmoe
