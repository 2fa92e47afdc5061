// Token operands on the device: see operand_rows.hpp. A warp makes 512 values of a row (operand_lanes.cuh);
// formats whose scale needs the whole row give it a CTA and read it twice, the second time from the caches.
#include "experts/cuda/operand_rows.hpp"

#include <cuda_runtime.h>

#include <algorithm>

#include "experts/cuda/host_launch.cuh"
#include "experts/cuda/operand_lanes.cuh"
#include "numerics/rows.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

struct RowsParams {
  OperandRowsCall call;
  DeviceQuantizer quantizer;
  bool aligned = false;
  bool has_group_scale = false;
};

/// The local expert of a row, -1 where the row does not count. Layers without ids: 0.
__device__ __forceinline__ int ExpertOfRow(const OperandRowsCall& call, int64_t row) {
  if (call.expert_num_tokens != nullptr) {
    const auto expert = static_cast<int>(row / call.rows_per_expert);
    return row - expert * call.rows_per_expert < __ldg(call.expert_num_tokens + expert) ? expert : -1;
  }
  if (call.topk_ids == nullptr) {
    return 0;
  }
  for (int64_t i = 0; i < call.ids_per_row; ++i) {
    int id = __ldg(call.topk_ids + row * call.ids_per_row + i);
    if (call.expert_map != nullptr) {
      id = id >= 0 && id < call.num_experts ? __ldg(call.expert_map + id) : -1;
    }
    if (id >= 0 && id < call.num_local_experts) {
      return id;
    }
  }
  return -1;
}

/// What a lane quantizes: the source values, weighted and smoothed.
__device__ __forceinline__ void LoadOperand(const RowsParams& p, int64_t row, int expert, int64_t k,
                                            float (&v)[kLaneValues]) {
  const OperandRowsCall& call = p.call;
  const int64_t source = row / call.rows_per_token;
  const int element_bytes = call.source_dtype == DType::kF32 ? 4 : 2;
  const auto* base =
      static_cast<const std::byte*>(call.source) + source * call.source_row_stride * element_bytes;
  LoadLane(base, call.source_dtype, k, call.cols, p.aligned, v);
  if (call.row_weight != nullptr) {
    const float weight = __ldg(call.row_weight + source);
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      v[i] *= weight;
    }
  }
  if (call.pre_quant_scale != nullptr) {
    const float* smoothing = call.pre_quant_scale + expert * call.cols + k;
    for (int i = 0; i < kLaneValues; ++i) {
      v[i] *= k + i < call.cols ? __ldg(smoothing + i) : 0.0F;
    }
  }
  if (p.quantizer.rule.round_to_bf16_first && p.quantizer.kind != DeviceQuantizer::Kind::kNone) {
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      v[i] = RoundToBf16(v[i]);
    }
  }
}

__device__ __forceinline__ float TensorScaleOf(const RowsParams& p, int expert) {
  if (p.quantizer.dynamic_tensor_scale) {
    return TensorScaleFromAmax(p.quantizer, __uint_as_float(__ldg(p.call.amax_bits)));
  }
  return p.call.tensor_scale != nullptr ? __ldg(p.call.tensor_scale + expert) : 1.0F;
}

__device__ __forceinline__ void StoreOperand(const RowsParams& p, int64_t row, int64_t k,
                                             const GroupStep& step, float (&v)[kLaneValues]) {
  if (p.quantizer.kind != DeviceQuantizer::Kind::kNone) {
    QuantizeLane(p.quantizer, step, v);
  }
  uint32_t words[8];
  PackLane(v, p.call.element, words);
  RowSink{static_cast<uint16_t*>(p.call.values), p.call.padded_cols}.Store(row, k, p.call.padded_cols, words);
}

/// Formats whose scales are at hand or belong to a group: one part of a row a warp.
__global__ void __launch_bounds__(kThreads) MakeParts(const __grid_constant__ RowsParams p) {
  GridLaunchNext();
  GridWait();
  const OperandRowsCall& call = p.call;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const auto parts = static_cast<uint32_t>((call.padded_cols + kPartValues - 1) / kPartValues);
  for (uint32_t unit = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
       unit < static_cast<uint32_t>(call.num_rows) * parts; unit += gridDim.x * kWarps) {
    const int64_t row = unit / parts;
    const int64_t k =
        static_cast<int64_t>(unit - static_cast<uint32_t>(row) * parts) * kPartValues + lane * kLaneValues;
    const int expert = ExpertOfRow(call, row);
    if (expert < 0) {
      continue;
    }
    float v[kLaneValues];
    LoadOperand(p, row, expert, k, v);
    GroupStep step;
    if (p.quantizer.kind != DeviceQuantizer::Kind::kNone) {
      const uint32_t amax =
          p.quantizer.group == 0 ? 0 : GroupAmaxBits(LaneAmaxBits(v, false), p.quantizer.group);
      step = StepOf(p.quantizer, TensorScaleOf(p, expert), amax);
    }
    StoreOperand(p, row, k, step, v);
    if (p.has_group_scale && k % 128 == 0 && k < call.padded_cols) {
      call.group_scale[row * (call.padded_cols / 128) + k / 128] = step.left_scale;
    }
    if (p.quantizer.dynamic_tensor_scale && k == 0) {
      call.row_scale[row] = step.left_scale;
    }
  }
}

/// Scales per token: a row a CTA.
__global__ void __launch_bounds__(kThreads) MakeRows(const __grid_constant__ RowsParams p) {
  __shared__ uint32_t warp_amax[2][kWarps];
  GridLaunchNext();
  GridWait();
  const OperandRowsCall& call = p.call;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;  // as many as a row has parts, up to kWarps
  int turn = 0;
  for (int64_t row = blockIdx.x; row < call.num_rows; row += gridDim.x) {
    const int expert = ExpertOfRow(call, row);
    if (expert < 0) {
      continue;
    }
    float v[kLaneValues];
    uint32_t amax = 0;
    int64_t k = 0;
    for (int64_t base = warp * kPartValues; base < call.padded_cols; base += warps * kPartValues) {
      k = base + lane * kLaneValues;
      LoadOperand(p, row, expert, k, v);
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
      call.row_scale[row] = step.left_scale;
    }
    const bool once = call.padded_cols <= warps * kPartValues;  // the values are still in registers
    for (int64_t base = warp * kPartValues; base < call.padded_cols; base += warps * kPartValues) {
      k = base + lane * kLaneValues;
      if (!once) {
        LoadOperand(p, row, expert, k, v);
      }
      StoreOperand(p, row, k, step, v);
    }
  }
}

/// The largest finite magnitude of the rows that count. Magnitudes have one maximum in whatever order they
/// come.
__global__ void __launch_bounds__(kThreads) RowsAmax(const __grid_constant__ RowsParams p) {
  GridLaunchNext();
  GridWait();
  const OperandRowsCall& call = p.call;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const auto parts = static_cast<uint32_t>((call.padded_cols + kPartValues - 1) / kPartValues);
  uint32_t amax = 0;
  for (uint32_t unit = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
       unit < static_cast<uint32_t>(call.num_rows) * parts; unit += gridDim.x * kWarps) {
    const int64_t row = unit / parts;
    const int expert = ExpertOfRow(call, row);
    if (expert >= 0) {
      float v[kLaneValues];
      LoadOperand(
          p, row, expert,
          static_cast<int64_t>(unit - static_cast<uint32_t>(row) * parts) * kPartValues + lane * kLaneValues,
          v);
      amax = max(amax, LaneAmaxBits(v, true));
    }
  }
  amax = __reduce_max_sync(kAllLanes, amax);
  if (lane == 0 && amax != 0) {
    atomicMax(call.amax_bits, amax);
  }
}

}  // namespace

Status LaunchOperandRows(const OperandRowsCall& call) {
  FMOE_RETURN_IF_ERROR(CheckOperandFormat(call.activation));
  if (call.num_rows == 0) {
    return Status::Ok();
  }
  RowsParams p{call, MakeDeviceQuantizer(call.activation)};
  const int element_bytes = call.source_dtype == DType::kF32 ? 4 : 2;
  p.aligned =
      reinterpret_cast<uintptr_t>(call.source) % 16 == 0 && call.source_row_stride * element_bytes % 16 == 0;
  p.has_group_scale = HasGroupScale(call.activation);
  auto* stream = static_cast<cudaStream_t>(call.stream);
  const auto parts = static_cast<uint32_t>((call.padded_cols + kPartValues - 1) / kPartValues);
  const int64_t limit = 8 * int64_t{CurrentSmCount()};
  const auto part_grid =
      static_cast<unsigned>(std::min(limit, (call.num_rows * parts + kWarps - 1) / kWarps));
  if (p.quantizer.dynamic_tensor_scale) {
    FMOE_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(call.amax_bits, 0, sizeof(uint32_t), stream), "RowsAmax"));
    FMOE_RETURN_IF_ERROR(LaunchKernel("RowsAmax", RowsAmax, part_grid, kThreads, 0, stream, p));
  }
  if (p.quantizer.kind == DeviceQuantizer::Kind::kPerRow) {
    const int64_t warps = std::min<int64_t>(kWarps, parts);
    const auto grid = static_cast<unsigned>(std::min(limit * kWarps / warps, call.num_rows));
    return LaunchKernel("MakeRows", MakeRows, grid, static_cast<unsigned>(warps * kWarpSize), 0, stream, p);
  }
  return LaunchKernel("MakeParts", MakeParts, part_grid, kThreads, 0, stream, p);
}

}  // namespace fusedmoe::cuda
