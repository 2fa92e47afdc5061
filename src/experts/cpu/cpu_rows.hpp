#pragma once

#include "experts/cpu/cpu_run.hpp"

namespace fusedmoe::cpu {

/// Rows that meet a GEMM, before they are packed: hidden states in the form that the caller has, or what the
/// activation left.
class RowReader {
 public:
  RowReader(const CpuLayer& layer, const Run& run, Gemm gemm)
      : layer_(layer),
        run_(run),
        shape_(layer.plan.shape(gemm)),
        coded_(gemm == kGateUp && run.input.coded) {}

  /// Rows come as codes of the scheme.
  bool coded() const { return coded_; }
  const std::byte* Codes(int64_t slot) const { return run_.input.Row(run_.slots.rows[slot]); }
  const std::byte* CodeScales(int64_t slot) const { return run_.input.ScalesOf(run_.slots.rows[slot]); }
  /// The intermediate row of a slot.
  float* Mid(int64_t slot) const { return run_.mid + slot * layer_.plan.gate_up.row_stride(); }

  /// The row of a slot in fp32.
  void Load(const InputTransform& transform, int64_t slot, float* row) const;
  /// The scale of a whole tensor: stored with the weights, or that of the rows of this forward.
  float TensorScale(const InputTransform& transform) const {
    return layer_.activation.static_tensor_scale ? transform.tensor_scale : run_.batch_scale;
  }

 private:
  const CpuLayer& layer_;
  const Run& run_;
  const GemmShape& shape_;
  const bool coded_;
};

/// Multiplies a row by the factors of its columns, where it has some.
void ScaleColumns(const InputTransform& transform, int64_t cols, float* row);

/// A row in the order of packed columns, `padded_cols` floats: `row`, or behind as many floats.
float* InPackedOrder(const GemmShape& shape, const InputTransform& transform, float* row);

/// Where the scheme has one scale for the whole batch, which no checkpoint stores: sets Run::batch_scale to
/// that of the rows that meet a GEMM.
void SetBatchScale(const CpuLayer& layer, Gemm gemm, Run& run);

}  // namespace fusedmoe::cpu
