#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/kernel_table_isa.hpp"
#include "experts/cpu/kernels/unit_scale_isa.hpp"

/// Values of one token into tiles of 16-bit floats (layout: TileView).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// bf16 of 16 values, in the low words of the lanes.
template <TileKind kKind>
FMOE_INLINE void StoreBf16Planes(uint16_t* out, Floats x) {
  const Ints high = Bf16Of(x);
  if constexpr (kKind == kTileBf16) {
    StoreWords(out, high);
  } else {
    // x - h is exact, and what bf16 leaves of it is below 2^-17 of x.
    const Ints low = Bf16Of(Subtract(x, FromBits(ShiftLeft<16>(high))));
    const Ints both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(high)),
                                         _mm512_cvtepi32_epi16(low), 1);
    const Ints words = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    StoreInts(out, _mm512_permutexvar_epi32(words, both));
  }
}

template <TileKind kKind>
void PackBf16(const PackArguments* a) {
  const Ints halves = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  uint16_t* out = (uint16_t*)a->tile.codes;
  for (int64_t unit = 0; unit < a->units; ++unit) {
    for (int v = 0; v < 64; v += 16, out += 16 * Planes(kKind)) {
      const Floats x = Load(a->values + 64 * unit + v);
      StoreBf16Planes<kKind>(out, a->nibbles ? _mm512_permutexvar_ps(halves, x) : x);
    }
    a->tile.scale[unit] = a->scales != nullptr ? a->scales[unit] : 1.0F;
  }
}

/// Below this every value of a unit lies after its scale: the sum of 64 products with |e4m3| * 2^-8 <= 1.75
/// is at most 57344, and f16 ends at 65504. Codes of e4m3 (up to 448) need no scale.
constexpr int kF16LargestExponent = 9;

/// Scales are powers of two, so that bf16 values enter exactly (to 2^-34 of the largest of their unit).
void PackF16(const PackArguments* a) {
  uint16_t* out = (uint16_t*)a->tile.codes;
  for (int64_t unit = 0; unit < a->units; ++unit, out += 64) {
    Floats x[kUnitVectors];
    Unroll<kUnitVectors>([&](int v) FMOE_FLAT { x[v] = Load(a->values + 64 * unit + v * kLanes); });
    float scale, multiplier = 1.0F;
    if (a->scales != nullptr) {
      scale = a->scales[unit];
    } else {
      const uint32_t amax = LargestBits(x);
      scale = ScaleOf(amax, 1.0F).scale;  // NaN and zero as integer tiles have them
      multiplier = 0.0F;
      if (scale > 0.0F) {
        const uint32_t exponent = (amax >> 23) - (kF16LargestExponent - 1);
        scale = FloatOfBits(exponent << 23);
        multiplier = FloatOfBits((254 - exponent) << 23);
      }
    }
    Unroll<kUnitVectors>([&](int v) FMOE_FLAT {
      StoreF16(out + v * kLanes, multiplier > 0.0F ? Multiply(x[v], Set(multiplier)) : Zero());
    });
    a->tile.scale[unit] = scale;
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
