#pragma once

#include <cstdint>

#include <fusedmoe/quant.hpp>

#include "numerics/codecs.hpp"
#include "numerics/host_device.hpp"

/// The formulas of dynamic quantization, one scale or one value at a time, for CPU and device code alike.
/// docs/numerics.md names the producers of each rule.
namespace fusedmoe {

/// What the scale formulas need to know of an element type.
struct ElementRange {
  float largest = 0.0F;  ///< largest finite value
  int max_exponent = 0;  ///< exponent of the largest power of two ("emax")
  int mantissa_bits = 0;
};

template <typename Codec>
FMOE_HOST_DEVICE constexpr ElementRange RangeOf() {
  return {Codec::Largest(), Codec::kMaxExponent, Codec::kMantissaBits};
}

/// 2^exponent rounded into what fp32 can hold (2^-149 .. 2^127).
FMOE_HOST_DEVICE constexpr float PowerOfTwo(int exponent) {
  return exponent > 127     ? FloatFromBits(254U << 23)
         : exponent >= -126 ? FloatFromBits(static_cast<uint32_t>(exponent + 127) << 23)
         : exponent >= -149 ? FloatFromBits(1U << (exponent + 149))
                            : FloatFromBits(1U);
}

/// The e8m0 code of an MX block from its largest magnitude. A NaN or infinity in the block makes the scale
/// NaN, so that the whole block decodes to NaN. A zero block has the smallest scale (code 1 by kNoElementMax,
/// as upstream).
FMOE_HOST_DEVICE constexpr uint8_t MxScaleCode(MxScaleRule rule, const ElementRange& range, float amax) {
  const uint32_t bits = FloatBits(amax);
  if (bits >= 0x7f800000U) {
    return kE8m0Nan;
  }
  if (rule == MxScaleRule::kNoElementMax) {
    return EncodeE8m0Exponent(bits < 0x00800000U ? -126 : FloorLog2(amax));
  }
  if (bits == 0) {
    return 0;
  }
  switch (rule) {
    case MxScaleRule::kEven:
    case MxScaleRule::kEvenE2m1: {
      // Half a unit of the element's last mantissa bit is added before truncation: a block maximum that would
      // round up to the next power of two counts as that power. By e2m1's one bit 448 * 2^n, the largest
      // e4m3, is where the exponent changes: no block saturates.
      const int mantissa_bits = rule == MxScaleRule::kEven ? range.mantissa_bits : 1;
      const float bumped = FloatFromBits(bits + (uint32_t{1} << (22 - mantissa_bits)));
      const int exponent = FloatBits(bumped) >= 0x7f800000U ? 128 : FloorLog2(bumped);
      return EncodeE8m0Exponent(exponent - range.max_exponent);
    }
    case MxScaleRule::kFloor:
      return EncodeE8m0Exponent(FloorLog2(amax) - range.max_exponent);
    case MxScaleRule::kCeil:
    case MxScaleRule::kFloorOfQuotient: {
      const float quotient = amax / range.largest;
      if (FloatBits(quotient) == 0) {
        return 0;
      }
      return EncodeE8m0Exponent(rule == MxScaleRule::kCeil ? CeilLog2(quotient) : FloorLog2(quotient));
    }
    case MxScaleRule::kNoElementMax:
      break;
  }
  return 0;
}

/// amax within the bound of the rule; NaN stays.
FMOE_HOST_DEVICE constexpr float BoundedAmax(const ActivationRule& rule, float amax) {
  return rule.amax_upper_bound > 0.0F && amax > rule.amax_upper_bound ? rule.amax_upper_bound : amax;
}

/// A real-valued scale, amax / divisor: of a tensor, a token or a group. Not finite when amax is not.
FMOE_HOST_DEVICE constexpr float RealScale(const ActivationRule& rule, float divisor, float amax) {
  float scale = BoundedAmax(rule, amax) / divisor;
  if (FloatBits(scale) == 0) {
    scale = rule.zero_scale;
  }
  if (scale < rule.scale_floor) {
    scale = rule.scale_floor;
  }
  const uint32_t bits = FloatBits(scale);
  if (rule.power_of_two_scale && bits != 0 && bits < 0x7f800000U) {
    scale = PowerOfTwo(CeilLog2(scale));
  }
  return scale;
}

/// The e4m3 block scale of a two-level format: amax / divisor in units of the tensor scale, to nearest even,
/// saturating at 448. A NaN or infinity in the block makes it NaN. With `multiply_by_reciprocal`, upstream's
/// spelling: (1 / tensor_scale) * (amax * (1 / divisor)).
FMOE_HOST_DEVICE constexpr uint8_t TwoLevelScaleCode(const ActivationRule& rule, float divisor,
                                                     float tensor_scale, float amax) {
  amax = BoundedAmax(rule, amax);
  if (FloatBits(amax) >= 0x7f800000U) {
    return 0x7f;
  }
  float scale = rule.multiply_by_reciprocal ? (1.0F / tensor_scale) * (amax * (1.0F / divisor))
                                            : amax / divisor / tensor_scale;
  if (FloatBits(scale) == 0) {
    scale = rule.zero_scale;
  }
  if (scale < rule.scale_floor) {
    scale = rule.scale_floor;
  }
  const uint8_t code = EncodeE4m3RneSaturating(scale);
  return code == 0 && rule.zero_scale > 0.0F ? EncodeE4m3RneSaturating(rule.zero_scale) : code;
}

/// How values are brought into the range of their codes: divided by the scale, or multiplied by its inverse
/// where that is exact, where the rule says so, and where the scale is zero (codes 0, with the sign of the
/// value).
struct EncodeStep {
  float factor = 0.0F;
  bool multiply = false;
  /// Not 0: integer codes are the product with this, formed and rounded in fp64
  /// (multiply_by_divisor_over_amax).
  double wide_factor = 0.0;

  FMOE_HOST_DEVICE constexpr float Apply(float value) const {
    return multiply ? value * factor : value / factor;
  }
};

FMOE_HOST_DEVICE constexpr EncodeStep StepFor(const ActivationRule& rule, float scale) {
  const uint32_t bits = FloatBits(scale);
  if (bits == 0) {
    return {0.0F, true};
  }
  // Powers of two from 2^-127: the inverse is an fp32 number, and the product is the quotient, bit for bit.
  const bool power_of_two = (bits & 0x007fffffU) == 0 || bits == 0x00400000U;
  if (bits < 0x7f800000U && (power_of_two || rule.multiply_by_reciprocal)) {
    const float inverse = 1.0F / scale;
    if (FloatBits(inverse) < 0x7f800000U) {
      return {inverse, true};
    }
  }
  return {scale, false};
}

}  // namespace fusedmoe
