#include "jobs/quantize/measure.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe::jobs {
namespace {

// Magnitudes, in units of the scale, from which on a value is further from the largest code than any other
// value is from its own: half a step beyond it.
struct Range {
  float above = 0, below = 0;
};

Range RangeOf(DType element) {
  switch (element) {
    case DType::kF4E2M1:
      return {7.0F, 7.0F};
    case DType::kF8E4M3:
      return {464.0F, 464.0F};
    case DType::kU4:
    case DType::kI4:
      return {7.5F, 8.5F};
    default:
      return {127.5F, 128.5F};
  }
}

// The type of a scale may round it down by as much (BF16): that clips nothing.
constexpr float kScaleRounding = 1.0F + 0x1p-8F;

float ScaleOf(const CanonicalMatrix& matrix, int64_t row, int64_t block_row, int64_t block_col) {
  float scale = matrix.tensor_scale.value_or(1.0F);
  if (!matrix.channel_scale.empty()) {
    scale *= matrix.channel_scale.view().as<float>()[row];
  }
  if (!matrix.block_scale.empty()) {
    const TensorView view = matrix.block_scale.view();
    float block = 0;
    DecodeRow(view.dtype(), view.data() + block_row * view.stride_bytes(0), block_col, 1, &block);
    scale *= block;
  }
  return scale;
}

struct Block {
  float amax = 0, kept = 0;
  bool saturated = false;
};

}  // namespace

void Power::Add(const Power& other) {
  noise += other.noise;
  signal += other.signal;
}

double Power::rel_l2() const {
  return noise == 0 ? 0.0 : std::sqrt(noise / signal);
}

// Exact matrices have no finite ratio; 999 dB stands for it, so that the report stays JSON.
double Power::sqnr_db() const {
  return noise == 0 ? 999.0 : 10 * std::log10(signal / noise);
}

Power NoiseOf(TensorView weights, const CanonicalMatrix& matrix) {
  Power power;
  const RowDecoder decoder(matrix);
  std::vector<float> original(static_cast<size_t>(matrix.cols)), decoded(original.size());
  for (int64_t row = 0; row < matrix.rows; ++row) {
    DecodeRow(weights.dtype(), weights.data() + row * weights.stride_bytes(0), 0, matrix.cols,
              original.data());
    decoder.Decode(row, 0, matrix.cols, decoded.data());
    power.signal += DotRows(original.data(), original.data(), matrix.cols);
    for (size_t col = 0; col < original.size(); ++col) {
      original[col] -= decoded[col];
    }
    power.noise += DotRows(original.data(), original.data(), matrix.cols);
  }
  return power;
}

Measured Measure(TensorView weights, const CanonicalMatrix& matrix) {
  Measured measured;
  QuantizedTensor& tensor = measured.tensor;
  measured.power = NoiseOf(weights, matrix);
  tensor.rel_l2 = measured.power.rel_l2();
  tensor.sqnr_db = measured.power.sqnr_db();
  const WeightFormat& format = matrix.format;
  const int64_t block_rows = format.has_block_scale() && format.block.row > 0 ? format.block.row
                             : format.has_channel_scale                       ? 1
                                                                              : matrix.rows;
  const int64_t block_cols =
      format.has_block_scale() && format.block.col > 0 ? format.block.col : matrix.cols;
  const Range range = RangeOf(format.element);
  const RowDecoder decoder(matrix);
  const int64_t across = (matrix.cols + block_cols - 1) / block_cols;
  std::vector<float> original(static_cast<size_t>(matrix.cols)), decoded(original.size());
  std::vector<Block> blocks;
  for (int64_t row = 0; row < matrix.rows; ++row) {
    if (row % block_rows == 0) {
      blocks.assign(static_cast<size_t>(across), {});
    }
    DecodeRow(weights.dtype(), weights.data() + row * weights.stride_bytes(0), 0, matrix.cols,
              original.data());
    decoder.Decode(row, 0, matrix.cols, decoded.data());
    for (int64_t index = 0; index < across; ++index) {
      Block& block = blocks[static_cast<size_t>(index)];
      const float scale = ScaleOf(matrix, row, row / block_rows, index) * kScaleRounding;
      const int64_t end = std::min(matrix.cols, (index + 1) * block_cols);
      for (int64_t col = index * block_cols; col < end; ++col) {
        const float value = original[static_cast<size_t>(col)], kept = decoded[static_cast<size_t>(col)];
        block.amax = std::max(block.amax, std::fabs(value));
        block.kept = std::max(block.kept, std::fabs(kept));
        block.saturated |= value > range.above * scale || -value > range.below * scale;
        tensor.max_abs_error = std::max(tensor.max_abs_error, std::fabs(static_cast<double>(value) - kept));
      }
    }
    if ((row + 1) % block_rows == 0 || row + 1 == matrix.rows) {
      for (const Block& block : blocks) {
        ++tensor.blocks;
        tensor.zero_blocks += block.amax > 0 && block.kept == 0;
        tensor.saturated_blocks += block.saturated;
      }
    }
  }
  return measured;
}

}  // namespace fusedmoe::jobs
