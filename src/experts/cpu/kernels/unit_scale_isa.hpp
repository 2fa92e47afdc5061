#pragma once

#include <stdint.h>
#include <string.h>

#include "experts/cpu/kernels/simd_isa.hpp"

/// What every packing of activations needs: the scale of a unit of 64 values, and bf16.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

constexpr int kUnitVectors = 64 / kLanes;

/// |x| as integers: larger floats have larger bits, and NaN and infinity stand above all of them.
template <int kVectors = kUnitVectors>
FMOE_INLINE uint32_t LargestBits(const Floats* x) {
  Ints largest = IntZero();
  Unroll<kVectors>([&](int v) FMOE_FLAT { largest = IntMaxUnsigned(largest, Bits(Absolute(x[v]))); });
  return MaxUnsignedOf(largest);
}

constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kNanBits = 0x7fc00000;
/// 2^-110: the reciprocal of a scale below it would overflow. Such a unit counts as zero; it is 2^-100 of any
/// weight.
constexpr uint32_t kTinyBits = (127 - 110) << 23;

FMOE_INLINE float FloatOfBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

/// Scale and its reciprocal for codes up to `largest_code`. A unit with NaN or infinity gets a NaN scale,
/// which spoils its own token and no other.
struct UnitScale {
  float scale, encode_multiplier;
};
FMOE_INLINE UnitScale ScaleOf(uint32_t amax_bits, float largest_code) {
  if (amax_bits >= kInfinityBits) {
    return {FloatOfBits(kNanBits), 0.0F};
  }
  if (amax_bits < kTinyBits) {
    return {0.0F, 0.0F};
  }
  const float amax = FloatOfBits(amax_bits);
  return {amax / largest_code, largest_code / amax};
}

/// A power of two, by which the largest magnitude has thirteen bits: a code of six, in sixteenths at most 448
/// times its lowest bit, and all smaller ones beside it stay whole.
FMOE_INLINE UnitScale PowerScaleOf(uint32_t amax_bits) {
  if (amax_bits >= kInfinityBits || amax_bits < kTinyBits) {
    return ScaleOf(amax_bits, 1.0F);
  }
  const uint32_t exponent = amax_bits >> 23;  // at least that of kTinyBits, 17
  return {FloatOfBits((exponent - 12) << 23), FloatOfBits((254 + 12 - exponent) << 23)};
}

/// To nearest even: adds half a unit less one, plus the last bit that stays. NaN becomes the quiet NaN
/// 0x7fc0.
FMOE_INLINE Ints Bf16Of(Floats x) {
  const Ints bits = Bits(x);
  const Ints odd = IntAnd(ShiftRight16(bits), IntSet(1));
  const Ints rounded = ShiftRight16(IntAdd(bits, IntAdd(odd, IntSet(0x7fff))));
  return SelectNan(x, IntSet(0x7fc0), rounded);
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
