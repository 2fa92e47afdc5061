#pragma once

#include <cstdint>

#include <fusedmoe/dtype.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>

#include "experts/cuda/launch.hpp"
#include "experts/cuda/operands/operand_format.hpp"

namespace fusedmoe::cuda {

/// Rows of activations to the operand of a GEMM: converted, weighted, smoothed, quantized as the scheme says
/// and kept as the exact values of their codes (e2m1, e4m3, int8 and e2m1 * e4m3 are all exact in BF16),
/// padded with zeros. Layers whose rows are BF16 already, with hidden a multiple of the unit and no
/// quantization, need none of this.
struct OperandRowsCall {
  ActivationRows source;
  int64_t padded_cols = 0;
  int64_t num_rows = 0;  ///< rows of the result
  int64_t rows_per_token =
      1;  ///< result row r reads source row r / rows_per_token (top_k for TokenRows.by_route)
  DType element =
      DType::kBF16;  ///< of the result: BF16, F16 for F16 weights, F8_E4M3 or I8 for codes as they are
  ActivationFormat activation;  ///< not quantized: conversion only
  /// Whose row it is, where scales depend on the expert: slot r's id (null: batched, expert r /
  /// rows_per_expert).
  const int32_t* topk_ids = nullptr;
  /// Ids that belong to a row: 1 where rows are slots, top_k where they are tokens. A row without a local
  /// expert is neither read nor written, and does not count for a dynamic tensor scale.
  int64_t ids_per_row = 1;
  const int32_t* expert_map = nullptr;
  int64_t num_experts = 0;  ///< global
  int64_t num_local_experts = 0;
  const int32_t* expert_num_tokens = nullptr;  ///< batched: rows beyond the counts are not read
  int64_t rows_per_expert = 0;
  void* values = nullptr;         ///< [num_rows][padded_cols] of `element`
  float* row_scale = nullptr;     ///< F32 [num_rows]: dynamic scales, where the format has them
  float* group_scale = nullptr;   ///< F32 [num_rows][ScaleGroups(padded_cols)]
  uint32_t* amax_bits = nullptr;  ///< one word of scratch: dynamic tensor scales only
  void* stream = nullptr;
};

/// Enqueues the kernels: one, or three with a dynamic tensor scale. No allocation, no synchronization.
Status LaunchOperandRows(const OperandRowsCall& call);

}  // namespace fusedmoe::cuda
