#pragma once

#include "experts/cuda/decode/decode_exchange_sm90.cuh"
#include "experts/cuda/decode/decode_map_sm90.cuh"
#include "experts/cuda/decode/decode_rows_sm90.cuh"
#include "experts/cuda/device/fragments.cuh"
#include "experts/cuda/operands/operand_lanes.cuh"

/// Token rows of a segment that are made operands on their way to shared memory: weighted, smoothed,
/// quantized as the scheme says, by the formulas of the operand kernels that prefill has (operand_rows.hpp).
/// The rows of a CTA's lists are few, so that each CTA makes its own, of tokens and of the intermediate: two
/// launches before and between the GEMMs cost 14 us of 32 (H200, qwen3-30b-a3b, FP8 blocks, M=1).
///
/// A warp makes kRowPart columns of a row at a time, 8 a lane. Scales of rows want the largest value of all
/// columns first; one scale over the call that of all tokens, and of all lists of the intermediate.
namespace fusedmoe::cuda {

inline constexpr int kOperandValues = kRowPart / kWarpSize;  ///< of a lane

/// Bytes of a token's row in DecodeShared.tokens.
__device__ __forceinline__ int TokenStride(const DecodeArguments& args) {
  return static_cast<int>(args.source[0].cols) * 2;
}

/// Values of a token from column k on as `expert` wants them: of its staged row, where tokens are staged.
__device__ __forceinline__ void LoadToken(const DecodeArguments& args, const uint8_t* tokens, int token,
                                          int expert, int k, float (&v)[kOperandValues]) {
  const ActivationRows& source = args.source[0];
  if (!args.stages_tokens) {
    LoadActivations(source, token, expert, k, v);
    return;
  }
  const uint4 piece = k < source.cols
                          ? *reinterpret_cast<const uint4*>(tokens + token * TokenStride(args) + k * 2)
                          : uint4{0, 0, 0, 0};
  const uint32_t words[kOperandValues / 2] = {piece.x, piece.y, piece.z, piece.w};
  UnpackLane(words, source.dtype, v);
  WeighLane(source, token, expert, k, v);
}

/// Values of the intermediate from column k on, F32 as the first GEMM left them; zero beyond the matrix. All
/// lanes of the warp. `many`: the warp has more to receive.
__device__ __forceinline__ void LoadMid(const DecodeArguments& args, uint32_t tag, int route, int expert,
                                        int k, bool many, float (&v)[kOperandValues]) {
  constexpr int kPairs = kOperandValues / 2;
  const int cols = static_cast<int>(args.source[1].cols);
  if (!args.tagged_mid) {
    const float* from = static_cast<const float*>(args.mid) + route * args.mid_stride + k;
#pragma unroll
    for (int i = 0; i < kOperandValues; i += 4) {
      const float4 four =
          k + i < cols ? __ldcg(reinterpret_cast<const float4*>(from + i)) : float4{0, 0, 0, 0};
      v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
    }
  } else {
    const auto* from = reinterpret_cast<const ulonglong2*>(args.tagged + route * args.mid_stride + k);
    const auto there = [tag](uint64_t word) { return static_cast<uint32_t>(word >> 32) == tag; };
    ulonglong2 words[kPairs] = {};
    uint32_t missing = 0;
#pragma unroll
    for (int u = 0; u < kPairs; ++u) {
      missing |= k + 2 * u < cols ? 1U << u : 0U;
    }
    while (true) {
#pragma unroll
      for (int u = 0; u < kPairs; ++u) {
        if ((missing >> u & 1) != 0) {
          words[u] = LoadRelaxed(from + u);
        }
      }
      int last = 0;
#pragma unroll
      for (int u = 0; u < kPairs; ++u) {
        if ((missing >> u & 1) != 0) {
          if (there(words[u].x) && there(words[u].y)) {
            missing &= ~(1U << u);
          } else {
            last = u;
          }
        }
      }
      const uint32_t lanes = __ballot_sync(kAllLanes, missing != 0);
      if (lanes == 0) {
        break;
      }
      if (many && (threadIdx.x & 31) == __ffs(static_cast<int>(lanes)) - 1) {  // as in ReceiveMid
        while (!there(LoadRelaxed(reinterpret_cast<const uint64_t*>(from + last)))) {
          __nanosleep(64);
        }
      }
      __syncwarp();
    }
#pragma unroll
    for (int u = 0; u < kPairs; ++u) {
      v[2 * u] = __uint_as_float(static_cast<uint32_t>(words[u].x));
      v[2 * u + 1] = __uint_as_float(static_cast<uint32_t>(words[u].y));
    }
  }
#pragma unroll
  for (int i = 0; i < kOperandValues; ++i) {
    v[i] = k + i < cols ? v[i] : 0.0F;  // columns of the padding stand there too
  }
  if (args.source[1].smoothing != nullptr) {
    SmoothLane(args.source[1].smoothing + static_cast<int64_t>(expert) * cols, k, cols, v);
  }
}

/// Largest finite magnitude of the call's tokens that have an expert here, to map.amax: one scale for all.
/// The caller synchronizes.
__device__ __forceinline__ void FindTokensAmax(const DecodeArguments& args, const DecodeMap& map,
                                               const uint8_t* tokens) {
  const int lane = threadIdx.x & 31, top_k = args.top_k.divisor;
  const int parts = static_cast<int>(args.source[0].cols + kRowPart - 1) / kRowPart;
  uint32_t amax = 0;
  for (int unit = threadIdx.x >> 5; unit < args.num_tokens * parts; unit += kDecodeWarps) {
    const int token = unit / parts;
    bool counts = false;
    for (int route = token * top_k; route < (token + 1) * top_k; ++route) {
      counts = counts || (map.valid[route >> 5] >> (route & 31) & 1) != 0;
    }
    if (counts) {
      float v[kOperandValues];
      LoadToken(args, tokens, token, 0, (unit - token * parts) * kRowPart + lane * kOperandValues, v);
      RoundFirst(args.quantizer, v);
      amax = max(amax, LaneAmaxBits(v, true));
    }
  }
  amax = __reduce_max_sync(kAllLanes, amax);
  if (lane == 0 && amax != 0) {
    atomicMax(map.amax, amax);
  }
}

/// Makes operands of the rows of the map. `scale_by`: a power of two that every element carries (kRawTokens).
template <bool kF16>
__device__ __forceinline__ void MakeRows(const DecodeArguments& args, const DecodeMap& map,
                                         const DecodeSegment& s, uint32_t tag, const uint8_t* tokens,
                                         uint8_t* rows, float scale_by) {
  const DecodePhase& f = args.phase[s.phase];
  const ActivationRows& source = args.source[s.phase];
  const DeviceQuantizer& q = args.quantizer;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, count = *map.num_rows;
  const bool by_row = q.kind == DeviceQuantizer::Kind::kPerRow;
  float call_scale = 1.0F;
  if (q.dynamic_tensor_scale) {
    call_scale = TensorScaleFromAmax(
        q, __uint_as_float(s.phase == 0 ? *map.amax : LoadAcquire(MidAmax(args, tag, false))));
  }
  // Scales of rows: a first turn over all columns, whatever the cut. A warp with one part keeps it.
  const int all_parts = static_cast<int>(source.cols + kRowPart - 1) / kRowPart;
  const bool keeps = by_row && f.splits.divisor == 1 && all_parts == f.row_parts.divisor &&
                     count * all_parts <= kDecodeWarps;
  float v[kOperandValues];
#pragma unroll 1
  for (int turn = by_row ? 0 : 1; turn < 2; ++turn) {
    const int parts = turn == 0 ? all_parts : f.row_parts.divisor, units = count * parts;
#pragma unroll 1
    for (int unit = warp; unit < units; unit += kDecodeWarps) {
      const int row = unit / parts, part = unit - row * parts;
      const int route = static_cast<int>(map.row_source[row] & 0xFFFFU), expert = map.row_pieces[row];
      const int begin = turn == 0 ? 0 : static_cast<int>(map.row_source[row] >> 16) * f.split_k;
      const int k = (begin & ~127) + part * kRowPart + lane * kOperandValues;  // groups are whole
      uint8_t* const to = rows + row * s.stride;
      auto* const row_amax = reinterpret_cast<uint32_t*>(to + f.split_k * 2 + 4);
      if (turn == 0 || !keeps) {
        if (s.phase == 0) {
          LoadToken(args, tokens, args.top_k.Div(route), expert, k, v);
        } else {
          LoadMid(args, tag, route, expert, k, units > kDecodeWarps, v);
        }
        RoundFirst(q, v);
      }
      uint32_t amax = LaneAmaxBits(v, false);
      if (turn == 0) {
        amax = __reduce_max_sync(kAllLanes, amax);
        if (lane == 0) {
          atomicMax(row_amax, amax);
        }
        continue;
      }
      GroupStep step;
      if (q.kind != DeviceQuantizer::Kind::kNone) {
        const float tensor_scale = q.dynamic_tensor_scale           ? call_scale
                                   : source.tensor_scale != nullptr ? __ldg(source.tensor_scale + expert)
                                                                    : 1.0F;
        amax = by_row ? *row_amax : GroupAmaxBits<kOperandValues>(amax, q.group);
        step = StepOf(q, tensor_scale, amax);
        step.value_scale *= scale_by;
        QuantizeLane(q, step, v);
      }
      const int at = k - begin;
      if (at >= 0 && at < f.split_k) {
        uint32_t words[kOperandValues / 2];
        PackLane(v, kF16 ? DType::kF16 : DType::kBF16, words);
        *reinterpret_cast<uint4*>(to + at * 2) = make_uint4(words[0], words[1], words[2], words[3]);
        if (f.group_bytes != 0 && at % 128 == 0) {
          *reinterpret_cast<float*>(to + f.split_k * 2 + 16 + at / 128 * 4) = step.left_scale;
        }
      }
      if (args.row_scales && part == 0 && lane == 0) {
        *reinterpret_cast<float*>(to + f.split_k * 2) = step.left_scale;
      }
    }
    if (turn == 0) {
      __syncthreads();
    }
  }
}

}  // namespace fusedmoe::cuda
