#pragma once

#include <type_traits>

#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/device/ptx_panel.cuh"
#include "experts/cuda/prefill/prefill.hpp"
#include "experts/cuda/prefill/prefill_copies_sm90.cuh"
#include "experts/cuda/prefill/prefill_end_sm90.cuh"
#include "experts/cuda/prefill/prefill_products_sm90.cuh"
#include "experts/cuda/prefill/prefill_shape.cuh"

/// The grouped GEMM of prefill: out[token][row] = W[expert][row] . token, one persistent CTA an SM. FP8 by
/// FP8 has one of its own, prefill_codes_sm90.cuh. kIntegers: INT8 by INT8, sums exact over all of K.
///
///     panel     [slab of 64 k, or 128 of codes][panel row][8 pieces of 16 bytes]      rows sorted by expert,
///               each expert from a multiple of 8 on; K in the order of TokenPosition or TokenByte; piece c
///               stands at c ^ (row & 7). That is the image of the 128-byte-swizzled shared memory operand:
///               the tokens of a tile and slab are one contiguous bulk copy.
///     tile      256 weight rows (16 row blocks) x N tokens of one expert; N fitted to the expert in steps of
///               16, an expert with more tokens than a tile is cut evenly (prefill_tiles_sm90.cuh).
///     pair      of CTAs, 128-token tiles: two token pieces of the same weights, each copies half of these to
///               both; of an odd last piece two row tiles of the same tokens, each copies half of the tokens.
///
///     warp 0         token stages:  empty ─► bulk copy ─► full           prefill_copies_sm90.cuh
///     warps 1-3      weight slots:  w_empty ─► 16 bulk copies ─► w_full
///     2 or 4 warpgroups, each warp 16 rows of each of its blocks of 64:
///        expand, wgmma, ...  ─►  sums      prefill_products_sm90.cuh
///                  epilogue  ─►  outputs   prefill_end_sm90.cuh
///
/// 64-token tiles (up to 48 tokens an expert): four warpgroups of 64 rows hide the latency of expansion; 128:
/// two of 128 rows, so that a weight is expanded once for 128 tokens. Both in one kernel is more than ptxas
/// can allocate for wgmma (it then serializes it: warning C7512).
namespace fusedmoe::cuda {

template <FragmentFormat kFormat, PrefillEpilogue kEpilogue, int kTileTokens, bool kIntegers>
__global__ void __launch_bounds__(PrefillShape<kFormat, kTileTokens, kIntegers>::kThreads, 1)
    PrefillGemm(const __grid_constant__ PrefillGemmParams p) {
  using S = PrefillShape<kFormat, kTileTokens, kIntegers>;
  extern __shared__ __align__(1024) uint8_t memory[];  // the period of the swizzle
  const PrefillShared<S> shared(memory);
  const typename S::Tiles tiles(p, shared.table());
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid >> 5;
  const int lane = tid & 31;

  if (tid == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      BarrierInit(shared.full + 8 * s, 1);
      BarrierInit(shared.empty + 8 * s, ReleasesBy<S::kPairs>(4 * S::kWarpgroups));
    }
    for (int s = 0; s < S::kSlots; ++s) {
      BarrierInit(shared.w_full + 8 * s, 3);
      BarrierInit(shared.w_empty + 8 * s, ReleasesBy<S::kPairs>(4 * S::kWarpgroups));
    }
    BarrierInitFence();
  }
  tiles.Open(p, tid, S::kThreads);

  if (warp < 4) {
    // The pool is what the launch took: 640 x 96 = 128 x 32 + 512 x 112, 384 x 168 = 128 x 40 + 256 x 232.
    RegistersDown<S::kWarpgroups == 4 ? 32 : 40>();
    if (warp == 0) {
      CopyTokens<S>(p, shared, tiles, lane);
    } else {
      CopyWeights<S>(p, shared, tiles, warp, lane);
    }
    return;
  }

  // ---- the warps that multiply
  RegistersUp<S::kWarpgroups == 4 ? 112 : 232>();
  const int num_tiles = tiles.Count();
  PrefillProducts<kFormat, kEpilogue, kTileTokens, kIntegers> products(p, shared, warp, lane);
  PrefillTile tile;
  auto run = [&](auto tokens_constant) {
    constexpr int N = decltype(tokens_constant)::value;
    float acc[S::kRowGroups][N / 2];
    products.template Run<N>(tile, acc);
    PrefillEnd<kFormat, kTileTokens, kIntegers, N> end(p, shared, tile, acc, tid);
    if constexpr (kEpilogue == PrefillEpilogue::kPanel) {
      end.StorePanel();
    } else if constexpr (kEpilogue == PrefillEpilogue::kRows16) {
      end.StoreRows16();
    } else {
      end.StoreRowsF32();
    }
  };
  for (int t = tiles.begin; t < num_tiles; t += tiles.stride) {
    tiles.Locate(t, tile);
    const int sixteens = (tile.width + 15) / 16;
    if constexpr (kTileTokens == 64) {
      if (sixteens == 1) {
        run(std::integral_constant<int, 16>{});
      } else if (sixteens == 2) {
        run(std::integral_constant<int, 32>{});
      } else if (sixteens == 3) {
        run(std::integral_constant<int, 48>{});
      } else {
        run(std::integral_constant<int, 64>{});
      }
    } else {
      if (sixteens <= 4) {
        run(std::integral_constant<int, 64>{});
      } else if (sixteens == 5) {
        run(std::integral_constant<int, 80>{});
      } else if (sixteens == 6) {
        run(std::integral_constant<int, 96>{});
      } else if (sixteens == 7) {
        run(std::integral_constant<int, 112>{});
      } else {
        run(std::integral_constant<int, 128>{});
      }
    }
  }
  if (kEpilogue == PrefillEpilogue::kPanel) {
    BulkStoreDone();  // the second GEMM may read the panel once this grid has ended
  }
  if constexpr (S::kPairs) {
    PairSync();  // the other one still arrives at barriers here
  }
}

}  // namespace fusedmoe::cuda
