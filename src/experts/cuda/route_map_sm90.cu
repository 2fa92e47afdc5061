// Where every route (token, choice) goes: a stable counting sort by expert on the device.
//
//   ids [M, k] ──► expert_of [route]    local expert, or -1 where the route is skipped
//                  panel_row [route]    row of the token panel, or -1
//                  first_row [E], counts [E]
//
// Rows of an expert are consecutive, in route order, and start on a multiple of 8 (the swizzle of a panel has
// a period of 8 rows), so that the result depends on the ids alone. A CTA takes kChunkRoutes routes: for up
// to that many, which is 512 tokens of 8 choices, one launch does everything; beyond it a first launch counts
// the chunks. A sort in which every expert's CTA reads all routes needs one launch, but reads E times the
// ids: at 512 experts and 16384 tokens that is 300 MB.
#include "experts/cuda/host_launch.cuh"
#include "experts/cuda/prefill.hpp"
#include "experts/cuda/ptx.cuh"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kRoutesPerWarp = static_cast<int>(kRouteChunk) / kWarps;
static_assert(kRouteChunk % kThreads == 0, "every warp takes whole rounds of 32 routes");
constexpr int kExpertLimit = static_cast<int>(kMaxExperts);

__device__ __forceinline__ int LocalExpert(const RouteMapParams& p, int64_t route) {
  if (p.expert_num_tokens != nullptr) {
    const int expert = static_cast<int>(route / p.rows_per_expert);
    return route - expert * p.rows_per_expert < p.expert_num_tokens[expert] ? expert : -1;
  }
  int id = __ldg(p.topk_ids + route);
  if (p.expert_map != nullptr) {
    id = id >= 0 && id < p.num_experts ? __ldg(p.expert_map + id) : -1;
  }
  return id >= 0 && id < p.num_local_experts ? id : -1;
}

/// Counts of a chunk, one histogram a warp in shared memory: [kWarps][num_local_experts] 16-bit.
__device__ void CountChunk(const RouteMapParams& p, uint16_t* histogram, int64_t begin, int64_t end) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(threadIdx.x); i < kWarps * p.num_local_experts; i += kThreads) {
    histogram[i] = 0;
  }
  __syncthreads();
  uint16_t* own = histogram + warp * p.num_local_experts;
  for (int round = 0; round < kRoutesPerWarp / 32; ++round) {
    const int64_t route = begin + warp * kRoutesPerWarp + round * 32 + lane;
    const int expert = route < end ? LocalExpert(p, route) : -1;
    const uint32_t same = __match_any_sync(~0U, expert);
    if (expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1) {
      own[expert] = static_cast<uint16_t>(own[expert] + __popc(same));
    }
    __syncwarp();
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads, 1) CountRoutes(const __grid_constant__ RouteMapParams p) {
  extern __shared__ uint16_t histogram[];
  GridWait();
  GridLaunchNext();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kRouteChunk;
  CountChunk(p, histogram, begin, min(p.num_routes, begin + kRouteChunk));
  for (int expert = static_cast<int>(threadIdx.x); expert < p.num_local_experts; expert += kThreads) {
    int count = 0;
    for (int warp = 0; warp < kWarps; ++warp) {
      count += histogram[warp * p.num_local_experts + expert];
    }
    p.chunk_counts[static_cast<int64_t>(blockIdx.x) * p.num_local_experts + expert] = count;
  }
}

__global__ void __launch_bounds__(kThreads, 1) PlaceRoutes(const __grid_constant__ RouteMapParams p) {
  extern __shared__ uint16_t histogram[];
  __shared__ int next_row[kExpertLimit];
  __shared__ int warp_sums[kWarps];
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
  GridWait();
  GridLaunchNext();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kRouteChunk;
  const int64_t end = min(p.num_routes, begin + kRouteChunk);
  CountChunk(p, histogram, begin, end);

  // Routes of expert `tid` in the chunks before this one, and in all.
  int before = 0;
  int total = 0;
  if (tid < p.num_local_experts) {
    if (gridDim.x == 1) {
      for (int w = 0; w < kWarps; ++w) {
        total += histogram[w * p.num_local_experts + tid];
      }
    } else {
      for (int chunk = 0; chunk < static_cast<int>(gridDim.x); ++chunk) {
        const int count = p.chunk_counts[static_cast<int64_t>(chunk) * p.num_local_experts + tid];
        total += count;
        before += chunk < static_cast<int>(blockIdx.x) ? count : 0;
      }
    }
  }
  // First rows: exclusive sums of the counts, each rounded up to 8.
  const int aligned = (total + 7) & ~7;
  int inclusive = aligned;
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(~0U, inclusive, step);
    inclusive += lane >= step ? other : 0;
  }
  if (lane == 31) {
    warp_sums[warp] = inclusive;
  }
  __syncthreads();
  int first = inclusive - aligned;
  for (int w = 0; w < warp; ++w) {
    first += warp_sums[w];
  }
  if (tid < p.num_local_experts) {
    if (blockIdx.x == 0) {
      p.map.first_row[tid] = first;
      p.map.counts[tid] = total;
    }
    next_row[tid] = first + before;
    // Each warp's histogram becomes the rank of its first route.
    int rank = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int count = histogram[w * p.num_local_experts + tid];
      histogram[w * p.num_local_experts + tid] = static_cast<uint16_t>(rank);
      rank += count;
    }
  }
  __syncthreads();
  uint16_t* own = histogram + warp * p.num_local_experts;
  for (int round = 0; round < kRoutesPerWarp / 32; ++round) {
    const int64_t route = begin + warp * kRoutesPerWarp + round * 32 + lane;
    const int expert = route < end ? LocalExpert(p, route) : -1;
    const uint32_t same = __match_any_sync(~0U, expert);
    const int rank = expert >= 0 ? own[expert] : 0;
    __syncwarp();
    if (route < end) {
      p.map.expert_of[route] = expert;
      p.map.panel_row[route] = expert >= 0 ? next_row[expert] + rank + __popc(same & ((1U << lane) - 1)) : -1;
    }
    if (expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1) {
      own[expert] = static_cast<uint16_t>(rank + __popc(same));
    }
    __syncwarp();
  }
}

}  // namespace

Status LaunchRouteMap(const RouteMapParams& params, void* stream) {
  if (params.num_routes == 0) {
    return Status::Ok();
  }
  auto* queue = static_cast<cudaStream_t>(stream);
  const auto chunks = static_cast<unsigned>(RouteChunks(params.num_routes));
  const size_t shared = sizeof(uint16_t) * kWarps * static_cast<size_t>(params.num_local_experts);
  if (chunks > 1) {
    FMOE_RETURN_IF_ERROR(LaunchKernel("CountRoutes", CountRoutes, chunks, kThreads, shared, queue, params));
  }
  return LaunchKernel("PlaceRoutes", PlaceRoutes, chunks, kThreads, shared, queue, params);
}

}  // namespace fusedmoe::cuda
