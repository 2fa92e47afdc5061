#include "experts/cpu/cpu_slots.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace fusedmoe::cpu {

Status SortSlots(const CpuLayer& layer, const ExpertsInput& input, int64_t first_token, int64_t count,
                 PieceSlots& slots) {
  const int64_t top_k = layer.plan.top_k, num_experts = layer.plan.num_local_experts;
  const bool apart = layer.plan.slots_apart;
  const int32_t* ids = input.topk_ids + first_token * top_k;
  const float* weights = input.topk_weights + first_token * top_k;
  const int64_t limit = input.expert_map != nullptr ? layer.config.num_experts : num_experts;
  const auto local = [&](int64_t choice) -> int32_t {
    const int32_t id = ids[choice];
    return id < 0 || input.expert_map == nullptr ? id : input.expert_map[id];
  };
  std::fill_n(slots.offsets, num_experts + 1, 0);
  for (int64_t choice = 0; choice < count * top_k; ++choice) {
    if (ids[choice] < -1 || ids[choice] >= limit) {
      return Status::Usage(fmt::format("expert id {} of token {} is outside -1..{}", ids[choice],
                                       first_token + choice / top_k, limit - 1));
    }
    const int32_t expert = local(choice);
    if (expert >= num_experts) {
      return Status::Usage(fmt::format("the expert map sends id {} to local expert {} of {}", ids[choice],
                                       expert, num_experts));
    }
    if (expert >= 0) {
      ++slots.offsets[expert + 1];
    }
  }
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    slots.cursors[expert] = slots.offsets[expert];
    slots.offsets[expert + 1] += slots.offsets[expert];
  }
  for (int64_t choice = 0; choice < count * top_k; ++choice) {
    const int32_t expert = local(choice);
    if (expert < 0) {
      continue;
    }
    const int32_t slot = slots.cursors[expert]++;
    slots.rows[slot] = static_cast<int32_t>(first_token + choice / top_k);
    slots.outputs[slot] = static_cast<int32_t>(apart ? choice : choice / top_k);
    slots.weights[slot] = apart || input.router_weight_on_input ? 1.0F : weights[choice];
  }
  slots.count = slots.offsets[num_experts];
  slots.first_token = first_token;
  slots.num_tokens = count;
  const int64_t outputs_per_token = apart ? top_k : 1;
  slots.first_output = first_token * outputs_per_token;
  slots.num_outputs = count * outputs_per_token;
  return Status::Ok();
}

void TakeBatchedRows(const CpuLayer& layer, const ExpertsInput& input, BatchedPosition& at,
                     PieceSlots& slots) {
  const int64_t num_experts = layer.plan.num_local_experts, most = layer.plan.max_slots;
  const int64_t slab = input.rows.values.dim(1);
  std::fill_n(slots.offsets, num_experts + 1, 0);
  int64_t taken = 0;
  while (at.expert < num_experts && taken < most) {
    const int64_t count = std::min(input.expert_num_tokens[at.expert] - at.row, most - taken);
    for (int64_t i = 0; i < count; ++i) {
      slots.rows[taken + i] = static_cast<int32_t>(at.expert * slab + at.row + i);
      slots.outputs[taken + i] = static_cast<int32_t>(taken + i);
      slots.weights[taken + i] = 1.0F;
    }
    taken += count;
    at.row += count;
    slots.offsets[at.expert + 1] = static_cast<int32_t>(count);
    if (at.row == input.expert_num_tokens[at.expert]) {
      at = {at.expert + 1, 0};
    }
  }
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    slots.offsets[expert + 1] += slots.offsets[expert];
  }
  slots.count = taken;
  slots.num_outputs = taken;
}

void TokenNumbers::Clear(const PieceSlots& slots) {
  std::fill_n(numbers, slots.num_tokens, -1);
}

void TokenNumbers::Note(const PieceSlots& slots, int64_t first_slot, int64_t count) {
  for (int64_t slot = first_slot; slot < first_slot + count; ++slot) {
    numbers[slots.rows[slot] - slots.first_token] = static_cast<int32_t>(slot);
  }
}

int64_t TokenNumbers::Assign(const PieceSlots& slots) {
  int32_t count = 0;
  for (int64_t token = 0; token < slots.num_tokens; ++token) {
    int32_t& number = numbers[token];
    if (number >= 0) {  // a slot, so far
      slot_of[count] = number;
      number = count++;
    }
  }
  return count;
}

}  // namespace fusedmoe::cpu
