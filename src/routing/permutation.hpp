#pragma once

#include <cstdint>
#include <span>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// Orders the slots of a routed batch by expert. A slot is a flat index token * top_k + j into topk_ids.
/// Everything is stable: within an expert, slots stand in ascending order. Nothing allocates; ids of -1 and
/// ids whose map entry is -1 are skipped unless said otherwise. `expert_map` may be empty: ids are local.
namespace fusedmoe {

/// Tokens per local expert: `counts` [num_local_experts].
void CountExpertTokens(std::span<const int32_t> topk_ids, std::span<const int32_t> expert_map,
                       std::span<int32_t> counts);

/// Room that AlignBlockSize needs for `num_slots` slots: every expert may fill its last block by one slot
/// only, but never more experts than slots have one. `whole_blocks`: rounded up to the block.
int64_t MaxAlignedSlots(int64_t num_slots, int64_t num_experts, int64_t block, bool whole_blocks);

/// What happens to slots whose expert is not local.
enum class NonLocal : uint8_t {
  kDrop,  ///< they appear nowhere; blocks are in local order
  kMark   ///< they are sorted by global id like the others; their blocks carry -1
};

/// Slots sorted by expert, every expert padded to whole blocks with the value `topk_ids.size()`.
/// `sorted_slots` needs MaxAlignedSlots entries, `block_experts` one for each of its blocks (rounded up),
/// `scratch` num_experts + 1 entries. `num_experts` counts global experts. Returns the padded total; entries
/// behind it are filled with the padding value, and -1 in `block_experts`. kUsage when an array is too small,
/// kBadInput for an id outside of [-1, num_experts).
Result<int64_t> AlignBlockSize(std::span<const int32_t> topk_ids, int64_t num_experts, int64_t block,
                               std::span<const int32_t> expert_map, NonLocal non_local,
                               std::span<int32_t> sorted_slots, std::span<int32_t> block_experts,
                               std::span<int32_t> scratch);

/// The same for the batched format [E, max_tokens, H], where rows of one expert already stand together:
/// entries are rows e * max_tokens + j, the padding value is E * max_tokens. Needs E * round_up(max_tokens,
/// block) entries.
Result<int64_t> AlignBatchedBlockSize(std::span<const int32_t> expert_counts, int64_t max_tokens,
                                      int64_t block, std::span<int32_t> sorted_rows,
                                      std::span<int32_t> block_experts);

/// The permutation of a batch into rows grouped by local expert.
struct Permutation {
  /// [num_local_experts + 1]: exclusive prefix sums; the last: all local rows.
  std::span<int64_t> expert_first_row;
  std::span<int32_t> slot_to_row;  ///< [slots]; slots without a local expert get the rows behind all others,
                                   ///< by global id
  std::span<int32_t> row_to_slot;  ///< [slots]; `slots` in rows without a local expert
};

/// Fills a permutation. `scratch` needs 2 * num_experts + 1 entries, num_experts counting global ones. Ids of
/// -1 come last of all. Returns the number of local rows. Errors as above.
Result<int64_t> MakePermutation(std::span<const int32_t> topk_ids, int64_t num_experts,
                                std::span<const int32_t> expert_map, const Permutation& permutation,
                                std::span<int32_t> scratch);

/// rows[r] = hidden[slot / top_k] for the local rows r: whole rows of `hidden` are copied as bytes, so packed
/// codes and per-token or block scales move the same way. Shapes [M, ...] and [>= local rows, ...] of one
/// dtype.
Status PermuteRows(TensorView hidden, int64_t top_k, std::span<const int32_t> row_to_slot,
                   int64_t num_local_rows, MutableTensorView rows, const Executor& executor = {});

/// output[t] = sum over j of expert_rows[slot_to_row[t, j]] * weight[t, j], in slot order in fp32; rows from
/// num_local_rows on count as 0 and are never read. F32 [>= local rows, H] and [M, H]. `topk_weights` null:
/// ones.
Status UnpermuteRows(TensorView expert_rows, int64_t top_k, std::span<const int32_t> slot_to_row,
                     int64_t num_local_rows, const float* topk_weights, MutableTensorView output,
                     const Executor& executor = {});

}  // namespace fusedmoe
