#pragma once

#include "experts/cuda/device/fragments.cuh"
#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/device/ptx_panel.cuh"
#include "experts/cuda/device/swish_sm90.cuh"
#include "experts/cuda/prefill/prefill.hpp"
#include "experts/cuda/prefill/prefill_shape.cuh"
#include "experts/cuda/prefill/prefill_tiles_sm90.cuh"
#include "experts/cuda/prefill/prefill_values_sm90.cuh"

/// What becomes of the sums of a tile of prefill_gemm_sm90.cuh.
///
///     acc[g][4 i + 0, 1]    fragment row r of row block 4 (warpgroup kGroups + g) + row_warp,
///                           tokens 8 i + 2 q + 0, 1
///     acc[g][4 i + 2, 3]    row r + 8
namespace fusedmoe::cuda {

template <FragmentFormat kFormat, int kTileTokens, bool kIntegers, int N>
struct PrefillEnd {
  using S = PrefillShape<kFormat, kTileTokens, kIntegers>;
  using F = Fragments<kFormat>;
  static constexpr int kWarpgroups = S::kWarpgroups;
  static constexpr int kGroups = S::kRowGroups;

  const PrefillGemmParams& p;
  const PrefillShared<S>& shared;
  const PrefillTile& tile;
  float (&acc)[kGroups][N / 2];
  const int tid;
  const int lane;
  const int row_warp;
  const int warpgroup;
  const int r;
  int tile_row = lane & 7;
  int tile_index = lane >> 3;

  __device__ __forceinline__ PrefillEnd(const PrefillGemmParams& params, const PrefillShared<S>& of_shared,
                                        const PrefillTile& of_tile, float (&sums)[kGroups][N / 2], int of_tid)
      : p(params),
        shared(of_shared),
        tile(of_tile),
        acc(sums),
        tid(of_tid),
        lane(of_tid & 31),
        row_warp(of_tid >> 5 & 3),
        warpgroup((of_tid >> 7) - 1),
        r(lane >> 2) {
    asm volatile("" : "+r"(tile_row), "+r"(tile_index));  // addresses are made here, not before the tile loop
  }

  /// Activated, quantized where the tile does that, into the panel of the second GEMM: 64 columns are 8 row
  /// blocks, of one warpgroup, or of two.
  __device__ __forceinline__ void StorePanel() {
    constexpr int kShare = 128 * (2 / kGroups);
    const int half = kGroups == 2 ? warpgroup : warpgroup >> 1;
    const int slab = tile.row * 2 + half;
    uint8_t* const staged = shared.staging + half * 16384;
    const uint32_t buffer = SharedAddress(shared.staging) + half * 16384;
    const bool leader = (tid & (kShare - 1)) == (kShare == 256 ? 128 : 0);
    if (leader) {
      BulkStoreReadDone();
    }
    NamedBarrier(1 + half, kShare);
    // Row blocks of the warp within the slab: `first`, and four more.
    const int first = (kGroups == 2 ? 0 : (warpgroup & 1) * 4) + row_warp;
    float values[kGroups][N / 4];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int64_t column = min(IntermediateColumn(slab * 8 + first + 4 * g, r), p.scale_rows - 1);
      const RowPair rows = LoadRowPair(p, tile.expert, column, column, true);
#pragma unroll
      for (int i = 0; i < N / 8; ++i) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const float gate = fmaf(acc[g][4 * i + v], rows.scale[0], rows.bias[0]);
          const float up = fmaf(acc[g][4 * i + v + 2], rows.scale[1], rows.bias[1]);
          values[g][2 * i + v] = GatedSwish(p.swish, gate, up);
        }
      }
    }
    if constexpr (MayQuantizeInTile(kFormat, kTileTokens)) {
      if (p.quantizer.kind != DeviceQuantizer::Kind::kNone) {
        QuantizeValues<kTileTokens, kShare / 32, kGroups, N>(p, tile.expert, staged, 1 + half,
                                                             tid & (kShare - 1), values);
      }
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < N / 8; i += 2) {
        const float* h = &values[g][2 * i];
        const int n = 8 * (i + (tile_index & 1)) + tile_row;
        const uint32_t low = F::kF16 ? PackF16x2(h[0], h[1]) : PackBf16x2(h[0], h[1]);
        const uint32_t high = F::kF16 ? PackF16x2(h[2], h[3]) : PackBf16x2(h[2], h[3]);
        StoreTiles2(buffer + n * 128 + (((first + 4 * g) ^ tile_row) << 4), low, high);
      }
    }
    FenceAsyncProxy();
    NamedBarrier(1 + half, kShare);
    if (leader && slab * 64 < p.ld) {
      BulkStore(static_cast<uint8_t*>(p.out) + (static_cast<int64_t>(slab) * p.panel_rows + tile.token) * 128,
                buffer, (tile.tokens + 7) / 8 * 1024);
    }
  }

  /// BF16 rows.
  __device__ __forceinline__ void StoreRows16() {
    constexpr int kBufferBytes = S::kEpilogueBytes / kWarpgroups;
    const uint32_t buffer = SharedAddress(shared.staging) + warpgroup * kBufferBytes;
    const uint8_t* const staged = shared.staging + warpgroup * kBufferBytes;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int64_t row = min((tile.row * 16 + BlockOf(g)) * 16 + r, static_cast<int>(p.scale_rows) - 9);
      const RowPair rows = LoadRowPair(p, tile.expert, row, row + 8, false);
      if (p.panel_scale != nullptr) {
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
          if (8 * i < tile.tokens) {
            const float2 factor = FactorOf(i);
            acc[g][4 * i] *= factor.x, acc[g][4 * i + 1] *= factor.y;
            acc[g][4 * i + 2] *= factor.x, acc[g][4 * i + 3] *= factor.y;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < N / 8; i += 2) {
        const float* v = &acc[g][4 * i];
        const int n = 8 * (i + (tile_index >> 1)) + tile_row;
        StoreTiles4(
            buffer + n * 128 + (((2 * row_warp + (tile_index & 1)) ^ tile_row) << 4),
            PackBf16x2(fmaf(v[0], rows.scale[0], rows.bias[0]), fmaf(v[1], rows.scale[0], rows.bias[0])),
            PackBf16x2(fmaf(v[2], rows.scale[1], rows.bias[1]), fmaf(v[3], rows.scale[1], rows.bias[1])),
            PackBf16x2(fmaf(v[4], rows.scale[0], rows.bias[0]), fmaf(v[5], rows.scale[0], rows.bias[0])),
            PackBf16x2(fmaf(v[6], rows.scale[1], rows.bias[1]), fmaf(v[7], rows.scale[1], rows.bias[1])));
      }
      NamedBarrier(1 + warpgroup, 128);
      int thread = tid & 127;
      asm volatile("" : "+r"(thread));
      const int column = tile.row * 256 + (warpgroup * kGroups + g) * 64 + (thread & 7) * 8;
      if (column < p.ld) {
        for (int n = thread >> 3; n < tile.tokens; n += 16) {
          *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + (tile.token + n) * p.ld + column) =
              *reinterpret_cast<const uint4*>(staged + n * 128 + (((thread & 7) ^ (n & 7)) << 4));
        }
      }
      NamedBarrier(1 + warpgroup, 128);
    }
  }

  /// F32 rows, activated where p.activated says so.
  __device__ __forceinline__ void StoreRowsF32() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int block = tile.row * 16 + BlockOf(g);
      if (block < p.num_blocks) {
        // Where the two rows of the lane stand among the scales, and in the row of outputs.
        int64_t low = static_cast<int64_t>(block) * 16 + r;
        int64_t high = low + 8;
        int64_t out_low = low;
        int64_t out_high = high;
        if (p.rows == PrefillRows::kGateUp) {
          low = high = IntermediateColumn(block, r);
          out_low = (block >> 3) * 128 + (block & 7) * 8 + r;
          out_high = out_low + 64;
        } else if (p.rows == PrefillRows::kUp) {
          low = IntermediateColumn(2 * block, r);
          high = IntermediateColumn(2 * block + 1, r);
        }
        const RowPair rows = LoadRowPair(p, tile.expert, low, high, p.rows == PrefillRows::kGateUp);
        // Eight rows of the block side by side: a store fills whole 32-byte sectors.
        int token = 2 * (lane & 3);
        asm volatile("" : "+r"(token));
        if (p.activated) {
          StoreActivated(g, block, token, rows);
          continue;
        }
        float* out = static_cast<float*>(p.out) + (tile.token + token) * p.ld;
        const float* token_scale = p.panel_scale == nullptr ? nullptr : p.panel_scale + tile.token + token;
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
#pragma unroll
          for (int v = 0; v < 2; ++v) {
            if (token + 8 * i + v < tile.tokens) {
              const float factor = token_scale == nullptr ? 1.0F : __ldg(token_scale + 8 * i + v);
              out[out_low] = fmaf(acc[g][4 * i + v] * factor, rows.scale[0], rows.bias[0]);
              out[out_high] = fmaf(acc[g][4 * i + 2 + v] * factor, rows.scale[1], rows.bias[1]);
            }
            out += v == 0 ? p.ld : 7 * p.ld;
          }
        }
      }
    }
  }

 private:
  /// Group `g` of the warp's rows: row block of the tile.
  __device__ __forceinline__ int BlockOf(int g) const {
    return (warpgroup * kGroups + g) * 4 + row_warp;
  }

  /// The scales of tokens 8 i + 2 q + 0, 1.
  __device__ __forceinline__ float2 FactorOf(int i) const {
    return p.panel_scale == nullptr || 8 * i >= tile.tokens  // rows of a panel come in eights
               ? make_float2(1.0F, 1.0F)
               : __ldg(reinterpret_cast<const float2*>(p.panel_scale + tile.token + 8 * i + 2 * (lane & 3)));
  }

  /// The gated outputs of row block `block` of all, under all scales.
  __device__ __forceinline__ void StoreActivated(int g, int block, int token, const RowPair& rows) {
    float* out = static_cast<float*>(p.out) + (tile.token + token) * p.ld + block * 8 + r;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const float2 factor = FactorOf(i);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const float f = v == 0 ? factor.x : factor.y;
        const float gate = fmaf(acc[g][4 * i + v], f * rows.scale[0], rows.bias[0]);
        const float up = fmaf(acc[g][4 * i + 2 + v], f * rows.scale[1], rows.bias[1]);
        const float h = GatedSwish(p.swish, gate, up);
        if (token + 8 * i + v < tile.tokens) {
          __stcg(out, h);
        }
        out += v == 0 ? p.ld : 7 * p.ld;
      }
    }
  }
};

}  // namespace fusedmoe::cuda
