#pragma once

#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/launch.hpp"
#include "experts/cuda/operands/quantize_sm90.cuh"

/// A row of activations in the hands of a warp: a lane holds 16 consecutive k, a warp 512 (a part).
///
///     lane l: k = 512 part + 16 l .. + 15      groups of 16: a lane; 32, 64, 128: 2, 4, 8 lanes side by side
///
/// Decode, whose rows are few, gives a lane 8 (decode_rows_sm90.cuh): N of the functions.
///
/// Four lanes make a slab of 64 k. In a panel (prefill_gemm_sm90.cuh) piece c of a slab holds the pairs k =
/// 16 q + 2 c + {0, 1} of its four lanes q, so that a transposition among four lanes turns natural order into
/// whole 16-byte pieces.
namespace fusedmoe::cuda {

inline constexpr int kLaneValues = 16;
inline constexpr int kPartValues = 32 * kLaneValues;

/// Words of two BF16 or F16 values, in order.
template <int N>
__device__ __forceinline__ void UnpackLane(const uint32_t (&words)[N / 2], DType dtype, float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    if (dtype == DType::kBF16) {
      v[2 * i] = __uint_as_float(words[i] << 16);
      v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000U);
    } else {
      v[2 * i] = __half2float(__ushort_as_half(static_cast<uint16_t>(words[i])));
      v[2 * i + 1] = __half2float(__ushort_as_half(static_cast<uint16_t>(words[i] >> 16)));
    }
  }
}

/// N values (8 or 16) of a row of F32, BF16 or F16 from `k` on; zero from `cols` on. `aligned`: base and
/// stride of the rows are multiples of 16 bytes.
template <int N>
__device__ inline void LoadLane(const void* row, DType dtype, int64_t k, int64_t cols, bool aligned,
                                float (&v)[N]) {
  if (dtype == DType::kF32) {
    const auto* x = static_cast<const float*>(row) + k;
    if (aligned && k + N <= cols) {
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(x + i));
        v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = k + i < cols ? __ldg(x + i) : 0.0F;
    }
    return;
  }
  const auto* x = static_cast<const uint16_t*>(row) + k;
  uint32_t words[N / 2];
  if (aligned && k + N <= cols) {
#pragma unroll
    for (int i = 0; i < N / 2; i += 4) {
      const uint4 piece = __ldg(reinterpret_cast<const uint4*>(x) + i / 4);
      words[i] = piece.x, words[i + 1] = piece.y, words[i + 2] = piece.z, words[i + 3] = piece.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const uint32_t first = k + 2 * i < cols ? __ldg(x + 2 * i) : 0;
      const uint32_t second = k + 2 * i + 1 < cols ? __ldg(x + 2 * i + 1) : 0;
      words[i] = first | second << 16;
    }
  }
  UnpackLane(words, dtype, v);
}

/// As LoadLane, but value k is column order[k] of the row.
template <int N>
__device__ inline void GatherLane(const void* row, DType dtype, const int32_t* order, int64_t k, int64_t cols,
                                  float (&v)[N]) {
  for (int i = 0; i < N; ++i) {
    v[i] = 0.0F;
    if (k + i < cols) {
      const int column = __ldg(order + k + i);
      if (dtype == DType::kF32) {
        v[i] = __ldg(static_cast<const float*>(row) + column);
      } else {
        const uint16_t bits = __ldg(static_cast<const uint16_t*>(row) + column);
        v[i] = dtype == DType::kBF16 ? __uint_as_float(uint32_t{bits} << 16)
                                     : __half2float(__ushort_as_half(bits));
      }
    }
  }
}

/// Factors of an expert's columns; zero beyond them.
template <int N>
__device__ __forceinline__ void SmoothLane(const float* factors, int64_t k, int64_t cols, float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    v[i] *= k + i < cols ? __ldg(factors + k + i) : 0.0F;
  }
}

/// What an expert makes of values of source row `row` before they are quantized.
template <int N>
__device__ __forceinline__ void WeighLane(const ActivationRows& rows, int64_t row, int expert, int64_t k,
                                          float (&v)[N]) {
  if (rows.row_weight != nullptr) {
    const float weight = __ldg(rows.row_weight + row);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] *= weight;
    }
  }
  if (rows.smoothing != nullptr) {
    SmoothLane(rows.smoothing + expert * rows.cols, k, rows.cols, v);
  }
}

/// Values of source row `row` from column `k` on as `expert` wants them: in its order, weighted, smoothed.
template <int N>
__device__ __forceinline__ void LoadActivations(const ActivationRows& rows, int64_t row, int expert,
                                                int64_t k, float (&v)[N]) {
  const int element_bytes = rows.dtype == DType::kF32 ? 4 : 2;
  const auto* base = static_cast<const std::byte*>(rows.values) + row * rows.row_stride * element_bytes;
  if (rows.order == nullptr) {
    LoadLane(base, rows.dtype, k, rows.cols, rows.aligned(), v);
  } else {
    GatherLane(base, rows.dtype, rows.order + expert * rows.cols, k, rows.cols, v);
  }
  WeighLane(rows, row, expert, k, v);
}

/// Where the rule says so, before anything is quantized.
template <int N>
__device__ __forceinline__ void RoundFirst(const DeviceQuantizer& q, float (&v)[N]) {
  if (q.rule.round_to_bf16_first && q.kind != DeviceQuantizer::Kind::kNone) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = RoundToBf16(v[i]);
    }
  }
}

/// Largest magnitude as bits: of all values (NaN above all), or of the finite ones.
template <int N>
__device__ inline uint32_t LaneAmaxBits(const float (&v)[N], bool finite_only) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint32_t bits = __float_as_uint(v[i]) & 0x7fffffffU;
    amax = max(amax, finite_only && bits >= 0x7f800000U ? 0U : bits);
  }
  return amax;
}

/// The maximum over the lanes of a group, each of which holds N values.
template <int N = kLaneValues>
__device__ inline uint32_t GroupAmaxBits(uint32_t amax, int group) {
  for (int lanes = 1; lanes * N < group; lanes <<= 1) {
    amax = max(amax, __shfl_xor_sync(kAllLanes, amax, lanes));
  }
  return amax;
}

/// Values to words of two operand elements, in order.
template <int N>
__device__ inline void PackLane(const float (&v)[N], DType element, uint32_t (&words)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    words[i] =
        element == DType::kF16 ? PackF16x2(v[2 * i], v[2 * i + 1]) : PackBf16x2(v[2 * i], v[2 * i + 1]);
  }
}

/// Quantizes the values of a lane in place and returns what is left to multiply with.
template <int N>
__device__ inline float QuantizeLane(const DeviceQuantizer& q, const GroupStep& step, float (&v)[N]) {
  const FastStep fast = FastStepOf(step.encode);
  if (q.element == DType::kF8E4M3) {  // the unit's own conversion: 8 operations an element, not 20
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 pair = UnpackE4m3x2(PackE4m3x2(fast.Apply(v[i]), fast.Apply(v[i + 1])));
      v[i] = pair.x * step.value_scale;
      v[i + 1] = pair.y * step.value_scale;
    }
    return step.left_scale;
  }
  if (q.element == DType::kI8 && q.rule.int_rounding == IntRounding::kHalfEven &&
      step.encode.wide_factor == 0.0) {  // the rule of nearly all, without a choice an element
#pragma unroll
    for (float& value : v) {
      value = RoundHalfEven(ClampToRange(fast.Apply(value), -128.0F, 127.0F)) * step.value_scale;
    }
    return step.left_scale;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    v[i] = QuantizeElement(q, fast, step.encode.wide_factor, v[i]) * step.value_scale;
  }
  return step.left_scale;
}

/// Operands that are codes themselves.
FMOE_HOST_DEVICE constexpr bool IsCode(DType element) {
  return element == DType::kF8E4M3 || element == DType::kI8;
}

/// 16 numbers of that type to 4 words of codes, in order. Exact: what is packed has been rounded.
__device__ inline void PackCodes(const float (&v)[kLaneValues], DType element, uint32_t (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* four = v + 4 * i;
    if (element == DType::kI8) {
      constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23: integers stand in the low bits of the sum
      words[i] = __byte_perm(
          __byte_perm(__float_as_uint(four[0] + kMagic), __float_as_uint(four[1] + kMagic), 0x0040),
          __byte_perm(__float_as_uint(four[2] + kMagic), __float_as_uint(four[3] + kMagic), 0x0040), 0x5410);
    } else {
      words[i] = PackE4m3x2(four[0], four[1]) | PackE4m3x2(four[2], four[3]) << 16;
    }
  }
}

/// Transposes 4 x 4 words among four neighbouring lanes: word i of lane q becomes word q of lane i.
__device__ inline void TransposeQuad(uint32_t& w0, uint32_t& w1, uint32_t& w2, uint32_t& w3, int q) {
  const bool odd = (q & 1) != 0;
  const uint32_t a = __shfl_xor_sync(kAllLanes, odd ? w0 : w1, 1);
  const uint32_t b = __shfl_xor_sync(kAllLanes, odd ? w2 : w3, 1);
  w0 = odd ? a : w0, w1 = odd ? w1 : a;
  w2 = odd ? b : w2, w3 = odd ? w3 : b;
  const bool high = (q & 2) != 0;
  const uint32_t c = __shfl_xor_sync(kAllLanes, high ? w0 : w2, 2);
  const uint32_t d = __shfl_xor_sync(kAllLanes, high ? w1 : w3, 2);
  w0 = high ? c : w0, w2 = high ? w2 : c;
  w1 = high ? d : w1, w3 = high ? w3 : d;
}

/// Panels: [slab of 64 k, or 128 of codes][row][8 pieces of 16 bytes], piece c at c ^ (row & 7), see
/// prefill_gemm_sm90.cuh. A row that goes to several places is arranged once, by all lanes of a warp
/// together.
struct PanelSink {
  uint4* panel;
  int64_t rows;

  __device__ __forceinline__ static void Arrange(uint32_t (&words)[8]) {
    const int q = static_cast<int>(threadIdx.x) & 3;
    TransposeQuad(words[0], words[1], words[2], words[3], q);
    TransposeQuad(words[4], words[5], words[6], words[7], q);
  }
  __device__ __forceinline__ void Store(int64_t row, int64_t k, const uint32_t (&words)[8]) const {
    const int q = static_cast<int>(threadIdx.x) & 3;
    uint4* out = panel + ((k >> 6) * rows + row) * 8;
    out[q ^ (row & 7)] = make_uint4(words[0], words[1], words[2], words[3]);
    out[(q + 4) ^ (row & 7)] = make_uint4(words[4], words[5], words[6], words[7]);
  }
  /// Codes in order, TokenByte in the panel.
  __device__ __forceinline__ static void ArrangeCodes(uint32_t (&words)[4], bool integers) {
    const int q = static_cast<int>(threadIdx.x) & 3;
#pragma unroll
    for (uint32_t& word : words) {
      word = __byte_perm(word, 0, 0x3120);
    }
    if (integers) {
      TransposeQuad(words[0], words[1], words[2], words[3], q);
    }
  }
  __device__ __forceinline__ void StoreCodes(int64_t row, int64_t k, const uint32_t (&words)[4]) const {
    const int q = static_cast<int>(threadIdx.x) & 3;
    uint4* out = panel + ((k >> 7) * rows + row) * 8;
    out[(static_cast<int>(k >> 6 & 1) * 4 + q) ^ (row & 7)] =
        make_uint4(words[0], words[1], words[2], words[3]);
  }

  // ---- four codes a lane, lane l those of k = 4 l .. + 3 of a slab of 128 (code_rows_sm90.cuh)
  __device__ __forceinline__ static uint32_t ArrangedCodes(uint32_t codes) {
    return __byte_perm(codes, 0, 0x3120);
  }
  /// The lane's word in the first slab; the next slab's is rows * 32 further.
  __device__ __forceinline__ uint32_t* CodesAt(int64_t row, int lane, bool integers) const {
    const int high = lane >> 4, quarter = lane >> 2 & 3, step = lane & 3;
    const int piece = (high * 4 + (integers ? step : quarter)) ^ (static_cast<int>(row) & 7);
    return reinterpret_cast<uint32_t*>(panel) + row * 32 + piece * 4 + (integers ? quarter : step);
  }
};

}  // namespace fusedmoe::cuda
