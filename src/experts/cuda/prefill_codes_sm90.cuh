#pragma once

#include "experts/cuda/prefill.hpp"
#include "experts/cuda/ptx.cuh"
#include "experts/cuda/ptx_panel.cuh"
#include "experts/cuda/quantize_sm90.cuh"

/// The end of the first GEMM where its outputs become codes at once: a tile holds 128 columns of the
/// intermediate, so all scales but those of whole rows are at hand.
///
///     values in registers ─► largest magnitude of each token, by warp ─► one thread a token: scale ─► codes
///     ─► image of a panel slab in shared memory (block b: piece b / 2, byte 2 r + b % 2) ─► one bulk copy
namespace fusedmoe::cuda {

/// `values[g][2 i + v]`: row block first_block + g of the tile, fragment row r, token 8 i + 2 q + v.
/// `staging`: an image of kTileTokens x 128 bytes, then kWarps + 4 rows of kTileTokens words. Called by the
/// warps that multiply, `thread` counts them.
template <int kTileTokens, int kWarps, int kGroups, int N>
__device__ __forceinline__ void StoreCodePanel(const PrefillGemmParams& p, int expert, int tile_row,
                                               int token, int tokens, int first_block, uint8_t* staging,
                                               int thread, float (&values)[kGroups][N / 4]) {
  constexpr int kThreads = 32 * kWarps;
  auto* const amax = reinterpret_cast<uint32_t*>(staging + kTileTokens * 128);
  auto* const steps = reinterpret_cast<FastStep*>(amax + kWarps * kTileTokens);
  const int lane = thread & 31;
  const int q = lane & 3;
  const int r = lane >> 2;
  const bool by_group = p.out_group_scale != nullptr;
  if (thread == 0) {
    BulkStoreReadDone();  // of the tile before
  }
  if (by_group) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      uint32_t largest[2] = {};
#pragma unroll
      for (int v = 0; v < 2; ++v) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          largest[v] = max(largest[v], __float_as_uint(values[g][2 * i + v]) & 0x7fffffffU);
        }
#pragma unroll
        for (int step = 4; step < 32; step <<= 1) {
          largest[v] = max(largest[v], __shfl_xor_sync(kAllLanes, largest[v], step));
        }
      }
      if (r == 0) {
        *reinterpret_cast<uint2*>(amax + (thread >> 5) * kTileTokens + 8 * i + 2 * q) =
            make_uint2(largest[0], largest[1]);
      }
    }
  }
  NamedBarrier(1, kThreads);
  FastStep one;
  if (by_group) {
    if (thread < N) {
      uint32_t largest = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        largest = max(largest, amax[w * kTileTokens + thread]);
      }
      const GroupStep step = StepOf(p.quantizer, 1.0F, largest);
      steps[thread] = FastStepOf(step.encode);
      if (thread < tokens && tile_row < p.row_tiles) {
        p.out_group_scale[tile_row * p.panel_rows + token + thread] = step.left_scale;
      }
    }
    NamedBarrier(1, kThreads);
  } else {
    const float scale = p.out_tensor_scale == nullptr ? 1.0F : __ldg(p.out_tensor_scale + expert);
    one = FastStepOf(StepFor(p.quantizer.rule, scale));
  }
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const FastStep step = by_group ? steps[8 * i + 2 * q + v] : one;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        values[g][2 * i + v] = step.Apply(values[g][2 * i + v]);
      }
    }
  }
  const uint32_t image = SharedAddress(staging);
  if constexpr (kGroups == 2) {  // both halves of the 16-bit elements are here
    const int tile_index = lane >> 3;
    const int in_tile = lane & 7;
    const int piece = first_block >> 1;
#pragma unroll
    for (int i = 0; i < N / 8; i += 2) {
      uint32_t words[2];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        words[t] = PackE4m3x2(values[0][2 * (i + t)], values[1][2 * (i + t)]) |
                   PackE4m3x2(values[0][2 * (i + t) + 1], values[1][2 * (i + t) + 1]) << 16;
      }
      StoreTiles2(image + (8 * (i + (tile_index & 1)) + in_tile) * 128 + ((piece ^ in_tile) << 4), words[0],
                  words[1]);
    }
  } else {
    const int piece = first_block >> 1;
    uint8_t* const bytes = staging + 2 * r + (first_block & 1);
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const uint32_t pair = PackE4m3x2(values[0][2 * i], values[0][2 * i + 1]);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int n = 8 * i + 2 * q + v;
        bytes[n * 128 + ((piece ^ (n & 7)) << 4)] = static_cast<uint8_t>(pair >> (8 * v));
      }
    }
  }
  FenceAsyncProxy();
  NamedBarrier(1, kThreads);
  if (thread == 0 && tile_row < p.row_tiles) {  // of an odd number of row tiles a pair's last one is none
    BulkStore(static_cast<uint8_t*>(p.out) + (static_cast<int64_t>(tile_row) * p.panel_rows + token) * 128,
              image, (tokens + 7) / 8 * 1024);
  }
}

}  // namespace fusedmoe::cuda
