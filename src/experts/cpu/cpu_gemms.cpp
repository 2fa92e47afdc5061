#include <algorithm>

#include "core/checked_math.hpp"
#include "experts/cpu/cpu_experts.hpp"
#include "experts/cpu/cpu_run.hpp"

/// How the vector kernels walk through both GEMMs of a piece: into which tasks each is divided, which tiles
/// meet which stripes, and what a task does with its sums.
namespace fusedmoe::cpu {
namespace {

/// More tasks than threads, so that a thread that lost its core for a while does not hold up the others.
constexpr int64_t kGemmTasksPerThread = 4;
/// Experts with so many tokens on average or fewer are read, not computed.
constexpr int64_t kStreamTokens = 4;
/// Where experts are read, a thread's share of one is not cut into shorter pieces than that: hardware reads
/// some 8 KB beyond the end of each. Qwen3-30B-A3B, NVFP4, one token, two threads: pieces of 110 KB read 6 %
/// slower than such of 440 KB, of 220 KB 3 %.
constexpr int64_t kLeastStretch = 512 << 10;
/// Columns (in units of 16) of a short tile that are computed in one call, of gate and up each or of down;
/// and the sums of a call: those, or those of a batch of tall tiles.
constexpr int64_t kShortTileStripes = 4;
constexpr int64_t kMostSums = kBatchTiles * kBatchStripes * kMaxHeight * kPanelRows;
static_assert(2 * kShortTileStripes * kHeights[1] <= kBatchStripes * kMaxHeight);
/// Tiles of an expert that go through the stripes together, at most: as many as have views on the stack.
constexpr int64_t kMostViews = 64;

}  // namespace

/// Tiles [begin, end) of one expert as the kernels see them, of one part or of gate and up. Made once for all
/// stripes of a task: made again for each pair of stripes they took 2 % of prefill (INT4, 64 tokens an
/// expert).
struct CpuExperts::Views {
  int64_t begin, end;
  int parts;
  Stretch stretch;
  TileView of[2][kMostViews];
  /// Where the share of each tile begins of the bytes that are asked for ahead; those of short tiles are
  /// empty.
  int64_t share[kMostViews + 1];

  /// What comes behind the stripes that end at `done` is asked for while these are multiplied.
  void AskBehind(const uint8_t* done) {
    const uint8_t* next = done < stretch.end ? done : stretch.next;
    for (int part = 0; part < parts; ++part) {
      for (int64_t i = 0; i < end - begin; ++i) {
        of[part][i].next = next == nullptr ? nullptr : next + share[i];
        of[part][i].next_bytes = next == nullptr ? 0 : share[i + 1] - share[i];
      }
    }
  }
};

/// Tiles from `begin` on that meet a stripe one after the other: of one expert, and small enough to stay in
/// L2 until the next stripe comes.
int64_t CpuExperts::EndOfBatch(const Run& run, const GemmShape& shape, int64_t begin) const {
  const Tile& first = run.tiles[begin];
  int64_t end = begin + 1;
  while (end < run.num_tiles && run.tiles[end].expert == first.expert && end - begin < kMostViews &&
         (run.tiles[end].first_row + TileRows(plan_, run.tiles[end]) - first.first_row) *
                 shape.tile_row_bytes <=
             plan_.tile_batch_bytes) {
    ++end;
  }
  return end;
}

/// Scales and biases of the rows of stripes that come next: a line each, far apart from the stripes, which
/// cost 2 to 4 % of decode when they were waited for (NVFP4, Qwen3-30B-A3B, one token).
void CpuExperts::PrefetchSides(const float* scales, const float* biases, int64_t stripe,
                               int64_t count) const {
  for (int64_t i = stripe; i < stripe + count; ++i) {
    __builtin_prefetch(scales + i * kPanelRows, 0, 3);
    if (biases != nullptr) {
      __builtin_prefetch(biases + i * kPanelRows, 0, 3);
    }
  }
}

/// Where a tile of a part stands.
void CpuExperts::View(const Run& run, const GemmShape& shape, int part, const Tile& tile,
                      const Stretch& stretch, TileView& view) const {
  view.rows = run.SlotTiles(plan_, part) + tile.first_slot;
  void* memory = ReadsTokensApart(plan_, tile)
                     ? view.rows[0]
                     : run.Tiles(plan_, part) + tile.first_row * shape.tile_row_bytes;
  PlaceTile(&view, memory, shape.kernel, shape.tile, shape.padded_cols, kHeights[tile.height_index]);
  view.tokens = tile.count;
  view.group_scales = GroupScalesOf(shape.panel);
  view.slab_tiles = shape.slab_tiles;
  view.wide_slabs = shape.wide_slabs;
  view.prefetch = shape.prefetch[std::min(tile.height_index, 1)];
  view.prefetch_far = shape.prefetch_far;
  view.next_into_l2 = plan_.next_into_l2;
  view.stretch_end = stretch.end;
  view.stretch_jump = stretch.next == nullptr ? 0 : stretch.next - stretch.end;
}

/// Views of parts [first_part, first_part + parts), whose tall tiles ask for `ahead_bytes` in equal shares
/// while they meet some stripes.
void CpuExperts::ViewTiles(const Run& run, const GemmShape& shape, int first_part, int parts,
                           int64_t tile_begin, int64_t tile_end, int64_t ahead_bytes, const Stretch& stretch,
                           Views& views) const {
  views.begin = tile_begin;
  views.end = tile_end;
  views.parts = parts;
  views.stretch = stretch;
  const Tile* tiles = run.tiles + tile_begin;
  const int64_t count = tile_end - tile_begin;
  const int64_t tall =
      std::count_if(tiles, tiles + count, [&](const Tile& tile) { return IsTall(shape, tile); });
  for (int64_t i = 0, done = 0; i < count; ++i) {
    for (int part = 0; part < parts; ++part) {
      View(run, shape, first_part + part, tiles[i], stretch, views.of[part][i]);
      views.of[part][i].turn = parts == 2 ? &views.of[1 - part][i] : nullptr;
    }
    views.share[i] = tall == 0 ? 0 : ahead_bytes * done / tall / 64 * 64;
    done += IsTall(shape, tiles[i]) ? 1 : 0;
    views.share[i + 1] = tall == 0 ? 0 : ahead_bytes * done / tall / 64 * 64;
  }
}

/// Into how many ranges of pairs of stripes the second GEMM is divided: tall tiles take as long for one
/// stripe as for two.
int64_t CpuExperts::DownRanges(const Run& run) const {
  const int64_t threads = run.executor->num_threads;
  if (threads <= 1) {
    return 1;
  }
  const bool read = run.num_tiles > 0 && run.tiled_slots <= kStreamTokens * run.tiled_experts;
  const int64_t pieces = plan_.down.expert_bytes() / threads / kLeastStretch;
  return std::min(
      CeilDiv(plan_.down.stripes, 2),
      threads * (read ? std::clamp<int64_t>(pieces, 1, kGemmTasksPerThread) : kGemmTasksPerThread));
}

/// Into how many tasks gate and up are divided: batches of tiles (EndOfBatch) times ranges of stripes.
///
///   ranges as few as leave no task more than its part of a thread's work, a long one included where many
///   tokens choose one expert; or up to twice as many, where they fill the last round of all threads better.
///
/// Few, because a range costs as much as another pair of stripes: hardware reads some 8 KB beyond its end,
/// and with its first stripes the tokens come into L1 and L2.
CpuExperts::Division CpuExperts::GateUpDivision(const Run& run) const {
  const GemmShape& shape = plan_.gate_up;
  Division division{0, 1};
  int64_t largest = 0;
  for (int64_t tile = 0, end = 0; tile < run.num_tiles; tile = end) {
    end = EndOfBatch(run, shape, tile);
    largest = std::max(largest, end - tile);
    ++division.batches;
  }
  const int64_t threads = run.executor->num_threads;
  if (threads <= 1) {
    return division;
  }
  const int64_t least = CeilDiv(kGemmTasksPerThread * threads * largest, run.num_tiles);
  const auto cost = [&](int64_t ranges) {
    return CeilDiv(division.batches * ranges, threads) * (CeilDiv(shape.stripes, ranges) + 1);
  };
  division.ranges = std::min(least, shape.stripes);
  for (int64_t ranges = division.ranges + 1; ranges <= std::min(2 * least, shape.stripes); ++ranges) {
    division.ranges = cost(ranges) < cost(division.ranges) ? ranges : division.ranges;
  }
  return division;
}

void CpuExperts::GateUp(Run& run) const {
  if (run.num_tiles == 0) {
    return;
  }
  const GemmShape& shape = plan_.gate_up;
  const int64_t position_bytes = shape.parts * shape.stripe_bytes;
  const Division division = GateUpDivision(run);
  // Tasks of one range follow each other, so that a thread reads on where its last task ended.
  ParallelFor(*run.executor, division.batches * division.ranges, [&](int64_t task) {
    const int64_t range = task / division.batches;
    const int64_t first = shape.stripes * range / division.ranges;
    const int64_t end = shape.stripes * (range + 1) / division.ranges;
    int64_t tile = 0;
    for (int64_t batch = task % division.batches; batch > 0; --batch) {
      tile = EndOfBatch(run, shape, tile);
    }
    const int64_t tile_end = EndOfBatch(run, shape, tile);
    const ExpertPanels& expert = experts_[static_cast<size_t>(run.tiles[tile].expert)];
    const ExpertPanels* next =
        tile_end < run.num_tiles ? &experts_[static_cast<size_t>(run.tiles[tile_end].expert)] : nullptr;
    const Stretch stretch{expert.gate_up + end * position_bytes,
                          next == nullptr ? nullptr : next->gate_up + first * position_bytes};
    const int64_t step = ColumnsAtOnce(run, shape, tile, tile_end);
    Views views;
    ViewTiles(run, shape, 0, separate_inputs_ ? static_cast<int>(shape.parts) : 1, tile, tile_end,
              step * position_bytes, stretch, views);
    for (int64_t stripe = first; stripe < end; stripe += step) {
      if (stripe + step >= end && next != nullptr) {
        PrefetchSides(next->gate_up_scale, next->gate_up_bias, first * shape.parts, step * shape.parts);
      }
      GateUpStripes(run, views, stripe, std::min(step, end - stripe));
    }
  });
}

/// Output columns that a micro-kernel computes before its sums are worked on: two stripes, for one short
/// tile, whose sums wait for the last products of their stripe, several.
int64_t CpuExperts::ColumnsAtOnce(const Run& run, const GemmShape& shape, int64_t tile_begin,
                                  int64_t tile_end) const {
  const bool is_short = tile_end - tile_begin == 1 && run.tiles[tile_begin].height_index <= 1;
  const bool apart = separate_inputs_ && shape.parts == 2;  // two stripes of each part
  return is_short ? kShortTileStripes : apart ? kBatchStripes / 2 : 2 / shape.parts;
}

/// Whether a tile is for the batch kernels.
bool CpuExperts::IsTall(const GemmShape& shape, const Tile& tile) const {
  return table_->batch[shape.kernel][shape.tile] != nullptr && kHeights[tile.height_index] == kMaxHeight;
}

/// Tiles from `begin` on that meet the weights together: tall ones of one height, or one.
int64_t CpuExperts::TilesAtOnce(const Run& run, const GemmShape& shape, int64_t begin, int64_t end) const {
  if (!IsTall(shape, run.tiles[begin])) {
    return 1;
  }
  int64_t tall = 1;
  while (begin + tall < end && run.tiles[begin + tall].height_index == run.tiles[begin].height_index) {
    ++tall;
  }
  return CeilDiv(tall, CeilDiv(tall, plan_.batch_tiles));  // batches of equal size
}

/// sums[tile][stripe][token][16] of stripes and `count` tiles of TilesAtOnce, the first of which is `first`.
/// One short tile meets stripes that follow each other: those of gate and up in turns, each the tile of its
/// input.
void CpuExperts::Multiply(const GemmShape& shape, const Tile& first, const TileView* views, int64_t count,
                          const Stripes& stripes, float* sums) const {
  if (IsTall(shape, first)) {
    table_->batch[shape.kernel][shape.tile](stripes.first, stripes.count, stripes.stride, shape.blocks, views,
                                            count, sums);
  } else {
    table_->dot[shape.kernel][shape.tile][first.height_index](stripes.first, stripes.count, shape.blocks,
                                                              views, sums);
  }
}

/// Gate and up of 16 * num_stripes columns for all tokens of an expert, and the activation.
void CpuExperts::GateUpStripes(Run& run, Views& views, int64_t stripe, int64_t num_stripes) const {
  const GemmShape& shape = plan_.gate_up;
  const ExpertPanels& expert = experts_[static_cast<size_t>(run.tiles[views.begin].expert)];
  const ActivationSpec& spec = problem_.config.activation;
  const bool gated = shape.parts == 2;
  const uint8_t* weights = expert.gate_up + stripe * shape.parts * shape.stripe_bytes;
  alignas(64) float dots[kMostSums];
  ActivateArguments arguments{};
  arguments.activation = static_cast<int>(spec.kind);
  arguments.alpha = spec.alpha;
  arguments.beta = spec.beta;
  arguments.limit = spec.limit;
  arguments.mid_stride = shape.row_stride();
  PrefetchSides(expert.gate_up_scale, expert.gate_up_bias, (stripe + num_stripes) * shape.parts,
                num_stripes * shape.parts);
  views.AskBehind(weights + num_stripes * shape.parts * shape.stripe_bytes);
  for (int64_t index = views.begin, count = 0; index < views.end; index += count) {
    count = TilesAtOnce(run, shape, index, views.end);
    const Tile* tiles = run.tiles + index;
    const int64_t at = index - views.begin;
    const int64_t stripe_sums = kHeights[tiles->height_index] * kPanelRows;
    int64_t up_sums = stripe_sums, column_sums = stripe_sums * shape.parts;
    if (!separate_inputs_ || !IsTall(shape, *tiles)) {
      Multiply(shape, *tiles, views.of[0] + at, count,
               {weights, num_stripes * shape.parts, shape.stripe_bytes}, dots);
    } else {
      column_sums = stripe_sums;
      up_sums = count * num_stripes * stripe_sums;
      for (int part = 0; part < shape.parts; ++part) {
        Multiply(shape, *tiles, views.of[part] + at, count,
                 {weights + part * shape.stripe_bytes, num_stripes, shape.parts * shape.stripe_bytes},
                 dots + part * up_sums);
      }
    }
    for (int64_t i = 0; i < count * num_stripes; ++i) {
      const Tile& tile = tiles[i / num_stripes];
      const int64_t column = stripe + i % num_stripes, side = column * shape.parts * kPanelRows;
      const float* sums = dots + i * column_sums;
      arguments.tokens = tile.count;
      arguments.gate = gated ? sums : nullptr;
      arguments.up = gated ? sums + up_sums : sums;
      arguments.gate_row_scale = expert.gate_up_scale + side;
      arguments.up_row_scale = arguments.gate_row_scale + (gated ? kPanelRows : 0);
      if (expert.gate_up_bias != nullptr) {
        arguments.gate_bias = expert.gate_up_bias + side;
        arguments.up_bias = arguments.gate_bias + (gated ? kPanelRows : 0);
      }
      arguments.mid = run.mid + tile.first_slot * shape.row_stride() + column * kPanelRows;
      table_->activate(&arguments);
    }
  }
}

void CpuExperts::Down(Run& run) const {
  const GemmShape& shape = plan_.down;
  const int64_t tasks = DownRanges(run);
  ParallelFor(*run.executor, tasks, [&](int64_t task) {
    const int64_t pairs = CeilDiv(shape.stripes, 2);
    DownColumns(run, 2 * (pairs * task / tasks), std::min(2 * (pairs * (task + 1) / tasks), shape.stripes));
  });
}

/// Columns of the output for all experts, from zero to the caller's dtype.
void CpuExperts::DownColumns(Run& run, int64_t first_stripe, int64_t end_stripe) const {
  const GemmShape& shape = plan_.down;
  const int64_t row_floats = shape.row_stride();
  const int64_t first_col = first_stripe * kPanelRows;
  for (int64_t row = 0; run.num_jobs == 0 && row < run.num_outputs; ++row) {  // jobs started the sums
    std::fill_n(run.sums + row * row_floats + first_col, (end_stripe - first_stripe) * kPanelRows, 0.0F);
  }
  alignas(64) float dots[kMostSums];
  float* rows[kMaxHeight];
  AccumulateArguments arguments{};
  arguments.rows = rows;
  for (int64_t begin = 0, end = 0; begin < run.num_tiles; begin = end) {
    end = EndOfBatch(run, shape, begin);
    const ExpertPanels& expert = experts_[static_cast<size_t>(run.tiles[begin].expert)];
    const ExpertPanels* next =
        end < run.num_tiles ? &experts_[static_cast<size_t>(run.tiles[end].expert)] : nullptr;
    const Stretch stretch{expert.down + end_stripe * shape.stripe_bytes,
                          next == nullptr ? nullptr : next->down + first_stripe * shape.stripe_bytes};
    const int64_t step = ColumnsAtOnce(run, shape, begin, end);
    Views views;
    ViewTiles(run, shape, 2, 1, begin, end, step * shape.stripe_bytes, stretch, views);
    for (int64_t stripe = first_stripe; stripe < end_stripe; stripe += step) {
      const int64_t count = std::min(step, end_stripe - stripe);
      if (stripe + step >= end_stripe && next != nullptr) {
        PrefetchSides(next->down_scale, next->down_bias, first_stripe, step);
      }
      PrefetchSides(expert.down_scale, expert.down_bias, stripe + step, step);
      const uint8_t* weights = expert.down + stripe * shape.stripe_bytes;
      views.AskBehind(weights + count * shape.stripe_bytes);
      for (int64_t index = begin, taken = 0; index < end; index += taken) {
        taken = TilesAtOnce(run, shape, index, end);
        const Tile* tiles = run.tiles + index;
        Multiply(shape, *tiles, views.of[0] + (index - begin), taken, {weights, count, shape.stripe_bytes},
                 dots);
        for (int64_t i = 0; i < taken * count; ++i) {
          const Tile& tile = tiles[i / count];
          const int64_t col = (stripe + i % count) * kPanelRows;
          for (int token = 0; token < tile.count; ++token) {
            rows[token] = run.sums + run.slot_outputs[tile.first_slot + token] * row_floats + col;
          }
          arguments.dot = dots + i * kHeights[tile.height_index] * kPanelRows;
          arguments.row_scale = expert.down_scale + col;
          arguments.bias = expert.down_bias == nullptr ? nullptr : expert.down_bias + col;
          arguments.tokens = tile.count;
          arguments.weights = run.slot_weights + tile.first_slot;
          table_->accumulate(&arguments);
        }
      }
    }
  }
  for (int64_t row = 0; row < run.num_outputs; ++row) {
    StoreOutput(run, row, first_col, std::min(end_stripe * kPanelRows, shape.rows));
  }
}

/// Columns of a row of sums to the caller's dtype.
void CpuExperts::StoreOutput(const Run& run, int64_t row, int64_t first_col, int64_t end_col) const {
  const int64_t value_bytes = DTypeBits(run.output.dtype()) / 8;
  const int64_t target = run.batched ? run.slot_rows[row] : run.first_output + row;
  table_->from_float[run.output_type](
      run.sums + row * plan_.down.row_stride() + first_col, end_col - first_col,
      run.output.data() + target * run.output_row_bytes + first_col * value_bytes);
}

}  // namespace fusedmoe::cpu
