#pragma once

#include <type_traits>

#include "experts/cuda/device/ptx_panel.cuh"
#include "experts/cuda/device/swish_sm90.cuh"
#include "experts/cuda/operands/operand_lanes.cuh"
#include "experts/cuda/prefill/prefill.hpp"
#include "experts/cuda/prefill/prefill_codes_shape.cuh"
#include "experts/cuda/prefill/prefill_tiles_sm90.cuh"

/// What becomes of the sums of a tile of prefill_codes_sm90.cuh. A lane has two tokens and of each, in every
/// slab of 64 columns, 16 that lie side by side: a group's scale needs its quad alone, and everything is
/// stored in pieces of 16 bytes without a stop in shared memory.
///
///     acc[h][32 s + 4 i + 2 v + c]    token r + 8 v; row block 8 s + i of the warpgroup, row 8 h + 2 q + c
///                                     gated: gate or up (h) of column 64 s + 16 q + 2 i + c
///
/// Instructions count here. Scales and biases of rows looked up by code that all layers share, and words
/// stored one by one: 2863 instead of 2694 us (deepseek-v3, M=4096), 537 instead of 477 (qwen3-30b-a3b).
namespace fusedmoe::cuda {

/// Made before the products of the tile, so that what it reads is there behind them: reads of the scales of
/// rows in each end were waits for memory, about 1 us a tile (218 us, now 204: qwen3-30b-a3b, M=512).
template <int kSlabs>
struct CodesEnd {
  const PrefillGemmParams& p;
  const PrefillTile& tile;
  float (&acc)[2][32 * kSlabs];
  CodesEndShared& shared;
  int first_slab;  ///< of the tile's two, or four halves of row blocks
  int row;         ///< the first of the lane's tokens, counted from the tile's first
  int thread;      ///< of those of both warpgroups
  int q;

  bool gate_up;
  float tensor_scale[2];
  float token_scale[2] = {1.0F, 1.0F};

  __device__ __forceinline__ CodesEnd(const PrefillGemmParams& params, const PrefillTile& of,
                                      float (&sums)[2][32 * kSlabs], CodesEndShared& memory, int slab,
                                      int token, int of_threads)
      : p(params),
        tile(of),
        acc(sums),
        shared(memory),
        first_slab(slab),
        row(token),
        thread(of_threads),
        q(of_threads & 3) {
    gate_up = p.rows == PrefillRows::kGateUp;
    const float* const scales = p.tensor_scale + tile.expert * (gate_up ? 2 : 1);
    tensor_scale[0] = __ldg(scales);
    tensor_scale[1] = __ldg(scales + (gate_up ? 1 : 0));
  }

  /// Behind the kernel that wrote the tokens.
  __device__ __forceinline__ void LoadTokenScales() {
    if (p.panel_scale != nullptr) {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        token_scale[v] = row + 8 * v >= tile.tokens ? 1.0F : __ldg(p.panel_scale + PanelRow(v));
      }
    }
  }

  /// Starts to copy the scales and biases of the tile's rows to where this warpgroup has its own.
  __device__ __forceinline__ void FetchRows() const {
    if (Plain()) {
      return;
    }
    WarpgroupBarrier();  // the tile before has read its own
    const float* const from = (thread & 64) == 0 ? p.row_scale : p.bias;
    const int at = (thread & 63) * 4;
    const int64_t column = int64_t{tile.row} * (gate_up ? 128 : 256) + (gate_up ? at & 127 : at);
    const int part = gate_up ? 2 * tile.expert + (at >> 7) : tile.expert;
    if (from != nullptr && column < p.scale_rows) {
      CopyAsync16(SharedAddress(&shared.rows[thread >> 7][thread >> 6 & 1][at]),
                  from + part * p.scale_rows + column);
    }
  }
  /// They are there, for all of the warpgroup.
  __device__ __forceinline__ void AwaitRows() const {
    if (!Plain()) {
      CopyAsyncWaitAll();
      WarpgroupBarrier();
    }
  }

  /// Activated, quantized, into the panel of the second GEMM.
  __device__ __forceinline__ void StorePanel() {
    Activate(p.quantizer.rule.round_to_bf16_first);
    FastStep steps[2];
    if (p.out_group_scale != nullptr) {
      uint32_t largest[2];
      LargestOfTokens(largest);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const GroupStep step = StepOf(p.quantizer, 1.0F, largest[v]);
        steps[v] = FastStepOf(step.encode);
        if (q == 0 && first_slab == 0 && row + 8 * v < tile.tokens && tile.row < p.row_tiles) {
          p.out_group_scale[tile.row * p.panel_rows + PanelRow(v)] = step.left_scale;
        }
      }
    } else {
      const float scale = p.out_tensor_scale == nullptr ? 1.0F : __ldg(p.out_tensor_scale + tile.expert);
      steps[0] = steps[1] = FastStepOf(StepFor(p.quantizer.rule, scale));
    }
    const int end = tile.row < p.row_tiles ? (tile.tokens + 7) & ~7 : 0;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      uint4* const out = static_cast<uint4*>(p.out) + (tile.row * p.panel_rows + PanelRow(v)) * 8;
#pragma unroll
      for (int s = 0; s < kSlabs; ++s) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // four columns, of row blocks 2 j and 2 j + 1
          float h[4];
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            h[c] = steps[v].Apply(acc[0][32 * s + 4 * (2 * j + c / 2) + 2 * v + c % 2]);
          }
          words[j] = PackE4m3x2(h[0], h[2]) | PackE4m3x2(h[1], h[3]) << 16;  // TokenByte
        }
        if (row + 8 * v < end) {
          __stcg(out + ((4 * (first_slab + s) + q) ^ (row & 7)),
                 make_uint4(words[0], words[1], words[2], words[3]));
        }
      }
    }
  }

  /// BF16 rows.
  __device__ __forceinline__ void StoreRows16() {
    if (Plain()) {
      StoreRows16(std::true_type{});
    } else {
      StoreRows16(std::false_type{});
    }
  }

  /// F32 rows, activated where p.activated says so.
  __device__ __forceinline__ void StoreRowsF32() {
    if (p.activated) {
      Activate(false);
    }
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int block = tile.row * 16 + (first_slab + s) * 8 + i;
        if (block >= p.num_blocks) {
          continue;
        }
        if (p.activated) {
          const float* const h = &acc[0][32 * s + 4 * i];
          const float2 pairs[2] = {make_float2(h[0], h[1]), make_float2(h[2], h[3])};
          StorePairs(block * 8 + 2 * q, pairs);
          continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Where the rows of the lane stand among those of the tile, and in the row of outputs.
          const int in_tile = (first_slab + s) * 8 + i;
          int place = in_tile * 16 + 8 * half + 2 * q;
          int64_t at = int64_t{tile.row} * 256 + place;
          if (gate_up) {
            place = 128 * half + static_cast<int>(IntermediateColumn(in_tile, 2 * q));
            at = (block >> 3) * 128 + (block & 7) * 8 + 64 * half + 2 * q;
          } else if (p.rows == PrefillRows::kUp) {
            place = static_cast<int>(IntermediateColumn(2 * in_tile + half, 2 * q));
          }
          float2 pairs[2];
          Scale(std::false_type{}, half, place, 8 * s + i, pairs);
          StorePairs(at, pairs);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int PanelRow(int v) const {
    return tile.token + row + 8 * v;
  }
  /// Weight rows have neither scales nor biases of their own.
  __device__ __forceinline__ bool Plain() const {
    return p.row_scale == nullptr && p.bias == nullptr;
  }

  __device__ __forceinline__ void WarpgroupBarrier() const {
    NamedBarrier(2 + (thread >> 7), 128);
  }

  /// Two neighbouring weight rows of both tokens under all scales. `place`: theirs in shared.rows.
  template <typename PlainType>
  __device__ __forceinline__ void Scale(PlainType, int half, int place, int index, float2 (&pairs)[2]) const {
    float2 scale = make_float2(tensor_scale[half], tensor_scale[half]);
    float2 bias = make_float2(0.0F, 0.0F);
    if constexpr (!PlainType::value) {
      const auto& rows = shared.rows[thread >> 7];
      if (p.row_scale != nullptr) {
        const float2 factors = *reinterpret_cast<const float2*>(&rows[0][place]);
        scale.x *= factors.x, scale.y *= factors.y;
      }
      if (p.bias != nullptr) {
        bias = *reinterpret_cast<const float2*>(&rows[1][place]);
      }
    }
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const float* const sum = &acc[half][4 * index + 2 * v];
      pairs[v].x = fmaf(sum[0], token_scale[v] * scale.x, bias.x);
      pairs[v].y = fmaf(sum[1], token_scale[v] * scale.y, bias.y);
    }
  }

  /// Gated outputs take the place of the gate's sums.
  __device__ __forceinline__ void Activate(bool round) {
    if (Plain()) {
      Activate(std::true_type{}, round);
    } else {
      Activate(std::false_type{}, round);
    }
  }
  template <typename PlainType>
  __device__ __forceinline__ void Activate(PlainType plain, bool round) {
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      const int place = (first_slab + s) * 64 + 16 * q;
      if (int64_t{tile.row} * 128 + place >= p.scale_rows) {  // a slab that only the tile has
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          acc[0][32 * s + i] = 0.0F;
        }
        continue;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float2 gate[2];
        float2 up[2];
        Scale(plain, 0, place + 2 * i, 8 * s + i, gate);
        Scale(plain, 1, 128 + place + 2 * i, 8 * s + i, up);
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          float2 h =
              make_float2(GatedSwish(p.swish, gate[v].x, up[v].x), GatedSwish(p.swish, gate[v].y, up[v].y));
          if (round) {
            const uint32_t pair = PackBf16x2(h.x, h.y);
            h = make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000U));
          }
          acc[0][32 * s + 4 * i + 2 * v] = h.x, acc[0][32 * s + 4 * i + 2 * v + 1] = h.y;
        }
      }
    }
  }

  /// The largest magnitudes of the tokens in the 128 columns of the tile.
  __device__ __forceinline__ void LargestOfTokens(uint32_t (&largest)[2]) const {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      largest[v] = 0;
#pragma unroll
      for (int i = 0; i < 16 * kSlabs; ++i) {
        largest[v] = max(largest[v], __float_as_uint(acc[0][i / 2 * 4 + 2 * v + i % 2]) & 0x7fffffffU);
      }
      largest[v] = max(largest[v], __shfl_xor_sync(kAllLanes, largest[v], 1));
      largest[v] = max(largest[v], __shfl_xor_sync(kAllLanes, largest[v], 2));
    }
    if constexpr (kSlabs == 1) {  // the other warpgroup has the other 64 columns
      if (q < 2) {
        shared.largest[first_slab][row + 8 * q] = q == 0 ? largest[0] : largest[1];
      }
      NamedBarrier(1, 256);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        largest[v] = max(largest[v], shared.largest[1 - first_slab][row + 8 * v]);
      }
      NamedBarrier(1, 256);
    }
  }

  template <typename PlainType>
  __device__ __forceinline__ void StoreRows16(PlainType plain) {
    auto* const out = static_cast<uint16_t*>(p.out) + PanelRow(0) * p.ld;
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        // A quad has 32 columns of two row blocks: words of two columns each become pieces of eight.
        const int place = ((first_slab + s) * 8 + i) * 16;
        const int column = tile.row * 256 + place;
        uint32_t words[2][4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          float2 pairs[2];
          Scale(plain, w % 2, place + 8 * w + 2 * q, 8 * s + i + w / 2, pairs);
          words[0][w] = PackBf16x2(pairs[0].x, pairs[0].y);
          words[1][w] = PackBf16x2(pairs[1].x, pairs[1].y);
        }
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          TransposeQuad(words[v][0], words[v][1], words[v][2], words[v][3], q);
          if (row + 8 * v < tile.tokens && column + 8 * q < p.ld) {
            // As an assignment the compiler makes four stores of it: 1051 instead of 781 us (deepseek-v3).
            __stcg(reinterpret_cast<uint4*>(out + 8 * v * p.ld + column + 8 * q),
                   make_uint4(words[v][0], words[v][1], words[v][2], words[v][3]));
          }
        }
      }
    }
  }

  __device__ __forceinline__ void StorePairs(int64_t column, const float2 (&pairs)[2]) const {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      if (row + 8 * v < tile.tokens) {
        __stcg(reinterpret_cast<float2*>(static_cast<float*>(p.out) + PanelRow(v) * p.ld + column), pairs[v]);
      }
    }
  }
};

}  // namespace fusedmoe::cuda
