#pragma once

#include "experts/cuda/decode/decode_arguments.hpp"
#include "experts/cuda/device/ptx.cuh"

/// What the decode kernel (decode_sm90.cuh) is made of: the map of routes and the weight stream of a warp.
namespace fusedmoe::cuda {

#ifdef FMOE_DECODE_STAMPS
__device__ __forceinline__ void Stamp(const DecodeArguments& args, int index) {
  if (threadIdx.x == 0 && args.stamps != nullptr) {
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    args.stamps[blockIdx.x * kDecodeStamps + index] = now;
  }
}
#else
__device__ __forceinline__ void Stamp(const DecodeArguments&, int) {}
#endif

/// The addresses of a CTA's map in shared memory.
struct DecodeMap {
  uint16_t* route_of;
  uint16_t* list_expert;
  uint16_t* list_first;
  uint16_t* list_count;
  uint16_t* expert_first;
  uint16_t* histogram;
  uint32_t* valid;       ///< bit of a route: it has a local expert
  uint32_t* row_source;  ///< of a staged row: first piece; operands made here: route | split << 16
  uint16_t* row_pieces;  ///< pieces that stand in memory; or the row's expert
  int* segment_list;     ///< [2][kMaxSegments] first (list, split) of a segment
  int* segment_block;    ///< first row block in it
  int* segment_size;     ///< row blocks
  int* num_segments;     ///< [2]
  int* num_rows;         ///< token rows of the segment at hand
  uint32_t* tag;         ///< of the launch, decode_exchange_sm90.cuh
  uint32_t* amax;        ///< largest finite magnitude of the call's tokens: dynamic tensor scales
  int* num_lists;        ///< of the launch
  int* row_offset;       ///< [kSegmentLists] first row of a list

  __device__ DecodeMap(uint8_t* shared, const DecodeShared& at, int routes) {
    const int padded = (routes + 31) / 32 * 32;
    route_of = reinterpret_cast<uint16_t*>(shared + at.route_of);
    list_expert = reinterpret_cast<uint16_t*>(shared + at.lists);
    list_first = list_expert + padded;
    list_count = list_first + padded;
    expert_first = reinterpret_cast<uint16_t*>(shared + at.expert_first);
    histogram = reinterpret_cast<uint16_t*>(shared + at.histogram);
    valid = reinterpret_cast<uint32_t*>(shared + at.valid);
    row_source = reinterpret_cast<uint32_t*>(shared + at.row_source);
    row_pieces = reinterpret_cast<uint16_t*>(shared + at.row_pieces);
    segment_list = reinterpret_cast<int*>(shared + at.segments);
    segment_block = segment_list + 2 * kMaxSegments;
    segment_size = segment_block + 2 * kMaxSegments;
    num_segments = reinterpret_cast<int*>(shared + at.scalars);
    num_rows = num_segments + 2;
    tag = reinterpret_cast<uint32_t*>(num_segments + 3);
    amax = tag + 1;
    num_lists = num_segments + 5;
    row_offset = num_segments + 8;
  }
};

/// What memory says of a route: its expert, or (batched) the rows of its expert. Nothing waits for it yet.
__device__ __forceinline__ int LoadRoute(const DecodeArguments& args, int route) {
  return args.expert_num_tokens != nullptr ? __ldg(args.expert_num_tokens + args.rows_per_expert.Div(route))
                                           : __ldcg(args.topk_ids + route);
}

/// The local expert of a route, -1: none here. `loaded`: of LoadRoute.
__device__ __forceinline__ int RouteExpert(const DecodeArguments& args, int route, int loaded) {
  if (args.expert_num_tokens != nullptr) {
    const int expert = args.rows_per_expert.Div(route);
    return route - expert * args.rows_per_expert.divisor < loaded ? expert : -1;
  }
  int id = loaded;
  if (args.expert_map != nullptr) {
    id = static_cast<unsigned>(id) < static_cast<unsigned>(args.num_experts) ? __ldg(args.expert_map + id)
                                                                             : -1;
  }
  return static_cast<unsigned>(id) < static_cast<unsigned>(args.num_local_experts) ? id : -1;
}

/// The weight stream of a warp: a cursor over GEMMs, segments and runs of contiguous chunks of one size. All
/// lanes keep it, one issues.
template <typename Chunks>
struct WeightStream {
  static constexpr int kSlotBytes = Chunks::kSlotBytes, kScaleBytes = Chunks::kScaleBytes;
  const DecodeArguments& args;
  const DecodeMap& map;
  uint32_t ring, barriers;
  uint64_t policy;
  int warp, lane;
  int phase = 0, segment = -1, left = 0, list = 0, block = 0, chunk = 0;  ///< what comes after the run
  int run = 0, bytes = Chunks::StreamBytes(0), slot = 0;
  const uint8_t* pointer = nullptr;
  uint32_t scales = 0;  ///< from the first weight of the GEMM, in 16 bytes

  __device__ __forceinline__ void NextRun() {
    while (true) {
      while (left == 0) {  // open the next segment with work for this warp
        if (phase == 2) {
          return;
        }
        if (++segment >= map.num_segments[phase]) {
          ++phase, segment = -1;
          continue;
        }
        const DecodePhase& f = args.phase[phase];
        const int index = phase * kMaxSegments + segment, total = map.segment_size[index] * f.chunks.divisor;
        const int begin = total * warp / kDecodeWarps;
        left = total * (warp + 1) / kDecodeWarps - begin;
        block = f.chunks.Div(begin);
        chunk = begin - block * f.chunks.divisor;
        block += map.segment_block[index];
        const int lists = f.blocks_per_expert.Div(block);
        list = map.segment_list[index] + lists;
        block -= lists * f.blocks_per_expert.divisor;
      }
      const DecodePhase& f = args.phase[phase];
      const int stream_bytes = Chunks::StreamBytes(phase), slab_bytes = Chunks::SlabBytes(phase);
      const int l = f.splits.Div(list), split = list - l * f.splits.divisor;
      const int split_first = split * f.chunks.divisor;
      // Chunks of this split that exist: the last split may have fewer.
      const int end = min(f.chunks.divisor, f.total_chunks - split_first);
      const bool tail = split_first + end == f.total_chunks && f.tail_slabs * slab_bytes != stream_bytes;
      const uint8_t* const matrix = f.blocks + map.list_expert[l] * f.places.bytes;
      pointer = matrix + f.places.Codes(block) + (split_first + chunk) * stream_bytes;
      bytes = stream_bytes;
      if constexpr (kScaleBytes > 0) {
        scales = static_cast<uint32_t>((map.list_expert[l] * f.places.bytes + f.places.Scales(block)) / 16 +
                                       split_first + chunk);
      }
      // Contiguous up to the end of the expert, unless row blocks share scales.
      if (kScaleBytes == 0 && f.splits.divisor == 1 && !tail) {
        run = min(left, (f.blocks_per_expert.divisor - block) * f.chunks.divisor - chunk);
        left -= run;
        chunk = 0, block = 0, ++list;
        return;
      }
      int steps = min(left, f.chunks.divisor - chunk);
      run = max(0, min(steps, end - chunk));
      if (tail && run > 0 && chunk + run == end) {  // the shorter chunk is a run of its own
        if (run > 1) {
          steps = --run;
        } else {
          bytes = f.tail_slabs * slab_bytes;
        }
      }
      left -= steps, chunk += steps;
      if (chunk == f.chunks.divisor) {
        chunk = 0;
        if (++block == f.blocks_per_expert.divisor) {
          block = 0, ++list;
        }
      }
      if (run > 0) {
        return;
      }
    }
  }

  /// Before a slot is read.
  __device__ __forceinline__ static void Await(uint32_t barrier, int parity) {
#ifndef FMOE_PLAIN_COPIES
    BarrierWait(barrier, parity);
#endif
  }

  __device__ __forceinline__ const uint8_t* ScalesOfChunk() const {
    return args.phase[phase].blocks + int64_t{scales} * 16;
  }

  __device__ __forceinline__ void Issue(int slots) {
    if (run == 0) {
      NextRun();
      if (run == 0) {
        return;
      }
    }
#ifdef FMOE_PLAIN_COPIES
    // For racecheck, which does not follow the copy engine: the same bytes to the same slot by the lanes.
    for (int at = 16 * lane; at < bytes; at += 16 * kWarpSize) {
      *static_cast<uint4*>(__cvta_shared_to_generic(ring + slot * kSlotBytes + at)) =
          *reinterpret_cast<const uint4*>(pointer + at);
    }
    if (kScaleBytes > 0 && lane == 0) {
      *static_cast<uint4*>(__cvta_shared_to_generic(ring + (slot + 1) * kSlotBytes - kScaleBytes)) =
          *reinterpret_cast<const uint4*>(ScalesOfChunk());
    }
    __syncwarp();
#else
    if (ElectOne()) {
      BarrierExpect(barriers + 8 * slot, bytes);
      BulkLoad(ring + slot * kSlotBytes, pointer, bytes, barriers + 8 * slot, policy);
      if constexpr (kScaleBytes > 0) {  // a second bulk copy: 1 to 2 % slower (M=8)
        CopyAsync16(ring + (slot + 1) * kSlotBytes - kScaleBytes, ScalesOfChunk());
        CopyAsyncArrive(barriers + 8 * slot);
      }
    }
#endif
    pointer += bytes;
    scales += kScaleBytes / 16;
    --run;
    if (++slot == slots) {
      slot = 0;
    }
  }
};

/// Routes up to here are sorted by one warp, in its registers: an eighth of the general way.
inline constexpr int kFewRoutes = kWarpSize;

/// Warp 0: the lists of at most 32 routes, `id` being this lane's; experts in the order in which routes name
/// them.
__device__ __forceinline__ int SortFew(const DecodeArguments& args, const DecodeMap& map, int id) {
  const int lane = threadIdx.x & 31, cap = args.list_tokens.divisor;
  const uint32_t same = __match_any_sync(kAllLanes, id);
  const uint32_t valid = __ballot_sync(kAllLanes, id >= 0);
  const int leader = __ffs(static_cast<int>(same)) - 1, count = __popc(same);
  const bool leads = id >= 0 && leader == lane;
  if (lane == 0) {
    map.valid[0] = valid;
  }
  if (__ballot_sync(kAllLanes, leads) == valid) {  // no expert twice, as for one token: lists are routes
    if (leads) {
      const int list = __popc(valid & ((1U << lane) - 1));
      map.list_expert[list] = static_cast<uint16_t>(id);
      map.list_first[list] = static_cast<uint16_t>(list);
      map.list_count[list] = 1;
      map.route_of[list] = static_cast<uint16_t>(lane);
    }
    return __popc(valid);
  }
  int own = 0;  // lists << 16 | routes
  if (leads) {
    own = count + (args.list_tokens.Div(count + cap - 1) << 16);
  }
  const int inclusive = SumUpToLane(own);
  const int lists = __shfl_sync(kAllLanes, inclusive, 31) >> 16;
  const int first = (inclusive - own) & 0xFFFF;
  if (leads) {
    int list = (inclusive - own) >> 16;
    for (int at = 0; at < count; at += cap, ++list) {
      map.list_expert[list] = static_cast<uint16_t>(id);
      map.list_first[list] = static_cast<uint16_t>(first + at);
      map.list_count[list] = static_cast<uint16_t>(min(cap, count - at));
    }
  }
  const int position = __shfl_sync(kAllLanes, first, leader) + __popc(same & ((1U << lane) - 1));
  if (id >= 0) {
    map.route_of[position] = static_cast<uint16_t>(lane);
  }
  return lists;
}

/// The same for more routes, a counting sort by the whole CTA, a thread a route. All warps return; the
/// result and the lists are valid in warp 0 only. route_of is left to the caller, who has `rank` for it:
/// routes of the same expert before this one in its warp.
__device__ __forceinline__ int SortMany(const DecodeArguments& args, const DecodeMap& map, int routes,
                                        int expert, int& rank) {
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int route_chunks = (routes + 31) / 32, experts = args.num_local_experts;
  if (warp < route_chunks) {
    const uint32_t same = __match_any_sync(kAllLanes, expert);
    const uint32_t valid = __ballot_sync(kAllLanes, expert >= 0);
    rank = __popc(same & ((1U << lane) - 1));
    if (expert >= 0 && rank == 0) {
      map.histogram[warp * experts + expert] = static_cast<uint16_t>(__popc(same));
    }
    if (lane == 0) {
      map.valid[warp] = valid;
    }
  }
  __syncthreads();
  // Counts in shared memory are read four or eight at a time: one after the other they are a chain of 30
  // cycles each.
  for (int e = tid; e < experts; e += kDecodeThreads) {
    constexpr int kBatch = 8;
    int run = 0;
    for (int c = 0; c < route_chunks; c += kBatch) {
      int n[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        n[u] = c + u < route_chunks ? map.histogram[(c + u) * experts + e] : 0;
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (c + u < route_chunks) {
          map.histogram[(c + u) * experts + e] = static_cast<uint16_t>(run);
        }
        run += n[u];
      }
    }
    map.expert_first[e] = static_cast<uint16_t>(run);
  }
  __syncthreads();
  if (warp != 0) {
    return 0;
  }
  constexpr int kBatch = 4;
  const int per_lane = (experts + 31) / 32, first = lane * per_lane, cap = args.list_tokens.divisor;
  const auto counts = [&](int j, int(&n)[kBatch]) {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      n[u] = j + u < per_lane && first + j + u < experts ? map.expert_first[first + j + u] : 0;
    }
  };
  int own = 0;  // lists << 16 | routes
  for (int j = 0; j < per_lane; j += kBatch) {
    int n[kBatch];
    counts(j, n);
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      own += n[u] + (args.list_tokens.Div(n[u] + cap - 1) << 16);
    }
  }
  const int inclusive = SumUpToLane(own);
  const int lists = __shfl_sync(kAllLanes, inclusive, 31) >> 16;
  int list = (inclusive - own) >> 16, position = (inclusive - own) & 0xFFFF;
  for (int j = 0; j < per_lane; j += kBatch) {
    int n[kBatch];
    counts(j, n);
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int expert_at = first + j + u;
      if (n[u] > 0) {
        map.expert_first[expert_at] = static_cast<uint16_t>(position);
      }
      for (int at = 0; at < n[u]; at += cap, ++list) {
        map.list_expert[list] = static_cast<uint16_t>(expert_at);
        map.list_first[list] = static_cast<uint16_t>(position + at);
        map.list_count[list] = static_cast<uint16_t>(min(cap, n[u] - at));
      }
      position += n[u];
    }
  }
  return lists;
}

/// A lane of warp 0 for each GEMM: this CTA's share of it in segments, runs of lists whose token rows fit in
/// shared memory together; one in nearly all cases.
__device__ __forceinline__ void CutSegments(const DecodeArguments& args, const DecodeMap& map, int lists,
                                            int gemm) {
  const DecodePhase& f = args.phase[gemm];
  const int num = lists * f.splits.divisor, total = num * f.blocks_per_expert.divisor;
  const int stride = f.split_k * 2 + 16 + f.group_bytes;
  const int rows_cap = gemm == 0 && args.by_token ? 1 << 20 : min(args.rows_bytes / stride - 1, kSegmentRows);
  int a = args.grid.Div(total * blockIdx.x);
  const int b = args.grid.Div(total * (blockIdx.x + 1));
  int n = 0;
  const auto put = [&](int list, int block, int size) {
    map.segment_list[gemm * kMaxSegments + n] = list;
    map.segment_block[gemm * kMaxSegments + n] = block;
    map.segment_size[gemm * kMaxSegments + n++] = size;
  };
  const int first = f.blocks_per_expert.Div(a);
  const int touched = f.blocks_per_expert.Div(b + f.blocks_per_expert.divisor - 1) - first;
  if (a < b && touched <= kSegmentLists && touched * args.list_tokens.divisor <= rows_cap) {
    put(first, a - first * f.blocks_per_expert.divisor, b - a);  // however long the lists are
    a = b;
  }
  while (a < b && n < kMaxSegments) {  // the plan proves that the bound is not reached
    const int v0 = f.blocks_per_expert.Div(a);
    int v = v0, rows = 0, end = v0 * f.blocks_per_expert.divisor;
    while (v - v0 < kSegmentLists && end < b) {
      const int c = map.list_count[f.splits.Div(v)];
      if (rows + c > rows_cap) {
        break;
      }
      rows += c, ++v, end += f.blocks_per_expert.divisor;
    }
    end = min(b, end);
    put(v0, a - v0 * f.blocks_per_expert.divisor, end - a);
    a = end;
  }
  map.num_segments[gemm] = n;
}

}  // namespace fusedmoe::cuda
