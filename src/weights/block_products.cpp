#include "weights/block_products.hpp"

#include <algorithm>
#include <bit>

#include "numerics/rows.hpp"

namespace fusedmoe {

bool BecomesProducts(const WeightFormat& format) {
  const bool one_column = format.has_block_scale() && format.block.col == 1 && format.block.row != 1;
  return one_column && (format.element == DType::kF4E2M1 || format.element == DType::kF8E4M3) &&
         (format.block_scale_dtype == DType::kF8E4M3 || format.block_scale_dtype == DType::kF8E8M0);
}

void MultiplyRow(const CanonicalMatrix& matrix, int64_t row, uint16_t* out) {
  constexpr int64_t kChunk = 512;
  float values[kChunk], scales[kChunk];
  const TensorView &codes = matrix.codes.view(), &blocks = matrix.block_scale.view();
  const int64_t block = matrix.format.block.row;
  const int64_t scale_row = block <= 0 ? 0 : (matrix.scale_row_offset + row) / block;
  for (int64_t first = 0; first < matrix.cols; first += kChunk) {
    const int64_t count = std::min(kChunk, matrix.cols - first);
    DecodeRow(codes.dtype(), codes.data() + row * codes.stride_bytes(0), first, count, values);
    DecodeRow(blocks.dtype(), blocks.data() + scale_row * blocks.stride_bytes(0),
              matrix.scale_col_offset + first, count, scales);
    for (int64_t k = 0; k < count; ++k) {
      out[first + k] = static_cast<uint16_t>(std::bit_cast<uint32_t>(values[k] * scales[k]) >> 16);
    }
  }
}

}  // namespace fusedmoe
