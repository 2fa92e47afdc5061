#include "jobs/lint/statistics.hpp"

#include <algorithm>
#include <cmath>

#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe::lint {
namespace {

// Whether the quantizer leaves a code near the largest in every group: formats with a scale for each group.
// Searched scales may give up a quarter of the range, so half of it is the threshold.
float FullCode(const CanonicalMatrix& matrix) {
  const WeightFormat& format = matrix.format;
  const bool grouped = format.block.row == 1 && format.block.col > 0 && matrix.zero_point.empty() &&
                       matrix.group_index.empty();
  if (!grouped) {
    return 0.0F;
  }
  switch (format.element) {
    case DType::kF4E2M1:
      return format.block_scale_dtype == DType::kF8E8M0 ? 3.0F : 4.0F;
    case DType::kU4:
    case DType::kI4:
      return 7.0F;
    default:
      return 0.0F;
  }
}

// A quantizer of integers leaves one code of the largest magnitude in every group: of small ones that is more
// than what is too many.
bool HasSmallGroups(const WeightFormat& format) {
  const bool integers = format.element == DType::kU8 || format.element == DType::kI8;
  return integers && format.block.col > 0 && format.block.col < 128;
}

void MeasureScales(const CanonicalMatrix& matrix, MatrixStatistics& statistics) {
  if (matrix.block_scale.empty() || matrix.block_scale.dtype() != DType::kF8E4M3) {
    return;
  }
  const TensorView scales = matrix.block_scale.view();
  for (int64_t row = 0; row < scales.dim(0); ++row) {
    const auto* codes = reinterpret_cast<const uint8_t*>(scales.data() + row * scales.stride_bytes(0));
    statistics.blocks += scales.dim(1);
    statistics.blocks_at_limit += std::count(codes, codes + scales.dim(1), uint8_t{0x7e});
  }
}

}  // namespace

MatrixStatistics Measure(const CanonicalMatrix& matrix) {
  MatrixStatistics statistics;
  MeasureScales(matrix, statistics);
  const RowDecoder decoder(matrix);
  const auto cols = static_cast<size_t>(matrix.cols);
  std::vector<float> values(cols), codes(cols);
  const DType element = matrix.format.element;
  const bool bytes = DTypeBits(element) == 8;
  // Integers lie around a center; those with a zero point of their own use both ends.
  const bool centered = element == DType::kU8 && matrix.zero_point.empty();
  const bool counts = bytes && (element != DType::kU8 || centered) && !HasSmallGroups(matrix.format);
  const float limit = centered ? 127.0F : LargestValue(element), full = FullCode(matrix);
  const auto zero = static_cast<float>(matrix.format.implied_zero());
  const int64_t group = full > 0 ? matrix.format.block.col : matrix.cols;
  for (int64_t row = 0; row < matrix.rows; ++row) {
    decoder.Decode(row, 0, matrix.cols, values.data());
    double power = 0;
    for (const float value : values) {
      if (!std::isfinite(value)) {
        ++statistics.not_finite;
      } else {
        power += static_cast<double>(value) * value;
        statistics.nonzero += value != 0.0F;
      }
    }
    statistics.row_power.push_back(power / static_cast<double>(matrix.cols));
    if (!matrix.format.quantized() || (!bytes && full == 0)) {
      continue;
    }
    DecodeRow(element, matrix.codes.view().data() + row * matrix.codes.view().stride_bytes(0), 0, matrix.cols,
              codes.data());
    statistics.codes += matrix.cols;
    if (counts) {
      statistics.codes_at_limit += std::count_if(codes.begin(), codes.end(), [&](float code) {
        return std::fabs(code - (centered ? zero : 0.0F)) >= limit;
      });
    }
    for (int64_t begin = 0; full > 0 && begin + group <= matrix.cols; begin += group) {
      float largest = 0;
      for (int64_t col = begin; col < begin + group; ++col) {
        largest = std::max(largest, std::fabs(codes[static_cast<size_t>(col)] - zero));
      }
      statistics.groups += largest > 0;
      statistics.slack_groups += largest > 0 && largest < full / 2;
    }
  }
  return statistics;
}

RowPattern PatternOf(const std::vector<double>& row_power) {
  RowPattern pattern;
  const size_t count = row_power.size() / 2 * 2;
  if (count < 8) {
    return pattern;
  }
  const auto difference = [&](auto in_second, double& noise) {
    double sums[2] = {0, 0}, squares[2] = {0, 0};
    for (size_t row = 0; row < count; ++row) {
      const auto side = static_cast<size_t>(in_second(row));
      sums[side] += row_power[row];
      squares[side] += row_power[row] * row_power[row];
    }
    const double all = sums[0] + sums[1], each = static_cast<double>(count) / 2;
    if (!(all > 0)) {
      return 0.0;
    }
    // Rows of one side scatter around its mean: the sums differ by the root of what they scatter together.
    const double scatter = squares[0] - sums[0] * sums[0] / each + squares[1] - sums[1] * sums[1] / each;
    noise = std::sqrt(std::max(scatter, 0.0)) / all;
    return std::fabs(sums[0] - sums[1]) / all;
  };
  pattern.alternation = difference([](size_t row) { return row % 2 == 1; }, pattern.alternation_noise);
  pattern.halves = difference([count](size_t row) { return row >= count / 2; }, pattern.halves_noise);
  return pattern;
}

}  // namespace fusedmoe::lint
