#pragma once

#include <cstdint>
#include <span>

#include <fusedmoe/status.hpp>

/// What happens to the ids of a routed batch before or instead of an experts call.
namespace fusedmoe {

/// TensorRT-LLM's packed form: the id in the upper half, the weight as bf16 bits in the lower. Ids below
/// 2^15.
void PackTopK(std::span<const int32_t> ids, std::span<const float> weights, std::span<int32_t> packed);

/// Which of `count` replicas a token of that row takes: a hash of the row, so that dispatch and combine agree
/// and neighbouring tokens spread.
constexpr int64_t ReplicaOf(int64_t token, int64_t count) {
  return (token * int64_t{2654435769} & 0xffffffff) % count;
}

/// Logical ids [M, k] to physical ones, in place allowed. `logical_to_physical` [E, max_replicas], -1 padded;
/// `replica_count` [E]. Ids of -1 stay. `first_token`: row of the batch's first token. kBadInput for an id
/// outside of the maps or an expert without replicas.
Status ChooseReplicas(std::span<const int32_t> logical_ids, int64_t top_k,
                      std::span<const int32_t> replica_count, std::span<const int32_t> logical_to_physical,
                      std::span<int32_t> physical_ids, int64_t first_token = 0);

/// Takes identity experts (ids from `num_real_experts` on) out of a routed batch: their weights add up in
/// `identity_weights` [M], by which the token's own hidden state is to be added; their slots have id -1 in
/// `kept` [M, k], which may be `topk_ids` itself.
void SplitIdentity(int64_t num_tokens, int64_t top_k, int64_t num_real_experts, const int32_t* topk_ids,
                   const float* topk_weights, int32_t* kept, float* identity_weights);

}  // namespace fusedmoe
