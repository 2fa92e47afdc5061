#pragma once

#include "experts/cuda/decode_arguments.hpp"
#include "experts/cuda/ptx.cuh"

/// What the decode kernel (decode_sm90.cuh) is made of: the map of routes, the weight stream of a warp, the
/// sum over routes at the end.
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
  uint32_t* valid;  ///< bit of a route: it has a local expert
  uint32_t* row_source;
  uint16_t* row_pieces;
  int* segment_list;   ///< [2][kMaxSegments] first (list, split) of a segment
  int* segment_block;  ///< first row block in it
  int* segment_size;   ///< row blocks
  int* num_segments;   ///< [2]
  int* num_rows;       ///< token rows of the segment at hand
  int* row_offset;     ///< [kSegmentLists] first row of a list

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
    row_offset = num_segments + 8;
  }
};

/// The local expert of a route, -1: none here.
__device__ __forceinline__ int RouteExpert(const DecodeArguments& args, int route) {
  if (args.expert_num_tokens != nullptr) {
    const int expert = args.rows_per_expert.Div(route);
    return route - expert * args.rows_per_expert.divisor < __ldg(args.expert_num_tokens + expert) ? expert
                                                                                                  : -1;
  }
  int id = __ldcg(args.topk_ids + route);
  if (args.expert_map != nullptr) {
    id = static_cast<unsigned>(id) < static_cast<unsigned>(args.num_experts) ? __ldg(args.expert_map + id)
                                                                             : -1;
  }
  return static_cast<unsigned>(id) < static_cast<unsigned>(args.num_local_experts) ? id : -1;
}

/// An output of the first GEMM: as the operand of the second, or F32 where something stands between them.
template <bool kF16>
__device__ __forceinline__ void PutMid(const DecodeArguments& args, int64_t at, float value) {
  if (args.phases == 1) {
    static_cast<float*>(args.mid)[at] = value;
  } else if constexpr (kF16) {
    static_cast<__half*>(args.mid)[at] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(args.mid)[at] = __float2bfloat16(value);
  }
}

/// Four outputs of a token from column `col`; what lies beyond `hidden` is dropped.
__device__ __forceinline__ void StoreOutputs(const DecodeArguments& args, int64_t row, int col,
                                             const float4& v) {
  const int64_t at = row * args.hidden + col;
  const bool whole = args.hidden % 4 == 0;
  if (args.output_dtype == DType::kF32) {
    float* to = static_cast<float*>(args.output) + at;
    if (whole) {
      *reinterpret_cast<float4*>(to) = v;
      return;
    }
    const float values[4] = {v.x, v.y, v.z, v.w};
    for (int i = 0; i < 4 && col + i < args.hidden; ++i) {
      to[i] = values[i];
    }
    return;
  }
  const bool bf16 = args.output_dtype == DType::kBF16;
  const uint2 pairs = bf16 ? make_uint2(PackBf16x2(v.x, v.y), PackBf16x2(v.z, v.w))
                           : make_uint2(PackF16x2(v.x, v.y), PackF16x2(v.z, v.w));
  uint16_t* to = static_cast<uint16_t*>(args.output) + at;
  if (whole) {
    *reinterpret_cast<uint2*>(to) = pairs;
    return;
  }
  const uint32_t words[2] = {pairs.x, pairs.y};
  for (int i = 0; i < 4 && col + i < args.hidden; ++i) {
    to[i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
  }
}

/// y[token] = sum of its weighted expert rows, in a fixed order. Eight loads are in flight at a time: one
/// after the other they cost 3.5 us a layer (H100).
__device__ __forceinline__ void CombineRoutes(const DecodeArguments& args, const DecodeMap& map) {
  const int quads = args.partial_stride / 4, top_k = args.top_k.divisor;
  const int splits = args.phase[1].splits.divisor, parts = top_k * splits;
  const uint32_t mask = top_k == 32 ? ~0U : (1U << top_k) - 1;
  const bool batched = args.expert_num_tokens != nullptr;
  const int wanted = (args.hidden + 3) / 4;
  for (int i = blockIdx.x * kDecodeThreads + threadIdx.x; i < args.num_tokens * wanted;
       i += gridDim.x * kDecodeThreads) {
    const int token = i / wanted, c = i - token * wanted, first = token * top_k;
    const uint32_t valid =
        __funnelshift_r(map.valid[first >> 5], map.valid[(first + top_k - 1) >> 5], first & 31) & mask;
    if (batched && (valid & 1) == 0) {
      continue;  // rows beyond the counts are left alone
    }
    const float4* from =
        reinterpret_cast<const float4*>(args.partial) + static_cast<int64_t>(token) * parts * quads + c;
    float4 sum = {0, 0, 0, 0};
    constexpr int kBatch = 8;
    for (int split = 0; split < splits; ++split, from += quads) {
#pragma unroll 1
      for (int j = 0; j < top_k; j += kBatch) {
        float4 v[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          v[u] = float4{0, 0, 0, 0};
          if ((valid >> (j + u) & 1) != 0) {
            v[u] = __ldcg(from + static_cast<int64_t>((j + u) * splits) * quads);
          }
        }
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          sum.x += v[u].x, sum.y += v[u].y, sum.z += v[u].z, sum.w += v[u].w;
        }
      }
    }
    StoreOutputs(args, token, 4 * c, sum);
  }
}

/// The weight stream of a warp: a cursor over GEMMs, segments and runs of contiguous chunks. All lanes keep
/// it, lane 0 issues.
template <int kChunkBytes, int kUnitBytesOfSlab>
struct WeightStream {
  const DecodeArguments& args;
  const DecodeMap& map;
  uint32_t ring, barriers;
  uint64_t policy;
  int warp, lane;
  int phase = 0, segment = -1, left = 0, run = 0, list = 0, block = 0, slot = 0;
  int chunk = 0, end_chunk = 0, tail_bytes = 0;  ///< in the block (and split)
  const uint8_t* pointer = nullptr;

  __device__ __forceinline__ void NextRun() {
    while (true) {
      int first = 0;
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
        first = begin - block * f.chunks.divisor;
        block += map.segment_block[index];
        const int lists = f.blocks_per_expert.Div(block);
        list = map.segment_list[index] + lists;
        block -= lists * f.blocks_per_expert.divisor;
      }
      const DecodePhase& f = args.phase[phase];
      const int l = f.splits.Div(list), split = list - l * f.splits.divisor;
      const int split_first = split * f.chunks.divisor;
      pointer = f.blocks + map.list_expert[l] * f.expert_bytes + static_cast<int64_t>(block) * f.block_bytes +
                (split_first + first) * kChunkBytes;
      chunk = first;
      // Chunks of this split that exist: the last split may have fewer.
      end_chunk = min(f.chunks.divisor, f.total_chunks - split_first);
      tail_bytes = split_first + end_chunk == f.total_chunks ? f.tail_slabs * kUnitBytesOfSlab : kChunkBytes;
      if (f.splits.divisor == 1) {  // contiguous up to the end of the expert
        run = min(left, (f.blocks_per_expert.divisor - block) * f.chunks.divisor - first);
        left -= run;
        block = 0, ++list;
        return;
      }
      const int virtual_run = min(left, f.chunks.divisor - first);
      run = max(0, min(virtual_run, end_chunk - first));
      left -= virtual_run;
      if (++block == f.blocks_per_expert.divisor) {
        block = 0, ++list;
      }
      if (run > 0) {
        return;
      }
    }
  }

  __device__ __forceinline__ void Issue(int slots) {
    if (run == 0) {
      NextRun();
      if (run == 0) {
        return;
      }
    }
    int bytes = kChunkBytes;
    if (++chunk == end_chunk) {
      bytes = tail_bytes, chunk = 0;
    }
    if (lane == 0) {
      BarrierExpect(barriers + 8 * slot, bytes);
      BulkLoad(ring + slot * kChunkBytes, pointer, bytes, barriers + 8 * slot, policy);
    }
    pointer += bytes;
    --run;
    if (++slot == slots) {
      slot = 0;
    }
  }
};

/// Sorts the routes by expert (stable), makes the lists and cuts this CTA's share of both GEMMs into
/// segments. `ids`, `ranks`: of this thread's routes.
template <int kRounds>
__device__ __forceinline__ void BuildMap(const DecodeArguments& args, const DecodeMap& map, int routes,
                                         const int (&ids)[kRounds], int (&ranks)[kRounds]) {
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int route_chunks = (routes + 31) / 32, experts = args.num_local_experts;
#pragma unroll
  for (int t = 0; t < kRounds; ++t) {
    const int group = t * kDecodeWarps + warp;
    if (group < route_chunks) {
      const uint32_t same = __match_any_sync(kAllLanes, ids[t]);
      const uint32_t valid = __ballot_sync(kAllLanes, ids[t] >= 0);
      ranks[t] = __popc(same & ((1U << lane) - 1));
      if (ids[t] >= 0 && ranks[t] == 0) {
        map.histogram[group * experts + ids[t]] = static_cast<uint16_t>(__popc(same));
      }
      if (lane == 0) {
        map.valid[group] = valid;
      }
    }
  }
  __syncthreads();
  if (route_chunks > 1) {
    for (int e = tid; e < experts; e += kDecodeThreads) {
      int run = 0;
      for (int c = 0; c < route_chunks; ++c) {
        const int n = map.histogram[c * experts + e];
        map.histogram[c * experts + e] = static_cast<uint16_t>(run);
        run += n;
      }
      map.expert_first[e] = static_cast<uint16_t>(run);
    }
    __syncthreads();
  }
  if (warp != 0) {
    return;
  }
  const int per_lane = (experts + 31) / 32, first = lane * per_lane, cap = args.list_tokens;
  const auto count = [&](int e) -> int {
    return e >= experts ? 0 : route_chunks > 1 ? map.expert_first[e] : map.histogram[e];
  };
  int own = 0;  // lists << 16 | routes
  for (int j = 0; j < per_lane; ++j) {
    const int n = count(first + j);
    own += n;
    for (int at = 0; at < n; at += cap) {
      own += 1 << 16;
    }
  }
  int inclusive = own;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int other = __shfl_up_sync(kAllLanes, inclusive, d);
    if (lane >= d) {
      inclusive += other;
    }
  }
  const int lists = __shfl_sync(kAllLanes, inclusive, 31) >> 16;
  int list = (inclusive - own) >> 16, position = (inclusive - own) & 0xFFFF;
  for (int j = 0; j < per_lane; ++j) {
    const int n = count(first + j);
    if (n > 0) {
      map.expert_first[first + j] = static_cast<uint16_t>(position);
      if (route_chunks == 1) {
        map.histogram[first + j] = 0;
      }
    }
    for (int at = 0; at < n; at += cap, ++list) {
      map.list_expert[list] = static_cast<uint16_t>(first + j);
      map.list_first[list] = static_cast<uint16_t>(position + at);
      map.list_count[list] = static_cast<uint16_t>(min(cap, n - at));
    }
    position += n;
  }
  __syncwarp();
  // Segments: runs of lists whose token rows fit in shared memory together; one in nearly all cases.
  if (lane < 2) {
    const DecodePhase& f = args.phase[lane];
    const int num = lists * f.splits.divisor, total = num * f.blocks_per_expert.divisor;
    const int stride = f.split_k * 2 + 16 + f.group_bytes;
    const int rows_cap =
        lane == 0 && args.by_token ? 1 << 20 : min(args.rows_bytes / stride - 1, kSegmentRows);
    int a = args.grid.Div(total * blockIdx.x);
    const int b = args.grid.Div(total * (blockIdx.x + 1));
    int n = 0;
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
      map.segment_list[lane * kMaxSegments + n] = v0;
      map.segment_block[lane * kMaxSegments + n] = a - v0 * f.blocks_per_expert.divisor;
      map.segment_size[lane * kMaxSegments + n++] = end - a;
      a = end;
    }
    map.num_segments[lane] = (args.phases >> lane & 1) != 0 ? n : 0;
  }
}

}  // namespace fusedmoe::cuda
