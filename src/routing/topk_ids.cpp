#include "routing/topk_ids.hpp"

#include <fmt/format.h>

#include "numerics/codecs.hpp"

namespace fusedmoe {

void PackTopK(std::span<const int32_t> ids, std::span<const float> weights, std::span<int32_t> packed) {
  for (size_t slot = 0; slot < ids.size(); ++slot) {
    packed[slot] =
        static_cast<int32_t>(static_cast<uint32_t>(ids[slot]) << 16 | EncodeBf16Rne(weights[slot]));
  }
}

Status ChooseReplicas(std::span<const int32_t> logical_ids, int64_t top_k,
                      std::span<const int32_t> replica_count, std::span<const int32_t> logical_to_physical,
                      std::span<int32_t> physical_ids, int64_t first_token) {
  const auto num_experts = static_cast<int64_t>(replica_count.size());
  const int64_t max_replicas =
      num_experts == 0 ? 0 : static_cast<int64_t>(logical_to_physical.size()) / num_experts;
  for (size_t slot = 0; slot < logical_ids.size(); ++slot) {
    const int32_t id = logical_ids[slot];
    if (id == -1) {
      physical_ids[slot] = -1;
      continue;
    }
    const int64_t count = id >= 0 && id < num_experts ? replica_count[static_cast<size_t>(id)] : 0;
    if (count < 1 || count > max_replicas) {
      return Status::BadInput(fmt::format("expert {} has {} replicas; ids must be below {} and have 1 to {}",
                                          id, count, num_experts, max_replicas));
    }
    const int64_t token = first_token + static_cast<int64_t>(slot) / top_k;
    physical_ids[slot] =
        logical_to_physical[static_cast<size_t>(id * max_replicas + ReplicaOf(token, count))];
  }
  return Status::Ok();
}

void SplitIdentity(int64_t num_tokens, int64_t top_k, int64_t num_real_experts, const int32_t* topk_ids,
                   const float* topk_weights, int32_t* kept, float* identity_weights) {
  for (int64_t token = 0; token < num_tokens; ++token) {
    float sum = 0.0F;
    for (int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
      const bool identity = topk_ids[slot] >= num_real_experts;
      sum += identity ? topk_weights[slot] : 0.0F;
      kept[slot] = identity ? -1 : topk_ids[slot];
    }
    identity_weights[token] = sum;
  }
}

}  // namespace fusedmoe
