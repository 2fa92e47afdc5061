#pragma once

#include <type_traits>

#include "experts/cuda/decode/decode_exchange_sm90.cuh"
#include "experts/cuda/decode/decode_map_sm90.cuh"
#include "experts/cuda/decode/decode_operands_sm90.cuh"
#include "experts/cuda/decode/decode_rows_sm90.cuh"
#include "experts/cuda/decode/decode_work_sm90.cuh"

/// Decode: the whole layer in one persistent launch, one CTA of 16 warps an SM, weights read once.
///
///   route map   every CTA sorts the routes by expert: a counting sort of 1 us, cheaper than a launch;
///               lists = up to list_tokens routes of one expert               decode_map_sm90.cuh
///   token rows  to shared memory                                             decode_rows_sm90.cuh
///               quantized on the way                                         decode_operands_sm90.cuh
///   gate-up     CTA: a contiguous range of (list, row block);
///               warp: an even share of its chunks                            decode_work_sm90.cuh
///   hand-over   no barrier; only CTAs that share an expert wait for
///               each other                                                   decode_exchange_sm90.cuh
///   down        the same over (list, split of K, row block)
///   combine     the sum over routes, as they come
///
///   warp:  ring  | slot 0: chunk | slot 1: chunk | ...   chunk = SPC slabs of a row block, one bulk copy
///          One lane refills the slot just read. The ring runs over blocks, experts and from gate-up into
///          down, so the stream never stops: down weights arrive while the CTA waits for activations.
///   MMA    16 x 8 x 16: rows are weights, columns tokens. Unused columns read a row of zeros: repeating a
///          token instead cost 10-14 % through power (H200, dsv3 M=8: 175 -> 203 us).
///
/// A row block that a warp boundary cuts is added in warp order through shared memory: results do not depend
/// on timing. All CTAs must be resident: the grid is at most one CTA an SM.
///
/// Measured choices (H200, NVFP4, on the first form of this kernel): 16 warps (8: 151, 12: 129, 16: 118 us,
/// qwen3-30b M=64); 2 ring slots (4 slots 46.6, 2 slots 43.8 us, M=8: a deeper ring only lengthens the
/// queue that token rows wait in); one slot in flight before the token rows are fetched, the rest behind
/// them (M=1: 20.0 -> 15.6 us).
namespace fusedmoe::cuda {

/// Before the grid may be waited for: the barriers of a warp's ring, zeros to count in, and to L2 the fp32
/// scales, which are wanted only in the epilogues, each time at the end of a dependent chain.
template <bool kOperands>
__device__ __forceinline__ void PrepareDecode(const DecodeArguments& args, const DecodeMap& map,
                                              uint32_t barriers, int arrivals, int routes) {
  const int tid = threadIdx.x;
  if ((tid & 31) == 0) {
#pragma unroll 1
    for (int s = 0; s < args.slots; ++s) {
      BarrierInit(barriers + 8 * s, arrivals);
    }
  }
  BarrierInitFence();
  if (routes > kFewRoutes) {
    const int route_chunks = (routes + 31) / 32;
    for (int i = tid; i < (route_chunks * args.num_local_experts + 1) / 2; i += kDecodeThreads) {
      reinterpret_cast<uint32_t*>(map.histogram)[i] = 0;
    }
  }
  if (kOperands && tid == 0) {
    *map.amax = 0;
  }
  if (tid < (args.num_local_experts * 2 + 31) / 32) {
    const int parts = args.gated ? 2 : 1;
    PrefetchL2(args.phase[0].tensor_scale + min(32 * tid, args.num_local_experts * parts - 1));
    PrefetchL2(args.phase[1].tensor_scale + min(32 * tid, args.num_local_experts - 1));
  }
}

/// Asks for the rows of all tokens, where a CTA stages them once: kOperands as they came, to be quantized
/// from `tokens`, else to `rows`.
template <bool kOperands>
__device__ __forceinline__ void AskForTokens(const DecodeArguments& args, uint8_t* tokens, uint8_t* rows,
                                             int token_rows) {
  if constexpr (kOperands) {
    if (args.stages_tokens) {
      const ActivationRows& source = args.source[0];
      const int pieces = static_cast<int>(source.cols) / 8;
      StageTokens(tokens, TokenStride(args), source.values, source.row_stride, args.num_tokens, pieces,
                  pieces);
    }
  } else if (args.by_token) {
    const DecodePhase& f = args.phase[0];
    StageTokens(rows, f.split_k * 2 + 16, f.rows, f.row_stride, token_rows, f.cols / 8, f.split_k / 8);
  }
}

/// The lists of the call and the segments of this CTA. `expert`: of the thread's route, -1: none. `rank`: of
/// many routes, the thread's among those of its warp and expert.
template <bool kOperands>
__device__ __forceinline__ void MapRoutes(const DecodeArguments& args, const DecodeMap& map, int routes,
                                          int expert, int& rank) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  int lists = 0;
  if (routes > kFewRoutes) {
    lists = SortMany(args, map, routes, expert, rank);
  } else if (warp == 0) {
    lists = SortFew(args, map, expert);
  }
  if (warp == 0) {
    __syncwarp();
    if (lane < 2) {
      CutSegments(args, map, lists, lane);
    }
    if (kOperands && lane == 2) {
      *map.num_lists = lists;
    }
  }
}

/// What a chunk of each GEMM has: the sizes of its slabs in memory, of what one bulk copy brings, and of a
/// ring slot, which holds one of either. kScaleBytes of a slot come from where scales stand apart.
template <FragmentFormat kGateUp, FragmentFormat kDown, int SPC>
struct DecodeChunks {
  static constexpr bool kAlike = kGateUp == kDown;
  static constexpr int kDownSlabs = kAlike ? SPC : DecodeChunkSlabs(kDown).first;
  template <FragmentFormat kFormat>
  static constexpr int kSlabBytes = Fragments<kFormat>::kUnitStride / Fragments<kFormat>::kUnitSlabs;
  template <FragmentFormat kFormat, int kSlabs>
  static constexpr int kBytes = kSlabs / Fragments<kFormat>::kUnitSlabs* Fragments<kFormat>::kUnitBytes;
  static constexpr int kScaleBytes = kBytes<kGateUp, SPC> - SPC * kSlabBytes<kGateUp>;
  static constexpr int kSlotBytes =
      kBytes<kGateUp, SPC> > kBytes<kDown, kDownSlabs> ? kBytes<kGateUp, SPC> : kBytes<kDown, kDownSlabs>;
  static_assert(kScaleBytes == 0 || (kAlike && kScaleBytes == 16 && SPC == Fragments<kGateUp>::kUnitSlabs),
                "in its slot a unit is whole");
  static_assert(kAlike || kDownSlabs * kSlabBytes<kDown> == kBytes<kDown, kDownSlabs>,
                "scales of down stand with its codes");
  static_assert(Fragments<kGateUp>::kUnitBytes % 16 == 0 && Fragments<kDown>::kUnitBytes % 16 == 0,
                "bulk copies move whole 16 bytes");

  __device__ __forceinline__ static constexpr int SlabBytes(int phase) {
    return kAlike || phase == 0 ? kSlabBytes<kGateUp> : kSlabBytes<kDown>;
  }
  __device__ __forceinline__ static constexpr int StreamBytes(int phase) {
    return kAlike || phase == 0 ? SPC * kSlabBytes<kGateUp> : kDownSlabs * kSlabBytes<kDown>;
  }
};

/// The ring slot that a warp reads next.
struct DecodeSlot {
  const uint8_t* units;
  int at = 0, parity = 0;
};

/// A warp's chunks c0 .. c1 - 1 of a segment. `own`: it has the first chunk of the row block at hand.
template <typename Work, typename Stream>
__device__ __forceinline__ void MultiplyChunks(const DecodeArguments& args, Work& work, Stream& stream,
                                               const uint8_t* ring, uint32_t barriers, DecodeSlot& slot,
                                               int c0, int c1, bool& own) {
  const DecodePhase& f = work.f;
#pragma unroll 1
  for (int c = c0; c < c1; ++c) {
    const bool whole = work.chunk < work.whole_chunks;
    if (whole || work.chunk < work.chunks) {
      stream.Await(barriers + 8 * slot.at, slot.parity);
      work.MultiplyChunk(slot.units, whole);
      __syncwarp();
      stream.Issue(args.slots);
      slot.units += Stream::kSlotBytes;
      if (++slot.at == args.slots) {
        slot.at = 0, slot.parity ^= 1, slot.units = ring;
      }
    }
    if (++work.chunk == f.chunks.divisor) {
      work.Fold();
      if (own) {
        work.Epilogue();
      } else {
        work.PutSums();
      }
      work.Clear();
      work.chunk = 0;
      own = true;
      if (c + 1 < c1 && ++work.block == f.blocks_per_expert.divisor) {
        // By the count of the list before: ptxas 13.0 read row_offset[list + 2] where one of the kernels
        // (INT4 in groups of 128, lists of 8) looked the next list up.
        work.block = 0, ++work.list, work.first_row += work.count;
        work.OpenList();
      }
    }
  }
}

/// All threads, behind the sums of a gate-up segment: CTAs that wait for its lists are told.
__device__ __forceinline__ void ReportLists(const DecodeArguments& args, const DecodeSegment& segment,
                                            uint32_t tag) {
  const DecodePhase& f = args.phase[0];
  const int tid = threadIdx.x;
  __syncthreads();
  if (tid < segment.num_lists) {
    const int first = max(tid * f.blocks_per_expert.divisor, segment.block0);
    const int last = min((tid + 1) * f.blocks_per_expert.divisor, segment.block0 + segment.num_blocks);
    AddRelease(ListCounters(args, tag, false) + segment.list0 + tid, last - first);
  }
}

/// kOperands: DecodePlan.makes_operands. SPC: slabs of a chunk of gate and up, and of down where both have
/// one format.
template <FragmentFormat kGateUp, FragmentFormat kDown, bool kOperands, int SPC, int NT>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    DecodeKernel(const __grid_constant__ DecodeArguments args) {
  using Chunks = DecodeChunks<kGateUp, kDown, SPC>;
  extern __shared__ __align__(128) uint8_t shared[];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int routes = args.num_tokens * args.top_k.divisor;
  const DecodeShared& at = args.shared;
  const DecodeMap map(shared, at, routes);
  const uint8_t* const ring = shared + warp * args.slots * Chunks::kSlotBytes;
  uint8_t* const rows = shared + at.rows;
  uint8_t* const tokens = shared + at.tokens;  // kOperands: as they came
  // Rows of by_token.
  const int token_rows = args.top_k.divisor == args.routes_per_row.divisor ? args.num_tokens : routes;
  float* const sums = reinterpret_cast<float*>(shared + at.partial_sums);
  const uint32_t barriers = SharedAddress(shared + at.barriers) + warp * args.slots * 8;

  Stamp(args, 8);
  PrepareDecode<kOperands>(args, map, barriers, Chunks::kScaleBytes == 0 ? 1 : 2, routes);
  __syncthreads();
  GridLaunchNext();
  GridWait();
  Stamp(args, 0);
  if (tid < (routes + 31) / 32 && args.topk_weights != nullptr) {
    PrefetchL2(args.topk_weights + 32 * tid);
  }

  // Loads first, answers later: the routes and the tag come while the token rows are asked for.
  static_assert(kDecodeThreads >= kMaxRoutes, "a thread a route, a thread a counter");
  const bool has_route = tid < routes;
  const uint64_t departures = tid == kDecodeThreads - 1 ? LoadDepartures(args) : 0;
  const int loaded = has_route ? LoadRoute(args, tid) : -1;
  AskForTokens<kOperands>(args, tokens, rows, token_rows);
  if (tid == kDecodeThreads - 1) {
    *map.tag = LaunchTag(args, departures);
  }
  const int expert = has_route ? RouteExpert(args, tid, loaded) : -1;
  int rank = 0;
  MapRoutes<kOperands>(args, map, routes, expert, rank);
  __syncthreads();
  const uint32_t tag = *map.tag;

  WeightStream<Chunks> stream{args, map, SharedAddress(ring), barriers, EvictFirstPolicy(), warp, lane};
  stream.Issue(
      args.slots);  // the rest once the token rows are on their way: they must not queue behind a full ring
  if (routes > kFewRoutes && expert >= 0) {
    map.route_of[map.expert_first[expert] + map.histogram[warp * args.num_local_experts + expert] + rank] =
        static_cast<uint16_t>(tid);
  }
  if (blockIdx.x == 0) {
    ListCounters(args, tag, true)[tid] = 0;
    if (kOperands && tid == 0) {
      *MidAmax(args, tag, true) = 0;
    }
  }
  Stamp(args, 1);

  DecodeSlot slot{ring};
  bool primed = false, knows_amax = false;
  const auto prime = [&]() {
    if (!primed) {
      primed = true;
      for (int s = 1; s < args.slots; ++s) {
        stream.Issue(args.slots);
      }
    }
  };
  const auto multiply = [&](auto work_type, int phase) {
    using Work = typename decltype(work_type)::type;
    using Format = typename Work::Format;
    const DecodePhase& f = args.phase[phase];
    const bool tagged = phase == 1 && args.tagged_mid;
#pragma unroll 1
    for (int s = 0; s < map.num_segments[phase]; ++s) {
      const DecodeSegment segment = MakeSegment(args, map, phase, s);
      // ---- token rows of this segment to shared memory
      // The first token rows are asked for in CTAs without gate-up work too: they land before others follow.
      CopyAsyncWaitAll();
      __syncthreads();  // the map (route_of), or the last segment's readers
      if (!segment.by_token) {
        const bool by_call = kOperands && args.quantizer.dynamic_tensor_scale;
        ListRows<kOperands>(args, map, segment, rows);
        if (phase == 1 && !tagged) {
          WaitForLists(args, map, segment, tag, by_call);
        }
        if (phase == 0 && by_call && !knows_amax) {
          knows_amax = true;
          FindTokensAmax(args, map, tokens);
        }
        __syncthreads();
        if constexpr (kOperands) {
          prime();  // staged tokens have come; others wait behind the ring
          MakeRows<Format::kF16>(args, map, segment, tag, tokens, rows,
                                 Work::kRaw ? Format::kRawTokens : 1.0F);
        } else if (tagged) {
          ReceiveMid(args, map, f, tag, rows, segment.stride);
        } else {
          StageRows(map, f, segment.stride, rows);
        }
      }
      const int zero_row = segment.by_token ? token_rows : *map.num_rows;
      StageZeroRow(f, segment.stride, rows + zero_row * segment.stride);
      if constexpr (!kOperands) {
        prime();
      }
      CopyAsyncWaitAll();
      __syncthreads();

      // ---- this warp's chunks
      const int total = segment.num_blocks * f.chunks.divisor;
      const int c0 = total * warp / kDecodeWarps, c1 = total * (warp + 1) / kDecodeWarps;
      Work work{args, map, f, segment, rows, sums, tag, zero_row, warp, lane, lane >> 2, lane & 3};
      work.block = f.chunks.Div(c0), work.chunk = c0 - work.block * f.chunks.divisor;
      work.block += segment.block0;
      work.list = f.blocks_per_expert.Div(work.block);
      work.block -= work.list * f.blocks_per_expert.divisor;
      bool own = work.chunk == 0;
      Stamp(args, 2 + 2 * phase);
      if (c0 < c1) {
        work.first_row = segment.by_token ? 0 : map.row_offset[work.list];
        work.OpenList();
      }
      MultiplyChunks(args, work, stream, ring, barriers, slot, c0, c1, own);

      // ---- row blocks that several warps share: added in warp order by the warp that has the first chunk
      if (work.chunk != 0) {
        work.Fold();
        if (!own) {
          work.PutSums();
        }
      }
      __syncthreads();
      Stamp(args, 3 + 2 * phase);
      if (work.chunk != 0 && own && c0 < c1) {
        const int end = c1 - work.chunk + f.chunks.divisor;
        for (int w = warp + 1; w < kDecodeWarps && total * w / kDecodeWarps < end; ++w) {
          work.AddSums(w);
        }
        work.Epilogue();
      }
      if (phase == 0 && !args.tagged_mid) {
        ReportLists(args, segment, tag);
      }
    }
  };
  using GateUpWork = DecodeWork<kGateUp, kOperands, SPC, NT>;
  if constexpr (Chunks::kAlike) {
#pragma unroll 1
    for (int phase = 0; phase < 2; ++phase) {
      multiply(std::type_identity<GateUpWork>(), phase);
    }
  } else {
    multiply(std::type_identity<GateUpWork>(), 0);
    multiply(std::type_identity<DecodeWork<kDown, kOperands, Chunks::kDownSlabs, NT>>(), 1);
  }

  Stamp(args, 6);
  CombineRoutes(args, map);
  Stamp(args, 7);
  if (tid == 0) {
    CountDeparture(args);
  }
}

}  // namespace fusedmoe::cuda
