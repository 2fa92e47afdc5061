#pragma once

#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/device/ptx_panel.cuh"
#include "experts/cuda/prefill/prefill.hpp"

/// Which tiles the grouped GEMMs of prefill have: of 256 weight rows and some tokens of an expert, dealt to
/// the CTAs (or pairs of them) in turn, in an order in which CTAs that run together share weights in L2
/// (tokens first). Short tiles read as much from L2 as long ones and take nearly as long: dealt apart, so
/// that all CTAs have as many of each, they made no layer faster.
namespace fusedmoe::cuda {

/// What stands behind the weights of an odd last slab of 64 codes.
static __device__ const uint4 kZeroSlab[64] = {};

struct PrefillTile {
  int expert = 0;
  int row = 0;    ///< tile of 16 row blocks; of an odd number of them a pair's last one is none
  int token = 0;  ///< panel row of the first
  int tokens = 0;
  int width = 0;             ///< tokens that instructions are chosen for: alike in a pair
  bool one_weights = false;  ///< a pair: both have the same weights; else the same tokens
};

/// A slab of a tile's tokens in bytes, and what this CTA copies of it: of the same tokens each of a pair
/// copies half, to both.
struct TokenShare {
  int bytes;
  int own_bytes;
  int offset;
  bool both;
};

/// A place in a ring of kPlaces stages, and the parity of the turn.
template <int kPlaces>
struct RingPlace {
  int at = 0;
  int phase = 0;
  __device__ __forceinline__ void Next() {
    if (++at == kPlaces) {
      at = 0;
      phase ^= 1;
    }
  }
};

/// kPairs: two CTAs take two token pieces of the same weights, and of an odd last piece two row tiles.
/// kEven: an expert with more tokens than a tile is cut evenly (instructions fit any multiple of 16), else
/// into whole tiles and a rest.
template <int kTileTokens, bool kPairs, bool kEven>
struct PrefillTiles {
  static constexpr bool kInPairs = kPairs;
  static constexpr int kTableBytes = (3 * static_cast<int>(kMaxExperts) + 1) * 4;

  int* first_row;   ///< [E] shared memory
  int* counts;      ///< [E]
  int* first_tile;  ///< [E + 1]
  int num_experts;
  int row_tiles;
  int rank;    ///< of the CTA in its pair
  int begin;   ///< the first tile of the CTA or pair
  int stride;  ///< from each to the next

  __device__ PrefillTiles(const PrefillGemmParams& p, void* table)
      : first_row(static_cast<int*>(table)),
        counts(first_row + p.num_experts),
        first_tile(counts + p.num_experts),
        num_experts(p.num_experts),
        row_tiles(p.row_tiles),
        rank(kPairs ? static_cast<int>(blockIdx.x) & 1 : 0),
        begin(static_cast<int>(blockIdx.x) / (kPairs ? 2 : 1)),
        stride(static_cast<int>(gridDim.x) / (kPairs ? 2 : 1)) {}

  /// All threads of the CTA, whose barriers are initialized; behind it those of the other one of a pair are.
  __device__ __forceinline__ void Open(const PrefillGemmParams& p, int tid, int threads) const {
    // The map is ready once the first GEMM (or the kernel between the two) runs, so that the second may read
    // it and fetch weights before its tokens are there.
    if (p.wait_for_map) {
      GridWait();
      GridLaunchNext();
    }
    for (int e = tid; e < num_experts; e += threads) {
      first_row[e] = p.first_row[e];
      counts[e] = p.counts[e];
    }
    __syncthreads();
    if (tid < kWarpSize) {
      const int per_lane = (num_experts + kWarpSize - 1) / kWarpSize;
      int own = 0;
      for (int j = 0; j < per_lane; ++j) {
        const int e = tid * per_lane + j;
        own += e < num_experts ? TilesOf(counts[e]) : 0;
      }
      int at = SumUpToLane(own) - own;
      for (int j = 0; j < per_lane; ++j) {
        const int e = tid * per_lane + j;
        if (e < num_experts) {
          first_tile[e] = at;
          at += TilesOf(counts[e]);
          if (e == num_experts - 1) {
            first_tile[e + 1] = at;
          }
        }
      }
    }
    __syncthreads();
    if constexpr (kPairs) {
      PairSync();
    }
  }

  __device__ __forceinline__ int Count() const { return first_tile[num_experts]; }

  /// Tile `t` of the CTA. `tile` is one before it, or new. All lanes of a warp: they look at 32 experts at a
  /// time (one after the other is some 3 us in a GEMM of 128 experts).
  __device__ __forceinline__ void Locate(int t, PrefillTile& tile) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    uint32_t beyond;
    while ((beyond = __ballot_sync(kAllLanes, t < first_tile[min(tile.expert + 1 + lane, num_experts)])) ==
           0) {
      tile.expert += kWarpSize;
    }
    tile.expert += __ffs(static_cast<int>(beyond)) - 1;
    const int index = t - first_tile[tile.expert];
    const int count = counts[tile.expert];
    const int pieces = PiecesOf(count);
    const int step = kEven ? ((count + pieces - 1) / pieces + 7) & ~7 : kTileTokens;
    int piece;
    if constexpr (kPairs) {
      const int twos = pieces >> 1;
      tile.one_weights = index < row_tiles * twos;
      if (tile.one_weights) {
        tile.row = index / twos;
        piece = 2 * (index - tile.row * twos) + rank;
      } else {
        tile.row = 2 * (index - row_tiles * twos) + rank;
        piece = pieces - 1;
      }
    } else {
      tile.row = index / pieces;
      piece = index - tile.row * pieces;
    }
    tile.token = first_row[tile.expert] + piece * step;
    tile.tokens = min(step, count - piece * step);
    tile.width = kPairs && tile.one_weights ? step : tile.tokens;
  }

  __device__ __forceinline__ TokenShare ShareOf(const PrefillTile& tile) const {
    const int bytes = (tile.tokens + 7) / 8 * 1024;
    if (!kPairs || tile.one_weights) {
      return {bytes, bytes, 0, false};
    }
    const int half = (bytes / 1024 + 1) / 2 * 1024;
    return {bytes, rank == 0 ? half : bytes - half, rank == 0 ? 0 : half, true};
  }

  /// Whether other tiles read the weights of this one again, later.
  __device__ __forceinline__ bool ReadsAgain(const PrefillTile& tile) const {
    return counts[tile.expert] > (kPairs ? 2 : 1) * kTileTokens;
  }

 private:
  __device__ __forceinline__ static int PiecesOf(int count) {
    return (count + kTileTokens - 1) / kTileTokens;
  }
  __device__ __forceinline__ int TilesOf(int count) const {
    const int pieces = PiecesOf(count);
    return kPairs ? row_tiles * (pieces >> 1) + (pieces & 1) * ((row_tiles + 1) >> 1) : row_tiles * pieces;
  }
};

/// What a lane of the three warps that copy weights brings of a tile: one of its 16 row blocks, or nothing.
template <typename Tiles>
class WeightLane {
 public:
  /// `warp`: 1 to 3.
  __device__ __forceinline__ WeightLane(int warp, int lane)
      : piece(warp - 1 + 3 * lane),
        pieces(warp == 1 ? 6 : 5),
        scale_pieces(warp == 1 ? 2 : 1),
        brings_scales(piece % kBlocksOfScales == 0),
        lane_(lane) {}

  __device__ __forceinline__ void Open(const PrefillGemmParams& p, const Tiles& tiles,
                                       const PrefillTile& tile) {
    // Weights that are read again: deepseek-v3 M=4096 in FP8 fetched 5.6 GB for 1.2 GB of operands when they
    // were always the first to go.
    policy = tiles.ReadsAgain(tile) ? again_ : once_;
    // Of the same weights each of a pair copies every other row block, to both.
    both = Tiles::kInPairs && tile.one_weights;
    copies = lane_ < pieces && (!both || (piece & 1) == tiles.rank);
    const uint8_t* const matrix = p.blocks + tile.expert * p.places.bytes;
    const int64_t block = min(tile.row * 16 + piece, p.num_blocks - 1);
    source = matrix + p.places.Codes(block);
    scales = matrix + p.places.Scales(block);
  }

  const int piece;   ///< the row block
  const int pieces;  ///< of the warp
  /// Scales that stand apart are those of 64 rows: one of kBlocksOfScales pieces brings them.
  const int scale_pieces;  ///< of the warp
  const bool brings_scales;
  bool copies = false;
  bool both = false;  ///< to both of the pair
  uint64_t policy = 0;
  const uint8_t* source = nullptr;  ///< of its first slab
  const uint8_t* scales = nullptr;  ///< of its first unit

 private:
  const uint64_t once_ = EvictFirstPolicy();
  const uint64_t again_ = EvictNormalPolicy();
  const int lane_;
};

}  // namespace fusedmoe::cuda
