#pragma once

#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/device/ptx_panel.cuh"
#include "experts/cuda/operands/quantize_sm90.cuh"
#include "experts/cuda/prefill/prefill.hpp"

/// Where the second GEMM multiplies values in BF16: the outputs of the first one rounded to the grid of their
/// scales (code * block scale, exact in BF16) while they are in registers. 64 columns are eight row blocks,
/// and column 16 (r >> 1) + ... of them lies in fragment row r of each (IntermediateColumn), so that a group
/// of 16 is two rows of eight blocks: of all warps that share the slab.
///
///     |values| ─► largest of a warp's rows and blocks ─► amax[warp][group][token]
///     ─► one thread a group and token: step ─► values in place;      the scratch becomes the slab's image
namespace fusedmoe::cuda {

/// `values[g][2 i + v]`: a row block of the slab, fragment row r, token 8 i + 2 q + v. `scratch`: 16 KB.
/// Called by the kWarps warps of the slab; `thread` counts them, `barrier` is theirs.
template <int kTileTokens, int kWarps, int kGroups, int N>
__device__ __forceinline__ void QuantizeValues(const PrefillGemmParams& p, int expert, uint8_t* scratch,
                                               int barrier, int thread, float (&values)[kGroups][N / 4]) {
  constexpr int kThreads = 32 * kWarps;
  constexpr int kMostGroups = 4;  // of 16 columns
  auto* const amax = reinterpret_cast<uint32_t*>(scratch);
  auto* const steps = reinterpret_cast<FastStep*>(amax + kWarps * kMostGroups * kTileTokens);
  static_assert(kWarps * kMostGroups * kTileTokens * 4 + kMostGroups * kTileTokens * 16 <= 16384);
  const DeviceQuantizer& q = p.quantizer;
  const float tensor_scale = p.out_tensor_scale == nullptr ? 1.0F : __ldg(p.out_tensor_scale + expert);
  const int r = thread >> 2 & 7;
  const int token = 2 * (thread & 3);
  if (q.rule.round_to_bf16_first) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (float& value : values[g]) {
        value = RoundToBf16(value);
      }
    }
  }
  const bool by_group = q.kind != DeviceQuantizer::Kind::kPerTensor;
  const int shift = q.group == 16 ? 1 : q.group == 32 ? 2 : 3;  // fragment rows of a group: 2, 4 or 8
  const int groups = 8 >> shift;
  FastStep one;
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
        for (int rows = 0; rows < 3; ++rows) {
          if (rows < shift) {
            largest[v] = max(largest[v], __shfl_xor_sync(kAllLanes, largest[v], 4 << rows));
          }
        }
      }
      if ((r & ((1 << shift) - 1)) == 0) {
        *reinterpret_cast<uint2*>(amax + ((thread >> 5) * kMostGroups + (r >> shift)) * kTileTokens + 8 * i +
                                  token) = make_uint2(largest[0], largest[1]);
      }
    }
    NamedBarrier(barrier, kThreads);
    for (int at = thread; at < N * groups; at += kThreads) {
      const int group = at / N;
      const int place = group * kTileTokens + at - group * N;
      uint32_t largest = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        largest = max(largest, amax[w * kMostGroups * kTileTokens + place]);
      }
      const GroupStep step = StepOf(q, tensor_scale, largest);
      FastStep fast = FastStepOf(step.encode);
      fast.value_scale = step.value_scale;
      steps[place] = fast;
    }
    NamedBarrier(barrier, kThreads);
  } else {
    one = FastStepOf(StepFor(q.rule, tensor_scale));
  }
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const FastStep step = by_group ? steps[(r >> shift) * kTileTokens + 8 * i + token + v] : one;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float& value = values[g][2 * i + v];
        value = RoundToGrid(q.grid, step.Apply(value)) * step.value_scale;
      }
    }
  }
  if (by_group) {
    NamedBarrier(barrier, kThreads);  // the steps have been read
  }
}

}  // namespace fusedmoe::cuda
