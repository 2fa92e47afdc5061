#pragma once

#include <cstdint>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

#include "moe/experts.hpp"

namespace fusedmoe {

/// Everything that turns expert outputs into one row a token.
struct WeightAndReduceInput {
  TensorView expert_output;             ///< kContiguous: [M, k, H] F32; kNaiveBatched: [E_local, rows, H] F32
  const int32_t* topk_ids = nullptr;    ///< [M, k]; slots with -1, or whose expert is elsewhere, add nothing
  const float* topk_weights = nullptr;  ///< [M, k]
  const int32_t* expert_map = nullptr;  ///< [E] or null
  int64_t num_tokens = 0;
  int64_t top_k = 0;
  bool router_weight_on_input = false;  ///< the weights are in the input already
  /// kNaiveBatched: row of slot (m, j) inside the batch of its expert, [M, k].
  const int32_t* batch_rows = nullptr;
};

/// Sums weight x row over the slots of each token, in ascending slot order, in fp32, and rounds once to the
/// dtype of `output` [M, H]. kNoOp copies unless the two are the same memory; kDelegate is an error: the
/// finalize step must have replaced it.
Status WeightAndReduce(WeightAndReduceKind kind, const WeightAndReduceInput& input, MutableTensorView output,
                       const Executor& executor);

}  // namespace fusedmoe
