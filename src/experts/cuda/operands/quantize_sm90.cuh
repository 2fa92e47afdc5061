#pragma once

#include <cstdint>

#include <fusedmoe/quant.hpp>

#include "experts/cuda/operands/operand_format.hpp"
#include "numerics/codecs.hpp"
#include "numerics/integer_codecs.hpp"
#include "quant/activation_formulas.hpp"

/// Quantization of activations on the device: the formulas of quant/activation_formulas.hpp, the same bits as
/// quant/activation_rows.cpp. Results are BF16 numbers (see operand_rows.hpp) and the fp32 scale that is
/// left. Compile with --fmad=false: a product that is fused with the addition of a rounding constant would
/// round once less.
namespace fusedmoe::cuda {

/// An EncodeStep ready for many values: the quotient to the last bit without a division for each. A product
/// with the inverse, twice corrected by the exact rest (Markstein), is the rounded quotient unless a rest
/// underflows: a power of two ahead keeps scales near 1.
struct alignas(16) FastStep {
  float factor = 0.0F;   ///< divisor; 0: the product counts
  float inverse = 0.0F;  ///< multiplier
  float ahead = 1.0F;
  float value_scale = 1.0F;  ///< GroupStep's, where steps are handed on in memory

  __device__ __forceinline__ float Apply(float value) const {
    value *= ahead;
    const float product = __fmul_rn(value, inverse);
    float quotient = __fmaf_rn(__fmaf_rn(-product, factor, value), inverse, product);
    quotient = __fmaf_rn(__fmaf_rn(-quotient, factor, value), inverse, quotient);
    // Products beyond all codes stay: their rest may be infinite. NaN stays.
    return factor != 0.0F && fabsf(product) < 0x1p20F ? quotient : product;
  }
};

__device__ __forceinline__ FastStep FastStepOf(const EncodeStep& step) {
  FastStep fast;
  if (step.multiply || !(step.factor < INFINITY)) {
    fast.inverse = step.multiply ? step.factor : __fdiv_rn(1.0F, step.factor);
    return fast;
  }
  fast.ahead = step.factor < 0x1p-60F ? 0x1p64F : step.factor > 0x1p60F ? 0x1p-64F : 1.0F;
  fast.factor = step.factor * fast.ahead;
  fast.inverse = __fdiv_rn(1.0F, fast.factor);
  return fast;
}

/// What codes of a group are made with, and what their BF16 values are multiplied with.
struct GroupStep {
  EncodeStep encode;
  float value_scale = 1.0F;  ///< a BF16 value is code * value_scale
  float left_scale = 1.0F;   ///< the fp32 scale beside it
};

__device__ inline float TensorScaleFromAmax(const DeviceQuantizer& q, float finite_amax) {
  if (q.kind == DeviceQuantizer::Kind::kTwoLevel) {
    const float scale = __fdiv_rn(finite_amax, q.divisor * 448.0F);  // 448: largest e4m3
    return scale > 0.0F ? scale : 1.0F;
  }
  return RealScale(q.rule, q.divisor, finite_amax);
}

/// `amax_bits`: largest magnitude of the group as a bit pattern; NaN is above all.
__device__ inline GroupStep StepOf(const DeviceQuantizer& q, float tensor_scale, uint32_t amax_bits) {
  const float amax = FloatFromBits(amax_bits);
  GroupStep step;
  switch (q.kind) {
    case DeviceQuantizer::Kind::kNone:
      return step;
    case DeviceQuantizer::Kind::kPerTensor:
      step.encode = StepFor(q.rule, tensor_scale);
      step.left_scale = tensor_scale;
      return step;
    case DeviceQuantizer::Kind::kTwoLevel: {
      const float block = DecodeE4m3(TwoLevelScaleCode(q.rule, q.divisor, tensor_scale, amax));
      step.encode = StepFor(q.rule, block * tensor_scale);
      step.value_scale = block;
      step.left_scale = tensor_scale;
      return step;
    }
    case DeviceQuantizer::Kind::kMx:
      step.value_scale = DecodeE8m0(MxScaleCode(q.rule.mx_scale, q.range, BoundedAmax(q.rule, amax)));
      step.encode = StepFor(q.rule, step.value_scale);
      return step;
    case DeviceQuantizer::Kind::kPerRow:
    case DeviceQuantizer::Kind::kRealGroup: {
      float scale = RealScale(q.rule, q.divisor, amax);
      scale = q.scale_dtype == DType::kBF16  ? RoundToBf16(scale)
              : q.scale_dtype == DType::kF16 ? RoundToFp16(scale)
              : q.scale_dtype == DType::kF8E8M0
                  ? DecodeE8m0(EncodeE8m0Ceil(scale))  // power_of_two_scale: scale is one already
                  : scale;
      step.encode = StepFor(q.rule, scale);
      step.left_scale = scale;
      if (q.rule.multiply_by_divisor_over_amax && scale != 0.0F && FloatBits(scale) < 0x7f800000U) {
        // As quant/activation_rows.cpp: torch evaluates divisor / amax as reciprocal(amax) * divisor.
        const double divisor = q.divisor;
        const double floor = static_cast<double>(q.rule.scale_floor) * divisor;
        const double bounded = BoundedAmax(q.rule, amax);
        step.encode.wide_factor = 1.0 / (bounded < floor ? floor : bounded) * divisor;
      }
      return step;
    }
  }
  return step;
}

/// Decode(EncodeSaturating(value)) of a minifloat without the code between: 10 operations, not 40. The same
/// rounding as numerics/minifloat.hpp, by the same additions.
__device__ __forceinline__ float RoundToGrid(const ElementGrid& grid, float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t magnitude = bits & 0x7fffffffU;
  const float subnormal = __fsub_rn(__fadd_rn(__uint_as_float(magnitude), grid.magic), grid.magic);
  const uint32_t even = magnitude + ((1U << (grid.shift - 1)) - 1) + ((magnitude >> grid.shift) & 1);
  const float normal = __uint_as_float(even & ~((1U << grid.shift) - 1));
  float rounded = magnitude < grid.min_normal_bits ? subnormal : normal;
  rounded = rounded > grid.largest ? grid.largest : rounded;
  if (magnitude > 0x7f800000U) {
    return grid.has_nan ? value : grid.largest;
  }
  return __uint_as_float(__float_as_uint(rounded) | (bits & 0x80000000U));
}

template <typename Codec>
__device__ __forceinline__ float RoundToElement(float value) {
  const ElementGrid grid = ElementGrid::Of<Codec>();
  return RoundToGrid(grid, value);
}

/// The value of the code of one element. `wide_factor`: EncodeStep's.
__device__ inline float QuantizeElement(const DeviceQuantizer& q, const FastStep& step, double wide_factor,
                                        float value) {
  if (wide_factor != 0.0) {
    const double product = static_cast<double>(value) * wide_factor;
    value = static_cast<float>(q.rule.int_rounding == IntRounding::kHalfAway   ? round(product)
                               : q.rule.int_rounding == IntRounding::kTruncate ? trunc(product)
                                                                               : rint(product));
  } else {
    value = step.Apply(value);
  }
  switch (q.element) {
    case DType::kF4E2M1:
      return q.rule.ties_toward_zero ? DecodeE2m1(EncodeE2m1TiesTowardZero(value))
                                     : RoundToElement<E2m1>(value);
    case DType::kF8E4M3:
      return RoundToElement<E4m3fn>(value);
    case DType::kF8E5M2:
      return RoundToElement<E5m2>(value);
    case DType::kF6E2M3:
      return RoundToElement<E2m3>(value);
    case DType::kF6E3M2:
      return RoundToElement<E3m2>(value);
    case DType::kI8: {
      const float clamped = ClampToRange(value, -128.0F, 127.0F);
      return q.rule.int_rounding == IntRounding::kHalfEven   ? RoundHalfEven(clamped)
             : q.rule.int_rounding == IntRounding::kHalfAway ? RoundHalfAway(clamped)
                                                             : Truncate(clamped);
    }
    default:
      return value;
  }
}

}  // namespace fusedmoe::cuda
