#include "weights/super_scales.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/checked_math.hpp"
#include "numerics/codecs.hpp"

namespace fusedmoe {
namespace {

const float* FloatsOf(const Tensor& numbers, int64_t row, int64_t first) {
  return reinterpret_cast<const float*>(numbers.view().data() + row * numbers.view().stride_bytes(0)) + first;
}

float Reciprocal(float unit) {
  return unit == 0.0F ? 0.0F : 1.0F / unit;
}

/// The nearest integer of a byte; whether it is the number is asked later. A function of its own would be
/// called, and loops over groups are to run in vectors.
float Nearest(float x) {
  constexpr float kWhole = 0x1.8p23F;  // floats there are whole
  return std::max(-128.0F, std::min(127.0F, (x + kWhole) - kWhole));
}

}  // namespace

SuperRow::SuperRow(const CanonicalMatrix& matrix)
    : matrix_(matrix),
      groups_(matrix.format.super_cols / matrix.format.block.col),
      scales_(static_cast<size_t>(matrix.block_scale.dim(1))),
      minima_(scales_.size()) {}

uint16_t SuperRow::UnitOf(const Tensor& units, int64_t col) const {
  uint16_t unit = 0;
  std::memcpy(&unit, units.view().data() + row_ * units.view().stride_bytes(0) + col / groups_ * 2, 2);
  return unit;
}

bool SuperRow::Take(int64_t scale_row) {
  row_ = scale_row;
  const auto columns = static_cast<int64_t>(scales_.size());
  bool all = true;
  for (int64_t first = 0; first < columns; first += groups_) {
    all = TakeSuperBlock(first, std::min(groups_, columns - first)) && all;
  }
  return all;
}

/// Numbers that are integers of their unit come back when they are multiplied with it: both factors are
/// short.
bool SuperRow::TakeSuperBlock(int64_t first, int64_t count) {
  const float* scales = FloatsOf(matrix_.block_scale, row_, first);
  const float unit = DecodeFp16(scale_unit(first)), per_unit = Reciprocal(unit);
  int8_t *own_scales = scales_.data() + first, *own_minima = minima_.data() + first;
  int others = 0;
  for (int64_t g = 0; g < count; ++g) {
    const float code = Nearest(scales[g] * per_unit);
    own_scales[g] = static_cast<int8_t>(static_cast<int>(code));
    others += code * unit != scales[g] ? 1 : 0;
  }
  if (matrix_.zero_point.empty()) {
    return others == 0;
  }
  const float* zeros = FloatsOf(matrix_.zero_point, row_, first);
  const float minimum_unit = DecodeFp16(this->minimum_unit(first)), per_minimum = Reciprocal(minimum_unit);
  for (int64_t g = 0; g < count; ++g) {
    const float code = Nearest(zeros[g] * scales[g] * per_minimum), minimum = code * minimum_unit;
    own_minima[g] = static_cast<int8_t>(static_cast<int>(code));
    // Where the scale is zero, so is every weight, whatever the zero point.
    const bool zero = scales[g] == 0.0F;
    others += static_cast<int>(!zero) & static_cast<int>(minimum / (zero ? 1.0F : scales[g]) != zeros[g]);
  }
  return others == 0 || TakeOneValues(first, count);
}

/// The same where some groups have one value.
bool SuperRow::TakeOneValues(int64_t first, int64_t count) {
  const float* scales = FloatsOf(matrix_.block_scale, row_, first);
  const float* zeros = FloatsOf(matrix_.zero_point, row_, first);
  const float unit = DecodeFp16(scale_unit(first)), minimum_unit = DecodeFp16(this->minimum_unit(first));
  for (int64_t g = 0; g < count; ++g) {
    int8_t& code = scales_[static_cast<size_t>(first + g)];
    const float minimum = minimum_unit * static_cast<float>(minima_[static_cast<size_t>(first + g)]);
    const auto is = [&](GroupNumbers numbers) {
      return numbers.scale == scales[g] && (numbers.zero == zeros[g] || scales[g] == 0.0F);
    };
    if (!is(NumbersOf(unit * static_cast<float>(code), minimum))) {
      if (!is(NumbersOf(0.0F, minimum))) {
        return false;
      }
      code = 0;
    }
  }
  return true;
}

Status CheckSuperScales(const CanonicalMatrix& matrix) {
  const WeightFormat& format = matrix.format;
  const int64_t group = format.block.col;
  const bool integers = format.element == DType::kU4 || format.element == DType::kU8;
  const bool floats = format.block_scale_dtype == DType::kF32 &&
                      (matrix.zero_point.empty() || format.zero_point_dtype == DType::kF32);
  if (!integers || !floats || format.block.row != 1 || group <= 0 || format.super_cols % group != 0 ||
      !matrix.group_index.empty()) {
    return Status::BadInput(
        fmt::format("super_cols is {}; below it U4 or U8 with F32 scales in groups that divide it, in order, "
                    "are required",
                    format.super_cols));
  }
  const Shape wanted{matrix.block_scale.dim(0),
                     CeilDiv(matrix.block_scale.dim(1) * group, format.super_cols)};
  const std::pair<const char*, const Tensor*> units[] = {{"super_scale", &matrix.super_scale},
                                                         {"super_minimum", &matrix.super_minimum}};
  for (const auto& [name, tensor] : units) {
    if (tensor == &matrix.super_minimum && matrix.zero_point.empty()) {
      continue;
    }
    if (tensor->empty() || tensor->dtype() != DType::kF16 || !(tensor->shape() == wanted)) {
      return Status::BadInput(fmt::format("{} is {}; F16 {} is required", name,
                                          tensor->empty() ? "missing" : tensor->shape().ToString(),
                                          wanted.ToString()));
    }
  }
  SuperRow row(matrix);
  for (int64_t r = 0; r < matrix.block_scale.dim(0); ++r) {
    if (!row.Take(r)) {
      return Status::BadInput(fmt::format(
          "super_scale of row {} does not divide its scales and minima into integers of a byte", r));
    }
  }
  return Status::Ok();
}

}  // namespace fusedmoe
