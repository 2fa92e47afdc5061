// Between the GEMMs, where the first one does not end in the panel itself: activation, smoothing and
// quantization of F32 rows. Lanes and parts as in operand_lanes.cuh; column order as MidPanelParams says.
#include <algorithm>

#include "experts/cuda/host_launch.cuh"
#include "experts/cuda/operand_lanes.cuh"
#include "experts/cuda/prefill.hpp"
#include "experts/cuda/ptx_panel.cuh"
#include "moe/activation.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

struct MidKernelParams : MidPanelParams {
  bool is_swish = false;
  SwishParams swish;
};

/// The swish kinds in one formula (SwishOf). The fast exponential errs by 2^-20: far below what moves a code.
__device__ __forceinline__ float FastGatedSwish(const SwishParams& s, float gate, float up) {
  gate = MinNan(gate, s.gate_limit);
  up = MaxNan(MinNan(up, s.up_limit), -s.up_limit);
  const float swish = __fdividef(gate, 1.0F + exp2f(s.slope_log2 * gate));
  return MinNan(swish, s.swish_limit) * (up + s.beta);
}

/// 16 activated columns from `k` on.
__device__ void LoadMid(const MidKernelParams& p, int64_t row, int expert, int64_t k,
                        float (&v)[kLaneValues]) {
  const bool gated = IsGated(p.activation.kind);
  const int q = static_cast<int>(k >> 4) & 3;
  const float* slab = p.rows + row * p.ld + (k >> 6) * (gated ? 128 : 64) + 2 * q;
#pragma unroll
  for (int c = 0; c < kLaneValues / 2; ++c) {
    float2 gate = make_float2(0.0F, 0.0F);
    float2 up = gate;
    if (k < p.mid_rows) {
      gate = __ldg(reinterpret_cast<const float2*>(slab + 8 * c));
      if (gated) {
        up = __ldg(reinterpret_cast<const float2*>(slab + 8 * c + 64));
      }
    }
    if (p.is_swish) {
      v[2 * c] = FastGatedSwish(p.swish, gate.x, up.x);
      v[2 * c + 1] = FastGatedSwish(p.swish, gate.y, up.y);
    } else {
      v[2 * c] = Activate(p.activation, gate.x, up.x);
      v[2 * c + 1] = Activate(p.activation, gate.y, up.y);
    }
  }
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    if (p.smoothing != nullptr && k + i < p.intermediate) {
      v[i] *= __ldg(p.smoothing + expert * p.intermediate + k + i);
    }
    v[i] = k + i < p.intermediate ? v[i] : 0.0F;
    if (p.quantizer.rule.round_to_bf16_first && p.quantizer.kind != DeviceQuantizer::Kind::kNone) {
      v[i] = RoundToBf16(v[i]);
    }
  }
}

__device__ __forceinline__ void StoreMid(const MidKernelParams& p, int64_t row, int64_t k,
                                         const GroupStep& step, float (&v)[kLaneValues]) {
  if (p.quantizer.kind != DeviceQuantizer::Kind::kNone) {
    QuantizeLane(p.quantizer, step, v);
    if (p.panel_group_scale != nullptr) {
      if (k % 128 == 0 && k < p.mid_cols) {
        p.panel_group_scale[k / 128 * p.panel_rows + row] = step.left_scale;
      }
    } else if (p.quantizer.kind == DeviceQuantizer::Kind::kRealGroup) {  // folded into BF16: one rounding
#pragma unroll
      for (float& value : v) {
        value *= step.left_scale;
      }
    }
  }
  uint32_t words[8];
  PackLane(v, p.f16 ? DType::kF16 : DType::kBF16, words);
  PanelSink{reinterpret_cast<uint4*>(p.panel), p.panel_rows}.Store(row, k, p.mid_cols, words);
}

__global__ void __launch_bounds__(kThreads) MidParts(const __grid_constant__ MidKernelParams p) {
  GridWait();
  GridLaunchNext();  // after the wait: the GEMM behind reads the map before it waits
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const auto parts = static_cast<uint32_t>((p.mid_cols + kPartValues - 1) / kPartValues);
  for (uint32_t unit = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
       unit < static_cast<uint32_t>(p.num_routes) * parts; unit += gridDim.x * kWarps) {
    const int64_t route = unit / parts;
    const int64_t k =
        static_cast<int64_t>(unit - static_cast<uint32_t>(route) * parts) * kPartValues + lane * kLaneValues;
    const int row = __ldg(p.panel_row + route);
    if (row < 0) {
      continue;
    }
    const int expert = __ldg(p.expert_of + route);
    float v[kLaneValues];
    LoadMid(p, row, expert, k, v);
    GroupStep step;
    if (p.quantizer.kind != DeviceQuantizer::Kind::kNone) {
      const float tensor_scale = p.quantizer.dynamic_tensor_scale
                                     ? TensorScaleFromAmax(p.quantizer, __uint_as_float(__ldg(p.amax_bits)))
                                 : p.tensor_scale != nullptr ? __ldg(p.tensor_scale + expert)
                                                             : 1.0F;
      const uint32_t amax =
          p.quantizer.group == 0 ? 0 : GroupAmaxBits(LaneAmaxBits(v, false), p.quantizer.group);
      step = StepOf(p.quantizer, tensor_scale, amax);
    }
    StoreMid(p, row, k, step, v);
    if (p.quantizer.dynamic_tensor_scale && k == 0) {
      p.panel_scale[row] = step.left_scale;
    }
  }
}

__global__ void __launch_bounds__(kThreads) MidRows(const __grid_constant__ MidKernelParams p) {
  __shared__ uint32_t warp_amax[2][kWarps];
  GridWait();
  GridLaunchNext();
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;  // as many as a row has parts, up to kWarps
  int turn = 0;
  for (int64_t route = blockIdx.x; route < p.num_routes; route += gridDim.x) {
    const int row = __ldg(p.panel_row + route);
    if (row < 0) {
      continue;
    }
    const int expert = __ldg(p.expert_of + route);
    float v[kLaneValues];
    uint32_t amax = 0;
    for (int64_t base = warp * kPartValues; base < p.mid_cols; base += warps * kPartValues) {
      LoadMid(p, row, expert, base + lane * kLaneValues, v);
      amax = max(amax, LaneAmaxBits(v, false));
    }
    amax = __reduce_max_sync(kAllLanes, amax);
    if (lane == 0) {
      warp_amax[turn][warp] = amax;
    }
    __syncthreads();
    for (int w = 0; w < warps; ++w) {
      amax = max(amax, warp_amax[turn][w]);
    }
    turn ^= 1;  // the next row writes the other set: one barrier a row is enough
    const GroupStep step = StepOf(p.quantizer, 1.0F, amax);
    if (threadIdx.x == 0) {
      p.panel_scale[row] = step.left_scale;
    }
    const bool once = p.mid_cols <= warps * kPartValues;  // the values are still in registers
    for (int64_t base = warp * kPartValues; base < p.mid_cols; base += warps * kPartValues) {
      const int64_t k = base + lane * kLaneValues;
      if (!once) {
        LoadMid(p, row, expert, k, v);
      }
      StoreMid(p, row, k, step, v);
    }
  }
}

__global__ void __launch_bounds__(kThreads) MidAmax(const __grid_constant__ MidKernelParams p) {
  GridWait();
  GridLaunchNext();
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const auto parts = static_cast<uint32_t>((p.mid_cols + kPartValues - 1) / kPartValues);
  uint32_t amax = 0;
  for (uint32_t unit = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
       unit < static_cast<uint32_t>(p.num_routes) * parts; unit += gridDim.x * kWarps) {
    const int64_t route = unit / parts;
    const int row = __ldg(p.panel_row + route);
    if (row >= 0) {
      float v[kLaneValues];
      LoadMid(p, row, __ldg(p.expert_of + route),
              static_cast<int64_t>(unit - static_cast<uint32_t>(route) * parts) * kPartValues +
                  lane * kLaneValues,
              v);
      amax = max(amax, LaneAmaxBits(v, true));
    }
  }
  amax = __reduce_max_sync(kAllLanes, amax);
  if (lane == 0 && amax != 0) {
    atomicMax(p.amax_bits, amax);
  }
}

}  // namespace

Status LaunchMidPanel(const MidPanelParams& params, void* stream) {
  if (params.num_routes == 0) {
    return Status::Ok();
  }
  MidKernelParams p;
  static_cast<MidPanelParams&>(p) = params;
  p.is_swish = IsSwish(params.activation);
  p.swish = SwishOf(params.activation);
  auto* queue = static_cast<cudaStream_t>(stream);
  const int64_t limit = 8 * int64_t{CurrentSmCount()};
  const int64_t parts = (params.mid_cols + kPartValues - 1) / kPartValues;
  const auto grid = static_cast<unsigned>(std::min(limit, (params.num_routes * parts + kWarps - 1) / kWarps));
  if (params.quantizer.dynamic_tensor_scale) {
    FMOE_RETURN_IF_ERROR(LaunchKernel("MidAmax", MidAmax, grid, kThreads, 0, queue, p));
  }
  if (params.quantizer.kind == DeviceQuantizer::Kind::kPerRow) {
    const int64_t warps = std::min<int64_t>(kWarps, parts);
    const auto row_grid = static_cast<unsigned>(std::min(limit * kWarps / warps, params.num_routes));
    return LaunchKernel("MidRows", MidRows, row_grid, static_cast<unsigned>(warps * kWarpSize), 0, queue, p);
  }
  return LaunchKernel("MidParts", MidParts, grid, kThreads, 0, queue, p);
}

}  // namespace fusedmoe::cuda
