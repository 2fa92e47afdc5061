#pragma once

#include <cstddef>
#include <cstdint>

#include "numerics/host_device.hpp"

namespace fusedmoe {

/// Where the one-byte scale of row m and column k (one column a group) of a matrix lies. Tensor cores of
/// Blackwell read 128x4; the decode kernels of TensorRT-LLM read 8x4. Both pad rows and columns to whole
/// tiles with zero bytes.
enum class BlockScaleLayout : uint8_t { kLinear, k128x4, k8x4 };

/// Rows of a tile; both swizzled layouts have tiles of four columns.
FMOE_HOST_DEVICE constexpr int64_t TileRows(BlockScaleLayout layout) {
  return layout == BlockScaleLayout::k128x4 ? 128 : layout == BlockScaleLayout::k8x4 ? 8 : 1;
}

FMOE_HOST_DEVICE constexpr int64_t PaddedScaleRows(BlockScaleLayout layout, int64_t rows) {
  const int64_t tile = TileRows(layout);
  return (rows + tile - 1) / tile * tile;
}

FMOE_HOST_DEVICE constexpr int64_t PaddedScaleColumns(BlockScaleLayout layout, int64_t columns) {
  return layout == BlockScaleLayout::kLinear ? columns : (columns + 3) / 4 * 4;
}

/// Bytes of the scales of one matrix, padding included.
FMOE_HOST_DEVICE constexpr int64_t BlockScaleBytes(BlockScaleLayout layout, int64_t rows, int64_t columns) {
  return PaddedScaleRows(layout, rows) * PaddedScaleColumns(layout, columns);
}

/// Byte offset of scale (row, column) in a matrix of `columns` scale columns.
FMOE_HOST_DEVICE constexpr int64_t BlockScaleOffset(BlockScaleLayout layout, int64_t row, int64_t column,
                                                    int64_t columns) {
  const int64_t tiles_across = (columns + 3) / 4;
  switch (layout) {
    case BlockScaleLayout::k128x4:
      // Inside a tile of 512 bytes: 32 lanes of 16 bytes, each with the four rows that are 32 apart.
      return (row / 128 * tiles_across + column / 4) * 512 + row % 32 * 16 + row / 32 % 4 * 4 + column % 4;
    case BlockScaleLayout::k8x4:
      return (row / 8 * tiles_across + column / 4) * 32 + row % 8 * 4 + column % 4;
    case BlockScaleLayout::kLinear:
      break;
  }
  return row * columns + column;
}

/// `batch` row-major matrices of rows x columns bytes into the layout, each padded by itself; writes
/// batch * BlockScaleBytes(layout, rows, columns) bytes.
void SwizzleBlockScales(BlockScaleLayout layout, const std::byte* linear, int64_t batch, int64_t rows,
                        int64_t columns, std::byte* swizzled);

/// The inverse: writes batch * rows * columns bytes. Padding is not read.
void UnswizzleBlockScales(BlockScaleLayout layout, const std::byte* swizzled, int64_t batch, int64_t rows,
                          int64_t columns, std::byte* linear);

}  // namespace fusedmoe
