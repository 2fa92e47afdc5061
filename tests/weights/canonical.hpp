#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "numerics/codecs.hpp"
#include "numerics/rows.hpp"
#include "weights/dequantize.hpp"

/// Random canonical matrices, and their decoding by the definition, element by element.
namespace fusedmoe {

inline Tensor RandomBytes(DType dtype, const Shape& shape, std::mt19937& generator, int low = 0,
                          int high = 255) {
  auto tensor = Tensor::Allocate(dtype, shape);
  std::uniform_int_distribution<int> byte(low, high);
  for (int64_t i = 0; i < tensor->view().total_bytes(); ++i) {
    tensor->mutable_view().data()[i] = static_cast<std::byte>(byte(generator));
  }
  return *std::move(tensor);
}

inline Tensor RandomFloats(DType dtype, const Shape& shape, std::mt19937& generator, float low, float high) {
  auto tensor = Tensor::Allocate(dtype, shape);
  std::uniform_real_distribution<float> uniform(low, high);
  const int64_t cols = shape[shape.rank() - 1];
  std::vector<float> row(static_cast<size_t>(cols));
  for (int64_t begin = 0, index = 0; begin < shape.count(); begin += cols, ++index) {
    std::generate(row.begin(), row.end(), [&] { return uniform(generator); });
    EncodeRow(dtype, row.data(), cols, tensor->mutable_view().data() + index * PackedBytes(dtype, cols));
  }
  return *std::move(tensor);
}

struct MatrixOptions {
  bool zero_points = false;
  bool group_index = false;
  int64_t row_offset = 0, col_offset = 0;
};

/// Codes of every value; finite for the float types, so that comparisons need no NaN rule.
inline CanonicalMatrix RandomMatrix(int64_t rows, int64_t cols, const WeightFormat& format,
                                    std::mt19937& generator, const MatrixOptions& options = {}) {
  CanonicalMatrix matrix;
  matrix.rows = rows;
  matrix.cols = cols;
  matrix.format = format;
  matrix.scale_row_offset = options.row_offset;
  matrix.scale_col_offset = options.col_offset;
  if (format.quantized() && format.element != DType::kF8E4M3) {
    matrix.codes = RandomBytes(format.element, Shape{rows, cols}, generator);
  } else {
    const float largest = format.quantized() ? 448.0F : 2.0F;
    matrix.codes = RandomFloats(format.element, Shape{rows, cols}, generator, -largest, largest);
  }
  if (format.has_block_scale()) {
    const auto blocks = [](int64_t offset, int64_t size, int64_t block) {
      return block > 0 ? (offset + size + block - 1) / block : 1;
    };
    const Shape shape{blocks(options.row_offset, rows, format.block.row),
                      blocks(options.col_offset, cols, format.block.col)};
    matrix.block_scale = format.block_scale_dtype == DType::kF8E8M0
                             ? RandomBytes(DType::kF8E8M0, shape, generator, 110, 140)
                             : RandomFloats(format.block_scale_dtype, shape, generator, 0.01F, 4.0F);
    if (options.zero_points) {
      matrix.zero_point =
          RandomBytes(DType::kU8, shape, generator, 0, format.element == DType::kU4 ? 15 : 255);
    }
    if (options.group_index) {
      auto index = Tensor::Allocate(DType::kI32, Shape{cols});
      for (int64_t c = 0; c < cols; ++c) {
        index->mutable_view().as<int32_t>()[c] =
            static_cast<int32_t>(generator() % static_cast<uint32_t>(shape[1]));
      }
      matrix.group_index = *std::move(index);
    }
  }
  if (format.has_channel_scale) {
    matrix.channel_scale = RandomFloats(DType::kF32, Shape{rows}, generator, 0.001F, 0.1F);
  }
  if (format.has_tensor_scale) {
    matrix.tensor_scale = std::uniform_real_distribution<float>(1e-4F, 1e-2F)(generator);
  }
  return matrix;
}

inline double ElementByDefinition(const CanonicalMatrix& matrix, int64_t row, int64_t col) {
  const auto decode = [](const Tensor& tensor, int64_t r, int64_t c) {
    const std::byte* data = tensor.view().data() + r * tensor.view().stride_bytes(0);
    return static_cast<double>(DecodeCode(tensor.dtype(), LoadCode(tensor.dtype(), data, c)));
  };
  double value = 0;
  double zero = matrix.format.implied_zero();
  if (DTypeBits(matrix.format.element) <= 16) {
    value = decode(matrix.codes, row, col);
  } else {
    value = matrix.codes.view().as<float>()[row * matrix.cols + col];
  }
  double scale = 1;
  if (matrix.format.has_block_scale()) {
    const GroupShape block = matrix.format.block;
    const int64_t r = block.row > 0 ? (matrix.scale_row_offset + row) / block.row : 0;
    const int64_t c = !matrix.group_index.empty() ? matrix.group_index.view().as<int32_t>()[col]
                      : block.col > 0             ? (matrix.scale_col_offset + col) / block.col
                                                  : 0;
    scale =
        matrix.format.block_scale_dtype == DType::kF32
            ? static_cast<double>(matrix.block_scale.view().as<float>()[r * matrix.block_scale.dim(1) + c])
            : decode(matrix.block_scale, r, c);
    if (!matrix.zero_point.empty()) {
      zero = decode(matrix.zero_point, r, c);
    }
  }
  if (!matrix.channel_scale.empty()) {
    scale *= static_cast<double>(matrix.channel_scale.view().as<float>()[row]);
  }
  return (value - zero) * scale * static_cast<double>(matrix.tensor_scale.value_or(1.0F));
}

}  // namespace fusedmoe
