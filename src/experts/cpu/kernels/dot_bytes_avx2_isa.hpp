#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/dot_float_isa.hpp"
#include "experts/cpu/kernels/unit_scale_isa.hpp"

/// Short tiles of e4m3, where registers hold half of a stripe: a word of all rows at a time, and as many sums
/// as registers hold. 32 bytes of a panel are k and k + 1 of 16 rows; the odd k are the upper bytes of words,
/// the even ones those of what is shifted by a byte.
///
/// On cores of Intel (kTileF32) codes go to their place in f16 and are converted.
///
/// On cores of AMD (kTileRaised) they go to their place in fp32:
///
///     s eeee mmm  ->  s 0000 eeee mmm 0 ... 0     2^-120 of the number, of subnormal ones as well
///
/// There one conversion (vcvtph2ps), of eight values, starts per cycle; this takes one operation and a mask,
/// of which four start. Panels expect 2^-8 of the numbers, so the 2^112 in between stand beside the tile, as
/// a scale of each unit: values of the tile are raised until the largest of 64 is about 2^112, and no product
/// is subnormal. All factors are powers of two, so that sums have the bits of kTileF32. A subnormal operand
/// costs cores of Intel a hundred times as much as another.
///
/// Zen 3, weights in L2, one, two and four tokens: 23, 17 and 8 GB/s, by look-ups of the bytes of bf16
/// 17, 12.5 and 7.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

FMOE_INLINE Ints EvenBytesUp(Ints x) {
  return _mm256_slli_epi16(x, 8);
}

/// Numbers of the upper bytes of 16 words, divided by 256.
struct ByConversion {
  Ints mask;

  FMOE_INLINE ByConversion Make() { return {_mm256_set1_epi16((short)0xbf80)}; }
  __attribute__((always_inline)) void Upper(Ints x, Floats* out) const {
    const Ints f16 = IntAnd(_mm256_srai_epi16(x, 1), mask);
    out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(f16));
    out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(f16, 1));
  }
  FMOE_INLINE void RowsInOrder(Floats*) {}
};

/// The same divided by 2^120, of the even words and of the odd ones: an odd word comes to its place by a
/// shift, an even one by a product, which runs on a port that shifts cannot use.
struct ByPlace {
  Ints mask, factor;

  /// Held in registers: with two tokens, loads are half of what bounds the kernel.
  FMOE_INLINE ByPlace Make() {
    ByPlace places = {IntSet((int)0x87f00000), IntSet(1 << 12)};
    InPlace(places.mask);
    InPlace(places.factor);
    return places;
  }
  __attribute__((always_inline)) Floats Even(Ints x) const {
    return FromBits(IntAnd(MultiplyAddWordPairs(x, factor), mask));
  }
  __attribute__((always_inline)) void Upper(Ints x, Floats* out) const {
    out[0] = Even(x);
    out[1] = FromBits(IntAnd(ShiftRightSigned<4>(x), mask));
  }
  /// Rows 0, 2, ..., 14 and 1, 3, ..., 15 to rows 0-7 and 8-15.
  FMOE_INLINE void RowsInOrder(Floats* rows) {
    const Floats low = _mm256_unpacklo_ps(rows[0], rows[1]), high = _mm256_unpackhi_ps(rows[0], rows[1]);
    rows[0] = _mm256_permute2f128_ps(low, high, 0x20);
    rows[1] = _mm256_permute2f128_ps(low, high, 0x31);
  }
};

/// A unit with a short tile, one or two tokens at a time: four or eight sums, enough to hide the latency of
/// an addition. The additions of ShortUnits in their order.
template <WeightKernel kWeight, TileKind kKind, typename Bytes>
struct ShortUnitOfBytes {
  static constexpr int kMostTokens = 4;

  template <int kHeight>
  FMOE_INLINE void Add(const uint8_t* unit, const uint8_t* group_scales, int64_t ahead, const int32_t* words,
                       const float* scales, Floats (*totals)[kHeight]) {
    constexpr int kAtOnce = kHeight < 2 ? kHeight : 2;
    Unroll<kHeight / kAtOnce>([&](auto pass) FMOE_FLAT {
      AddTokens<kHeight, decltype(pass)() * kAtOnce, kAtOnce>(unit, group_scales, ahead, words, scales,
                                                              totals);
    });
  }

 private:
  template <int kHeight, int kFirst, int kTokens>
  FMOE_INLINE void AddTokens(const uint8_t* unit, const uint8_t* group_scales, int64_t ahead,
                             const int32_t* words, const float* scales, Floats (*totals)[kHeight]) {
    using Panel = FloatPanel<kWeight, F32Unit>;
    constexpr int kGroupVectors = Panel::kVectors / Panel::kGroups;
    const Bytes bytes = Bytes::Make();
    Floats scaled[2][kTokens];
    Unroll<Panel::kGroups>([&](auto group) FMOE_FLAT {
      Floats sums[2][kTokens][2];
      Unroll<4 * kTokens>([&](int i) FMOE_FLAT { (&sums[0][0][0])[i] = Zero(); });
      for (int v = 0; v < kGroupVectors; ++v, unit += 64, words += 4 * kHeight) {
        if constexpr (kFirst == 0) {
          PrefetchBeside(unit + ahead, sums[0][0][0]);
        }
        Unroll<4>([&](auto step) FMOE_FLAT {
          constexpr int kPair = decltype(step)() / 2, kByte = 1 - decltype(step)() % 2;
          constexpr int kWord = 2 * kPair + kByte;
          const Ints odd = LoadInts(unit + 32 * kPair);
          Floats weights[2];
          bytes.Upper(kByte == 1 ? odd : EvenBytesUp(odd), weights);
          DotWord<kKind, 2, kTokens, kHeight>(kWord, weights, words + kWord * kHeight + kFirst, sums);
          Unroll<2 * kTokens>([&](int i) FMOE_FLAT { InPlace(sums[i / kTokens][i % kTokens][kByte]); });
        });
      }
      Unroll<kTokens>([&](int t) FMOE_FLAT {
        Floats of_group[2];
        Unroll<2>([&](int i) FMOE_FLAT { of_group[i] = F32Unit::Finish(sums[i][t][0], sums[i][t][1]); });
        Bytes::RowsInOrder(of_group);
        Unroll<2>([&](int half) FMOE_FLAT {
          Floats& so_far = scaled[half][t];
          so_far = Panel::AddGroup(of_group[half], group_scales, group, half, so_far);
          if constexpr (group + 1 < Panel::kGroups && kTokens == 2) {
            asm("" : "+m"(so_far));  // spilled on purpose: else GCC 12 spills one of the eight sums
          }
        });
      });
    });
    Unroll<2 * kTokens>([&](int i) FMOE_FLAT {
      const int half = i / kTokens, token = i % kTokens;
      Floats& total = totals[half][kFirst + token];
      total = AddUnit<kKind>(total, scaled[half][token], scales + kFirst + token);
    });
  }
};

template <WeightKernel kWeight>
struct ShortUnit<kWeight, kTileRaised> : ShortUnitOfBytes<kWeight, kTileRaised, ByPlace> {};

template <WeightKernel kWeight>
struct ConvertedUnit : ShortUnitOfBytes<kWeight, kTileF32, ByConversion> {
  static constexpr int kMostTokens = 2;  // four meet half of the rows: 6.3 instead of 5.7 GB/s
};
template <>
struct ShortUnit<kWeightE4m3, kTileF32> : ConvertedUnit<kWeightE4m3> {};
template <>
struct ShortUnit<kWeightE4m3Scaled, kTileF32> : ConvertedUnit<kWeightE4m3Scaled> {};
template <>
struct ShortUnit<kWeightE4m3Stripe, kTileF32> : ConvertedUnit<kWeightE4m3Stripe> {};
template <>
struct ShortUnit<kWeightMxfp8, kTileF32> : ConvertedUnit<kWeightMxfp8> {};

/// Words for tall tiles.
struct RaisedUnit : F32Unit {
  template <WeightKernel kWeight>
  FMOE_INLINE void Decode(const uint8_t* vector, int half, Word* out) {
    const ByPlace places = ByPlace::Make();
    Unroll<2>([&](int pair) FMOE_FLAT {
      const __m128i words = _mm_loadu_si128((const __m128i*)(vector + 32 * pair + 16 * half));
      const Ints odd = _mm256_cvtepu16_epi32(words);
      out[2 * pair] = places.Even(EvenBytesUp(odd));
      out[2 * pair + 1] = places.Even(odd);
    });
  }
};
template <>
struct FloatUnit<kTileRaised> {
  using Type = RaisedUnit;
};

/// Subnormal numbers count between these two, also in programs that have them taken for zeros (DAZ and FTZ of
/// MXCSR), as libraries built with -ffast-math do: weights below 2^-6 would be lost. No destructor, which
/// would bring a weak symbol.
constexpr unsigned kTakesForZero = _MM_DENORMALS_ZERO_ON | _MM_FLUSH_ZERO_ON;
FMOE_INLINE unsigned CountSubnormals() {
  const unsigned before = _mm_getcsr();
  if ((before & kTakesForZero) != 0) {
    _mm_setcsr(before & ~kTakesForZero);
  }
  return before;
}
FMOE_INLINE void Restore(unsigned before) {
  if ((before & kTakesForZero) != 0) {
    _mm_setcsr(before);
  }
}

template <WeightKernel kWeight, int kHeight>
void RaisedDot(const uint8_t* stripes, int64_t num_stripes, int64_t blocks, const TileView* tile,
               float* out) {
  const unsigned before = CountSubnormals();
  FloatStripes<kWeight, kTileRaised, kHeight, false>(stripes, num_stripes, blocks, tile, out);
  Restore(before);
}

template <WeightKernel kWeight>
void RaisedDotTall(const uint8_t* stripes, int64_t num_stripes, int64_t blocks, const TileView* tile,
                   float* out) {
  const unsigned before = CountSubnormals();
  FloatDotTall<kWeight, kTileRaised>(stripes, num_stripes, blocks, tile, out);
  Restore(before);
}

template <WeightKernel kWeight>
void RaisedBatch(const uint8_t* stripes, int64_t num_stripes, int64_t stripe_stride, int64_t blocks,
                 const TileView* tiles, int64_t num_tiles, float* out) {
  const unsigned before = CountSubnormals();
  FloatBatch<kWeight, kTileRaised>(stripes, num_stripes, stripe_stride, blocks, tiles, num_tiles, out);
  Restore(before);
}

template <WeightKernel kWeight>
constexpr void SetRaisedDots(KernelTable& table) {
  table.dot[kWeight][kTileRaised][0] = &RaisedDot<kWeight, 1>;
  table.dot[kWeight][kTileRaised][1] = &RaisedDot<kWeight, 2>;
  table.dot[kWeight][kTileRaised][2] = &RaisedDot<kWeight, 4>;
  table.dot[kWeight][kTileRaised][3] = &RaisedDotTall<kWeight>;
  table.batch[kWeight][kTileRaised] = &RaisedBatch<kWeight>;
}

/// To 2^112 and below: sums of 64 products with 480 * 2^-120 end at 2^8, and the scale of the largest values
/// of fp32 is 2^127. Below 2^-15 the factor has its own end; 2^-126 then meets the smallest weight as 2^-128.
void PackRaised(const PackArguments* a) {
  constexpr uint32_t kExponents = 112 + 127, kLargestFactor = 254;
  float* out = (float*)a->tile.codes;
  for (int64_t unit = 0; unit < a->units; ++unit, out += 64) {
    Floats x[kUnitVectors];
    Unroll<kUnitVectors>([&](int v) FMOE_FLAT { x[v] = Load(a->values + 64 * unit + v * kLanes); });
    // Infinity and NaN stay what they are by any factor: those of the largest number.
    const uint32_t largest = LargestBits(x) >> 23, exponent = largest < 254 ? largest : 254;
    const uint32_t factor =
        kExponents + 127 - exponent < kLargestFactor ? kExponents + 127 - exponent : kLargestFactor;
    Unroll<kUnitVectors>(
        [&](int v) FMOE_FLAT { Store(out + v * kLanes, Multiply(x[v], Set(FloatOfBits(factor << 23)))); });
    a->tile.scale[unit] = FloatOfBits((kExponents + 127 - factor) << 23);
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
