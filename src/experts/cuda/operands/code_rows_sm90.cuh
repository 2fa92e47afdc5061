#pragma once

#include <type_traits>

#include "experts/cuda/operands/quantize_rows_sm90.cuh"

/// Rows of activations to rows of 8-bit codes, under stored scales, or one a row or a slab. Large calls read
/// them at the rate of memory only if a value costs few instructions and a whole row is on its way at once,
/// so this is apart from the kernels for all formats: rows stay in registers, nothing between loads asks for
/// what they bring, and values are divided by the shortest way that gives the quotient.
///
///     warp w of kWarps    slabs w, w + kWarps, ... of 128 k; lane l: four values of each, k = 4 l .. + 3
///
/// The policy of quantize_rows_sm90.cuh has functions more:
///
///     using Raw;                                               // four values as they are loaded
///     const Element* From(const RowPlace&, int lane) const;    // the lane's first values
///     Raw Fetch(const Element* from, int slab, int k) const;   // zeros beyond the columns
///     bool plain() const;                                      // Raw is all there is to the values
///     void Values(const Raw&, float (&v)[4]) const;
///     void Finish(const RowPlace&, int k, float (&v)[4]) const;   // where it is not
///     uint32_t* To(int64_t row, int lane) const;               // of the first slab's codes in a result row
///     int64_t slab_words() const;                              // from there to the next slab's
///     uint32_t Arranged(uint32_t codes) const;                 // four codes in order to their word
///
///     static constexpr bool kManyTargets;   // a row goes to several of the result, and scales may be stored
///                                           // ones or of slabs; then also:
///     void ForEachTarget(const Place&, F f) const;             // f(row) for all of them
///     float* GroupScaleAt(int64_t row, int slab) const;
namespace fusedmoe::cuda {

inline constexpr int kCodeSlabs = 8;  ///< of a row that a warp holds
inline constexpr int kMostCodeWarps = static_cast<int>(kMostCodeCols) / (kCodeSlabs * 128);  ///< of a row

/// One step for many values below `amax`: where the quotient needs no care, its two corrections alone.
struct RowStep {
  FastStep step;
  bool near;

  __device__ __forceinline__ RowStep(const EncodeStep& encode, uint32_t amax_bits)
      : step(FastStepOf(encode)) {
    near = step.factor != 0.0F && step.ahead == 1.0F && __uint_as_float(amax_bits) * step.inverse < 0x1p20F;
  }
  template <bool kNear>
  __device__ __forceinline__ float Apply(float value) const {
    if constexpr (!kNear) {
      return step.Apply(value);
    }
    const float product = __fmul_rn(value, step.inverse);
    const float quotient = __fmaf_rn(__fmaf_rn(-product, step.factor, value), step.inverse, product);
    return __fmaf_rn(__fmaf_rn(-quotient, step.factor, value), step.inverse, quotient);
  }
};

/// In order, a byte each.
template <bool kNear, bool kIntegers>
__device__ __forceinline__ uint32_t CodesOfFour(const RowStep& step, const float (&v)[4]) {
  float h[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    h[i] = step.Apply<kNear>(v[i]);
  }
  if constexpr (kIntegers) {
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr float kMagic = 12582912.0F;  // as PackCodes
      bits[i] = __float_as_uint(RoundHalfEven(ClampToRange(h[i], -128.0F, 127.0F)) + kMagic);
    }
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
  } else {
    return PackE4m3x2(h[0], h[1]) | PackE4m3x2(h[2], h[3]) << 16;
  }
}

/// Under one step for the whole row: put(i, word) for the lane's codes of each slab.
template <typename Rows, typename Put>
__device__ __forceinline__ void CodesOfRow(const Rows& rows, const RowStep& step,
                                           const float (&v)[kCodeSlabs][4], Put put) {
  const auto form = [&](auto near, auto integers) {
#pragma unroll
    for (int i = 0; i < kCodeSlabs; ++i) {
      put(i, rows.Arranged(CodesOfFour<decltype(near)::value, decltype(integers)::value>(step, v[i])));
    }
  };
  if (rows.quantizer.element == DType::kI8) {
    step.near ? form(std::true_type{}, std::true_type{}) : form(std::false_type{}, std::true_type{});
  } else {
    step.near ? form(std::true_type{}, std::false_type{}) : form(std::false_type{}, std::false_type{});
  }
}

/// Under a step for each slab, of e4m3. A step costs more than the codes of a lane: lane i makes that of slab
/// i, whose scale it returns.
template <typename Rows, typename Put>
__device__ __forceinline__ float CodesOfSlabs(const Rows& rows, int lane, const float (&v)[kCodeSlabs][4],
                                              Put put) {
  uint32_t own = 0;
#pragma unroll
  for (int i = 0; i < kCodeSlabs; ++i) {
    const uint32_t amax = __reduce_max_sync(kAllLanes, LaneAmaxBits(v[i], false));
    own = lane == i ? amax : own;
  }
  const GroupStep group = StepOf(rows.quantizer, 1.0F, own);
  const RowStep mine(group.encode, own);
  const bool all_near = __all_sync(kAllLanes, mine.near);
#pragma unroll
  for (int i = 0; i < kCodeSlabs; ++i) {
    RowStep step = mine;
    step.step.factor = __shfl_sync(kAllLanes, mine.step.factor, i);
    step.step.inverse = __shfl_sync(kAllLanes, mine.step.inverse, i);
    step.step.ahead = __shfl_sync(kAllLanes, mine.step.ahead, i);
    put(i, rows.Arranged(all_near ? CodesOfFour<true, false>(step, v[i])
                                  : CodesOfFour<false, false>(step, v[i])));
  }
  return group.left_scale;
}

/// kWarps a row: one, of which a CTA has kRowWarps, or all of the CTA.
template <typename Rows, int kWarps>
__global__ void __launch_bounds__((kWarps == 1 ? kRowWarps : kWarps) * kWarpSize,
                                  24 / (kWarps == 1 ? kRowWarps : kWarps))
    QuantizeCodeRows(const __grid_constant__ Rows rows) {
  constexpr int kRowsOfCta = kWarps == 1 ? kRowWarps : 1;
  __shared__ uint32_t warp_amax[2][kWarps];
  WaitForGridsAhead<Rows>();
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int cta_warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int warp = kWarps == 1 ? 0 : cta_warp;
  const int slabs = static_cast<int>(rows.padded_cols / 128);
  const bool by_slab = Rows::kManyTargets && rows.quantizer.kind == DeviceQuantizer::Kind::kRealGroup;
  const bool by_row = !Rows::kManyTargets || rows.quantizer.kind == DeviceQuantizer::Kind::kPerRow;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kRowsOfCta;
  int64_t index = static_cast<int64_t>(blockIdx.x) * kRowsOfCta + (kWarps == 1 ? cta_warp : 0);
  typename Rows::Place place;
  bool counts = index < rows.num_rows && rows.Locate(index, place);
  int turn = 0;
  // All warps of the row.
  const auto encode_row = [&](const float(&v)[kCodeSlabs][4], const typename Rows::Place& of, auto put) {
    uint32_t amax = 0;
#pragma unroll
    for (const auto& four : v) {
      amax = max(amax, LaneAmaxBits(four, false));
    }
    amax = __reduce_max_sync(kAllLanes, amax);
    if constexpr (kWarps > 1) {
      if (lane == 0) {
        warp_amax[turn][warp] = amax;
      }
      __syncthreads();
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        amax = max(amax, warp_amax[turn][w]);
      }
      turn ^= 1;  // the next row writes the other set: one barrier a row is enough
    }
    const GroupStep step = StepOf(rows.quantizer, by_row ? 1.0F : rows.TensorScaleOf(of.expert), amax);
    CodesOfRow(rows, RowStep(step.encode, amax), v, put);
    return step.left_scale;
  };
  for (; index < rows.num_rows; index += stride) {
    const typename Rows::Place here = place;
    const bool counts_here = counts;
    typename Rows::Raw raw[kCodeSlabs] = {};
    if (counts_here) {
      const auto* const from = rows.From(here, lane);
#pragma unroll
      for (int i = 0; i < kCodeSlabs; ++i) {
        raw[i] = rows.Fetch(from, i * kWarps + warp, (i * kWarps + warp) * 128 + 4 * lane);
      }
    }
    counts = index + stride < rows.num_rows && rows.Locate(index + stride, place);  // while those loads run
    if (!counts_here) {
      continue;
    }
    float v[kCodeSlabs][4];
#pragma unroll
    for (int i = 0; i < kCodeSlabs; ++i) {
      rows.Values(raw[i], v[i]);
    }
    if (!rows.plain()) {
#pragma unroll
      for (int i = 0; i < kCodeSlabs; ++i) {
        rows.Finish(here, (i * kWarps + warp) * 128 + 4 * lane, v[i]);
      }
    }
    const auto store = [&](uint32_t* to, int i, uint32_t word) {
      if (i * kWarps + warp < slabs) {
        to[(i * kWarps + warp) * rows.slab_words()] = word;
      }
    };
    if constexpr (Rows::kManyTargets) {
      uint32_t words[kCodeSlabs];
      const auto keep = [&](int i, uint32_t word) { words[i] = word; };
      float scale = 1.0F;  // of the row, or of slab `lane` of this warp
      if (by_slab) {
        scale = CodesOfSlabs(rows, lane, v, keep);
      } else {
        scale = encode_row(v, here, keep);
      }
      rows.ForEachTarget(here, [&](int64_t row) {
        uint32_t* const to = rows.To(row, lane);
#pragma unroll
        for (int i = 0; i < kCodeSlabs; ++i) {
          store(to, i, words[i]);
        }
        if (by_row && lane == 0 && warp == 0) {
          rows.row_scale[row] = scale;
        }
        if (by_slab && lane < kCodeSlabs && lane * kWarps + warp < slabs) {
          *rows.GroupScaleAt(row, lane * kWarps + warp) = scale;
        }
      });
    } else {
      uint32_t* const to = rows.To(here.row, lane);
      const float scale = encode_row(v, here, [&](int i, uint32_t word) { store(to, i, word); });
      if (lane == 0 && warp == 0) {
        rows.row_scale[here.row] = scale;
      }
    }
  }
}

template <typename Rows, int kWarps>
Status LaunchCodeRows(std::string_view name, const Rows& rows, cudaStream_t stream) {
  const int64_t rows_of_cta = kWarps == 1 ? kRowWarps : 1;
  const int64_t limit =
      CurrentSmCount() * std::max<int64_t>(1, 24 / (rows_of_cta * kWarps));  // what is resident
  const auto grid = static_cast<unsigned>(std::min(limit, (rows.num_rows + rows_of_cta - 1) / rows_of_cta));
  return LaunchKernel(name, QuantizeCodeRows<Rows, kWarps>, grid,
                      static_cast<unsigned>(rows_of_cta * kWarps * kWarpSize), 0, stream, rows);
}

template <typename Rows>
Status LaunchCodeRows(std::string_view name, const Rows& rows, cudaStream_t stream) {
  const int64_t slabs = rows.padded_cols / 128;
  return slabs <= kCodeSlabs       ? LaunchCodeRows<Rows, 1>(name, rows, stream)
         : slabs <= 2 * kCodeSlabs ? LaunchCodeRows<Rows, 2>(name, rows, stream)
         : slabs <= 4 * kCodeSlabs ? LaunchCodeRows<Rows, 4>(name, rows, stream)
         : slabs <= 8 * kCodeSlabs ? LaunchCodeRows<Rows, 8>(name, rows, stream)
                                   : LaunchCodeRows<Rows, kMostCodeWarps>(name, rows, stream);
}

/// LaunchQuantizeRows, by QuantizeCodeRows where the policy `makes_codes` and a row fits the registers of a
/// CTA.
template <typename Rows>
Status LaunchRows(std::string_view name, const Rows& rows, bool makes_codes, cudaStream_t stream) {
  const bool by_row = rows.quantizer.kind == DeviceQuantizer::Kind::kPerRow;
  return makes_codes && by_row && IsCodeRowQuantizer(rows.quantizer) && rows.padded_cols <= kMostCodeCols
             ? LaunchCodeRows(name, rows, stream)
             : LaunchQuantizeRows(name, rows, stream);
}

}  // namespace fusedmoe::cuda
