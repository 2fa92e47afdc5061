#pragma once

#include <type_traits>

#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/device/ptx_panel.cuh"
#include "experts/cuda/device/wgmma.cuh"
#include "experts/cuda/prefill/prefill.hpp"
#include "experts/cuda/prefill/prefill_codes_end_sm90.cuh"
#include "experts/cuda/prefill/prefill_shape.cuh"
#include "experts/cuda/prefill/prefill_tiles_sm90.cuh"

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
///     warps 1-3      weights ─┘
///     2 warpgroups   each 64 tokens x 256 rows; of up to 64 tokens each all x 128 rows
///
///         h = 0: rows 0-7 of the row blocks (gate)     wgmma ─► products ─► sums += products * scales
///         h = 1: rows 8-15 (up)                        wgmma ─► products ─► sums += products * scales
///
/// The 8-bit units keep some 14 bits of a sum: those of 128 k are added up in fp32. While one warpgroup adds,
/// the other one's products form. Both operands come from shared memory: the loop alone takes 1060 cycles for
/// 1024 of the units, with tokens in registers 1125, with two sets of products of half the columns 1166.
namespace fusedmoe::cuda {

template <int kTileTokens>
struct CodesShape {
  static constexpr bool kPairs = kTileTokens == 128;  ///< CTAs work in pairs
  static constexpr int kThreads = 384;
  static constexpr int kBlockBytes = 2048;  ///< codes of a row block and stage
  static constexpr int kWeightBytes = 16 * kBlockBytes;
  static constexpr int kStageBytes = kWeightBytes + kTileTokens * 128;
  static constexpr int kStages = kTileTokens == 128 ? 4 : 5;
  static constexpr int kEndBytes = static_cast<int>(sizeof(CodesEndShared));
  /// Of a stage: one a token, and those of row blocks 0, 4, 8, 12 (64 rows have the same).
  static constexpr int kScaleBytes = kTileTokens * 4 + 64;
  using Tiles = PrefillTiles<kTileTokens, kPairs, false>;
  static constexpr int kBytes =
      kStages * (kStageBytes + kScaleBytes) + kEndBytes + 2 * kStages * 8 + Tiles::kTableBytes;
  static_assert(kBytes <= 232448, "shared memory of a CTA of sm_90");
};

template <FragmentFormat kFormat, PrefillEpilogue kEpilogue, int kTileTokens>
__global__ void __launch_bounds__(CodesShape<kTileTokens>::kThreads, 1)
    PrefillGemmOfCodes(const __grid_constant__ PrefillGemmParams p) {
  using S = CodesShape<kTileTokens>;
  constexpr bool kPairs = S::kPairs;
  constexpr FragmentTraits kTraits = FragmentTraitsOf(kFormat);
  constexpr bool kBlockScales = kTraits.scale == FragmentScale::kF32Halves;
  static_assert(!kBlockScales || kTraits.scales_apart());
  extern __shared__ __align__(1024) uint8_t shared[];  // the period of the swizzle
  uint8_t* const scales = shared + S::kStages * S::kStageBytes;
  auto* const of_end = reinterpret_cast<CodesEndShared*>(scales + S::kStages * S::kScaleBytes);
  uint8_t* const barriers = reinterpret_cast<uint8_t*>(of_end + 1);
  const uint32_t full = SharedAddress(barriers);
  const uint32_t empty = full + 8 * S::kStages;
  const typename S::Tiles tiles(p, barriers + 2 * S::kStages * 8);
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid >> 5;
  const int lane = tid & 31;

  if (tid == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      BarrierInit(full + 8 * s, 4);
      BarrierInit(empty + 8 * s, ReleasesBy<kPairs>(8));
    }
    BarrierInitFence();
  }
  tiles.Open(p, tid, S::kThreads);
  const int num_tiles = tiles.Count();
  const int num_slabs = p.num_slabs;

  if (warp < 4) {
    // The pool is what the launch took: 384 x 168 = 128 x 40 + 256 x 232.
    RegistersDown<40>();
    PrefillTile tile;
    RingPlace<S::kStages> stage;
    if (warp == 0) {  // ---- tokens
      if (!p.wait_for_map) {
        GridWait();
      }
      FenceAsyncProxy();
      const uint64_t policy = EvictLastPolicy();
      for (int t = tiles.begin; t < num_tiles; t += tiles.stride) {
        tiles.Locate(t, tile);
        if (lane == 0) {
          const TokenShare share = tiles.ShareOf(tile);
          const int bytes = share.bytes;
          const uint8_t* source = p.panel + static_cast<int64_t>(tile.token) * 128 + share.offset;
          const float* factors = p.panel_group_scale == nullptr ? nullptr : p.panel_group_scale + tile.token;
#pragma unroll 1
          for (int left = num_slabs; left > 0; --left) {
            const uint32_t barrier = full + 8 * stage.at;
            const uint32_t to =
                SharedAddress(shared) + stage.at * S::kStageBytes + S::kWeightBytes + share.offset;
            BarrierWait(empty + 8 * stage.at, stage.phase ^ 1);
            BarrierExpect(barrier, factors == nullptr ? bytes : bytes + bytes / 32);
            if (factors != nullptr) {
              BulkLoad(SharedAddress(scales + stage.at * S::kScaleBytes), factors, bytes / 32, barrier,
                       policy);
              factors += p.panel_rows;
            }
            if (share.own_bytes > 0) {
              LoadStage(share.both, to, source, share.own_bytes, barrier, policy);
            }
            source += p.panel_rows * 128;
            stage.Next();
          }
        }
      }
    } else {  // ---- weights
      WeightLane<typename S::Tiles> own(warp, lane);
      const int scale_bytes = kBlockScales ? own.scale_pieces * 16 : 0;
      for (int t = tiles.begin; t < num_tiles; t += tiles.stride) {
        tiles.Locate(t, tile);
        own.Open(p, tiles, tile);
        const uint8_t* source = own.source;
        const uint8_t* from_scales = own.scales;
#pragma unroll 1
        for (int c = 0; c < num_slabs; ++c) {
          const bool half = !kBlockScales && c + 1 == num_slabs && p.last_piece_bytes < S::kBlockBytes;
          const uint32_t barrier = full + 8 * stage.at;
          BarrierWait(empty + 8 * stage.at, stage.phase ^ 1);
          if (lane == 0) {
            BarrierExpect(barrier, own.pieces * S::kBlockBytes + scale_bytes);
          }
          __syncwarp();
          if (own.copies) {
            const uint32_t to =
                SharedAddress(shared) + stage.at * S::kStageBytes + own.piece * S::kBlockBytes;
            const int bytes = half ? S::kBlockBytes / 2 : S::kBlockBytes;
            LoadStage(own.both, to, source, bytes, barrier, own.policy);
            if (half) {  // 64 k: zeros stand for the rest
              LoadStage(own.both, to + bytes, kZeroSlab, bytes, barrier, own.policy);
            }
            if (kBlockScales && own.brings_scales) {
              const uint32_t scale_to =
                  SharedAddress(scales + stage.at * S::kScaleBytes) + kTileTokens * 4 + own.piece * 4;
              LoadStage(own.both, scale_to, from_scales, 16, barrier, own.policy);
            }
          }
          source += S::kBlockBytes;
          from_scales += kTraits.scale_bytes();
          stage.Next();
        }
      }
    }
    return;
  }

  // ---- the warps that multiply
  RegistersUp<232>();
  const int row_warp = warp & 3;
  const int warpgroup = (warp >> 2) - 1;
  RingPlace<S::kStages> stage;
  PrefillTile tile;

  // `kSlabs` x 8 row blocks from 8 * first_slab on, the tokens from `base` on.
  auto run = [&](auto slabs_constant, int first_slab, int base) {
    constexpr int kSlabs = decltype(slabs_constant)::value;
    constexpr int kN = 64 * kSlabs;
    const int row = base + row_warp * 16 + (lane >> 2);
    float acc[2][kN / 2];
#pragma unroll
    for (auto& half : acc) {
#pragma unroll
      for (float& sum : half) {
        sum = 0.0F;
      }
    }
    constexpr int kSets = kSlabs == 2 ? 1 : 2;  // of products: what registers allow
    float products[kSets][kN / 2];
#pragma unroll
    for (auto& set : products) {
#pragma unroll
      for (float& sum : set) {
        sum = 0.0F;
      }
    }
    float factor[2] = {1.0F, 1.0F};
    float block_scale[2][2 * kSlabs];
    auto load_scales = [&] {
      if (p.panel_group_scale != nullptr) {
        const auto* const at = reinterpret_cast<const float*>(scales + stage.at * S::kScaleBytes) + row;
        factor[0] = at[0], factor[1] = at[8];
      }
      if constexpr (kBlockScales) {
        const auto* const at =
            reinterpret_cast<const float2*>(scales + stage.at * S::kScaleBytes + kTileTokens * 4) +
            first_slab * 4;
#pragma unroll
        for (int i = 0; i < 2 * kSlabs; ++i) {
          const float2 pair = at[2 * i];
          block_scale[0][i] = pair.x, block_scale[1][i] = pair.y;
        }
      }
    };
    auto multiply = [&](int half) {
      const uint32_t low = SharedDescriptorLow(SharedAddress(shared) + stage.at * S::kStageBytes);
      const uint32_t tokens = low + ((S::kWeightBytes + base * 128) >> 4);
      const uint32_t weights = low + ((first_slab * 8 * S::kBlockBytes + half * 512) >> 4);
      WgmmaFence();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint64_t a = SharedDescriptor(tokens + 2 * j);
        const uint64_t b = ByteDescriptor(weights + ((j / 2 * 1024 + j % 2 * 32) >> 4));
        if (j == 0) {
          WgmmaBytes<kN>::MmaFirst(products[half % kSets], a, b);
        } else {
          WgmmaBytes<kN>::Mma(products[half % kSets], a, b);
        }
      }
      WgmmaCommit();
    };
    auto add = [&](int half) {
      float(&set)[kN / 2] = products[half % kSets];
#pragma unroll
      for (float& sum : set) {
        asm volatile("" : "+f"(sum)::"memory");
      }
#pragma unroll
      for (int i = 0; i < 8 * kSlabs; ++i) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const float scale = kBlockScales ? factor[v] * block_scale[half][i >> 2] : factor[v];
          acc[half][4 * i + 2 * v] = fmaf(set[4 * i + 2 * v], scale, acc[half][4 * i + 2 * v]);
          acc[half][4 * i + 2 * v + 1] = fmaf(set[4 * i + 2 * v + 1], scale, acc[half][4 * i + 2 * v + 1]);
        }
      }
    };
    CodesEnd<kSlabs> end(p, tile, acc, *of_end, first_slab, row, tid - 128);
    end.FetchRows();
    BarrierWait(full + 8 * stage.at,
                stage.phase);  // what wrote the tokens has ended, so their scales are there
    end.LoadTokenScales();
#pragma unroll 1
    for (int left = num_slabs; left > 0; --left) {
      BarrierWait(full + 8 * stage.at, stage.phase);
      multiply(0);
      if constexpr (kSets == 2) {
        multiply(1);
        load_scales();
        WgmmaWait<1>();
        add(0);
      } else {
        load_scales();
        WgmmaWait<0>();
        add(0);
        multiply(1);
      }
      WgmmaWait<0>();
      __syncwarp();
      ReleaseStage<kPairs>(empty + 8 * stage.at, lane);
      stage.Next();
      add(1);
    }

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
        run(std::integral_constant<int, 2>{}, 0, warpgroup * 64);
        continue;
      }
    }
    run(std::integral_constant<int, 1>{}, warpgroup, 0);
  }
  if constexpr (kPairs) {
    PairSync();  // the other one still arrives at barriers here
  }
}

}  // namespace fusedmoe::cuda
