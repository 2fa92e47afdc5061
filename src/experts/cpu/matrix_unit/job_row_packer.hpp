#pragma once

#include "experts/cpu/cpu_rows.hpp"
#include "experts/cpu/matrix_unit/matrix_unit.hpp"

namespace fusedmoe::cpu {

/// Where a row of a job goes: to the tiles of the unit, its scales and sums beside them.
struct JobRow {
  uint8_t* token;
  int64_t step_bytes;
  float *scales, *sums;
  int64_t stride;  ///< from one scale or sum to the next
  /// The source, where the row comes quantized.
  const std::byte *codes, *code_scales;
};

/// Rows to the tiles of the unit: quantized as the scheme says and rounded as the unit multiplies them.
class JobRowPacker {
 public:
  JobRowPacker(const JobContext& context, Gemm gemm)
      : layer_(context.layer),
        unit_(context.unit),
        shape_(context.layer.plan.shape(gemm)),
        format_(context.unit.gemms[gemm].format),
        reader_(context.layer, context.run, gemm) {}

  const RowReader& reader() const { return reader_; }
  /// A row in fp32, `buffer`, into its place, or its codes. `buffer` has room for three rows.
  void Pack(const InputTransform& transform, const JobRow& row, float* buffer) const;

 private:
  bool PackRounded(const InputTransform& transform, const JobRow& row, float* buffer) const;
  void QuantizeToValues(const JobRow& row, float tensor_scale, const float* from, float* values) const;
  void PackCodes(const JobRow& row, const int8_t* codes) const;
  TilePack PackOf(const JobRow& row, const float* values) const;

  const CpuLayer& layer_;
  const MatrixUnit& unit_;
  const GemmShape& shape_;
  const TileFormat& format_;
  const RowReader reader_;
};

}  // namespace fusedmoe::cpu
