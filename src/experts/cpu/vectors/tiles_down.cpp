#include "experts/cpu/vectors/vector_gemm.hpp"
#include "experts/cpu/vectors/vector_path.hpp"

namespace fusedmoe::cpu {
namespace {

/// Experts with so many tokens on average or fewer are read, not computed.
constexpr int64_t kStreamTokens = 4;
/// Where experts are read, a thread's share of one is not cut into shorter ranges than that: hardware
/// prefetchers read some 8 KB beyond the end of each. Qwen3-30B-A3B, NVFP4, one token, two threads: ranges of
/// 110 KB read 6 % slower than such of 440 KB, of 220 KB 3 %.
constexpr int64_t kLeastRange = 512 << 10;

/// Stripes [first, end) of all experts, which are columns of the output: from zero to the caller's dtype.
class DownColumns {
 public:
  DownColumns(const CpuLayer& layer, const Run& run, int64_t first, int64_t end)
      : layer_(layer), run_(run), gemm_(layer, run, kDown), shape_(gemm_.shape()), first_(first), end_(end) {}

  void Compute() const {
    const int64_t first_col = first_ * kPanelRows;
    if (run_.jobs.count == 0) {  // else jobs started the sums
      for (int64_t row = 0; row < run_.slots.num_outputs; ++row) {
        std::fill_n(run_.sums + row * shape_.row_stride() + first_col, (end_ - first_) * kPanelRows, 0.0F);
      }
    }
    for (TileRange batch{0, 0}; batch.end < run_.tiles.count;) {
      batch = gemm_.BatchFrom(batch.end);
      AddBatch(batch);
    }
    for (int64_t row = 0; row < run_.slots.num_outputs; ++row) {
      StoreOutput(layer_, run_, row, first_col, std::min(end_ * kPanelRows, shape_.rows));
    }
  }

 private:
  void AddBatch(const TileRange& batch) const {
    const MatrixPanels& matrix = gemm_.MatrixOf(batch);
    const MatrixPanels* next = gemm_.MatrixBehind(batch);
    const WeightRange weight_range{matrix.stripes + end_ * shape_.stripe_bytes,
                                   next == nullptr ? nullptr : next->stripes + first_ * shape_.stripe_bytes};
    const int64_t step = gemm_.StripesAtOnce(batch);
    alignas(64) float dots[kMostSums];
    TileViews views(gemm_, batch, weight_range);
    for (int64_t stripe = first_; stripe < end_; stripe += step) {
      const int64_t count = std::min(step, end_ - stripe);
      if (stripe + step >= end_ && next != nullptr) {
        PrefetchRowScales(*next, first_, step);
      }
      PrefetchRowScales(matrix, stripe + step, step);
      const uint8_t* weights = matrix.stripes + stripe * shape_.stripe_bytes;
      views.SetNext(weights + count * shape_.stripe_bytes);
      for (int64_t index = batch.begin, taken = 0; index < batch.end; index += taken) {
        taken = gemm_.TilesAtOnce(index, batch.end);
        const Tile* tiles = run_.tiles.list + index;
        gemm_.Multiply(*tiles, views.From(index), taken, {weights, count, shape_.stripe_bytes}, dots);
        for (int64_t i = 0; i < taken * count; ++i) {
          const Tile& tile = tiles[i / count];
          Accumulate(matrix, tile, stripe + i % count, dots + i * kHeights[tile.height_index] * kPanelRows);
        }
      }
    }
  }

  /// Sixteen columns of the slots of a tile to the sums of their outputs.
  void Accumulate(const MatrixPanels& matrix, const Tile& tile, int64_t stripe, const float* dots) const {
    const int64_t col = stripe * kPanelRows;
    float* rows[kMaxHeight];
    for (int token = 0; token < tile.count; ++token) {
      rows[token] = run_.sums + run_.slots.outputs[tile.first_slot + token] * shape_.row_stride() + col;
    }
    AccumulateArguments arguments{};
    arguments.dot = dots;
    arguments.row_scale = matrix.row_scale + col;
    arguments.bias = matrix.bias == nullptr ? nullptr : matrix.bias + col;
    arguments.tokens = tile.count;
    arguments.rows = rows;
    arguments.weights = run_.slots.weights + tile.first_slot;
    layer_.kernels->accumulate(&arguments);
  }

  const CpuLayer& layer_;
  const Run& run_;
  const VectorGemm gemm_;
  const GemmShape& shape_;
  const int64_t first_, end_;
};

/// Into how many ranges of pairs of stripes down is divided: tall tiles take as long for one stripe as for
/// two.
int64_t DownRanges(const GemmShape& shape, const Run& run) {
  const int64_t threads = run.executor->num_threads;
  if (threads <= 1) {
    return 1;
  }
  const bool read = run.tiles.count > 0 && run.tiles.num_slots <= kStreamTokens * run.tiles.num_experts;
  const int64_t pieces = shape.expert_bytes() / threads / kLeastRange;
  const int64_t ranges = read ? std::clamp<int64_t>(pieces, 1, kGemmTasksPerThread) : kGemmTasksPerThread;
  return std::min(CeilDiv(shape.stripes, 2), threads * ranges);
}

}  // namespace

void DownOfTiles(const CpuLayer& layer, const Run& run) {
  const GemmShape& shape = layer.plan.down;
  const int64_t ranges = DownRanges(shape, run), pairs = CeilDiv(shape.stripes, 2);
  ParallelFor(*run.executor, ranges, [&](int64_t range) {
    const int64_t first = 2 * (pairs * range / ranges), end = 2 * (pairs * (range + 1) / ranges);
    DownColumns(layer, run, first, std::min(end, shape.stripes)).Compute();
  });
}

}  // namespace fusedmoe::cpu
