#include "moe/expert_slots.hpp"

#include <algorithm>

#include <fmt/format.h>

namespace fusedmoe {

Status SortSlotsByExpert(const ExpertSlots& problem, int32_t* offsets, int32_t* slots) {
  const int64_t total = problem.num_tokens * problem.top_k;
  const int64_t num_ids = problem.expert_map == nullptr ? problem.num_local_experts : problem.num_experts;
  std::fill(offsets, offsets + problem.num_local_experts + 1, 0);
  for (int64_t slot = 0; slot < total; ++slot) {
    if (const int32_t id = problem.topk_ids[slot]; id < -1 || id >= num_ids) {
      return Status::Usage(fmt::format("token {} names expert {}, experts are 0..{} (-1 skips a slot)",
                                       slot / problem.top_k, id, num_ids - 1));
    }
    if (const int32_t expert = LocalExpert(problem, slot); expert >= 0) {
      ++offsets[expert + 1];
    }
  }
  for (int64_t expert = 0; expert < problem.num_local_experts; ++expert) {
    offsets[expert + 1] += offsets[expert];
  }
  // Going backwards and counting down turns the ends into the starts without a second array.
  for (int64_t slot = total - 1; slot >= 0; --slot) {
    if (const int32_t expert = LocalExpert(problem, slot); expert >= 0) {
      slots[--offsets[expert + 1]] = static_cast<int32_t>(slot);
    }
  }
  // Now offsets[e + 1] is the start of expert e: shift by one.
  int32_t end = 0;
  for (int64_t slot = 0; slot < total; ++slot) {
    end += LocalExpert(problem, slot) >= 0 ? 1 : 0;
  }
  for (int64_t expert = 0; expert < problem.num_local_experts; ++expert) {
    offsets[expert] = offsets[expert + 1];
  }
  offsets[problem.num_local_experts] = end;
  return Status::Ok();
}

}  // namespace fusedmoe
