// The two ends of prefill that move rows: tokens into the panel of the first GEMM, and the outputs of the
// second into the sums of the tokens.
#include <algorithm>

#include "experts/cuda/device/host_launch.cuh"
#include "experts/cuda/operands/operand_lanes.cuh"
#include "experts/cuda/prefill/prefill.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

/// A warp moves 512 columns of a source row to the panel rows of its routes: a token is read once for all its
/// choices.
__global__ void __launch_bounds__(kThreads) Gather(const __grid_constant__ GatherParams p) {
  GridLaunchNext();
  GridWait();
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const auto parts = static_cast<uint32_t>((p.padded_cols + kPartValues - 1) / kPartValues);
  const int routes_per_row = p.rows.by_route ? 1 : static_cast<int>(p.top_k);
  const uint32_t num_rows = static_cast<uint32_t>(p.num_routes) / static_cast<uint32_t>(routes_per_row);
  // Few tokens: several warps share the choices of one, so that the card is full.
  const auto split = static_cast<uint32_t>(p.choice_split);
  const PanelSink sink{reinterpret_cast<uint4*>(p.panel), p.panel_rows};
  for (uint32_t unit = blockIdx.x * kWarps + threadIdx.x / kWarpSize; unit < num_rows * parts * split;
       unit += gridDim.x * kWarps) {
    const int64_t row = unit / (parts * split);
    const uint32_t rest = unit - static_cast<uint32_t>(row) * parts * split;
    const int64_t k = static_cast<int64_t>(rest / split) * kPartValues + lane * kLaneValues;
    // One lane a choice looks up where the row goes; rows that go nowhere are not read.
    const int target = lane < routes_per_row ? __ldg(p.panel_row + row * routes_per_row + lane) : -1;
    if (__all_sync(kAllLanes, target < 0)) {
      continue;
    }
    const auto* source =
        static_cast<const uint4*>(p.rows.values) + (row * p.rows.row_stride + k) / (p.codes ? 16 : 8);
    uint4 low = make_uint4(0, 0, 0, 0);
    uint4 high = low;
    if (k < p.rows.cols) {
      low = __ldg(source);
    }
    if (k + 8 < p.rows.cols && !p.codes) {
      high = __ldg(source + 1);
    }
    uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const float group_scale = p.rows.group_scale == nullptr || k >= p.padded_cols
                                  ? 1.0F
                                  : __ldg(p.rows.group_scale + row * ScaleGroups(p.padded_cols) + k / 128);
    if (p.rows.group_scale != nullptr && p.panel_group_scale == nullptr) {  // folded into BF16: one rounding
#pragma unroll
      for (uint32_t& word : words) {
        word = PackBf16x2(__uint_as_float(word << 16) * group_scale,
                          __uint_as_float(word & 0xffff0000U) * group_scale);
      }
    }
    const float row_scale = p.panel_scale != nullptr ? __ldg(p.rows.row_scale + row) : 1.0F;
    uint32_t codes[4] = {words[0], words[1], words[2], words[3]};
    if (p.codes) {
      PanelSink::ArrangeCodes(codes, p.integers);
    } else {
      PanelSink::Arrange(words);
    }
    for (int choice = static_cast<int>(rest % split); choice < routes_per_row;
         choice += static_cast<int>(split)) {
      const int to = __shfl_sync(kAllLanes, target, choice);
      if (to >= 0 && k < p.padded_cols) {
        if (p.codes) {
          sink.StoreCodes(to, k, codes);
        } else {
          sink.Store(to, k, words);
        }
        if (p.panel_scale != nullptr && k == 0) {
          p.panel_scale[to] = row_scale;
        }
        if (p.panel_group_scale != nullptr && k % 128 == 0) {
          p.panel_group_scale[k / 128 * p.panel_rows + to] = group_scale;
        }
      }
    }
  }
}

/// Eight columns of a row as they lie in memory.
template <bool kRowsF32>
struct Eight {
  uint4 words[kRowsF32 ? 2 : 1];

  __device__ __forceinline__ void Load(const void* row, int64_t column) {
    const auto* from =
        reinterpret_cast<const uint4*>(static_cast<const std::byte*>(row) + column * (kRowsF32 ? 4 : 2));
    words[0] = __ldcs(from);
    if constexpr (kRowsF32) {
      words[1] = __ldcs(from + 1);
    }
  }
  __device__ __forceinline__ void AddTo(float weight, float (&sum)[8]) const {
    const uint32_t flat[4] = {words[0].x, words[0].y, words[0].z, words[0].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kRowsF32) {
        const uint32_t high[4] = {words[1].x, words[1].y, words[1].z, words[1].w};
        sum[i] = fmaf(weight, __uint_as_float(flat[i]), sum[i]);
        sum[4 + i] = fmaf(weight, __uint_as_float(high[i]), sum[4 + i]);
      } else {
        sum[2 * i] = fmaf(weight, __uint_as_float(flat[i] << 16), sum[2 * i]);
        sum[2 * i + 1] = fmaf(weight, __uint_as_float(flat[i] & 0xffff0000U), sum[2 * i + 1]);
      }
    }
  }
};

__device__ __forceinline__ void StoreEight(const CombineParams& p, int64_t token, int64_t column,
                                           const float (&v)[8]) {
  const int64_t at = token * p.hidden + column;
  const bool whole = p.hidden % 8 == 0;
  if (p.output_dtype == DType::kF32) {
    auto* out = static_cast<float*>(p.output) + at;
    if (whole) {
      reinterpret_cast<float4*>(out)[0] = make_float4(v[0], v[1], v[2], v[3]);
      reinterpret_cast<float4*>(out)[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
      for (int i = 0; i < 8 && column + i < p.hidden; ++i) {
        out[i] = v[i];
      }
    }
    return;
  }
  const bool f16 = p.output_dtype == DType::kF16;
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = f16 ? PackF16x2(v[2 * i], v[2 * i + 1]) : PackBf16x2(v[2 * i], v[2 * i + 1]);
  }
  auto* out = static_cast<uint16_t*>(p.output) + at;
  if (whole) {
    *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    for (int i = 0; i < 8 && column + i < p.hidden; ++i) {
      out[i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
    }
  }
}

template <bool kRowsF32>
__global__ void __launch_bounds__(kThreads) Combine(const __grid_constant__ CombineParams p) {
  GridLaunchNext();
  GridWait();
  const auto eights = static_cast<uint32_t>((p.hidden + 7) / 8);
  const auto top_k = static_cast<uint32_t>(p.top_k);
  const uint32_t total = static_cast<uint32_t>(p.num_tokens) * eights;
  constexpr int64_t kElementBytes = kRowsF32 ? 4 : 2;
  // Rows in flight. One after the other, behind a branch for absent ones, took 16 us at 64 tokens.
  constexpr uint32_t kBatch = kRowsF32 ? 4 : 8;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < total; i += gridDim.x * kThreads) {
    const uint32_t token = i / eights;
    const uint32_t column = (i - token * eights) * 8;
    const int32_t* const rows = p.panel_row + static_cast<int64_t>(token) * top_k;
    const float* const weights =
        p.topk_weights == nullptr ? nullptr : p.topk_weights + static_cast<int64_t>(token) * top_k;
    float sum[8] = {};
    bool any = false;
    for (uint32_t first = 0; first < top_k; first += kBatch) {
      int row[kBatch];
      float weight[kBatch];
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        row[j] = first + j < top_k ? __ldg(rows + first + j) : -1;
        weight[j] = weights != nullptr && first + j < top_k ? __ldg(weights + first + j) : 1.0F;
      }
      Eight<kRowsF32> data[kBatch];
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        if (row[j] >= 0) {
          data[j].Load(static_cast<const std::byte*>(p.rows) + row[j] * p.ld * kElementBytes, column);
        }
      }
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        if (row[j] >= 0) {
          data[j].AddTo(weight[j], sum);
          any = true;
        }
      }
    }
    if (any || !p.batched) {
      StoreEight(p, token, column, sum);
    }
  }
}

}  // namespace

Status LaunchGather(const GatherParams& params, void* stream) {
  if (params.num_routes == 0) {
    return Status::Ok();
  }
  const int64_t rows = params.rows.by_route ? params.num_routes : params.num_routes / params.top_k;
  constexpr int64_t kFullCard = 2048;  // warps
  GatherParams p = params;
  int64_t units = rows * ((params.padded_cols + kPartValues - 1) / kPartValues);
  while (!params.rows.by_route && p.choice_split * 2 <= params.top_k && units * p.choice_split < kFullCard) {
    p.choice_split *= 2;
  }
  units *= p.choice_split;
  const auto grid =
      static_cast<unsigned>(std::min<int64_t>(8 * int64_t{CurrentSmCount()}, (units + kWarps - 1) / kWarps));
  return LaunchKernel("Gather", Gather, grid, kThreads, 0, static_cast<cudaStream_t>(stream), p);
}

Status LaunchCombine(const CombineParams& params, void* stream) {
  const int64_t eights = params.num_tokens * ((params.hidden + 7) / 8);
  if (eights == 0) {
    return Status::Ok();
  }
  const auto grid = static_cast<unsigned>(
      std::min<int64_t>(8 * int64_t{CurrentSmCount()}, (eights + kThreads - 1) / kThreads));
  return LaunchKernel("Combine", params.rows_f32 ? Combine<true> : Combine<false>, grid, kThreads, 0,
                      static_cast<cudaStream_t>(stream), params);
}

}  // namespace fusedmoe::cuda
