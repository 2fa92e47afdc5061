#pragma once

#include <type_traits>

#include "experts/cuda/activate.cuh"
#include "experts/cuda/decode_exchange_sm90.cuh"
#include "experts/cuda/decode_map_sm90.cuh"
#include "experts/cuda/fragments.cuh"

/// Decode: the whole layer in one persistent launch, one CTA of 16 warps an SM, weights read once.
///
///   route map   every CTA sorts the routes by expert: a counting sort of 1 us is cheaper than a launch
///   before
///               lists = up to list_tokens routes of one expert
///   gate-up     CTA: a contiguous range of (list, row block);  warp: an even share of its chunks
///   hand-over   no barrier: decode_exchange_sm90.cuh; only CTAs that share an expert wait for each other
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
/// queue that token rows wait in); one slot in flight before the token rows are
/// fetched, the rest behind them (M=1: 20.0 -> 15.6 us).
namespace fusedmoe::cuda {

template <FragmentFormat kFormat, int SPC, int NT>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    DecodeKernel(const __grid_constant__ DecodeArguments args) {
  using Format = Fragments<kFormat>;
  constexpr int kSlabBytes = Format::kUnitBytes / Format::kUnitSlabs;
  constexpr int kChunkBytes = SPC * kSlabBytes;
  constexpr int kStep = Format::kGroupSlabs > 1 ? Format::kGroupSlabs : 1;  // slabs handled together
  static_assert(SPC % kStep == 0 && SPC % Format::kUnitSlabs == 0, "a chunk holds whole units");
  static_assert(Format::kUnitBytes % 16 == 0, "bulk copies move whole 16 bytes");
  constexpr bool kHalves = Format::kHalves;
  constexpr bool kGrouped = Format::kPlace == ScalePlace::kAccumulator || kHalves;
  extern __shared__ __align__(128) uint8_t shared[];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int r = lane >> 2, q = lane & 3;
  const int routes = args.num_tokens * args.top_k.divisor, route_chunks = (routes + 31) / 32;
  const DecodeShared& at = args.shared;
  const DecodeMap map(shared, at, routes);
  const uint8_t* const ring = shared + warp * args.slots * kChunkBytes;
  uint8_t* const xs = shared + at.rows;
  float* const sums = reinterpret_cast<float*>(shared + at.partial_sums);
  const uint32_t barriers = SharedAddress(shared + at.barriers) + warp * args.slots * 8;

  Stamp(args, 8);
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < args.slots; ++s) {
      BarrierInit(barriers + 8 * s, 1);
    }
  }
  BarrierInitFence();
  if (routes > kFewRoutes) {
    for (int i = tid; i < (route_chunks * args.num_local_experts + 1) / 2; i += kDecodeThreads) {
      reinterpret_cast<uint32_t*>(map.histogram)[i] = 0;
    }
  }
  // The fp32 scales are wanted only in the epilogues, each time at the end of a dependent chain: to L2 now.
  if (tid < (args.num_local_experts * 2 + 31) / 32) {
    const int parts = args.gated ? 2 : 1;
    PrefetchL2(args.phase[0].tensor_scale + min(32 * tid, args.num_local_experts * parts - 1));
    PrefetchL2(args.phase[1].tensor_scale + min(32 * tid, args.num_local_experts - 1));
  }
  __syncthreads();
  GridLaunchNext();
  GridWait();
  Stamp(args, 0);
  if (tid < route_chunks && args.topk_weights != nullptr) {
    PrefetchL2(args.topk_weights + 32 * tid);
  }

  // Loads first, answers later: the routes and the tag come while the token rows are asked for.
  static_assert(kDecodeThreads >= kMaxRoutes, "a thread a route, a thread a counter");
  const bool has_route = tid < routes;
  const uint64_t departures = tid == kDecodeThreads - 1 ? LoadDepartures(args) : 0;
  const int loaded = has_route ? LoadRoute(args, tid) : -1;
  // Pieces of 16 bytes from global memory; beyond what stands there, zeros. The caller waits.
  const auto stage_row = [&](int row, int stride, const uint4* from, int first, int step, int pieces,
                             int all) {
    const uint32_t to = SharedAddress(xs) + row * stride;
    for (int c = first; c < pieces; c += step) {
      CopyAsync16(to + c * 16, from + c);
    }
    for (int c = pieces + first; c < all; c += step) {
      *reinterpret_cast<uint4*>(xs + row * stride + c * 16) = uint4{0, 0, 0, 0};
    }
  };
  if (args.by_token && (args.phases & 1) != 0) {
    const DecodePhase& f = args.phase[0];
    const int all = f.split_k / 8, pieces = f.cols / 8, stride = f.split_k * 2 + 16 + f.group_bytes;
    const int rows = args.top_k.divisor == args.routes_per_row.divisor ? args.num_tokens : routes;
    const auto* base = static_cast<const uint4*>(f.rows);
    const bool by_warp = rows >= kDecodeWarps / 2;
    for (int row = by_warp ? warp : 0; row < rows; row += by_warp ? kDecodeWarps : 1) {
      stage_row(row, stride, base + static_cast<int64_t>(row) * (f.row_stride / 8), by_warp ? lane : tid,
                by_warp ? 32 : kDecodeThreads, pieces, all);
      if (f.group_bytes != 0) {
        for (int g = by_warp ? lane : tid; g < f.split_k / 128; g += by_warp ? 32 : kDecodeThreads) {
          *reinterpret_cast<float*>(xs + row * stride + f.split_k * 2 + 16 + g * 4) =
              g < f.group_stride ? __ldcg(f.group_scale + static_cast<int64_t>(row) * f.group_stride + g)
                                 : 0.0F;
        }
      }
    }
  }
  if (tid == kDecodeThreads - 1) {
    *map.tag = LaunchTag(args, departures);
  }
  const int expert = has_route ? RouteExpert(args, tid, loaded) : -1;
  int lists = 0, rank = 0;
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
  }
  __syncthreads();
  const uint32_t tag = *map.tag;

  WeightStream<kChunkBytes, kSlabBytes> stream{args, map, SharedAddress(ring), barriers, EvictFirstPolicy(),
                                               warp, lane};
  stream.Issue(
      args.slots);  // the rest once the token rows are on their way: they must not queue behind a full ring
  if (routes > kFewRoutes && expert >= 0) {
    map.route_of[map.expert_first[expert] + map.histogram[warp * args.num_local_experts + expert] + rank] =
        static_cast<uint16_t>(tid);
  }
  if (blockIdx.x == 0) {
    ListCounters(args, tag, true)[tid] = 0;
  }
  Stamp(args, 1);

  int slot = 0, parity = 0;
  const uint8_t* units = ring;  // of the slot
  bool primed = false;
#pragma unroll 1
  for (int phase = 0; phase < 2; ++phase) {
    const DecodePhase& f = args.phase[phase];
    const int stride = f.split_k * 2 + 16 + f.group_bytes;  // 16 mod 128: rows fall on different banks
    const bool by_token = phase == 0 && args.by_token, tagged = phase == 1 && args.tagged_mid;
    const FastDiv routes_per_row = phase == 0 ? args.routes_per_row : FastDiv{};
#pragma unroll 1
    for (int segment = 0; segment < map.num_segments[phase]; ++segment) {
      const int index = phase * kMaxSegments + segment;
      const int list0 = map.segment_list[index], num_blocks = map.segment_size[index];
      const int block0 = map.segment_block[index];
      const int num_lists = f.blocks_per_expert.Div(block0 + num_blocks + f.blocks_per_expert.divisor - 1);
      // ---- token rows of this segment to shared memory
      // The first token rows are asked for in CTAs without gate-up work too: they land before others follow.
      CopyAsyncWaitAll();
      __syncthreads();  // the map (route_of), or the last segment's readers
      if (!by_token) {
        if (tid < num_lists * args.list_tokens.divisor) {
          const int v = args.list_tokens.Div(tid), n = tid - v * args.list_tokens.divisor;
          int offset = 0;
          for (int before = 0; before < v; ++before) {
            offset += map.list_count[f.splits.Div(list0 + before)];
          }
          const int l = f.splits.Div(list0 + v), split = list0 + v - l * f.splits.divisor;
          const int count = map.list_count[l];
          if (n == 0) {
            map.row_offset[v] = offset;
          }
          if (n < count) {
            const int row = routes_per_row.Div(map.route_of[map.list_first[l] + n]);
            const int shift = tagged ? 2 : 3;  // of elements to pieces
            map.row_source[offset + n] =
                static_cast<uint32_t>(row * (f.row_stride >> shift) + split * (f.split_k >> shift));
            map.row_pieces[offset + n] =
                static_cast<uint16_t>(max(0, min(f.split_k, f.cols - split * f.split_k)) >> shift);
          }
          if (v == num_lists - 1 && n == 0) {
            *map.num_rows = offset + count;
          }
        }
        if (phase == 1 && args.phases == 3 && !tagged && tid < num_lists) {
          const uint32_t* done = ListCounters(args, tag, false) + f.splits.Div(list0 + tid);
          while (LoadAcquire(done) < static_cast<uint32_t>(args.phase[0].blocks_per_expert.divisor)) {
          }
        }
        __syncthreads();
        if (tagged) {
          ReceiveMid(args, map, f, tag, xs, stride);
        }
        for (int row = warp; row < *map.num_rows && !tagged; row += kDecodeWarps) {
          const auto* from = static_cast<const uint4*>(f.rows) + map.row_source[row];
          const int pieces = map.row_pieces[row];
          stage_row(row, stride, from, lane, 32, pieces, f.split_k / 8);
          if (f.group_bytes != 0) {
            const int source = static_cast<int>(map.row_source[row]) / (f.row_stride / 8);
            const int g0 = (static_cast<int>(map.row_source[row]) - source * (f.row_stride / 8)) / 16;
            for (int g = lane; g < f.split_k / 128; g += 32) {
              *reinterpret_cast<float*>(xs + row * stride + f.split_k * 2 + 16 + g * 4) =
                  g0 + g < f.group_stride
                      ? __ldcg(f.group_scale + static_cast<int64_t>(source) * f.group_stride + g0 + g)
                      : 0.0F;
            }
          }
        }
      }
      const int zero_row =
          by_token ? (args.top_k.divisor == args.routes_per_row.divisor ? args.num_tokens : routes)
                   : *map.num_rows;
      for (int c = tid; c < (stride - 16) / 16; c += kDecodeThreads) {
        *reinterpret_cast<uint4*>(xs + zero_row * stride + c * 16 + (c >= f.split_k / 8 ? 16 : 0)) =
            uint4{0, 0, 0, 0};
      }
      if (!primed) {
        primed = true;
        for (int s = 1; s < args.slots; ++s) {
          stream.Issue(args.slots);
        }
      }
      CopyAsyncWaitAll();
      __syncthreads();

      // ---- this warp's chunks
      const int total = num_blocks * f.chunks.divisor;
      const int c0 = total * warp / kDecodeWarps, c1 = total * (warp + 1) / kDecodeWarps;
      int block = f.chunks.Div(c0), chunk = c0 - block * f.chunks.divisor;
      block += block0;
      int list = f.blocks_per_expert.Div(block);
      block -= list * f.blocks_per_expert.divisor;
      bool own = chunk == 0;  // this warp has the first chunk of the row block
      float acc[NT][4] = {};
      float odd[NT][4] = {};  // even and odd k-steps: two chains of MMAs
      const uint8_t* x[NT];
      int count = 0, first_row = 0;
      int whole_chunks = 0, chunks = 0;  // that the row blocks at hand have: of SPC slabs, and with the tail
      // What the epilogues of a list want, loaded when the list is opened: at the end of a row block they
      // would be a chain of latencies.
      float list_scale[2] = {}, factor[NT][2];
      int list_to[NT][2];               // where this lane's two columns go: elements of mid, or of partial
      const auto row_of = [&](int n) {  // staged row of the list's token n
        const int l = f.splits.Div(list0 + list);
        return n >= count ? zero_row
               : by_token ? routes_per_row.Div(map.route_of[map.list_first[l] + n])
                          : first_row + n;
      };
      const auto open_list = [&]() {
        const int l = f.splits.Div(list0 + list), split = list0 + list - l * f.splits.divisor;
        count = map.list_count[l];
        const int end = f.total_chunks - split * f.chunks.divisor;  // chunks from this split's first on
        chunks = min(f.chunks.divisor, end);
        whole_chunks = end <= f.chunks.divisor && f.tail_slabs < SPC ? end - 1 : chunks;
#pragma unroll
        for (int t = 0; t < NT; ++t) {
          x[t] = xs + row_of(r + 8 * t) * stride + q * 32;
          const int first = map.list_first[l];
          uint32_t route[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            route[c] = map.route_of[first + min(8 * t + 2 * q + c, count - 1)];
            factor[t][c] = 1.0F;
            list_to[t][c] =
                phase == 0 ? static_cast<int>(route[c]) * args.mid_stride
                           : (static_cast<int>(route[c]) * f.splits.divisor + split) * args.partial_stride;
          }
          const float* factors = phase == 1 ? args.topk_weights : f.token_scale;
          if (factors != nullptr) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              factor[t][c] = __ldg(factors + (phase == 1 ? static_cast<int>(route[c])
                                                         : routes_per_row.Div(static_cast<int>(route[c]))));
            }
          }
        }
        const int expert = map.list_expert[l], parts = phase == 0 && args.gated ? 2 : 1;
        list_scale[0] = __ldg(f.tensor_scale + expert * parts);
        list_scale[1] = __ldg(f.tensor_scale + expert * parts + parts - 1);
      };
      // What follows the products of a row block. It comes after every third chunk where K of down is 768:
      // with the questions of the general one it was 4 % of qwen3-30b-a3b at M=8 and 64.
      const auto plain_epilogue = [&]() {
#pragma unroll
        for (int t = 0; t < NT; ++t) {
          if (8 * t >= count) {
            break;
          }
          const bool there[2] = {8 * t + 2 * q < count, 8 * t + 2 * q + 1 < count};
          if (phase == 1) {
            float* const to = args.partial + kFragmentRows * block + r;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              if (there[c]) {
                const float scale = list_scale[0] * factor[t][c];
                SendPartial(to + list_to[t][c], acc[t][c] * scale);
                SendPartial(to + list_to[t][c] + 8, acc[t][c + 2] * scale);
              }
            }
            continue;
          }
          const int column = static_cast<int>(IntermediateColumn(block, r));
          float value[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            value[c] = FastSwish(acc[t][c] * list_scale[0], 1.0F) * (acc[t][c + 2] * list_scale[1]);
          }
          if (args.tagged_mid) {
            SendMid<Format::kF16>(args, tag, list_to[t], there, column, value[0], value[1]);
            continue;
          }
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (there[c]) {
              PutMid<Format::kF16>(args, list_to[t][c] + column, value[c]);
            }
          }
        }
      };
      const auto epilogue = [&]() {
        if (args.plain) {
          plain_epilogue();
          return;
        }
        const int l = f.splits.Div(list0 + list), split = list0 + list - l * f.splits.divisor;
        const int expert = map.list_expert[l];
        const bool gated = phase == 0 && args.gated;
        const int parts = gated ? 2 : 1;
        // Rows r and r + 8 of the block: which part, which row of the matrix.
        const int row_a = phase == 1 ? kFragmentRows * block + r
                          : gated    ? static_cast<int>(IntermediateColumn(block, r))
                                     : static_cast<int>(IntermediateColumn(2 * block, r));
        const int row_b = phase == 1 ? row_a + 8
                          : gated    ? row_a
                                     : static_cast<int>(IntermediateColumn(2 * block + 1, r));
        float scale_a = list_scale[0], scale_b = list_scale[1];
        const int64_t at_a = static_cast<int64_t>(expert) * parts * f.padded_rows + row_a;
        const int64_t at_b = static_cast<int64_t>(expert * parts + parts - 1) * f.padded_rows + row_b;
        float bias_a = 0, bias_b = 0;
        if (f.row_scale != nullptr) {
          scale_a *= __ldg(f.row_scale + at_a);
          scale_b *= __ldg(f.row_scale + at_b);
        }
        if (f.bias != nullptr && split == 0) {
          bias_a = __ldg(f.bias + at_a);
          bias_b = __ldg(f.bias + at_b);
        }
#pragma unroll
        for (int t = 0; t < NT; ++t) {
          if (8 * t >= count) {
            break;
          }
          const bool there[2] = {8 * t + 2 * q < count, 8 * t + 2 * q + 1 < count};
          float value[4];
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float scale = c < 2 ? scale_a : scale_b;
            if (phase == 0) {
              scale *= factor[t][c % 2];
            } else if (f.token_scale != nullptr) {
              scale *= __ldg(f.token_scale +
                             map.route_of[map.list_first[l] + min(8 * t + 2 * q + c % 2, count - 1)]);
            }
            value[c] = acc[t][c] * scale + (c < 2 ? bias_a : bias_b);
          }
          if (phase == 1) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              if (there[c] && row_a < args.partial_cols) {
                SendPartial(args.partial + list_to[t][c] + row_a, value[c] * factor[t][c]);
              }
              if (there[c] && row_a + 8 < args.partial_cols) {
                SendPartial(args.partial + list_to[t][c] + row_a + 8, value[c + 2] * factor[t][c]);
              }
            }
            continue;
          }
          if (args.plain_silu) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              value[c] = FastSwish(value[c], 1.0F) * value[c + 2];
            }
          } else {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              value[c] = ActivateAny(args.activation, value[c], gated ? value[c + 2] : 0.0F);
              if (!gated) {
                value[c + 2] = ActivateAny(args.activation, value[c + 2], 0.0F);
              }
            }
          }
          if (args.tagged_mid) {
            SendMid<Format::kF16>(args, tag, list_to[t], there, row_a, value[0], value[1]);
            if (!gated) {
              SendMid<Format::kF16>(args, tag, list_to[t], there, row_b, value[2], value[3]);
            }
            continue;
          }
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (there[c]) {
              PutMid<Format::kF16>(args, list_to[t][c] + row_a, value[c]);
              if (!gated) {
                PutMid<Format::kF16>(args, list_to[t][c] + row_b, value[c + 2]);
              }
            }
          }
        }
      };
      const auto fold = [&]() {
        if constexpr (!kGrouped) {
#pragma unroll
          for (int t = 0; t < NT; ++t) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              acc[t][j] += odd[t][j], odd[t][j] = 0.0F;
            }
          }
        }
      };
      const auto put_head = [&]() {
#pragma unroll
        for (int t = 0; t < NT; ++t) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            sums[(warp * NT * 4 + t * 4 + c) * 32 + lane] = acc[t][c];
          }
        }
      };
      // kStep slabs from slab `s` of the chunk, for the first nt * 8 tokens of the list.
      const auto multiply = [&](auto nt_constant, const uint8_t* units, int s) {
        constexpr int nt = decltype(nt_constant)::value;
        [[maybe_unused]] float group[nt][4];
        [[maybe_unused]] LaneScales scales;
        [[maybe_unused]] float half_scale[2][2];
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          typename Format::Codes codes;
          Format::LoadCodes(units, s + i, lane, codes);
          if constexpr (kHalves) {
            Format::LoadHalves(units, s + i, lane, scales, half_scale);
          } else if (i == 0) {
            Format::template LoadScales<false>(units, s + i, lane, args.half_is_f16, scales);
          }
          uint4 b[nt][2];
#pragma unroll
          for (int t = 0; t < nt; ++t) {
            const uint8_t* from = x[t] + (chunk * SPC + s + i) * 128;
            b[t][0] = *reinterpret_cast<const uint4*>(from);
            b[t][1] = *reinterpret_cast<const uint4*>(from + 16);
          }
          if constexpr (kGrouped) {
            if (i == 0) {
#pragma unroll
              for (int t = 0; t < nt; ++t) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                  group[t][c] = odd[t][c] = 0.0F;
                }
              }
            }
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            uint32_t a[4];
            Format::template Expand<false, kHalves>(codes, j, scales, a);
#pragma unroll
            for (int t = 0; t < nt; ++t) {
              const uint4& v = b[t][j / 2];
              const uint32_t b0 = j % 2 != 0 ? v.z : v.x, b1 = j % 2 != 0 ? v.w : v.y;
              if constexpr (kHalves) {
                const bool second = q >= 2;
                Mma16816<Format::kF16>(group[t], a, second ? 0 : b0, second ? 0 : b1);
                Mma16816<Format::kF16>(odd[t], a, second ? b0 : 0, second ? b1 : 0);
              } else {
                float(&sum)[4] = *(j % 2 != 0 ? &odd[t] : kGrouped ? &group[t] : &acc[t]);
                Mma16816<Format::kF16>(sum, a, b0, b1);
              }
            }
          }
        }
        if constexpr (kGrouped) {  // multiply and add once a group, in fp32
#pragma unroll
          for (int t = 0; t < nt; ++t) {
            float token[2] = {1.0F, 1.0F};
            if (Format::kTokenGroups && f.group_bytes != 0) {
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                token[c] = *reinterpret_cast<const float*>(xs + row_of(8 * t + 2 * q + c) * stride +
                                                           f.split_k * 2 + 16 + (chunk * SPC + s) / 2 * 4);
              }
            }
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              if constexpr (kHalves) {
                acc[t][c] += group[t][c] * half_scale[0][c / 2] + odd[t][c] * half_scale[1][c / 2];
              } else {
                acc[t][c] += (group[t][c] + odd[t][c]) * (scales.row[c / 2] * token[c % 2]);
              }
            }
          }
        }
      };
      Stamp(args, 2 + 2 * phase);
      if (c0 < c1) {
        first_row = by_token ? 0 : map.row_offset[list];
        open_list();
      }
#pragma unroll 1
      for (int c = c0; c < c1; ++c) {
        const bool whole = chunk < whole_chunks;
        if (whole || chunk < chunks) {
          stream.Await(barriers + 8 * slot, parity);
          const auto slabs = [&](auto nt_constant) {
            if (whole) {
#pragma unroll
              for (int s = 0; s < SPC; s += kStep) {
                multiply(nt_constant, units, s);
              }
            } else {
#pragma unroll 1
              for (int s = 0; s < f.tail_slabs; s += kStep) {
                multiply(nt_constant, units, s);
              }
            }
          };
          if (NT == 1 || count <= 8) {
            slabs(std::integral_constant<int, 1>{});
          } else {
            slabs(std::integral_constant<int, NT>{});
          }
          __syncwarp();
          stream.Issue(args.slots);
          units += kChunkBytes;
          if (++slot == args.slots) {
            slot = 0, parity ^= 1, units = ring;
          }
        }
        if (++chunk == f.chunks.divisor) {
          fold();
          if (own) {
            epilogue();
          } else {
            put_head();
          }
#pragma unroll
          for (int t = 0; t < NT; ++t) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              acc[t][j] = 0.0F;
            }
          }
          chunk = 0;
          own = true;
          if (c + 1 < c1 && ++block == f.blocks_per_expert.divisor) {
            // By the count of the list before: ptxas 13.0 read row_offset[list + 2] where one of the kernels
            // (INT4 in groups of 128, lists of 8) looked the next list up.
            block = 0, ++list, first_row += count;
            open_list();
          }
        }
      }
      // ---- row blocks that several warps share: added in warp order by the warp that has the first chunk
      if (chunk != 0) {
        fold();
        if (!own) {
          put_head();
        }
      }
      __syncthreads();
      Stamp(args, 3 + 2 * phase);
      if (chunk != 0 && own && c0 < c1) {
        const int end = c1 - chunk + f.chunks.divisor;
        for (int w = warp + 1; w < kDecodeWarps && total * w / kDecodeWarps < end; ++w) {
#pragma unroll
          for (int t = 0; t < NT; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              acc[t][i] += sums[(w * NT * 4 + t * 4 + i) * 32 + lane];
            }
          }
        }
        epilogue();
      }
      if (phase == 0 && args.phases == 3 && !args.tagged_mid) {
        __syncthreads();
        if (tid < num_lists) {
          const int first = max(tid * f.blocks_per_expert.divisor, block0);
          const int last = min((tid + 1) * f.blocks_per_expert.divisor, block0 + num_blocks);
          AddRelease(ListCounters(args, tag, false) + list0 + tid, last - first);
        }
      }
    }
  }

  Stamp(args, 6);
  if (args.phases != 1) {
    CombineRoutes(args, map);
  }
  Stamp(args, 7);
  if (tid == 0) {
    CountDeparture(args);
  }
}

}  // namespace fusedmoe::cuda
