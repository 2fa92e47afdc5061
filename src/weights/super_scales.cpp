#include "weights/super_scales.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/checked_math.hpp"
#include "numerics/codecs.hpp"

namespace fusedmoe {
namespace {

const float* FloatsOf(const Tensor& numbers, int64_t row, int64_t first) {
  return reinterpret_cast<const float*>(numbers.view().data() + row * numbers.view().stride_bytes(0)) + first;
}

/// codes[g] = the nearest integer of a byte of numbers[g] / unit, and what they come to. As loops of their
/// own over whole vectors: this is done for every group of a layer. Limits are those of integers, since
/// compilers make branches of the limits of floats, and bytes go out together,
/// since a pointer to them might be one to `numbers`.
template <int64_t kGroups>
void TakeIntegers(const float* numbers, float unit, int8_t* codes, float* products) {
  constexpr float kWhole = 0x1.8p23F;  // floats there are whole, and their bits count as integers do
  constexpr auto kZero = std::bit_cast<int32_t>(kWhole);
  const float per_unit = unit == 0.0F ? 0.0F : 1.0F / unit;
  int32_t whole[kGroups];
  for (int64_t g = 0; g < kGroups; ++g) {
    const auto bits = std::bit_cast<int32_t>(numbers[g] * per_unit + kWhole);
    whole[g] = std::clamp(bits, kZero - 128, kZero + 127) - kZero;
    products[g] = static_cast<float>(whole[g]) * unit;
  }
  int8_t bytes[kGroups];
  for (int64_t g = 0; g < kGroups; ++g) {
    bytes[g] = static_cast<int8_t>(whole[g]);
  }
  std::memcpy(codes, bytes, sizeof(bytes));
}

/// What a minimum may be off, since zero points divide it by scales: two roundings.
constexpr float kNear = 0x1p-23F;

/// Whether these are integers of bytes of their units: scales to the bit, since both factors are short, and
/// minima nearly. Differences are asked by their bits, which compilers take several of at a time, unlike
/// comparisons.
template <int64_t kGroups>
bool TakeGroups(const float* scales, float unit, int8_t* codes, const float* zeros, float minimum_unit,
                int8_t* minima) {
  float products[kGroups];
  uint32_t others = 0;
  TakeIntegers<kGroups>(scales, unit, codes, products);
  for (int64_t g = 0; g < kGroups; ++g) {
    others |= std::bit_cast<uint32_t>(products[g] - scales[g]) << 1;  // zero of either sign is none
  }
  if (zeros == nullptr) {
    return others == 0;
  }
  float numbers[kGroups];
  for (int64_t g = 0; g < kGroups; ++g) {
    numbers[g] = zeros[g] * scales[g];
  }
  TakeIntegers<kGroups>(numbers, minimum_unit, minima, products);
  uint32_t far = 0;
  for (int64_t g = 0; g < kGroups; ++g) {
    const float room = std::fabs(products[g]) * kNear - std::fabs(numbers[g] - products[g]);
    far |= std::bit_cast<uint32_t>(room);  // negative
  }
  return others == 0 && far >> 31 == 0 && std::isfinite(minimum_unit);
}

}  // namespace

SuperRow::SuperRow(const CanonicalMatrix& matrix)
    : matrix_(matrix),
      groups_(matrix.format.super_cols / matrix.format.block.col),
      scales_(static_cast<size_t>(matrix.block_scale.dim(1))),
      minima_(scales_.size()) {}

bool SuperRow::Take(int64_t scale_row) {
  row_ = scale_row;
  const auto columns = static_cast<int64_t>(scales_.size());
  bool all = true;
  for (int64_t first = 0; first < columns; first += groups_) {
    all = TakeSuperBlock(first, std::min(groups_, columns - first)) && all;
  }
  return all;
}

bool SuperRow::TakeSuperBlock(int64_t first, int64_t count) {
  const float* scales = FloatsOf(matrix_.block_scale, row_, first);
  const float* zeros = matrix_.zero_point.empty() ? nullptr : FloatsOf(matrix_.zero_point, row_, first);
  const float unit = DecodeFp16(scale_unit(first));
  const float minimum_unit = zeros == nullptr ? 0.0F : DecodeFp16(this->minimum_unit(first));
  int8_t *codes = scales_.data() + first, *minima = minima_.data() + first;
  bool all = true;
  int64_t g = 0;
  for (; g + 8 <= count; g += 8) {
    all &= TakeGroups<8>(scales + g, unit, codes + g, zeros == nullptr ? nullptr : zeros + g, minimum_unit,
                         minima + g);
  }
  for (; g < count; ++g) {
    all &= TakeGroups<1>(scales + g, unit, codes + g, zeros == nullptr ? nullptr : zeros + g, minimum_unit,
                         minima + g);
  }
  return all || (zeros != nullptr && TakeOneValues(first, count));
}

/// The same where some groups have one value.
bool SuperRow::TakeOneValues(int64_t first, int64_t count) {
  const float* scales = FloatsOf(matrix_.block_scale, row_, first);
  const float* zeros = FloatsOf(matrix_.zero_point, row_, first);
  const float unit = DecodeFp16(scale_unit(first)), minimum_unit = DecodeFp16(this->minimum_unit(first));
  for (int64_t g = 0; g < count; ++g) {
    int8_t& code = scales_[static_cast<size_t>(first + g)];
    const float minimum = minimum_unit * static_cast<float>(minima_[static_cast<size_t>(first + g)]);
    const float distance = std::fabs(zeros[g] * scales[g] - minimum);
    if (scales[g] == unit * static_cast<float>(code) && distance <= std::fabs(minimum) * kNear) {
      continue;
    }
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
