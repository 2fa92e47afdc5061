#include "moe/rows.hpp"

#include <algorithm>
#include <cmath>

#include "numerics/rows.hpp"

namespace fusedmoe {

void ScaleRow(DType dtype, const std::byte* row, float weight, int64_t count, float* out) {
  DecodeRow(dtype, row, 0, count, out);
  for (int64_t col = 0; col < count; ++col) {
    out[col] *= weight;
  }
}

void AddRows(TensorView first, TensorView second, const float* gates, MutableTensorView output,
             const Executor& executor) {
  const int64_t hidden = output.dim(1);
  ParallelFor(executor, output.dim(0), [&](int64_t token) {
    const float gate = gates == nullptr ? 1.0F : gates[token];
    const std::byte* a = first.data() + token * first.stride_bytes(0);
    const std::byte* b = second.data() + token * second.stride_bytes(0);
    std::byte* target = output.data() + token * output.stride_bytes(0);
    float sum[kRowChunk], addend[kRowChunk];
    for (int64_t begin = 0; begin < hidden; begin += kRowChunk) {
      const int64_t count = std::min(kRowChunk, hidden - begin);
      DecodeRow(first.dtype(), a, begin, count, sum);
      DecodeRow(second.dtype(), b, begin, count, addend);
      for (int64_t col = 0; col < count; ++col) {
        sum[col] += gate * addend[col];
      }
      EncodeRow(output.dtype(), sum, count, target + PackedBytes(output.dtype(), begin));
    }
  });
}

void NormalizeRows(MutableTensorView rows, const float* weight, float epsilon, const Executor& executor) {
  const int64_t width = rows.dim(1);
  ParallelFor(executor, rows.dim(0), [&](int64_t token) {
    auto* row = reinterpret_cast<float*>(rows.data() + token * rows.stride_bytes(0));
    double squares = 0.0;
    for (int64_t col = 0; col < width; ++col) {
      squares += static_cast<double>(row[col]) * row[col];
    }
    const auto factor = static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(width) + epsilon));
    for (int64_t col = 0; col < width; ++col) {
      row[col] = row[col] * factor * weight[col];
    }
  });
}

void ConvertRows(TensorView source, MutableTensorView target, const Executor& executor) {
  const int64_t hidden = target.dim(1);
  ParallelFor(executor, target.dim(0), [&](int64_t token) {
    const std::byte* from = source.data() + token * source.stride_bytes(0);
    std::byte* to = target.data() + token * target.stride_bytes(0);
    float values[kRowChunk];
    for (int64_t begin = 0; begin < hidden; begin += kRowChunk) {
      const int64_t count = std::min(kRowChunk, hidden - begin);
      DecodeRow(source.dtype(), from, begin, count, values);
      EncodeRow(target.dtype(), values, count, to + PackedBytes(target.dtype(), begin));
    }
  });
}

}  // namespace fusedmoe
