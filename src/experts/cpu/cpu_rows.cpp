#include "experts/cpu/cpu_rows.hpp"

#include <algorithm>
#include <cstring>

#include "experts/cpu/row_quantizer.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::cpu {
namespace {

/// The scale of the finite values of all rows: of every token once, or of every slot.
float BatchScale(const CpuLayer& layer, Gemm gemm, Run& run) {
  const bool tokens = gemm == kGateUp && !layer.batched;
  int64_t count = run.slots.count;
  if (tokens) {
    run.numbers.Clear(run.slots);
    run.numbers.Note(run.slots, 0, run.slots.count);
    count = run.numbers.Assign(run.slots);
  }
  const int64_t tasks = std::min({kPackTasks, layer.plan.max_tiles, count});
  const RowReader reader(layer, run, gemm);
  float largest[kPackTasks] = {};
  ParallelFor(*run.executor, tasks, [&](int64_t task) {
    float* row = run.tiles.row_buffers + task * 2 * layer.plan.widest_cols();
    float own = 0;  // neighbours write to the same line
    for (int64_t i = count * task / tasks; i < count * (task + 1) / tasks; ++i) {
      reader.Load(layer.expert(0).input[kGateInput], tokens ? run.numbers.slot_of[i] : i, row);
      own = std::max(own, FiniteAmaxOfRow(*layer.kernels, row, layer.plan.shape(gemm).cols));
    }
    largest[task] = own;
  });
  return DynamicTensorScale(layer.activation, *std::max_element(largest, largest + kPackTasks));
}

}  // namespace

void RowReader::Load(const InputTransform& transform, int64_t slot, float* row) const {
  if (coded_) {
    DequantizeRow(layer_.activation, TensorScale(transform), Codes(slot), CodeScales(slot), shape_.cols, row);
  } else if (shape_.gemm == kGateUp) {
    layer_.kernels->to_float[run_.input.type](run_.input.Row(run_.slots.rows[slot]), shape_.cols, row);
  } else {
    std::memcpy(row, Mid(slot), static_cast<size_t>(shape_.cols) * sizeof(float));
  }
}

void ScaleColumns(const InputTransform& transform, int64_t cols, float* row) {
  if (transform.pre_quant_scale != nullptr) {
    for (int64_t k = 0; k < cols; ++k) {
      row[k] *= transform.pre_quant_scale[k];
    }
  }
}

float* InPackedOrder(const GemmShape& shape, const InputTransform& transform, float* row) {
  if (transform.columns == nullptr) {
    std::fill(row + shape.cols, row + shape.padded_cols, 0.0F);
    return row;
  }
  float* packed = row + shape.padded_cols;
  for (int64_t k = 0; k < shape.padded_cols; ++k) {
    packed[k] = transform.columns[k] < 0 ? 0.0F : row[transform.columns[k]];
  }
  return packed;
}

void SetBatchScale(const CpuLayer& layer, Gemm gemm, Run& run) {
  if (!NeedsDynamicTensorScale(layer.activation) || run.slots.count == 0) {
    return;
  }
  const float* given = gemm == kGateUp ? run.input.tensor_scale : nullptr;
  run.batch_scale = given != nullptr ? *given : BatchScale(layer, gemm, run);
}

}  // namespace fusedmoe::cpu
