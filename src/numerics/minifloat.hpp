#pragma once

#include <cstdint>

#include "numerics/host_device.hpp"

namespace fusedmoe {

/// What a small float does with its topmost codes.
enum class MinifloatKind : uint8_t {
  kFinite,  ///< every code is a number (e2m1, e3m2, e2m3)
  kFn,      ///< all ones is NaN, no infinity (e4m3fn)
  kIeee,    ///< the last exponent holds infinity and NaN (e5m2, fp16)
  kFnuz     ///< the code of -0 is NaN, nothing else is special
};

/// A binary float of 1 + ExponentBits + MantissaBits bits, at most 16, whose values are all normal as fp32.
///
/// Decode is exact. Encode rounds to nearest, ties to even, and comes in two forms: `EncodeSaturating` maps
/// whatever exceeds the largest finite value, infinity included, to that value; `Encode` maps it to infinity,
/// or to NaN where there is no infinity, or saturates where there is neither. The sign of zero is kept (fnuz
/// has no -0 and gives +0). NaN gives the NaN code with its sign, and the largest finite value, positive, in
/// formats without NaN, which is what the cvt.rn.satfinite instructions of NVIDIA GPUs give.
///
/// Works on bits, so that it is the same on every device, with any compiler flags, and vectorizes.
template <int ExponentBits, int MantissaBits, int Bias, MinifloatKind Kind>
struct Minifloat {
  static constexpr int kMantissaBits = MantissaBits;
  static constexpr int kBias = Bias;
  static constexpr int kBits = 1 + ExponentBits + MantissaBits;
  static constexpr uint32_t kSignBit = uint32_t{1} << (kBits - 1);
  static constexpr uint32_t kMagnitudeMask = kSignBit - 1;
  static constexpr uint32_t kInfinityCode = ((uint32_t{1} << ExponentBits) - 1)
                                            << MantissaBits;  // kIeee only
  static constexpr uint32_t kLargestCode = Kind == MinifloatKind::kIeee ? kInfinityCode - 1
                                           : Kind == MinifloatKind::kFn ? kMagnitudeMask - 1
                                                                        : kMagnitudeMask;
  static constexpr bool kHasNan = Kind != MinifloatKind::kFinite;
  /// The quiet NaN with a positive sign.
  static constexpr uint32_t kNanCode = Kind == MinifloatKind::kIeee
                                           ? kInfinityCode | (1U << (MantissaBits - 1))
                                       : Kind == MinifloatKind::kFn   ? kMagnitudeMask
                                       : Kind == MinifloatKind::kFnuz ? kSignBit
                                                                      : kLargestCode;

  FMOE_HOST_DEVICE static constexpr float Decode(uint32_t code) {
    const uint32_t sign = (code & kSignBit) << (32 - kBits);
    const uint32_t magnitude = code & kMagnitudeMask;
    const uint32_t widened = magnitude << kShift;
    // 2^(1-bias) * (1 + f) - 2^(1-bias): exact, and no fp32 subnormal takes part.
    const float subnormal = FloatFromBits(widened | kMinNormalBits) - FloatFromBits(kMinNormalBits);
    const uint32_t normal = widened + (static_cast<uint32_t>(127 - Bias) << 23);
    uint32_t bits = SelectLess(magnitude, kFirstNormalCode, FloatBits(subnormal), normal);
    if constexpr (Kind == MinifloatKind::kIeee) {
      bits = SelectLess(magnitude, kInfinityCode, bits, widened | kFloatInfinity);  // payloads of NaN stay
    } else if constexpr (Kind == MinifloatKind::kFn) {
      bits = SelectLess(magnitude, kMagnitudeMask, bits, kFloatNan);
    } else if constexpr (Kind == MinifloatKind::kFnuz) {
      if (sign != 0 && magnitude == 0) {
        return FloatFromBits(kFloatNan);
      }
    }
    return FloatFromBits(sign | bits);
  }

  FMOE_HOST_DEVICE static constexpr uint32_t EncodeSaturating(float value) {
    return EncodeWith(value, kLargestCode);
  }

  FMOE_HOST_DEVICE static constexpr uint32_t Encode(float value) {
    constexpr uint32_t kOverflow = Kind == MinifloatKind::kIeee     ? kInfinityCode
                                   : Kind == MinifloatKind::kFinite ? kLargestCode
                                                                    : kNanCode;
    return EncodeWith(value, kOverflow);
  }

  /// The largest finite value.
  FMOE_HOST_DEVICE static constexpr float Largest() { return Decode(kLargestCode); }
  /// Exponent of the largest power of two ("emax" of the OCP MX text).
  static constexpr int kMaxExponent = static_cast<int>(kLargestCode >> MantissaBits) - Bias;

 private:
  static constexpr int kShift = 23 - MantissaBits;
  static constexpr uint32_t kFloatInfinity = 0x7f800000U;
  static constexpr uint32_t kFloatNan = 0x7fc00000U;
  static constexpr uint32_t kFirstNormalCode = uint32_t{1} << MantissaBits;
  static constexpr uint32_t kMinNormalBits = static_cast<uint32_t>(128 - Bias) << 23;

  /// a < b ? yes : no for a, b < 2^31, as masks: with branches, compilers keep the float operations of one
  /// side conditional (they might trap) and do not vectorize loops over this.
  FMOE_HOST_DEVICE static constexpr uint32_t SelectLess(uint32_t a, uint32_t b, uint32_t yes, uint32_t no) {
    const auto mask = static_cast<uint32_t>(static_cast<int32_t>(a - b) >> 31);
    return (yes & mask) | (no & ~mask);
  }

  /// `overflow`: the magnitude code of whatever rounds beyond the largest finite value, infinity included.
  FMOE_HOST_DEVICE static constexpr uint32_t EncodeWith(float value, uint32_t overflow) {
    const uint32_t bits = FloatBits(value);
    const uint32_t sign = (bits >> (32 - kBits)) & kSignBit;
    const uint32_t magnitude = bits & 0x7fffffffU;
    // Adding 2^(23 - MantissaBits) times the smallest normal value leaves the subnormal code, rounded to
    // nearest even by the adder, in the low bits.
    constexpr uint32_t kMagic = static_cast<uint32_t>(128 - Bias + 23 - MantissaBits) << 23;
    const uint32_t subnormal = FloatBits(FloatFromBits(magnitude) + FloatFromBits(kMagic)) - kMagic;
    const uint32_t half_less_one = (uint32_t{1} << (kShift - 1)) - 1;
    const uint32_t rounded = magnitude + half_less_one + ((magnitude >> kShift) & 1);
    const uint32_t normal = (rounded >> kShift) - (static_cast<uint32_t>(127 - Bias) << MantissaBits);
    uint32_t code = SelectLess(magnitude, kMinNormalBits, subnormal, normal);
    code = SelectLess(kLargestCode, code, overflow, code);
    if constexpr (Kind == MinifloatKind::kFinite || Kind == MinifloatKind::kFnuz) {
      return SelectLess(kFloatInfinity, magnitude, kNanCode, WithSign(sign, code));
    }
    return WithSign(sign, SelectLess(kFloatInfinity, magnitude, kNanCode, code));
  }

  FMOE_HOST_DEVICE static constexpr uint32_t WithSign(uint32_t sign, uint32_t code) {
    if constexpr (Kind == MinifloatKind::kFnuz) {
      return code == 0 || code == kNanCode ? code : sign | code;
    }
    return sign | code;
  }
};

using E2m1 = Minifloat<2, 1, 1, MinifloatKind::kFinite>;
using E3m2 = Minifloat<3, 2, 3, MinifloatKind::kFinite>;
using E2m3 = Minifloat<2, 3, 1, MinifloatKind::kFinite>;
using E4m3fn = Minifloat<4, 3, 7, MinifloatKind::kFn>;
using E5m2 = Minifloat<5, 2, 15, MinifloatKind::kIeee>;
using E4m3fnuz = Minifloat<4, 3, 8, MinifloatKind::kFnuz>;
using E5m2fnuz = Minifloat<5, 2, 16, MinifloatKind::kFnuz>;
using Fp16 = Minifloat<5, 10, 15, MinifloatKind::kIeee>;

}  // namespace fusedmoe
