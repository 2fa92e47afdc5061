#pragma once

#include <cstdint>

#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// Which slots (token * top_k + position) each local expert computes: a counting sort, stable, so that within
/// an expert slots ascend.
struct ExpertSlots {
  const int32_t* topk_ids = nullptr;    ///< [M, k] global ids; -1 is skipped
  const int32_t* expert_map = nullptr;  ///< [E] global -> local or -1; null: ids are local
  int64_t num_tokens = 0;
  int64_t top_k = 0;
  int64_t num_experts = 0;  ///< length of expert_map
  int64_t num_local_experts = 0;
};

/// Local expert of a slot's id; -1 where it is skipped or lives elsewhere. Ids must lie in [-1, num_experts),
/// without a map in [-1, num_local_experts); SortSlotsByExpert checks that.
inline int32_t LocalExpert(const ExpertSlots& problem, int64_t slot) {
  const int32_t id = problem.topk_ids[slot];
  return id < 0 || problem.expert_map == nullptr ? id : problem.expert_map[id];
}

/// Fills offsets [num_local_experts + 1] and slots [M * k]; expert e owns slots[offsets[e] .. offsets[e +
/// 1]). kUsage when an id lies outside the experts; then nothing is written beyond the arrays.
Status SortSlotsByExpert(const ExpertSlots& problem, int32_t* offsets, int32_t* slots);

}  // namespace fusedmoe
