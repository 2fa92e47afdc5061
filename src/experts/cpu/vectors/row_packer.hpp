#pragma once

#include "experts/cpu/cpu_rows.hpp"

namespace fusedmoe::cpu {

/// Rows to tiles of one token: quantized as the scheme says, packed as the micro-kernels read them.
class RowPacker {
 public:
  RowPacker(const CpuLayer& layer, const Run& run, Gemm gemm)
      : layer_(layer), shape_(layer.plan.shape(gemm)), reader_(layer, run, gemm) {}

  /// `buffer` has room for two rows in fp32.
  void Pack(const InputTransform& transform, int64_t slot, float* buffer, std::byte* tile) const;
  /// The intermediate row of a slot where nothing needs to be done to it before it is packed, else null.
  float* RowInPlace(const InputTransform& transform, int64_t slot) const;

 private:
  /// A row on its way into a tile.
  struct Row {
    const InputTransform& transform;
    int64_t slot;
    float* values;  ///< room for two
  };
  void PackValues(const float* values, const TileView& tile) const;
  void PackCodes(const Row& row, const TileView& tile) const;
  void PackBlocks(const Row& row, const TileView& tile) const;
  void PlaceStoredCodes(const Row& row, const std::byte* stored, int8_t* codes) const;
  int64_t ScaleIndex(int64_t group) const;
  void DecodeScales(float tensor_scale, const std::byte* stored, float* scales) const;

  Correction correction() const { return CorrectionOf(shape_.kernel, shape_.panel.has_zero_points()); }

  const CpuLayer& layer_;
  const GemmShape& shape_;
  const RowReader reader_;
};

}  // namespace fusedmoe::cpu
