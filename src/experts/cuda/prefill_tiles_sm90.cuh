#pragma once

#include "experts/cuda/prefill.hpp"
#include "experts/cuda/ptx.cuh"

/// Which tiles the grouped GEMMs of prefill have: of 256 weight rows and some tokens of an expert, in an
/// order in which CTAs that run together share weights in L2 (tokens first).
namespace fusedmoe::cuda {

struct PrefillTile {
  int expert = 0;
  int row = 0;    ///< tile of 16 row blocks; of an odd number of them a pair's last one is none
  int token = 0;  ///< panel row of the first
  int tokens = 0;
  int width = 0;             ///< tokens that instructions are chosen for: alike in a pair
  bool one_weights = false;  ///< a pair: both have the same weights; else the same tokens
};

/// kPairs: two CTAs take two token pieces of the same weights, and of an odd last piece two row tiles.
/// kEven: an expert with more tokens than a tile is cut evenly (instructions fit any multiple of 16), else
/// into whole tiles and a rest.
template <int kTileTokens, bool kPairs, bool kEven>
struct PrefillTiles {
  int* first_row;   ///< [E] shared memory
  int* counts;      ///< [E]
  int* first_tile;  ///< [E + 1]
  int num_experts;
  int row_tiles;

  __device__ PrefillTiles(const PrefillGemmParams& p, int* table)
      : first_row(table),
        counts(table + p.num_experts),
        first_tile(table + 2 * p.num_experts),
        num_experts(p.num_experts),
        row_tiles(p.row_tiles) {}

  /// All threads of the CTA; behind the map.
  __device__ __forceinline__ void Load(const PrefillGemmParams& p, int tid, int threads) const {
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
  }

  __device__ __forceinline__ int Count() const { return first_tile[num_experts]; }

  /// Tile `t` of CTA `rank` of a pair. `tile` is one before it, or new.
  __device__ __forceinline__ void Locate(int t, int rank, PrefillTile& tile) const {
    while (t >= first_tile[tile.expert + 1]) {
      ++tile.expert;
    }
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

 private:
  __device__ __forceinline__ static int PiecesOf(int count) {
    return (count + kTileTokens - 1) / kTileTokens;
  }
  __device__ __forceinline__ int TilesOf(int count) const {
    const int pieces = PiecesOf(count);
    return kPairs ? row_tiles * (pieces >> 1) + (pieces & 1) * ((row_tiles + 1) >> 1) : row_tiles * pieces;
  }
};

}  // namespace fusedmoe::cuda
