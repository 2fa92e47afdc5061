#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/cpu/cpu_plan.hpp"

namespace fusedmoe::cpu {

struct CpuLayer;
struct PieceSlots;

/// A tile of the vector kernels: one to eight slots of one expert, whose tokens meet its weights together.
struct Tile {
  int32_t expert = 0;
  int32_t first_slot = 0;
  int32_t count = 0;
  int32_t height_index = 0;
  int64_t first_row = 0;  ///< tile rows (padding included) before it
};

/// The next tile of an expert that has `left` tokens left. `tall`: CpuPlan::tall.
struct TileCut {
  int32_t tokens, height_index;
};
TileCut NextTile(int64_t left, int max_height_index, bool tall);

/// Whether the kernels read each token of a tile as a tile of its own; else they stand side by side.
inline bool ReadsTokensApart(const CpuPlan& plan, const Tile& tile) {
  return tile.height_index == 0 || (plan.tall && kHeights[tile.height_index] == kMaxHeight);
}
/// Rows of a tile in the memory of tiles.
inline int64_t TileRows(const CpuPlan& plan, const Tile& tile) {
  return ReadsTokensApart(plan, tile) ? tile.count : kHeights[tile.height_index];
}

/// Packing tasks, at most: each has a piece of the buffers for rows.
inline constexpr int64_t kPackTasks = 64;

/// The tiles of a piece, and the memory of what is packed for them.
struct PieceTiles {
  Tile* list = nullptr;
  int64_t count = 0;
  int64_t num_experts = 0, num_slots = 0;  ///< that they hold
  /// Where tokens stand in them, one tile behind the other. Up has gate's where it sees the same input.
  std::byte* packed[kNumOperands] = {};
  /// The tile of one token of each slot, where kernels read such tiles.
  void** slot_rows[kNumOperands] = {};
  /// Tokens that are packed once, by their numbers (TokenNumbers): tiles of one token, which kernels read
  /// until gate and up are multiplied.
  std::byte* token_rows[2] = {};
  // Buffers of the packing tasks: two rows in fp32, and the tokens of one tile.
  float* row_buffers = nullptr;
  std::byte* task_rows = nullptr;
};

/// Cuts the slots of the experts that the matrix unit does not take into tiles.
void CutTiles(const CpuLayer& layer, const PieceSlots& slots, PieceTiles& tiles);

}  // namespace fusedmoe::cpu
