#pragma once

#include <type_traits>

#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/device/ptx_panel.cuh"
#include "experts/cuda/prefill/prefill.hpp"
#include "experts/cuda/prefill/prefill_codes_copies_sm90.cuh"
#include "experts/cuda/prefill/prefill_codes_end_sm90.cuh"
#include "experts/cuda/prefill/prefill_codes_products_sm90.cuh"
#include "experts/cuda/prefill/prefill_codes_shape.cuh"
#include "experts/cuda/prefill/prefill_shape.cuh"

/// The grouped GEMM of prefill where weights and tokens are 8-bit codes: out[token][row] = token . W[row].
///
///     tile      128 (or 64) tokens of an expert x 256 weight rows (16 row blocks). Tokens are the rows of
///               the instruction: a lane has two, whose scales are two registers. With weights as the rows
///               it had 32, and reading their scales bound the GEMM (blocks: 4419 against 3654 us).
///     stage     128 k: 16 pieces of 2 KB of weights, and the tokens; operands of wgmma as they lie in
///               memory (fragment.hpp; panels as in prefill_gemm_sm90.cuh)
///     pair      of CTAs, 128-token tiles: two token pieces of the same weights, each copies every other
///               row block to both; of an odd last piece two row tiles, each copies half of the tokens
///
///     warp 0         tokens  ─┐ empty ─► bulk copies ─► full          4 stages of 48 KB, or 5 of 40
///     warps 1-3      weights ─┘                                       prefill_codes_copies_sm90.cuh
///     2 warpgroups   each 64 tokens x 256 rows; of up to 64 tokens each all x 128 rows
///                    products ─► sums                                 prefill_codes_products_sm90.cuh
///                    sums ─► outputs                                  prefill_codes_end_sm90.cuh
///
///         h = 0: rows 0-7 of the row blocks (gate)     wgmma ─► products ─► sums += products * scales
///         h = 1: rows 8-15 (up)                        wgmma ─► products ─► sums += products * scales
///
/// The 8-bit units keep some 14 bits of a sum: those of 128 k are added up in fp32. While one warpgroup adds,
/// the other one's products form. Both operands come from shared memory: the loop alone takes 1060 cycles for
/// 1024 of the units, with tokens in registers 1125, with two sets of products of half the columns 1166.
namespace fusedmoe::cuda {

template <FragmentFormat kFormat, PrefillEpilogue kEpilogue, int kTileTokens>
__global__ void __launch_bounds__(CodesShape<kFormat, kTileTokens>::kThreads, 1)
    PrefillGemmOfCodes(const __grid_constant__ PrefillGemmParams p) {
  using S = CodesShape<kFormat, kTileTokens>;
  extern __shared__ __align__(1024) uint8_t memory[];  // the period of the swizzle
  const CodesShared<S> shared(memory);
  const typename S::Tiles tiles(p, shared.table());
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid >> 5;
  const int lane = tid & 31;

  if (tid == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      BarrierInit(shared.full + 8 * s, 4);
      BarrierInit(shared.empty + 8 * s, ReleasesBy<S::kPairs>(8));
    }
    BarrierInitFence();
  }
  tiles.Open(p, tid, S::kThreads);

  if (warp < 4) {
    // The pool is what the launch took: 384 x 168 = 128 x 40 + 256 x 232.
    RegistersDown<40>();
    if (warp == 0) {
      CopyTokenCodes<S>(p, shared, tiles, lane);
    } else {
      CopyWeightCodes<S>(p, shared, tiles, warp, lane);
    }
    return;
  }

  // ---- the warps that multiply
  RegistersUp<232>();
  const int num_tiles = tiles.Count();
  const int row_warp = warp & 3;
  const int warpgroup = (warp >> 2) - 1;
  CodesProducts<S> products(p, shared, lane);
  PrefillTile tile;
  auto run = [&](auto slabs_constant, const CodesPart& part) {
    constexpr int kSlabs = decltype(slabs_constant)::value;
    const int row = part.base + row_warp * 16 + (lane >> 2);
    float acc[2][32 * kSlabs];
#pragma unroll
    for (auto& half : acc) {
#pragma unroll
      for (float& sum : half) {
        sum = 0.0F;
      }
    }
    CodesEnd<kSlabs> end(p, tile, acc, *shared.end, part.first_slab, row, tid - 128);
    end.FetchRows();
    products.AwaitTokens();
    end.LoadTokenScales();
    products.template Run<kSlabs>(part, row, acc);
    end.AwaitRows();
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
    if constexpr (kTileTokens == 128) {
      if (tile.tokens > 64) {
        run(std::integral_constant<int, 2>{}, CodesPart{0, warpgroup * 64});
        continue;
      }
    }
    run(std::integral_constant<int, 1>{}, CodesPart{warpgroup, 0});
  }
  if constexpr (S::kPairs) {
    PairSync();  // the other one still arrives at barriers here
  }
}

}  // namespace fusedmoe::cuda
