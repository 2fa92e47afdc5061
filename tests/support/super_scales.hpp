#pragma once

#include <random>

#include <fusedmoe/weights.hpp>

#include "core/checked_math.hpp"
#include "numerics/rows.hpp"
#include "weights/super_scales.hpp"

namespace fusedmoe::testing_support {

/// Gives a matrix of U4 or U8 codes in groups scales of two levels, as K types of GGUF have them: `units(i)`
/// are those of super-block i of the scales and of the minima, which F16 holds, `bytes()` the integers of a
/// group.
struct SuperPair {
  float scale, minimum;
};
template <typename Units, typename Bytes>
void SetSuper(CanonicalMatrix& matrix, bool minima, const Units& units, const Bytes& bytes) {
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
  for (int64_t at = 0; at < matrix.rows * supers; ++at) {
    const SuperPair unit = units(at);
    EncodeRow(DType::kF16, &unit.scale, 1, matrix.super_scale.mutable_view().data() + 2 * at);
    if (minima) {
      EncodeRow(DType::kF16, &unit.minimum, 1, matrix.super_minimum.mutable_view().data() + 2 * at);
    }
    const int64_t per = kSuper / format.block.col, first = at % supers * per;
    for (int64_t g = first; g < std::min(first + per, groups); ++g) {
      const SuperPair of = bytes();
      const GroupNumbers numbers =
          NumbersOf(unit.scale * of.scale, minima ? unit.minimum * of.minimum : 0.0F);
      matrix.block_scale.mutable_view().as<float>()[at / supers * groups + g] = numbers.scale;
      if (minima) {
        matrix.zero_point.mutable_view().as<float>()[at / supers * groups + g] = numbers.zero;
      }
    }
  }
}

/// Any integers of a byte in units of either sign, among them 0 and -128. Every seventh unit of scales is
/// zero, so that its groups have one value.
inline void MakeSuper(CanonicalMatrix& matrix, bool minima, std::mt19937& random) {
  const auto unit = [&](bool zero) {  // of eleven bits, some subnormal in F16
    const auto number = static_cast<float>(random() % 2048 + 1) * (random() % 2 == 0 ? 0x1p-16F : -0x1p-16F);
    return zero ? 0.0F : number;
  };
  const auto byte = [&] { return static_cast<float>(static_cast<int>(random() % 256) - 128); };
  SetSuper(
      matrix, minima,
      [&](int64_t at) {
        return SuperPair{unit(at % 7 == 6), unit(at % 11 == 10)};
      },
      [&] {
        return SuperPair{byte(), byte()};
      });
}

}  // namespace fusedmoe::testing_support
