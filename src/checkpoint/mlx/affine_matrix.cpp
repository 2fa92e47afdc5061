#include "checkpoint/mlx/affine_matrix.hpp"

#include <cmath>
#include <vector>

#include <fmt/format.h>

#include "numerics/rows.hpp"

namespace fusedmoe::checkpoint {
namespace {

// Code `index` of a row. `bytes` are a multiple of four, so that a code's last byte is never behind them.
uint32_t CodeAt(const std::byte* row, int64_t bytes, int64_t index, int bits) {
  const int64_t first_bit = index * bits, first = first_bit / 8;
  uint32_t pair = std::to_integer<uint32_t>(row[first]);
  if (first + 1 < bytes) {
    pair |= std::to_integer<uint32_t>(row[first + 1]) << 8;
  }
  return pair >> (first_bit % 8) & ((uint32_t{1} << bits) - 1);
}

Status CheckFinite(const std::vector<float>& values, int64_t row, std::string_view what) {
  for (size_t group = 0; group < values.size(); ++group) {
    if (!std::isfinite(values[group])) {
      return Status::BadInput(fmt::format("the {} of group {} of row {} is {}; finite is required", what,
                                          group, row, values[group]));
    }
  }
  return Status::Ok();
}

}  // namespace

Result<platform::FileBytes> ReadAffineRows(const AffineMatrix& matrix, const AffineReader& read,
                                           int64_t first, int64_t count) {
  FMOE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory,
                        platform::AllocateBytes(count * matrix.row_bytes()));
  FMOE_ASSIGN_OR_RETURN(const platform::FileBytes codes, read(AffinePart::kCodes, first, count));
  FMOE_ASSIGN_OR_RETURN(const platform::FileBytes stored_scales, read(AffinePart::kScales, first, count));
  FMOE_ASSIGN_OR_RETURN(const platform::FileBytes stored_biases, read(AffinePart::kBiases, first, count));
  const int64_t groups = matrix.cols / matrix.group;
  std::vector<float> scales(static_cast<size_t>(groups)), biases(static_cast<size_t>(groups));
  std::vector<float> values(static_cast<size_t>(matrix.cols));
  for (int64_t row = 0; row < count; ++row) {
    DecodeRow(matrix.dtype, stored_scales.data + row * matrix.side_bytes(), 0, groups, scales.data());
    DecodeRow(matrix.dtype, stored_biases.data + row * matrix.side_bytes(), 0, groups, biases.data());
    FMOE_RETURN_IF_ERROR(CheckFinite(scales, first + row, "scale"));
    FMOE_RETURN_IF_ERROR(CheckFinite(biases, first + row, "bias"));
    const std::byte* code = codes.data + row * matrix.code_bytes();
    for (int64_t group = 0; group < groups; ++group) {
      const float scale = scales[static_cast<size_t>(group)], bias = biases[static_cast<size_t>(group)];
      for (int64_t i = group * matrix.group; i < (group + 1) * matrix.group; ++i) {
        const auto q = static_cast<float>(CodeAt(code, matrix.code_bytes(), i, matrix.bits));
        values[static_cast<size_t>(i)] = q * scale + bias;
      }
    }
    EncodeRow(matrix.dtype, values.data(), matrix.cols, memory.get() + row * matrix.row_bytes());
  }
  const std::byte* data = memory.get();
  return platform::FileBytes{data, count * matrix.row_bytes(), std::move(memory)};
}

}  // namespace fusedmoe::checkpoint
