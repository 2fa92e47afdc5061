#pragma once

#include <cstdint>

#include "numerics/host_device.hpp"
#include "numerics/minifloat.hpp"

/// One element, encoded and decoded, by names that say the rounding: Rne is to nearest, ties to even;
/// Saturating maps whatever is too large, infinity included, to the largest finite value. Zero keeps its
/// sign. docs/numerics.md has the tables.
namespace fusedmoe {

FMOE_HOST_DEVICE constexpr float DecodeE2m1(uint8_t code) {
  return E2m1::Decode(code);
}
FMOE_HOST_DEVICE constexpr float DecodeE4m3(uint8_t code) {
  return E4m3fn::Decode(code);
}
FMOE_HOST_DEVICE constexpr float DecodeE5m2(uint8_t code) {
  return E5m2::Decode(code);
}
FMOE_HOST_DEVICE constexpr float DecodeFp16(uint16_t code) {
  return Fp16::Decode(code);
}

/// Formats without NaN encode NaN as their largest value.
FMOE_HOST_DEVICE constexpr uint8_t EncodeE2m1RneSaturating(float value) {
  return static_cast<uint8_t>(E2m1::EncodeSaturating(value));
}
/// NaN stays NaN (0x7f, 0xff).
FMOE_HOST_DEVICE constexpr uint8_t EncodeE4m3RneSaturating(float value) {
  return static_cast<uint8_t>(E4m3fn::EncodeSaturating(value));
}
FMOE_HOST_DEVICE constexpr uint8_t EncodeE5m2RneSaturating(float value) {
  return static_cast<uint8_t>(E5m2::EncodeSaturating(value));
}
/// Overflow becomes infinity, as IEEE has it.
FMOE_HOST_DEVICE constexpr uint16_t EncodeFp16Rne(float value) {
  return static_cast<uint16_t>(Fp16::Encode(value));
}

/// The code of |value| as e2m1 with every tie going toward zero, the sign bit set for negatives and, as
/// ModelOpt's MXFP4 files have it, for zero (docs/numerics.md).
FMOE_HOST_DEVICE constexpr uint8_t EncodeE2m1TiesTowardZero(float value) {
  const float magnitude = FloatFromBits(FloatBits(value) & 0x7fffffffU);
  int code = 0;
  constexpr float kBounds[7] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};
  for (const float bound : kBounds) {
    code += magnitude > bound || magnitude != magnitude ? 1 : 0;
  }
  return static_cast<uint8_t>(code | (value > 0.0F || value != value ? 0 : 8));
}

FMOE_HOST_DEVICE constexpr float DecodeBf16(uint16_t code) {
  return FloatFromBits(static_cast<uint32_t>(code) << 16);
}

/// Overflow becomes infinity; NaN becomes the quiet NaN of its sign. fp32 subnormals round to bf16
/// subnormals.
FMOE_HOST_DEVICE constexpr uint16_t EncodeBf16Rne(float value) {
  const uint32_t bits = FloatBits(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return static_cast<uint16_t>(((bits >> 16) & 0x8000U) | 0x7fc0U);
  }
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

FMOE_HOST_DEVICE constexpr float RoundToBf16(float value) {
  return DecodeBf16(EncodeBf16Rne(value));
}
FMOE_HOST_DEVICE constexpr float RoundToFp16(float value) {
  return DecodeFp16(EncodeFp16Rne(value));
}

/// 2^(code - 127); code 0 is 2^-127, an fp32 subnormal, and 255 is NaN.
FMOE_HOST_DEVICE constexpr float DecodeE8m0(uint8_t code) {
  return code == 0     ? FloatFromBits(0x00400000U)
         : code == 255 ? FloatFromBits(0x7fc00000U)
                       : FloatFromBits(static_cast<uint32_t>(code) << 23);
}

inline constexpr uint8_t kE8m0Nan = 255;

/// floor(log2 |value|), exact, subnormals included; value must be finite and not zero.
FMOE_HOST_DEVICE constexpr int FloorLog2(float value) {
  const uint32_t magnitude = FloatBits(value) & 0x7fffffffU;
  if (magnitude >= 0x00800000U) {
    return static_cast<int>(magnitude >> 23) - 127;
  }
  int exponent = -150;
  for (uint32_t rest = magnitude; rest != 0; rest >>= 1) {
    ++exponent;
  }
  return exponent;
}

/// ceil(log2 |value|), exact; value must be finite and not zero.
FMOE_HOST_DEVICE constexpr int CeilLog2(float value) {
  const uint32_t magnitude = FloatBits(value) & 0x7fffffffU;
  const bool power_of_two =
      magnitude >= 0x00800000U ? (magnitude & 0x007fffffU) == 0 : (magnitude & (magnitude - 1)) == 0;
  return FloorLog2(value) + (power_of_two ? 0 : 1);
}

/// The code of 2^exponent, clamped to 0..254.
FMOE_HOST_DEVICE constexpr uint8_t EncodeE8m0Exponent(int exponent) {
  const int code = exponent + 127;
  return static_cast<uint8_t>(code < 0 ? 0 : code > 254 ? 254 : code);
}

/// Scales as powers of two: the largest not above, the smallest not below, the nearest (1.5 * 2^n goes up).
/// Zero and what is below 2^-127 give code 0, beyond 2^127 gives 254; NaN, infinity and negative values give
/// 255 (NaN).
FMOE_HOST_DEVICE constexpr uint8_t EncodeE8m0Floor(float value) {
  const uint32_t bits = FloatBits(value);
  return bits >= 0x7f800000U ? (bits == 0x80000000U ? uint8_t{0} : kE8m0Nan)
         : bits == 0         ? uint8_t{0}
                             : EncodeE8m0Exponent(FloorLog2(value));
}
FMOE_HOST_DEVICE constexpr uint8_t EncodeE8m0Ceil(float value) {
  const uint8_t floor = EncodeE8m0Floor(value);
  return floor == kE8m0Nan || FloatBits(value) << 1 == 0 ? floor : EncodeE8m0Exponent(CeilLog2(value));
}
FMOE_HOST_DEVICE constexpr uint8_t EncodeE8m0Nearest(float value) {
  const uint8_t floor = EncodeE8m0Floor(value);
  if (floor >= 254 || FloatBits(value) < 0x00400000U) {
    return floor;
  }
  // Above half of the way to the next power: the top mantissa bit, which for 2^-127 .. 2^-126 is one lower.
  const uint32_t half = floor == 0 ? 0x00200000U : 0x00400000U;
  return static_cast<uint8_t>(floor + ((FloatBits(value) & half) != 0 ? 1 : 0));
}

}  // namespace fusedmoe
