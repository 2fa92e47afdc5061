#include <algorithm>
#include <cstring>

#include "experts/cpu/vectors/row_packer.hpp"
#include "experts/cpu/vectors/vector_path.hpp"

namespace fusedmoe::cpu {
namespace {

/// Work below this many values is not worth waking threads for: 4 K values take some 2 us, and what one
/// thread packs of rows that others computed waits for their caches.
constexpr int64_t kSerialValues = 4 << 10;

/// The rows of one operand into tiles.
class TilePacker {
 public:
  TilePacker(const CpuLayer& layer, Operand operand, Run& run)
      : layer_(layer),
        operand_(operand),
        run_(run),
        shape_(layer.plan.shape(GemmOf(operand))),
        rows_(layer, run, shape_.gemm),
        shared_(operand != kMid && !layer.batched && layer.shared_inputs[operand]) {}

  void Pack() const {
    if (shared_) {
      PackTokens();
    }
    const PieceTiles& tiles = run_.tiles;
    const int64_t tasks = std::min(kPackTasks, tiles.count);
    ForTasks(tasks, RowsLeft(), [&](int64_t task) {
      for (int64_t tile = tiles.count * task / tasks; tile < tiles.count * (task + 1) / tasks; ++tile) {
        PackTile(tiles.list[tile], task);
      }
    });
  }

 private:
  template <typename Task>
  void ForTasks(int64_t tasks, int64_t rows, const Task& task) const {
    const Executor serial;
    ParallelFor(rows * shape_.padded_cols <= kSerialValues ? serial : *run_.executor, tasks, task);
  }

  /// Rows that PackTile works on: where tokens are packed already, those that it puts side by side.
  int64_t RowsLeft() const {
    if (!shared_) {
      return run_.slots.count;
    }
    int64_t rows = 0;
    for (const Tile* tile = run_.tiles.list; tile != run_.tiles.list + run_.tiles.count; ++tile) {
      rows += ReadsTokensApart(layer_.plan, *tile) ? 0 : tile->count;
    }
    return rows;
  }

  float* RowBuffer(int64_t task) const {
    return run_.tiles.row_buffers + task * 2 * layer_.plan.widest_cols();
  }

  /// Every token that visits an expert of a tile, once: tiles of one token.
  void PackTokens() const {
    run_.numbers.Clear(run_.slots);
    for (const Tile* tile = run_.tiles.list; tile != run_.tiles.list + run_.tiles.count; ++tile) {
      run_.numbers.Note(run_.slots, tile->first_slot, tile->count);
    }
    const int64_t count = run_.numbers.Assign(run_.slots);
    const int64_t tasks = std::min<int64_t>(kPackTasks, count);
    ForTasks(tasks, count, [&](int64_t task) {
      for (int64_t token = count * task / tasks; token < count * (task + 1) / tasks; ++token) {
        rows_.Pack(layer_.expert(0).input[operand_], run_.numbers.slot_of[token], RowBuffer(task),
                   run_.tiles.token_rows[operand_] + token * shape_.tile_row_bytes);
      }
    });
  }

  /// The tile of one token that a slot has in a tile: packed by PackTokens, the intermediate row itself, or
  /// packed to `place`.
  std::byte* TokenOf(const Tile& tile, int64_t slot, int64_t task, std::byte* place) const {
    if (shared_) {
      return run_.tiles.token_rows[operand_] + run_.numbers.Of(run_.slots, slot) * shape_.tile_row_bytes;
    }
    const InputTransform& transform = layer_.expert(tile.expert).input[operand_];
    if (float* row = shape_.tile == kTileF32 ? rows_.RowInPlace(transform, slot) : nullptr) {
      return reinterpret_cast<std::byte*>(row);
    }
    rows_.Pack(transform, slot, RowBuffer(task), place);
    return place;
  }

  /// The tokens of a tile side by side; tokens that do not exist multiply zeros.
  void PackTile(const Tile& tile, int64_t task) const {
    const CpuPlan& plan = layer_.plan;
    const int64_t row_bytes = shape_.tile_row_bytes;
    const int64_t most_bytes = std::max(plan.gate_up.tile_row_bytes, plan.down.tile_row_bytes);
    std::byte* rows = run_.tiles.task_rows + task * kHeights[plan.max_height_index] * most_bytes;
    const int height = kHeights[tile.height_index];
    // Tokens that the kernels read apart stay where they are, or stand in the tile one after the other.
    const bool apart = ReadsTokensApart(plan, tile);
    std::byte* place = run_.tiles.packed[operand_] + tile.first_row * row_bytes;
    void** slot_rows = run_.tiles.slot_rows[operand_] + tile.first_slot;
    const int32_t* tokens[kMaxHeight];
    for (int token = 0; token < tile.count; ++token) {
      std::byte* row =
          TokenOf(tile, tile.first_slot + token, task, (apart ? place : rows) + token * row_bytes);
      slot_rows[token] = row;
      tokens[token] = reinterpret_cast<const int32_t*>(row);
    }
    if (apart) {
      return;
    }
    if (tile.count < height) {
      std::byte* none = rows + tile.count * row_bytes;
      std::memset(none, 0, static_cast<size_t>(row_bytes));
      std::fill(tokens + tile.count, tokens + height, reinterpret_cast<const int32_t*>(none));
    }
    layer_.kernels->interleave(tokens, row_bytes / 4, height, reinterpret_cast<int32_t*>(place));
  }

  const CpuLayer& layer_;
  const Operand operand_;
  Run& run_;
  const GemmShape& shape_;
  const RowPacker rows_;
  const bool shared_;  ///< a token is packed once, not once an expert
};

}  // namespace

void PackTiles(const CpuLayer& layer, Operand operand, Run& run) {
  if (run.tiles.count > 0) {
    TilePacker(layer, operand, run).Pack();
  }
}

}  // namespace fusedmoe::cpu
