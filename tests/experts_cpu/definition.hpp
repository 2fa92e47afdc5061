#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu_layer.hpp"
#include "moe/activation.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_quantizer.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe::cpu_test {

/// The layer in fp64, row by row: the definition, with nothing of the kernels in it. Where the scheme
/// quantizes activations, rows go through FakeQuantizeRow in fp32.
class Definition {
 public:
  explicit Definition(const Layer& layer) : layer_(layer) {
    for (const CanonicalExpert& expert : layer.experts) {
      gate_.push_back(Decode(expert.gate));
      up_.push_back(Decode(expert.up));
      down_.push_back(Decode(expert.down));
    }
  }

  std::vector<double> Mid(int64_t expert, const std::vector<double>& row, float batch_scale = 1.0F) const {
    const auto e = static_cast<size_t>(expert);
    const CanonicalExpert& canonical = layer_.experts[e];
    std::vector<double> mid = Multiply(canonical.up, up_[e], row, batch_scale);
    std::vector<double> gate = mid;
    if (layer_.spec.activation.gated()) {
      gate = Multiply(canonical.gate, gate_[e], row, batch_scale);
    }
    for (size_t i = 0; i < mid.size(); ++i) {
      mid[i] = Activate<double>(layer_.spec.activation, gate[i], mid[i]);
    }
    return mid;
  }

  std::vector<double> ExpertRow(int64_t expert, const std::vector<double>& row) const {
    const auto e = static_cast<size_t>(expert);
    return Multiply(layer_.experts[e].down, down_[e], Mid(expert, row), 1.0F);
  }

  std::vector<double> Forward(const Batch& batch) const {
    const LayerSpec& spec = layer_.spec;
    std::vector<std::vector<double>> mids(batch.ids.size());
    const float input_scale = BatchScale(batch, [&](size_t slot) { return RowOfSlot(batch, slot); });
    for (size_t slot = 0; slot < batch.ids.size(); ++slot) {
      if (batch.ids[slot] >= 0) {
        mids[slot] = Mid(batch.ids[slot], RowOfSlot(batch, slot), input_scale);
      }
    }
    const float mid_scale = BatchScale(batch, [&](size_t slot) { return mids[slot]; });
    std::vector<double> out(static_cast<size_t>(batch.tokens * spec.hidden), 0.0);
    for (size_t slot = 0; slot < batch.ids.size(); ++slot) {
      if (batch.ids[slot] < 0) {
        continue;
      }
      const auto e = static_cast<size_t>(batch.ids[slot]);
      const std::vector<double> result = Multiply(layer_.experts[e].down, down_[e], mids[slot], mid_scale);
      const int64_t token = static_cast<int64_t>(slot) / spec.top_k;
      for (int64_t i = 0; i < spec.hidden; ++i) {
        out[static_cast<size_t>(token * spec.hidden + i)] +=
            static_cast<double>(batch.weights[slot]) * result[static_cast<size_t>(i)];
      }
    }
    return out;
  }

  std::vector<double> RowOfSlot(const Batch& batch, size_t slot) const {
    return Row(batch, static_cast<int64_t>(slot) / layer_.spec.top_k);
  }

  std::vector<double> Row(const Batch& batch, int64_t token) const {
    std::vector<float> row(static_cast<size_t>(layer_.spec.hidden));
    DecodeRow(layer_.spec.dtype, batch.hidden.view().data() + token * batch.hidden.view().stride_bytes(0), 0,
              layer_.spec.hidden, row.data());
    return {row.begin(), row.end()};
  }

 private:
  template <typename Rows>
  float BatchScale(const Batch& batch, Rows rows) const {
    const ActivationFormat& activation = layer_.scheme.activation;
    if (!activation.quantized() || !NeedsTensorScale(activation) || activation.static_tensor_scale) {
      return 1.0F;
    }
    float amax = 0.0F;
    for (size_t slot = 0; slot < batch.ids.size(); ++slot) {
      if (batch.ids[slot] >= 0) {
        for (const double value : rows(slot)) {
          amax = std::max(amax, std::fabs(static_cast<float>(value)));
        }
      }
    }
    return DynamicTensorScale(activation, amax);
  }

  static std::vector<double> Decode(const CanonicalMatrix& matrix) {
    std::vector<double> values(static_cast<size_t>(matrix.rows * matrix.cols));
    if (!matrix.empty()) {
      const RowDecoder decoder(matrix);
      for (int64_t row = 0; row < matrix.rows; ++row) {
        decoder.Decode(row, 0, matrix.cols, values.data() + row * matrix.cols);
      }
    }
    return values;
  }

  std::vector<double> Multiply(const CanonicalMatrix& matrix, const std::vector<double>& values,
                               std::vector<double> x, float batch_scale) const {
    if (!matrix.pre_quant_scale.empty()) {
      for (size_t k = 0; k < x.size(); ++k) {
        x[k] *= static_cast<double>(matrix.pre_quant_scale.view().as<float>()[k]);
      }
    }
    if (layer_.scheme.activation.quantized() && layer_.spec.mode != ActivationMode::kWeightOnly) {
      std::vector<float> rounded(x.begin(), x.end());
      const bool is_static = layer_.scheme.activation.static_tensor_scale;
      FakeQuantizeRow(layer_.scheme.activation,
                      is_static ? matrix.input_tensor_scale.value_or(1.0F) : batch_scale, rounded.data(),
                      matrix.cols);
      x.assign(rounded.begin(), rounded.end());
    }
    std::vector<double> out(static_cast<size_t>(matrix.rows), 0.0);
    for (int64_t row = 0; row < matrix.rows; ++row) {
      double sum = matrix.bias.empty() ? 0.0 : static_cast<double>(matrix.bias.view().as<float>()[row]);
      out[static_cast<size_t>(row)] = Dot(sum, values.data() + row * matrix.cols, x.data(), matrix.cols);
    }
    return out;
  }

  // Threads share nothing of it, and under TSan it was most of what the tests of arithmetic took.
  [[gnu::no_sanitize("thread")]] static double Dot(double sum, const double* a, const double* b,
                                                   int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
      sum += a[k] * b[k];
    }
    return sum;
  }

  const Layer& layer_;
  std::vector<std::vector<double>> gate_, up_, down_;
};

}  // namespace fusedmoe::cpu_test
