// Where every route (token, choice) goes: a stable counting sort by expert on the device.
//
//   ids [M, k] ──► expert_of [route]    local expert, or -1 where the route is skipped
//                  panel_row [route]    row of the token panel, or -1
//                  first_row [E], counts [E]
//
// Rows of an expert are consecutive, in route order, and start on a multiple of 8 (the swizzle of a panel has
// a period of 8 rows), so that the result depends on the ids alone. Two ways, by the work:
//
//   by expert   one launch, one CTA an expert, which reads all ids twice: shortest while there are few
//               experts x routes
//   by chunk    a CTA counts kRouteChunk routes, a thread a route; a second launch sums the chunks and
//               places. 512 experts of 16384 tokens read 1 MB so, not 500 MB. (In use for all sizes, it cost
//               20 us more at 64 and 512 tokens. With chunks of 4096 the two took 21 us of 8192 to 131072
//               routes, not 11 to 14.)
#include "experts/cuda/device/host_launch.cuh"
#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/prefill/prefill.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kByExpertThreads = 512;
/// Experts x routes up to which the map is made by expert.
constexpr int64_t kByExpertReads = int64_t{1} << 20;
static_assert(kRouteChunk == kThreads, "a thread a route");
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

/// Counts of a chunk, one histogram a warp in shared memory: [kWarps][num_local_experts] 16-bit. `expert`: of
/// the thread's route, -1: none. The lanes whose routes have the same.
__device__ uint32_t CountChunk(const RouteMapParams& p, uint16_t* histogram, int expert) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(threadIdx.x); i < kWarps * p.num_local_experts; i += kThreads) {
    histogram[i] = 0;
  }
  __syncthreads();
  const uint32_t same = __match_any_sync(~0U, expert);
  if (expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1) {
    histogram[warp * p.num_local_experts + expert] = static_cast<uint16_t>(__popc(same));
  }
  __syncthreads();
  return same;
}

/// CTA e: first row, count and places of expert e.
__global__ void __launch_bounds__(kByExpertThreads) MapByExpert(const __grid_constant__ RouteMapParams p) {
  constexpr int kByExpertWarps = kByExpertThreads / 32;
  __shared__ int less_of[kByExpertWarps];
  __shared__ int own_of[kByExpertWarps];
  GridLaunchNext();
  GridWait();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int self = static_cast<int>(blockIdx.x);
  const auto routes = static_cast<int>(p.num_routes);
  const int segment = (routes + kByExpertThreads - 1) / kByExpertThreads * 32;
  const int begin = warp * segment;
  const int end = min(routes, begin + segment);
  int less = 0;
  int own = 0;
#pragma unroll 8
  for (int route = begin + lane; route < end; route += 32) {
    const int expert = LocalExpert(p, route);
    less += expert >= 0 && expert < self ? 1 : 0;
    own += expert == self ? 1 : 0;
  }
  less = __reduce_add_sync(~0U, less);
  own = __reduce_add_sync(~0U, own);
  if (lane == 0) {
    less_of[warp] = less;
    own_of[warp] = own;
  }
  __syncthreads();
  int before = 0;
  int total = 0;
  int rank = 0;
  for (int w = 0; w < kByExpertWarps; ++w) {
    before += less_of[w];
    total += own_of[w];
    rank += w < warp ? own_of[w] : 0;
  }
  const int first = ((before + 7) & ~7) + 8 * self;  // room for every expert to start on a multiple of 8
  if (threadIdx.x == 0) {
    p.map.first_row[self] = first;
    p.map.counts[self] = total;
  }
#pragma unroll 4
  for (int route = begin + lane; route - lane < end; route += 32) {
    const int expert = route < end ? LocalExpert(p, route) : -2;
    const uint32_t mine = __ballot_sync(~0U, expert == self);
    if (expert == self || (expert == -1 && self == 0)) {
      p.map.expert_of[route] = expert;
      p.map.panel_row[route] = expert < 0 ? -1 : first + rank + __popc(mine & ((1U << lane) - 1));
    }
    rank += __popc(mine);
  }
}

__global__ void __launch_bounds__(kThreads, 1) CountRoutes(const __grid_constant__ RouteMapParams p) {
  extern __shared__ uint16_t histogram[];
  GridLaunchNext();
  GridWait();
  const int64_t route = static_cast<int64_t>(blockIdx.x) * kRouteChunk + threadIdx.x;
  CountChunk(p, histogram, route < p.num_routes ? LocalExpert(p, route) : -1);
  for (int expert = static_cast<int>(threadIdx.x); expert < p.num_local_experts; expert += kThreads) {
    int count = 0;
#pragma unroll
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
  GridLaunchNext();
  GridWait();
  const int64_t route = static_cast<int64_t>(blockIdx.x) * kRouteChunk + tid;
  const int expert = route < p.num_routes ? LocalExpert(p, route) : -1;
  const uint32_t same = CountChunk(p, histogram, expert);

  // Routes of expert `tid` in the chunks before this one, and in all.
  int before = 0;
  int total = 0;
  if (tid < p.num_local_experts) {
    if (gridDim.x == 1) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        total += histogram[w * p.num_local_experts + tid];
      }
    } else {
#pragma unroll 16
      for (int chunk = 0; chunk < static_cast<int>(gridDim.x); ++chunk) {
        const int count = p.chunk_counts[static_cast<int64_t>(chunk) * p.num_local_experts + tid];
        total += count;
        before += chunk < static_cast<int>(blockIdx.x) ? count : 0;
      }
    }
  }
  // First rows: exclusive sums of the counts, each rounded up to 8.
  const int aligned = (total + 7) & ~7;
  const int inclusive = SumUpToLane(aligned);
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
    uint16_t counts[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      counts[w] = histogram[w * p.num_local_experts + tid];
    }
    int rank = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      histogram[w * p.num_local_experts + tid] = static_cast<uint16_t>(rank);
      rank += counts[w];
    }
  }
  __syncthreads();
  if (route < p.num_routes) {
    p.map.expert_of[route] = expert;
    p.map.panel_row[route] = expert < 0 ? -1
                                        : next_row[expert] + histogram[warp * p.num_local_experts + expert] +
                                              __popc(same & ((1U << lane) - 1));
  }
}

}  // namespace

Status LaunchRouteMap(const RouteMapParams& params, void* stream) {
  if (params.num_routes == 0) {
    return Status::Ok();
  }
  auto* queue = static_cast<cudaStream_t>(stream);
  if (params.num_local_experts * params.num_routes <= kByExpertReads) {
    return LaunchKernel("MapByExpert", MapByExpert, static_cast<unsigned>(params.num_local_experts),
                        kByExpertThreads, 0, queue, params);
  }
  const auto chunks = static_cast<unsigned>(RouteChunks(params.num_routes));
  const size_t shared = sizeof(uint16_t) * kWarps * static_cast<size_t>(params.num_local_experts);
  if (chunks > 1) {
    FMOE_RETURN_IF_ERROR(LaunchKernel("CountRoutes", CountRoutes, chunks, kThreads, shared, queue, params));
  }
  return LaunchKernel("PlaceRoutes", PlaceRoutes, chunks, kThreads, shared, queue, params);
}

}  // namespace fusedmoe::cuda
