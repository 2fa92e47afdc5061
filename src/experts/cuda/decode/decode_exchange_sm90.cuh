#pragma once

#include "experts/cuda/decode/decode_arguments.hpp"
#include "experts/cuda/decode/decode_map_sm90.cuh"
#include "experts/cuda/device/ptx.cuh"

/// What the CTAs of a decode launch hand to each other. A release, a counter and a barrier are three trips to
/// L2, one after the other; a word that says by itself that it is there is one.
///
///   partial sums   F32 [route][split][column]: zero while not there (a zero is sent as -0). The one thread
///                  that adds a word clears it for the next launch.
///   intermediate   up to kTaggedRoutes and kTaggedElements: 64 bits, two elements of the operand (or
///                  one F32 that becomes one) and the tag of the launch. Each launch has a tag of its own, so
///                  that nothing needs clearing; a word has many readers.
///                  Beyond: through scratch, with a counter a list, which only the CTAs of that expert wait
///                  for. With many rows tags cost more than they save: asynchronous copies are all in flight
///                  at once, words with tags wait in registers (mixtral, 8 tokens: rows up to 10 us late).
///
/// Both kinds of words are relaxed accesses: a word carries its own proof, nothing else is ordered by it.
/// The tag is the number of launches so far, counted as CTAs that left over the CTAs of a launch. Its parity
/// chooses one of two sets of list counters; a launch clears the other one.
namespace fusedmoe::cuda {

/// Departures so far; LaunchTag takes them, some time later.
__device__ __forceinline__ uint64_t LoadDepartures(const DecodeArguments& args) {
  return LoadRelaxed(reinterpret_cast<const uint64_t*>(args.counters + 2 * kMaxRoutes));
}
/// Odd, so never what memory at rest holds; its bit 1 is the launch's parity.
__device__ __forceinline__ uint32_t LaunchTag(const DecodeArguments& args, uint64_t departures) {
  return static_cast<uint32_t>(departures / static_cast<uint32_t>(args.grid.divisor)) * 2 + 1;
}
__device__ __forceinline__ void CountDeparture(const DecodeArguments& args) {
  AddRelaxed(reinterpret_cast<uint64_t*>(args.counters + 2 * kMaxRoutes), 1);
}

/// The list counters of this launch, or of the next.
__device__ __forceinline__ uint32_t* ListCounters(const DecodeArguments& args, uint32_t tag, bool next) {
  return args.counters + ((tag >> 1 & 1) ^ (next ? 1U : 0U)) * kMaxRoutes;
}

/// Largest finite magnitude of this launch's intermediate, or of the next one's, as bits: where one scale
/// spans the call.
__device__ __forceinline__ uint32_t* MidAmax(const DecodeArguments& args, uint32_t tag, bool next) {
  return args.counters + 2 * kMaxRoutes + 4 + ((tag >> 1 & 1) ^ (next ? 1U : 0U));
}

/// Outputs of the first GEMM where one scale spans the intermediate of a call: this lane's largest finite
/// magnitude, as bits. All lanes of the warp.
__device__ __forceinline__ void NoteMidAmax(const DecodeArguments& args, uint32_t tag, uint32_t amax) {
  amax = __reduce_max_sync(kAllLanes, amax);
  if (ElectOne() && amax != 0) {
    atomicMax(MidAmax(args, tag, false), amax);
  }
}

/// What an output of the first GEMM is handed over as.
enum class MidElement : uint8_t { kBf16, kF16, kF32 };

/// An output of the first GEMM to scratch.
template <MidElement kElement>
__device__ __forceinline__ void PutMid(const DecodeArguments& args, int at, float value) {
  if constexpr (kElement == MidElement::kF32) {
    static_cast<float*>(args.mid)[at] = value;
  } else if constexpr (kElement == MidElement::kF16) {
    static_cast<__half*>(args.mid)[at] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(args.mid)[at] = __float2bfloat16(value);
  }
}

/// Outputs of the first GEMM for tokens (2q, 2q + 1) in the lanes of rows r, with tags: neighbouring lanes
/// pair up two columns and each sends one token; F32 goes a word a lane. `column` is this lane's; the routes
/// are of both tokens. All lanes of the warp.
template <MidElement kElement>
__device__ __forceinline__ void SendMid(const DecodeArguments& args, uint32_t tag, const int (&to)[2],
                                        const bool (&there)[2], int column, float first, float second) {
  if constexpr (kElement == MidElement::kF32) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (there[c]) {
        StoreRelaxed(args.tagged + to[c] + column,
                     static_cast<uint64_t>(tag) << 32 | __float_as_uint(c == 0 ? first : second));
      }
    }
    return;
  }
  const bool odd = (threadIdx.x >> 2 & 1) != 0;
  const float other = __shfl_xor_sync(kAllLanes, odd ? first : second, 4);
  const float low = odd ? other : first, high = odd ? second : other;
  if (odd ? there[1] : there[0]) {
    const uint32_t pair = kElement == MidElement::kF16 ? PackF16x2(low, high) : PackBf16x2(low, high);
    StoreRelaxed(args.tagged + ((odd ? to[1] : to[0]) + column) / 2, static_cast<uint64_t>(tag) << 32 | pair);
  }
}

/// Token rows of the second GEMM to shared memory, as they come. map.row_source and row_pieces count four
/// columns.
__device__ __forceinline__ void ReceiveMid(const DecodeArguments& args, const DecodeMap& map,
                                           const DecodePhase& f, uint32_t tag, uint8_t* rows, int stride) {
  constexpr int kBatch = 4;
  const int lane = threadIdx.x & 31;
  const int total = *map.num_rows * f.row_quads.divisor;
  const auto* const base = reinterpret_cast<const ulonglong2*>(args.tagged);
  const auto there = [tag](uint64_t word) { return static_cast<uint32_t>(word >> 32) == tag; };
  for (int first = threadIdx.x; first - lane < total; first += kBatch * kDecodeThreads) {
    const ulonglong2* from[kBatch];
    int to[kBatch];
    ulonglong2 v[kBatch];
    uint32_t missing = 0;
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int i = first + u * kDecodeThreads, row = min(f.row_quads.Div(i), kSegmentRows - 1);
      const int c = i - row * f.row_quads.divisor;
      const bool wanted = i < total && c < map.row_pieces[row];
      missing |= wanted ? 1U << u : 0U;
      from[u] = base + (wanted ? map.row_source[row] + c : 0);
      to[u] = i < total ? row * stride + c * 8 : -1;
      v[u] = ulonglong2{0, 0};
    }
    while (true) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if ((missing >> u & 1) != 0) {
          v[u] = LoadRelaxed(from[u]);
        }
      }
      const ulonglong2* last = nullptr;
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if ((missing >> u & 1) != 0) {
          if (there(v[u].x) && there(v[u].y)) {
            missing &= ~(1U << u);
          } else {
            last = from[u];
          }
        }
      }
      const uint32_t lanes = __ballot_sync(kAllLanes, missing != 0);
      if (lanes == 0) {
        break;
      }
      // Where a thread has several words, one lane waits for the warp: asking for all would take the
      // bandwidth of L2 from the weights that are still to come.
      if (total > kDecodeThreads && lane == __ffs(static_cast<int>(lanes)) - 1) {
        while (!there(LoadRelaxed(reinterpret_cast<const uint64_t*>(last)))) {
          __nanosleep(64);
        }
      }
      __syncwarp();
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (to[u] >= 0) {
        *reinterpret_cast<uint2*>(rows + to[u]) =
            make_uint2(static_cast<uint32_t>(v[u].x), static_cast<uint32_t>(v[u].y));
      }
    }
  }
}

/// A weighted output of the second GEMM to whoever adds it.
__device__ __forceinline__ void SendPartial(float* to, float value) {
  StoreRelaxed(to, __float_as_uint(value) == 0 ? -0.0F : value);
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

__device__ __forceinline__ bool AllThere(const float4& v) {
  return __float_as_uint(v.x) != 0 && __float_as_uint(v.y) != 0 && __float_as_uint(v.z) != 0 &&
         __float_as_uint(v.w) != 0;
}

/// y[token] = sum of its weighted expert rows, in a fixed order, as they come. Eight loads are in flight at a
/// time: one after the other they cost 3.5 us a layer (H100).
__device__ __forceinline__ void CombineRoutes(const DecodeArguments& args, const DecodeMap& map) {
  const int quads = args.partial_stride / 4, top_k = args.top_k.divisor;
  const FastDiv splits = args.phase[1].splits;
  const int parts = top_k * splits.divisor;  // of a token: its routes, each in its cuts of K
  const uint32_t mask = top_k == 32 ? ~0U : (1U << top_k) - 1;
  const bool batched = args.expert_num_tokens != nullptr;
  const int wanted = args.partial_cols / 4, total = args.num_tokens * wanted;
  const int share = args.grid.Div(total + args.grid.divisor - 1), begin = share * blockIdx.x;
  const int end = min(total, begin + share);
  auto* const base = reinterpret_cast<float4*>(args.partial);
  const auto routes_of = [&](int token) {  // a bit a route that is computed here
    const int first = token * top_k;
    return __funnelshift_r(map.valid[first >> 5], map.valid[(first + top_k - 1) >> 5], first & 31) & mask;
  };
  for (int i = begin + threadIdx.x; i < end; i += kDecodeThreads) {
    const int token = i / wanted, c = i - token * wanted;
    const uint32_t valid = routes_of(token);
    if (batched && (valid & 1) == 0) {
      continue;  // rows beyond the counts are left alone
    }
    float4* const from = base + static_cast<int64_t>(token) * parts * quads + c;
    const auto at = [&](int part) { return from + static_cast<int64_t>(part) * quads; };
    float4 sum = {0, 0, 0, 0};
    constexpr int kBatch = 8;
#pragma unroll 1
    for (int p = 0; p < parts; p += kBatch) {
      uint32_t wanted_parts = splits.divisor == 1 ? valid >> p & ((1U << kBatch) - 1) : 0;
      for (int u = 0; u < kBatch && splits.divisor > 1 && p + u < parts; ++u) {
        wanted_parts |= (valid >> splits.Div(p + u) & 1) << u;
      }
      float4 v[kBatch] = {};
      uint32_t missing = wanted_parts;
      while (missing != 0) {
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          if ((missing >> u & 1) != 0) {
            v[u] = LoadRelaxed(at(p + u));
          }
        }
        int last = 0;
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          if ((missing >> u & 1) != 0) {
            if (AllThere(v[u])) {
              missing &= ~(1U << u);
            } else {
              last = p + u;
            }
          }
        }
        if (missing != 0 && share > kWarpSize) {  // as in ReceiveMid: ask for one word, not for all
          while (__float_as_uint(LoadRelaxed(&at(last)->x)) == 0) {
            __nanosleep(64);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if ((wanted_parts >> u & 1) != 0) {
          *at(p + u) = float4{0, 0, 0, 0};
        }
        sum.x += v[u].x, sum.y += v[u].y, sum.z += v[u].z, sum.w += v[u].w;
      }
    }
    StoreOutputs(args, token, 4 * c, sum);
  }
}

}  // namespace fusedmoe::cuda
