#include "experts/cpu/vectors/tiles.hpp"

#include <algorithm>

#include "experts/cpu/cpu_layer.hpp"
#include "experts/cpu/cpu_slots.hpp"

namespace fusedmoe::cpu {

TileCut NextTile(int64_t left, int max_height_index, bool tall) {
  if (tall && left > 2) {
    return {static_cast<int32_t>(std::min<int64_t>(left, kMaxHeight)), kNumHeights - 1};
  }
  // A pass over a stripe costs about as much as two tokens (decoding), so padding by one or two is cheaper
  // than another tile: the last tile of 3 has height 4, of 6 and 7 height 8; 5 is 4 + 1.
  int index = max_height_index;
  while (index > 0 && kHeights[index - 1] >= left) {
    --index;
  }
  if (kHeights[index] - left > 2) {
    --index;
  }
  return {static_cast<int32_t>(std::min<int64_t>(left, kHeights[index])), index};
}

void CutTiles(const CpuLayer& layer, const PieceSlots& slots, PieceTiles& tiles) {
  const CpuPlan& plan = layer.plan;
  int64_t rows = 0;
  tiles.count = tiles.num_experts = tiles.num_slots = 0;
  for (int64_t expert = 0; expert < plan.num_local_experts; ++expert) {
    int32_t slot = slots.offsets[expert];
    const int32_t end = slots.offsets[expert + 1];
    if (plan.matrix_unit.enabled && end - slot >= plan.matrix_unit.from_tokens) {
      continue;  // CutJobs
    }
    tiles.num_slots += end - slot;
    tiles.num_experts += end > slot ? 1 : 0;
    while (slot < end) {
      const TileCut cut = NextTile(end - slot, plan.max_height_index, plan.tall);
      Tile& tile = tiles.list[tiles.count++];
      tile = {static_cast<int32_t>(expert), slot, cut.tokens, cut.height_index, rows};
      rows += TileRows(plan, tile);
      slot += cut.tokens;
    }
  }
}

}  // namespace fusedmoe::cpu
