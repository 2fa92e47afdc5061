#pragma once

#include <cstdint>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// The batched format on the card: launches in the order of `stream`. All pointers and views lie there.
namespace fusedmoe::cuda {

/// Where each slot's row stands in its expert's batch: by ascending slot, as on the CPU. Slots without an
/// expert, and those beyond `max_rows` (a token that chooses an expert twice), get -1.
struct BatchPlaces {
  const int32_t* topk_ids = nullptr;  ///< [num_slots], local ids; anything else is skipped
  int64_t num_slots = 0;
  int64_t num_experts = 0;
  int64_t max_rows = 0;
  int32_t* counts = nullptr;      ///< [num_experts]
  int32_t* batch_rows = nullptr;  ///< [num_slots]
};
Status AssignBatchRows(const BatchPlaces& places, void* stream);

/// Rows of `hidden` [M, H] into `batches` [E, max_rows, H]; with `weights` [num_slots] multiplied by them, in
/// F32.
Status DispatchRows(const BatchPlaces& places, int64_t top_k, TensorView hidden, const float* weights,
                    MutableTensorView batches, void* stream);

/// output[m] = sum over slots of weight * expert_output[e, row], in slot order, in fp32; `weights` null: 1.
Status CombineRows(const BatchPlaces& places, int64_t top_k, TensorView expert_output, const float* weights,
                   MutableTensorView output, void* stream);

}  // namespace fusedmoe::cuda
