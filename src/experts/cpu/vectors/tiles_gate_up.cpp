#include "experts/cpu/vectors/vector_gemm.hpp"
#include "experts/cpu/vectors/vector_path.hpp"

namespace fusedmoe::cpu {
namespace {

/// Gate and up of a piece: a task is a range of stripes that meets a batch of tiles.
class GateUpTasks {
 public:
  GateUpTasks(const CpuLayer& layer, const Run& run);

  int64_t count() const { return batches_ * ranges_; }
  void RunTask(int64_t task) const;

 private:
  void MultiplyStripes(TileViews& views, const TileRange& batch, int64_t stripe, int64_t num_stripes) const;
  void Activate(const MatrixPanels& matrix, const Tile& tile, int64_t column, const float* gate,
                const float* up) const;

  const CpuLayer& layer_;
  const Run& run_;
  const VectorGemm gemm_;
  const GemmShape& shape_;
  int64_t batches_ = 0, ranges_ = 1;
};

/// Into how many tasks gate and up are divided: batches of tiles times ranges of stripes.
///
///   ranges: as few as keep each task within its part of a thread's fair share, also that of a long batch
///   where many tokens choose one expert; up to twice as many if that fills the last round better.
///
/// Few, because a range costs as much as another pair of stripes: hardware prefetchers read some 8 KB beyond
/// its end, and with its first stripes the tokens come into L1 and L2.
GateUpTasks::GateUpTasks(const CpuLayer& layer, const Run& run)
    : layer_(layer), run_(run), gemm_(layer, run, kGateUp), shape_(gemm_.shape()) {
  int64_t largest = 0;
  for (TileRange batch{0, 0}; batch.end < run.tiles.count;) {
    batch = gemm_.BatchFrom(batch.end);
    largest = std::max(largest, batch.end - batch.begin);
    ++batches_;
  }
  const int64_t threads = run.executor->num_threads;
  if (threads <= 1) {
    return;
  }
  const int64_t least = CeilDiv(kGemmTasksPerThread * threads * largest, run.tiles.count);
  const auto cost = [&](int64_t ranges) {
    return CeilDiv(batches_ * ranges, threads) * (CeilDiv(shape_.stripes, ranges) + 1);
  };
  ranges_ = std::min(least, shape_.stripes);
  for (int64_t ranges = ranges_ + 1; ranges <= std::min(2 * least, shape_.stripes); ++ranges) {
    ranges_ = cost(ranges) < cost(ranges_) ? ranges : ranges_;
  }
}

/// Tasks of one range follow each other, so that a thread reads on where its last task ended.
void GateUpTasks::RunTask(int64_t task) const {
  const int64_t range = task / batches_;
  const int64_t first = shape_.stripes * range / ranges_;
  const int64_t end = shape_.stripes * (range + 1) / ranges_;
  TileRange batch = gemm_.BatchFrom(0);
  for (int64_t left = task % batches_; left > 0; --left) {
    batch = gemm_.BatchFrom(batch.end);
  }
  const MatrixPanels* next = gemm_.MatrixBehind(batch);
  const WeightRange weight_range{gemm_.MatrixOf(batch).stripes + end * gemm_.position_bytes(),
                                 next == nullptr ? nullptr : next->stripes + first * gemm_.position_bytes()};
  const int64_t step = gemm_.StripesAtOnce(batch);
  TileViews views(gemm_, batch, weight_range);
  for (int64_t stripe = first; stripe < end; stripe += step) {
    if (stripe + step >= end && next != nullptr) {
      PrefetchRowScales(*next, first * shape_.parts, step * shape_.parts);
    }
    MultiplyStripes(views, batch, stripe, std::min(step, end - stripe));
  }
}

/// Gate and up of 16 * num_stripes columns for the tokens of a batch, and the activation.
void GateUpTasks::MultiplyStripes(TileViews& views, const TileRange& batch, int64_t stripe,
                                  int64_t num_stripes) const {
  const MatrixPanels& matrix = gemm_.MatrixOf(batch);
  const bool gated = shape_.parts == 2;
  const uint8_t* weights = matrix.stripes + stripe * gemm_.position_bytes();
  alignas(64) float dots[kMostSums];
  PrefetchRowScales(matrix, (stripe + num_stripes) * shape_.parts, num_stripes * shape_.parts);
  views.SetNext(weights + num_stripes * gemm_.position_bytes());
  for (int64_t index = batch.begin, count = 0; index < batch.end; index += count) {
    count = gemm_.TilesAtOnce(index, batch.end);
    const Tile* tiles = run_.tiles.list + index;
    const int64_t stripe_sums = kHeights[tiles->height_index] * kPanelRows;
    int64_t up_sums = stripe_sums, column_sums = stripe_sums * shape_.parts;
    if (!gemm_.separate_inputs() || !gemm_.IsTall(*tiles)) {
      gemm_.Multiply(*tiles, views.From(index), count,
                     {weights, num_stripes * shape_.parts, shape_.stripe_bytes}, dots);
    } else {
      column_sums = stripe_sums;
      up_sums = count * num_stripes * stripe_sums;
      for (int64_t part = 0; part < shape_.parts; ++part) {
        gemm_.Multiply(*tiles, views.From(index, part), count,
                       {weights + part * shape_.stripe_bytes, num_stripes, gemm_.position_bytes()},
                       dots + part * up_sums);
      }
    }
    for (int64_t i = 0; i < count * num_stripes; ++i) {
      const float* sums = dots + i * column_sums;
      Activate(matrix, tiles[i / num_stripes], stripe + i % num_stripes, gated ? sums : nullptr,
               gated ? sums + up_sums : sums);
    }
  }
}

/// Sixteen columns of the intermediate rows of a tile.
inline void GateUpTasks::Activate(const MatrixPanels& matrix, const Tile& tile, int64_t column,
                                  const float* gate, const float* up) const {
  const int64_t row = column * shape_.parts * kPanelRows, up_row = row + (gate != nullptr ? kPanelRows : 0);
  ActivateArguments arguments{};
  SetActivation(layer_, arguments);
  arguments.tokens = tile.count;
  arguments.gate = gate;
  arguments.up = up;
  arguments.gate_row_scale = matrix.row_scale + row;
  arguments.up_row_scale = matrix.row_scale + up_row;
  if (matrix.bias != nullptr) {
    arguments.gate_bias = matrix.bias + row;
    arguments.up_bias = matrix.bias + up_row;
  }
  arguments.mid = run_.mid + tile.first_slot * shape_.row_stride() + column * kPanelRows;
  arguments.mid_stride = shape_.row_stride();
  layer_.kernels->activate(&arguments);
}

}  // namespace

void GateUpOfTiles(const CpuLayer& layer, const Run& run) {
  if (run.tiles.count == 0) {
    return;
  }
  const GateUpTasks tasks(layer, run);
  ParallelFor(*run.executor, tasks.count(), [&](int64_t task) { tasks.RunTask(task); });
}

}  // namespace fusedmoe::cpu
