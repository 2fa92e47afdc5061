// The GEMMs of ContractExperts: rows as they are read, quantized where the contract does, multiplied.
#include <algorithm>
#include <cstring>

#include "experts/contracts/common/contract_experts.hpp"
#include "moe/activation.hpp"
#include "moe/plain_rows.hpp"
#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe {
namespace {

constexpr auto kFloat = static_cast<int64_t>(sizeof(float));

float ScaleAt(const std::vector<float>& values, int64_t expert) {
  return values.empty() ? 1.0F : values[static_cast<size_t>(expert)];
}

}  // namespace

float ContractExperts::Rounded(double value) const {
  auto rounded = static_cast<float>(value);
  if (sixteen_bit_ != DType::kF32) {
    RoundRow(sixteen_bit_, &rounded, 1);
  }
  return rounded;
}

void ContractExperts::LoadRow(const Batch& batch, int32_t row, float* out) const {
  const TensorView values = batch.source->values;
  DecodeRow(values.dtype(), RowAt(values, row / batch.rows_per_token), 0, config_.hidden, out);
  if (batch.weight_input) {
    for (int64_t col = 0; col < config_.hidden; ++col) {
      out[col] *= batch.weights[row];
    }
  }
}

void ContractExperts::Quantize(int64_t expert, int projection, float batch_scale, int64_t count,
                               std::byte* codes, float* values) const {
  if (!activation_.quantized()) {
    if (sixteen_bit_ != DType::kF32) {
      RoundRow(sixteen_bit_, values, count);
    }
    return;
  }
  const float scale =
      activation_.static_tensor_scale ? ScaleAt(input_scale_[projection], expert) : batch_scale;
  if (sixteen_bit_ != DType::kF32) {
    FakeQuantizeRow(activation_, scale, values, count);
    RoundRow(sixteen_bit_, values, count);
    return;
  }
  // Codes times block scales; the tensor scale comes with the factor behind the sum, as kernels have it.
  std::byte* scales = codes + (CodeRowBytes(activation_, count) + 7) / 8 * 8;
  QuantizeRow(activation_, scale, values, count, codes, scales);
  DequantizeRow(activation_, 1.0F, codes, scales, count, values);
}

double ContractExperts::Factor(int64_t expert, int projection, float batch_scale) const {
  if (sixteen_bit_ != DType::kF32) {
    return 1.0;  // all scales are in the rounded operands
  }
  const std::vector<float>& products = output_scale_[projection == 2 ? 1 : 0];
  if (!products.empty() && activation_.quantized()) {
    return ScaleAt(products, expert);
  }
  double factor = ScaleAt(tensor_scale_[projection], expert);
  if (activation_.quantized() && NeedsTensorScale(activation_)) {
    factor *= static_cast<double>(activation_.static_tensor_scale ? ScaleAt(input_scale_[projection], expert)
                                                                  : batch_scale);
  }
  return factor;
}

void ContractExperts::MultiplyRow(const WeightRows& weights, int64_t expert, int64_t row, float tensor_scale,
                                  const float* inputs, int64_t count, double factor, double* sums) const {
  float values[kColumnBlock];
  std::fill(sums, sums + count, 0.0);
  for (int64_t begin = 0; begin < weights.cols(); begin += kColumnBlock) {
    const int64_t length = std::min(kColumnBlock, weights.cols() - begin);
    weights.Decode(expert, row, begin, length, values);
    if (sixteen_bit_ != DType::kF32) {
      for (int64_t col = 0; col < length; ++col) {
        values[col] *= tensor_scale;
      }
      RoundRow(sixteen_bit_, values, length);
    }
    for (int64_t token = 0; token < count; ++token) {
      sums[token] += DotRows(values, inputs + token * weights.cols() + begin, length);
    }
  }
  const float* bias = weights.bias(expert);
  for (int64_t token = 0; token < count; ++token) {
    sums[token] = sums[token] * factor + (bias == nullptr ? 0.0 : static_cast<double>(bias[row]));
  }
}

void ContractExperts::GateUp(int64_t expert, const Batch& batch, const Workspace& workspace,
                             const Executor& executor) const {
  const bool gated = config_.activation.gated();
  const int64_t hidden = config_.hidden, width = config_.intermediate;
  auto* gate_rows = workspace.Get<float>(slots_.input);
  float* up_rows = one_input_ ? gate_rows : gate_rows + kTokenBlock * hidden;
  auto* codes = workspace.Get<std::byte>(slots_.codes);
  auto* mid = workspace.Get<float>(slots_.mid);
  for (int64_t begin = batch.offsets[expert]; begin < batch.offsets[expert + 1]; begin += kTokenBlock) {
    const int64_t count = std::min<int64_t>(kTokenBlock, batch.offsets[expert + 1] - begin);
    const int32_t* rows = batch.rows + begin;
    ParallelFor(executor, count, [&](int64_t index) {
      float* row = gate_rows + index * hidden;
      LoadRow(batch, rows[index], row);
      if (!one_input_) {
        float* up_row = up_rows + index * hidden;
        std::memcpy(up_row, row, static_cast<size_t>(hidden * kFloat));
        Quantize(expert, 1, batch.input_scale, hidden, codes + index * code_bytes_, up_row);
      }
      Quantize(expert, 0, batch.input_scale, hidden, codes + index * code_bytes_, row);
    });
    const double gate_factor = Factor(expert, 0, batch.input_scale);
    const double up_factor = Factor(expert, gated ? 1 : 0, batch.input_scale);
    ParallelFor(executor, width, [&](int64_t col) {
      double gate[kTokenBlock], up[kTokenBlock];
      MultiplyRow(gate_up_, expert, col, ScaleAt(tensor_scale_[0], expert), gate_rows, count, gate_factor,
                  gate);
      if (gated) {
        MultiplyRow(gate_up_, expert, width + col, ScaleAt(tensor_scale_[1], expert), up_rows, count,
                    up_factor, up);
      }
      for (int64_t index = 0; index < count; ++index) {
        double g = gate[index], u = gated ? up[index] : 0.0;
        if (sixteen_bit_ != DType::kF32) {
          g = static_cast<double>(Rounded(g));
          u = static_cast<double>(Rounded(u));
        }
        mid[rows[index] * width + col] = Rounded(Activate(config_.activation, g, u));
      }
    });
  }
}

void ContractExperts::Down(int64_t expert, const Batch& batch, MutableTensorView output,
                           const Workspace& workspace, const Executor& executor) const {
  const bool standard = config_.activation_format == ActivationFormatKind::kStandard;
  const int64_t hidden = config_.hidden, width = config_.intermediate;
  auto* block = workspace.Get<float>(slots_.input);
  auto* codes = workspace.Get<std::byte>(slots_.codes);
  const auto* mid = workspace.Get<float>(slots_.mid);
  float* out = standard ? workspace.Get<float>(slots_.sums) : output.as<float>();
  for (int64_t begin = batch.offsets[expert]; begin < batch.offsets[expert + 1]; begin += kTokenBlock) {
    const int64_t count = std::min<int64_t>(kTokenBlock, batch.offsets[expert + 1] - begin);
    const int32_t* rows = batch.rows + begin;
    ParallelFor(executor, count, [&](int64_t index) {
      float* row = block + index * width;
      std::memcpy(row, mid + rows[index] * width, static_cast<size_t>(width * kFloat));
      Quantize(expert, 2, batch.mid_scale, width, codes + index * code_bytes_, row);
    });
    const double factor = Factor(expert, 2, batch.mid_scale);
    ParallelFor(executor, hidden, [&](int64_t col) {
      double sums[kTokenBlock];
      MultiplyRow(down_, expert, col, ScaleAt(tensor_scale_[2], expert), block, count, factor, sums);
      for (int64_t index = 0; index < count; ++index) {
        if (!standard) {
          out[rows[index] * hidden + col] = static_cast<float>(sums[index]);
          continue;
        }
        const float weight =
            batch.weights == nullptr || batch.weight_input ? 1.0F : batch.weights[rows[index]];
        out[rows[index] / batch.rows_per_token * hidden + col] += weight * static_cast<float>(sums[index]);
      }
    });
  }
}

// One scale over all rows that some local expert computes; `mid` null: the input rows.
float ContractExperts::BatchScale(const Batch& batch, int64_t width, const float* mid, float* scratch) const {
  float amax = 0.0F;
  for (int32_t index = 0; index < batch.offsets[config_.num_local_experts]; ++index) {
    const float* row = scratch;
    if (mid == nullptr) {
      LoadRow(batch, batch.rows[index], scratch);
    } else {
      row = mid + batch.rows[index] * width;
    }
    amax = std::max(amax, RowFiniteAmax(row, width));
  }
  return DynamicTensorScale(activation_, amax);
}

}  // namespace fusedmoe
