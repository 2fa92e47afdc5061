// F32 weights on the ordinary units (float32.hpp). A CTA computes 64 rows x 64 columns of one expert at a
// time, a thread 4 x 4 of them (and the same of up), from tiles of 16 k in shared memory. Sums run through
// ascending k.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "core/checked_math.hpp"
#include "experts/cuda/device/host_launch.cuh"
#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/float32/float32.hpp"
#include "experts/cuda/prefill/prefill.hpp"
#include "moe/activation.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 64;   ///< rows, columns
constexpr int kDepth = 16;  ///< k of a tile
constexpr int kPitch = kTile + 4;

struct RoutesParams {
  const int32_t* panel_row = nullptr;
  int64_t num_routes = 0;
  int32_t* routes = nullptr;
};

__global__ void __launch_bounds__(kThreads) RoutesByRow(const __grid_constant__ RoutesParams p) {
  GridWait();
  const int64_t route = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (route < p.num_routes && p.panel_row[route] >= 0) {
    p.routes[p.panel_row[route]] = static_cast<int32_t>(route);
  }
}

struct GemmParams {
  const int32_t* first_row = nullptr;
  const int32_t* counts = nullptr;
  const float* weights = nullptr;  ///< [E][parts][columns][k]
  const float* bias = nullptr;     ///< [E][parts][columns]
  float* out = nullptr;
  int64_t ld = 0;
  int columns = 0;
  int k = 0;
  int column_tiles = 0;
  // First GEMM: rows of the call. Second: F32 rows by panel row.
  Float32Rows rows;
  const int32_t* routes = nullptr;  ///< null: the second GEMM
  int top_k = 1;
  ActivationSpec activation;
};

__device__ float LoadValue(const Float32Rows& rows, int64_t at) {
  switch (rows.dtype) {
    case DType::kF32:
      return __ldg(static_cast<const float*>(rows.values) + at);
    case DType::kF16:
      return __half2float(__ushort_as_half(__ldg(static_cast<const uint16_t*>(rows.values) + at)));
    default:
      return __uint_as_float(uint32_t{__ldg(static_cast<const uint16_t*>(rows.values) + at)} << 16);
  }
}

/// The tiles of 16 k that a CTA multiplies.
template <int kParts>
struct Tiles {
  float x[kDepth][kPitch];
  float w[kParts][kDepth][kPitch];
};

/// The token row that a thread brings of every tile.
struct SourceRow {
  bool there = false;
  int64_t row = 0;      ///< of Float32Rows
  float factor = 1.0F;  ///< its router weight, where the input carries it
};

template <bool kDown>
__device__ __forceinline__ SourceRow SourceOf(const GemmParams& p, int64_t panel_row, bool there) {
  SourceRow source{there, panel_row};
  if (!kDown && there) {
    const int route = p.routes[panel_row];
    source.factor = p.rows.weights == nullptr ? 1.0F : __ldg(p.rows.weights + route);
    source.row = route / p.top_k;
  }
  return source;
}

/// `k0`: the first k. Each thread brings four consecutive k of line tid / 4 of every tile.
template <int kParts>
__device__ __forceinline__ void LoadTiles(const GemmParams& p, const SourceRow& source, const float* weights,
                                          int column0, int k0, Tiles<kParts>& tiles) {
  const int tid = static_cast<int>(threadIdx.x);
  const int line = tid / 4, depth = tid % 4 * 4;
  const bool has_column = column0 + line < p.columns;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int k = k0 + depth + i;
    tiles.x[depth + i][line] =
        source.there && k < p.k ? LoadValue(p.rows, source.row * p.rows.stride + k) * source.factor : 0.0F;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int64_t at = (int64_t{part} * p.columns + column0 + line) * p.k + k;
      tiles.w[part][depth + i][line] = has_column && k < p.k ? __ldg(weights + at) : 0.0F;
    }
  }
}

/// sum[part][i][j] += the products of row `row` + i and column `column` + j of the tiles.
template <int kParts>
__device__ __forceinline__ void AddProducts(const Tiles<kParts>& tiles, int row, int column,
                                            float (&sum)[kParts][4][4]) {
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    float a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = tiles.x[k][row + i];
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float b = tiles.w[part][k][column + j];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[part][i][j] = __fmaf_rn(a[i], b, sum[part][i][j]);
        }
      }
    }
  }
}

/// With its bias, activated.
template <int kParts, bool kDown>
__device__ __forceinline__ float OutputOf(const GemmParams& p, int expert, int column,
                                          float (&value)[kParts]) {
  if (p.bias != nullptr) {
    for (int part = 0; part < kParts; ++part) {
      value[part] += __ldg(p.bias + (int64_t{expert} * kParts + part) * p.columns + column);
    }
  }
  return kDown         ? value[0]
         : kParts == 2 ? Activate(p.activation, value[0], value[kParts - 1])
                       : Activate(p.activation, value[0], 0.0F);
}

/// kParts 2: gate and up, activated. 1: up alone (activated), or down.
template <int kParts, bool kDown>
__global__ void __launch_bounds__(kThreads) Gemm(const __grid_constant__ GemmParams p) {
  __shared__ Tiles<kParts> tiles;
  GridWait();
  const int expert = static_cast<int>(blockIdx.x) / p.column_tiles;
  const int column0 = (static_cast<int>(blockIdx.x) - expert * p.column_tiles) * kTile;
  const int count = p.counts[expert], first = p.first_row[expert], tid = static_cast<int>(threadIdx.x);
  const float* const weights = p.weights + int64_t{expert} * kParts * p.columns * p.k;
  const int row_of_thread = tid / 16 * 4, column_of_thread = tid % 16 * 4;
  for (int row0 = 0; row0 < count; row0 += kTile) {
    float sum[kParts][4][4] = {};
    const int line = row0 + tid / 4;
    const SourceRow source = SourceOf<kDown>(p, int64_t{first} + line, line < count);
    for (int k0 = 0; k0 < p.k; k0 += kDepth) {
      __syncthreads();
      LoadTiles(p, source, weights, column0, k0, tiles);
      __syncthreads();
      AddProducts(tiles, row_of_thread, column_of_thread, sum);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = column0 + column_of_thread + j, row = row0 + row_of_thread + i;
        if (row < count && column < p.columns) {
          float value[kParts];
          for (int part = 0; part < kParts; ++part) {
            value[part] = sum[part][i][j];
          }
          p.out[(int64_t{first} + row) * p.ld + column] = OutputOf<kParts, kDown>(p, expert, column, value);
        }
      }
    }
  }
}

}  // namespace

Status LaunchFloat32(const LayerShape& shape, const Float32Weights& weights, const Float32Rows& rows,
                     const ExpertsCall& call) {
  auto* const stream = static_cast<cudaStream_t>(call.stream);
  const Float32Plan plan = PlanFloat32(shape, call.num_tokens);
  const int64_t top_k = shape.batched ? 1 : shape.top_k, routes = call.num_tokens * top_k;
  const auto experts = static_cast<unsigned>(shape.num_local_experts);
  auto* const words = reinterpret_cast<int32_t*>(call.scratch + plan.map_offset);
  auto* const route_of = reinterpret_cast<int32_t*>(call.scratch + plan.routes_offset);
  RouteMapParams map;
  map.map = {words, words + experts, words + 2 * experts, words + 2 * experts + routes};
  map.chunk_counts = words + 2 * experts + 2 * routes;
  map.num_routes = routes;
  map.num_local_experts = static_cast<int>(shape.num_local_experts);
  map.num_experts = static_cast<int>(shape.num_experts);
  map.topk_ids = call.topk_ids;
  map.expert_map = call.expert_map;
  map.expert_num_tokens = shape.batched ? call.expert_num_tokens : nullptr;
  map.rows_per_expert = std::max<int64_t>(1, call.rows_per_expert);
  FMOE_RETURN_IF_ERROR(LaunchRouteMap(map, stream));
  const auto route_grid = static_cast<unsigned>(CeilDiv(routes, kThreads));
  FMOE_RETURN_IF_ERROR(LaunchKernel("RoutesByRow", RoutesByRow, route_grid, kThreads, 0, stream,
                                    RoutesParams{map.map.panel_row, routes, route_of}));

  GemmParams first;
  first.first_row = map.map.first_row;
  first.counts = map.map.counts;
  first.weights = weights.gate_up;
  first.bias = weights.gate_up_bias;
  first.out = reinterpret_cast<float*>(call.scratch + plan.mid_offset);
  first.ld = shape.intermediate;
  first.columns = static_cast<int>(shape.intermediate);
  first.k = static_cast<int>(shape.hidden);
  first.column_tiles = static_cast<int>(CeilDiv(shape.intermediate, kTile));
  first.rows = rows;
  first.routes = route_of;
  first.top_k = static_cast<int>(top_k);
  first.activation = shape.activation;
  FMOE_RETURN_IF_ERROR(LaunchKernel("Float32 gate and up", shape.gated() ? Gemm<2, false> : Gemm<1, false>,
                                    experts * static_cast<unsigned>(first.column_tiles), kThreads, 0, stream,
                                    first));
  GemmParams second = first;
  second.weights = weights.down;
  second.bias = weights.down_bias;
  second.rows = {first.out, DType::kF32, first.ld, nullptr};
  second.routes = nullptr;
  second.out = reinterpret_cast<float*>(call.scratch + plan.rows_offset);
  second.ld = RoundUp(shape.hidden, 8);
  second.columns = static_cast<int>(shape.hidden);
  second.k = static_cast<int>(shape.intermediate);
  second.column_tiles = static_cast<int>(CeilDiv(shape.hidden, kTile));
  FMOE_RETURN_IF_ERROR(LaunchKernel("Float32 down", Gemm<1, true>,
                                    experts * static_cast<unsigned>(second.column_tiles), kThreads, 0, stream,
                                    second));
  CombineParams combine;
  combine.rows = second.out;
  combine.rows_f32 = true;
  combine.batched = shape.batched;
  combine.ld = second.ld;
  combine.panel_row = map.map.panel_row;
  combine.topk_weights = shape.batched || call.router_weight_on_input ? nullptr : call.topk_weights;
  combine.num_tokens = call.num_tokens;
  combine.top_k = top_k;
  combine.hidden = shape.hidden;
  combine.output = call.output;
  combine.output_dtype = call.output_dtype;
  return LaunchCombine(combine, stream);
}

}  // namespace fusedmoe::cuda
