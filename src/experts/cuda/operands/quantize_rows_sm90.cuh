#pragma once

#include <algorithm>

#include "experts/cuda/device/host_launch.cuh"
#include "experts/cuda/operands/operand_lanes.cuh"

/// Rows of activations made operands: one algorithm for the tokens of a layer (operand_rows.cu) and for what
/// stands between its GEMMs (mid_panel_sm90.cu). A warp makes 512 values of a row (operand_lanes.cuh);
/// formats whose scale needs the whole row give it a CTA and read it twice, the second time from the caches.
///
/// What differs is a policy that is also the kernels' parameter:
///
///     struct Rows : QuantizedRows {
///       static constexpr bool kWaitFirst;  // what runs behind reads results of grids ahead of this one
///                                          // before it waits itself: it may start only after the wait here
///       bool Locate(int64_t index, RowPlace& place) const;  // false: the row does not count, for no lane
///       void Load(const RowPlace&, int64_t k, float (&v)[kLaneValues]) const;  // 0 beyond the columns
///       void Store(const RowPlace&, int64_t k, const GroupStep&, const float (&v)[kLaneValues]) const;
///     };
namespace fusedmoe::cuda {

inline constexpr int kRowThreads = 256;
inline constexpr int kRowWarps = kRowThreads / kWarpSize;

struct RowPlace {
  int64_t row = 0;  ///< where the result goes
  int expert = 0;
};

/// What all rows have.
struct QuantizedRows {
  DeviceQuantizer quantizer;
  int64_t num_rows = 0;  ///< indices that Locate is asked for
  int64_t padded_cols = 0;
  const float* tensor_scale = nullptr;  ///< [E] static scales; null: 1
  uint32_t* amax_bits = nullptr;        ///< dynamic tensor scales
  float* row_scale = nullptr;           ///< where the format has one a row
  using Place = RowPlace;

  FMOE_HOST_DEVICE uint32_t parts() const {
    return static_cast<uint32_t>((padded_cols + kPartValues - 1) / kPartValues);
  }
  __device__ float TensorScaleOf(int expert) const {
    if (quantizer.dynamic_tensor_scale) {
      return TensorScaleFromAmax(quantizer, __uint_as_float(__ldg(amax_bits)));
    }
    return tensor_scale != nullptr ? __ldg(tensor_scale + expert) : 1.0F;
  }
};

template <typename Rows>
__device__ __forceinline__ void WaitForGridsAhead() {
  if constexpr (Rows::kWaitFirst) {
    GridWait();
    GridLaunchNext();
  } else {
    GridLaunchNext();
    GridWait();
  }
}

/// Calls f(place, k) for the parts of rows that belong to this warp.
template <typename Rows, typename F>
__device__ __forceinline__ void ForEachPart(const Rows& rows, F&& f) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const uint32_t parts = rows.parts();
  for (uint32_t unit = blockIdx.x * kRowWarps + threadIdx.x / kWarpSize;
       unit < static_cast<uint32_t>(rows.num_rows) * parts; unit += gridDim.x * kRowWarps) {
    const uint32_t index = unit / parts;
    RowPlace place;
    if (rows.Locate(index, place)) {
      f(place, static_cast<int64_t>(unit - index * parts) * kPartValues + lane * kLaneValues);
    }
  }
}

/// Formats whose scales are at hand or belong to a group: one part of a row a warp.
template <typename Rows>
__global__ void __launch_bounds__(kRowThreads) QuantizeParts(const __grid_constant__ Rows rows) {
  WaitForGridsAhead<Rows>();
  ForEachPart(rows, [&](const RowPlace& place, int64_t k) {
    float v[kLaneValues];
    rows.Load(place, k, v);
    const DeviceQuantizer& q = rows.quantizer;
    GroupStep step;
    if (q.kind != DeviceQuantizer::Kind::kNone) {
      const uint32_t amax = q.group == 0 ? 0 : GroupAmaxBits(LaneAmaxBits(v, false), q.group);
      step = StepOf(q, rows.TensorScaleOf(place.expert), amax);
      QuantizeLane(q, step, v);
    }
    rows.Store(place, k, step, v);
    if (q.dynamic_tensor_scale && k == 0) {
      rows.row_scale[place.row] = step.left_scale;
    }
  });
}

/// Scales per row: a row a CTA.
template <typename Rows>
__global__ void __launch_bounds__(kRowThreads) QuantizeWholeRows(const __grid_constant__ Rows rows) {
  __shared__ uint32_t warp_amax[2][kRowWarps];
  WaitForGridsAhead<Rows>();
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;  // as many as a row has parts, up to kRowWarps
  int turn = 0;
  for (int64_t index = blockIdx.x; index < rows.num_rows; index += gridDim.x) {
    RowPlace place;
    if (!rows.Locate(index, place)) {
      continue;
    }
    float v[kLaneValues];
    uint32_t amax = 0;
    for (int64_t base = warp * kPartValues; base < rows.padded_cols; base += warps * kPartValues) {
      rows.Load(place, base + lane * kLaneValues, v);
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
    const GroupStep step = StepOf(rows.quantizer, 1.0F, amax);
    if (threadIdx.x == 0) {
      rows.row_scale[place.row] = step.left_scale;
    }
    const bool once = rows.padded_cols <= warps * kPartValues;  // the values are still in registers
    for (int64_t base = warp * kPartValues; base < rows.padded_cols; base += warps * kPartValues) {
      const int64_t k = base + lane * kLaneValues;
      if (!once) {
        rows.Load(place, k, v);
      }
      QuantizeLane(rows.quantizer, step, v);
      rows.Store(place, k, step, v);
    }
  }
}

/// The largest finite magnitude of the rows that count. Magnitudes have one maximum in whatever order they
/// come.
template <typename Rows>
__global__ void __launch_bounds__(kRowThreads) RowsAmax(const __grid_constant__ Rows rows) {
  WaitForGridsAhead<Rows>();
  uint32_t amax = 0;
  ForEachPart(rows, [&](const RowPlace& place, int64_t k) {
    float v[kLaneValues];
    rows.Load(place, k, v);
    amax = max(amax, LaneAmaxBits(v, true));
  });
  amax = __reduce_max_sync(kAllLanes, amax);
  if (threadIdx.x % kWarpSize == 0 && amax != 0) {
    atomicMax(rows.amax_bits, amax);
  }
}

/// Enqueues the kernels: one, or two where one scale spans all rows (amax_bits must be zero then).
template <typename Rows>
Status LaunchQuantizeRows(std::string_view name, const Rows& rows, cudaStream_t stream) {
  const int64_t limit = 8 * int64_t{CurrentSmCount()};
  const int64_t parts = rows.parts();
  const auto grid =
      static_cast<unsigned>(std::min(limit, (rows.num_rows * parts + kRowWarps - 1) / kRowWarps));
  if (rows.quantizer.dynamic_tensor_scale) {
    FMOE_RETURN_IF_ERROR(LaunchKernel(name, RowsAmax<Rows>, grid, kRowThreads, 0, stream, rows));
  }
  if (rows.quantizer.kind == DeviceQuantizer::Kind::kPerRow) {
    const int64_t warps = std::min<int64_t>(kRowWarps, parts);
    const auto row_grid = static_cast<unsigned>(std::min(limit * kRowWarps / warps, rows.num_rows));
    return LaunchKernel(name, QuantizeWholeRows<Rows>, row_grid, static_cast<unsigned>(warps * kWarpSize), 0,
                        stream, rows);
  }
  return LaunchKernel(name, QuantizeParts<Rows>, grid, kRowThreads, 0, stream, rows);
}

}  // namespace fusedmoe::cuda
