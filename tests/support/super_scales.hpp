#pragma once

#include <random>

#include <fusedmoe/weights.hpp>

#include "core/checked_math.hpp"
#include "numerics/rows.hpp"
#include "weights/super_scales.hpp"

namespace fusedmoe::testing_support {

/// Scales of two levels, as K types of GGUF have them, in place of those of U4 or U8 codes in groups:
/// integers of a byte in units of either sign, among them 0 and -128; minima likewise. Every seventh unit of
/// scales is zero, so that its groups have one value.
inline void MakeSuper(CanonicalMatrix& matrix, bool minima, std::mt19937& random) {
  constexpr int64_t kSuper = 256;
  WeightFormat& format = matrix.format;
  format.super_cols = kSuper;
  format.block_scale_dtype = DType::kF32;
  const int64_t groups = CeilDiv(matrix.cols, format.block.col), supers = CeilDiv(matrix.cols, kSuper);
  const Shape of_groups{matrix.rows, groups}, of_supers{matrix.rows, supers};
  matrix.block_scale = *Tensor::Allocate(DType::kF32, of_groups);
  matrix.super_scale = *Tensor::Allocate(DType::kF16, of_supers);
  matrix.zero_point = {};
  if (minima) {
    format.zero_point_dtype = DType::kF32;
    matrix.zero_point = *Tensor::Allocate(DType::kF32, of_groups);
    matrix.super_minimum = *Tensor::Allocate(DType::kF16, of_supers);
  }
  const auto unit_of = [&](Tensor& units, int64_t at, bool zero) {
    const auto number = static_cast<float>(random() % 2048 + 1) * (random() % 2 == 0 ? 0x1p-16F : -0x1p-16F);
    const float unit = zero ? 0.0F : number;  // of eleven bits, some subnormal in F16
    EncodeRow(DType::kF16, &unit, 1, units.mutable_view().data() + 2 * at);
    return unit;
  };
  for (int64_t at = 0; at < matrix.rows * supers; ++at) {
    const float unit = unit_of(matrix.super_scale, at, at % 7 == 6);
    const float minimum_unit = minima ? unit_of(matrix.super_minimum, at, at % 11 == 10) : 0.0F;
    const int64_t per = kSuper / format.block.col, first = at % supers * per;
    for (int64_t g = first; g < std::min(first + per, groups); ++g) {
      const auto byte = [&] { return static_cast<float>(static_cast<int>(random() % 256) - 128); };
      const GroupNumbers numbers = NumbersOf(unit * byte(), minimum_unit * byte());
      matrix.block_scale.mutable_view().as<float>()[at / supers * groups + g] = numbers.scale;
      if (minima) {
        matrix.zero_point.mutable_view().as<float>()[at / supers * groups + g] = numbers.zero;
      }
    }
  }
}

}  // namespace fusedmoe::testing_support
