#pragma once

#include "core/checked_math.hpp"
#include "experts/cpu/cpu_run.hpp"

namespace fusedmoe::cpu {

/// More tasks than threads, so that a thread that lost its core for a while does not hold up the others.
inline constexpr int64_t kGemmTasksPerThread = 4;
/// Columns (in units of 16) of a short tile that are computed in one call, of gate and up each or of down;
/// and the sums of a call: those, or those of a batch of tall tiles.
inline constexpr int64_t kShortTileStripes = 4;
inline constexpr int64_t kMostSums = kBatchTiles * kBatchStripes * kMaxHeight * kPanelRows;
static_assert(2 * kShortTileStripes * kHeights[1] <= kBatchStripes * kMaxHeight);
/// Tiles of an expert that go through the stripes together, at most: as many as have views on the stack.
inline constexpr int64_t kMostViews = 64;

/// A batch: tiles [begin, end) of one expert that meet a stripe one after the other.
struct TileRange {
  int64_t begin, end;
};

/// Stripes of one matrix, `stride` bytes apart.
struct Stripes {
  const uint8_t* first;
  int64_t count, stride;
};

/// Where a task's range of weights ends, and where the next one begins that it reads; null: nowhere.
struct WeightRange {
  const uint8_t* end;
  const uint8_t* next;
};

/// One of the GEMMs of a piece: which tiles meet which stripes together.
class VectorGemm {
 public:
  VectorGemm(const CpuLayer& layer, const Run& run, Gemm gemm)
      : layer_(layer), run_(run), shape_(layer.plan.shape(gemm)) {}

  const GemmShape& shape() const { return shape_; }
  const Tile* tiles() const { return run_.tiles.list; }
  /// Bytes from one stripe of all parts to the next.
  int64_t position_bytes() const { return shape_.parts * shape_.stripe_bytes; }
  /// Gate and up have tiles of their own.
  bool separate_inputs() const { return shape_.gemm == kGateUp && layer_.separate_inputs; }

  /// The batch that begins with a tile: as many as stay in L2 until the next stripe comes.
  TileRange BatchFrom(int64_t begin) const;
  const MatrixPanels& MatrixOf(const TileRange& batch) const {
    return layer_.expert(run_.tiles.list[batch.begin].expert).matrix(shape_.gemm);
  }
  /// That of the batch behind it; null: there is none.
  const MatrixPanels* MatrixBehind(const TileRange& batch) const {
    return batch.end < run_.tiles.count ? &MatrixOf({batch.end, batch.end}) : nullptr;
  }

  /// Stripes of each part that a micro-kernel multiplies before its sums are worked on: one or two, for one
  /// short tile, whose sums wait for the last products of their stripe, several.
  int64_t StripesAtOnce(const TileRange& batch) const {
    const bool is_short = batch.end - batch.begin == 1 && run_.tiles.list[batch.begin].height_index <= 1;
    const bool apart = separate_inputs() && shape_.parts == 2;  // two stripes of each part
    return is_short ? kShortTileStripes : apart ? kBatchStripes / 2 : 2 / shape_.parts;
  }
  /// Whether a tile is for the batch kernels.
  bool IsTall(const Tile& tile) const {
    return layer_.kernels->batch[shape_.kernel][shape_.tile] != nullptr &&
           kHeights[tile.height_index] == kMaxHeight;
  }
  /// Tiles from `begin` on that meet the weights together: tall ones of one height, or one.
  int64_t TilesAtOnce(int64_t begin, int64_t end) const {
    const Tile* tiles = run_.tiles.list;
    if (!IsTall(tiles[begin])) {
      return 1;
    }
    int64_t tall = 1;
    while (begin + tall < end && tiles[begin + tall].height_index == tiles[begin].height_index) {
      ++tall;
    }
    return CeilDiv(tall, CeilDiv(tall, layer_.plan.batch_tiles));  // batches of equal size
  }

  /// sums[tile][stripe][token][16] of stripes and `count` tiles of TilesAtOnce, the first of which is
  /// `first`. One short tile meets stripes that follow each other: those of gate and up alternately, each
  /// with the tile of its input.
  void Multiply(const Tile& first, const TileView* views, int64_t count, const Stripes& stripes,
                float* sums) const {
    const KernelTable& kernels = *layer_.kernels;
    if (IsTall(first)) {
      kernels.batch[shape_.kernel][shape_.tile](stripes.first, stripes.count, stripes.stride, shape_.blocks,
                                                views, count, sums);
    } else {
      kernels.dot[shape_.kernel][shape_.tile][first.height_index](stripes.first, stripes.count, shape_.blocks,
                                                                  views, sums);
    }
  }

  /// Where a tile of an operand stands, and how its kernel prefetches weights.
  void View(Operand operand, const Tile& tile, const WeightRange& range, TileView& view) const;

 private:
  const CpuLayer& layer_;
  const Run& run_;
  const GemmShape& shape_;
};

/// The tiles of a batch as the kernels see them, of down, of what gate and up share, or of each. Made once
/// for all stripes of a task: made again for each pair of stripes they took 2 % of prefill (INT4, 64 tokens
/// an expert).
class TileViews {
 public:
  TileViews(const VectorGemm& gemm, const TileRange& batch, const WeightRange& range);

  /// The views of the tiles from `tile` on; part 1: those of up, where it has its own.
  const TileView* From(int64_t tile, int64_t part = 0) const { return of_[part] + (tile - batch_.begin); }

  /// What comes behind the stripes that end at `done` is prefetched while these are multiplied.
  void SetNext(const uint8_t* done) {
    const uint8_t* next = done < range_.end ? done : range_.next;
    for (int64_t part = 0; part < parts_; ++part) {
      for (int64_t i = 0; i < batch_.end - batch_.begin; ++i) {
        of_[part][i].tall_tile.next = next == nullptr ? nullptr : next + share_[i];
        of_[part][i].tall_tile.next_bytes = next == nullptr ? 0 : share_[i + 1] - share_[i];
      }
    }
  }

 private:
  TileRange batch_;
  int64_t parts_;
  WeightRange range_;
  TileView of_[2][kMostViews];
  /// Where the share of each tile begins of the bytes that are prefetched; those of short tiles are
  /// empty.
  int64_t share_[kMostViews + 1];
};

/// Scales and biases of the rows of stripes that come next: a line each, far apart from the stripes, which
/// cost 2 to 4 % of decode when they were waited for (NVFP4, Qwen3-30B-A3B, one token).
inline void PrefetchRowScales(const MatrixPanels& matrix, int64_t stripe, int64_t count) {
  for (int64_t i = stripe; i < stripe + count; ++i) {
    __builtin_prefetch(matrix.row_scale + i * kPanelRows, 0, 3);
    if (matrix.bias != nullptr) {
      __builtin_prefetch(matrix.bias + i * kPanelRows, 0, 3);
    }
  }
}

}  // namespace fusedmoe::cpu
