#pragma once

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// The row operations of MoeKernel on the card: launches in the order of `stream`, nothing else. All views
/// lie on the card.
namespace fusedmoe::cuda {

/// output = first + gate * second by token, in fp32, rounded once; `gates` null: 1. Output may be one of the
/// inputs.
Status AddRows(TensorView first, TensorView second, const float* gates, MutableTensorView output,
               void* stream);

/// gates[m] = sigmoid(hidden[m] . gate), summed in fp64. `gate` F32 [H].
Status SharedGates(TensorView hidden, const float* gate, float* gates, void* stream);

/// rows[m] *= weight / sqrt(mean(rows[m]^2) + epsilon): F32 in place, squares summed in fp64.
Status NormalizeRows(MutableTensorView rows, const float* weight, float epsilon, void* stream);

/// Partial sums of all ranks for the same rows, F32, rows dense.
struct RankRows {
  const float* own = nullptr;       ///< those of this rank
  const float* received = nullptr;  ///< those of rank r: at received + r * rank_stride
  int64_t rank_stride = 0;          ///< in floats
  int rank = 0, ranks = 1;
};
/// output[m] = the sum over all ranks in ascending order, in fp32, rounded once: the same bits on every rank
/// and in every run.
Status AddRankRows(const RankRows& parts, MutableTensorView output, void* stream);

}  // namespace fusedmoe::cuda
