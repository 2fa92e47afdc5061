#pragma once

#include <cstdint>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/tensor.hpp>

namespace fusedmoe {

/// Floats of a piece of a row on the stack: small enough to stay in L1 from its sum to its rounding.
inline constexpr int64_t kRowChunk = 512;

/// out = weight * row, in fp32.
void ScaleRow(DType dtype, const std::byte* row, float weight, int64_t count, float* out);

/// output[m] = round(first[m] + gate[m] * second[m]): F32 matrices [M, H], added in fp32 and rounded once to
/// the dtype of `output`. `gates` null: every gate is 1.
void AddRows(TensorView first, TensorView second, const float* gates, MutableTensorView output,
             const Executor& executor);

/// rows[m] *= weight / sqrt(mean(rows[m]^2) + epsilon): F32 [M, H] in place. Squares are summed in fp64, in
/// the order of the columns.
void NormalizeRows(MutableTensorView rows, const float* weight, float epsilon, const Executor& executor);

/// Copies [M, H] rows between dtypes, rounding once.
void ConvertRows(TensorView source, MutableTensorView target, const Executor& executor);

}  // namespace fusedmoe
