#include "quant/swizzle.hpp"

#include <cstring>

namespace fusedmoe {

void SwizzleBlockScales(BlockScaleLayout layout, const std::byte* linear, int64_t batch, int64_t rows,
                        int64_t columns, std::byte* swizzled) {
  const int64_t matrix_bytes = BlockScaleBytes(layout, rows, columns);
  if (batch * matrix_bytes == 0) {
    return;
  }
  if (layout == BlockScaleLayout::kLinear) {
    std::memcpy(swizzled, linear, static_cast<size_t>(batch * matrix_bytes));
    return;
  }
  std::memset(swizzled, 0, static_cast<size_t>(batch * matrix_bytes));
  for (int64_t matrix = 0; matrix < batch; ++matrix) {
    std::byte* out = swizzled + matrix * matrix_bytes;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        out[BlockScaleOffset(layout, row, column, columns)] = *linear++;
      }
    }
  }
}

void UnswizzleBlockScales(BlockScaleLayout layout, const std::byte* swizzled, int64_t batch, int64_t rows,
                          int64_t columns, std::byte* linear) {
  const int64_t matrix_bytes = BlockScaleBytes(layout, rows, columns);
  for (int64_t matrix = 0; matrix < batch; ++matrix) {
    const std::byte* in = swizzled + matrix * matrix_bytes;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        *linear++ = in[BlockScaleOffset(layout, row, column, columns)];
      }
    }
  }
}

}  // namespace fusedmoe
