#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/float_units_isa.hpp"

/// Units that multiply two 16-bit floats in each 32-bit lane, with the names of float_units_isa.hpp. A file
/// that is compiled without an instruction gets it in fp32: the same formulas, for tests on machines that
/// lack it.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

struct PairUnit {
  static constexpr int kWordK = 2;
  using Word = Ints;
  FMOE_INLINE Word Broadcast(const int32_t* word) { return IntSet(*word); }
  FMOE_INLINE Word LoadWord(const uint8_t* words) { return LoadInts(words); }
  FMOE_INLINE void StoreWord(uint8_t* words, Word word) { StoreInts(words, word); }
};

/// Magnitudes of 8-bit floats (sign bit clear) as bf16, without rounding: the low and the high bytes. e4m3 is
/// multiplied with 2^-8, as other kernels read it, and its NaN is 480 of them, also as elsewhere.
struct Bf16Table {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};

constexpr Bf16Table MakeBf16Table(int mantissa_bits, int exponent_shift, bool has_infinity) {
  Bf16Table table = {};
  for (int code = 0; code < 128; ++code) {
    int exponent = code >> mantissa_bits;
    int mantissa = (code & ((1 << mantissa_bits) - 1)) << (7 - mantissa_bits);
    int bits = 0;
    if (has_infinity && exponent == 31) {
      bits = 255 << 7 | mantissa;
    } else if (exponent != 0) {
      bits = (exponent + exponent_shift) << 7 | mantissa;
    } else if (mantissa != 0) {  // subnormal here, normal in bf16
      for (exponent = 1; mantissa < 128; --exponent) {
        mantissa *= 2;
      }
      bits = (exponent + exponent_shift) << 7 | (mantissa & 127);
    }
    table.low[code] = (uint8_t)(bits & 255);
    table.high[code] = (uint8_t)(bits >> 8);
  }
  return table;
}

constexpr Bf16Table kE4m3AsBf16 = MakeBf16Table(3, 127 - 7 - 8, false);
constexpr Bf16Table kE5m2AsBf16 = MakeBf16Table(2, 127 - 15, true);

/// Codes of 4 bits as bf16: doubled e2m1, and integers less 8. A table repeats, so that of an index the bits
/// above the code do not matter.
struct NibbleBf16Table {
  alignas(64) uint16_t words[32];
};
constexpr NibbleBf16Table MakeNibbleBf16Table(bool e2m1) {
  constexpr uint16_t kE2m1[8] = {0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140};
  constexpr uint16_t kIntegers[9] = {0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100};
  NibbleBf16Table table = {};
  for (int i = 0; i < 32; ++i) {
    const int code = i % 16;
    table.words[i] = (uint16_t)(e2m1       ? kE2m1[code % 8] | (code < 8 ? 0 : 0x8000)
                                : code < 8 ? kIntegers[8 - code] | 0x8000
                                           : kIntegers[code - 8]);
  }
  return table;
}
constexpr NibbleBf16Table kE2m1AsBf16 = MakeNibbleBf16Table(true);
constexpr NibbleBf16Table kU4AsBf16 = MakeNibbleBf16Table(false);

/// vdpbf16ps: products are exact, sums are fp32. Subnormal numbers count as zero: products below 2^-126 are
/// lost.
struct Bf16Unit : PairUnit {
  using Sums = Floats;
  FMOE_INLINE Sums Start() { return Zero(); }

  FMOE_INLINE Sums Dot(Ints weights, Ints values, Sums sums) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)values);
#else
    const Ints high = _mm512_set1_epi32((int)0xffff0000);
    sums = MultiplyAdd(FromBits(IntAnd(weights, high)), FromBits(IntAnd(values, high)), sums);
    return MultiplyAdd(FromBits(ShiftLeft<16>(weights)), FromBits(ShiftLeft<16>(values)), sums);
#endif
  }

  FMOE_INLINE Floats Finish(Sums first, Sums second) {
    return Add(first, second);
  }

  /// BF16 stands in panels as it is multiplied. Codes of 4 bits are shifted to the ends of words, which look
  /// bf16 up, in the order that tiles have for them (PackArguments::nibbles): with them in
  /// that of k (`vpmultishiftqb`, in the way of products) units took 7 to 12 % longer from L2. 8-bit floats
  /// look two bytes up (`vpermi2b`: 128 entries), whose interleaving leaves four rows in each quarter of a
  /// register: rows 0-3 and 8-11 in one, 4-7 and 12-15 in the other.
  template <WeightKernel kWeight>
  FMOE_INLINE void Decode(const uint8_t* vector, int, Ints* pairs) {
    const Ints x = LoadInts(vector);
    if constexpr (kWeight == kWeightBf16) {
      pairs[0] = x;
    } else if constexpr (VectorK(kWeight) == 8) {
      const Ints table = LoadInts((kWeight < kWeightU4 ? kE2m1AsBf16 : kU4AsBf16).words);
      Unroll<4>([&](int p) FMOE_FLAT {
        pairs[p] = _mm512_permutexvar_epi16(p == 0 ? x : _mm512_srli_epi16(x, 4 * p), table);
      });
    } else {
#if defined(__AVX512VBMI__)
      const Bf16Table& table = kWeight == kWeightE5m2 ? kE5m2AsBf16 : kE4m3AsBf16;
      const Ints low = _mm512_permutex2var_epi8(LoadInts(table.low), x, LoadInts(table.low + 64));
      Ints high = _mm512_permutex2var_epi8(LoadInts(table.high), x, LoadInts(table.high + 64));
      high = IntOr(high, IntAnd(x, _mm512_set1_epi8((char)0x80)));
      const Ints a = _mm512_unpacklo_epi8(low, high), b = _mm512_unpackhi_epi8(low, high);
      pairs[0] = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), b);
      pairs[1] = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), b);
#endif
    }
  }
};

/// vfmadd231ph: sums in f16, two a lane (even and odd k), which must not exceed 65504 (kF16LargestExponent of
/// pack_pairs_isa.hpp sees to it). `Finish` adds the two chains and the two of a lane in f16, then leaves for
/// fp32.
struct F16Unit : PairUnit {
  using Sums = Ints;
  FMOE_INLINE Sums Start() { return IntZero(); }

#if defined(__AVX512FP16__)
  FMOE_INLINE Sums Dot(Ints weights, Ints values, Sums sums) {
    return _mm512_castph_si512(_mm512_fmadd_ph(_mm512_castsi512_ph(weights), _mm512_castsi512_ph(values),
                                               _mm512_castsi512_ph(sums)));
  }
  FMOE_INLINE Sums AddHalves(Sums a, Sums b) {
    return _mm512_castph_si512(_mm512_add_ph(_mm512_castsi512_ph(a), _mm512_castsi512_ph(b)));
  }
#else
  FMOE_INLINE Floats Widen(Ints x, int half) {
    return _mm512_cvtph_ps(half == 0 ? _mm512_castsi512_si256(x) : _mm512_extracti64x4_epi64(x, 1));
  }
  FMOE_INLINE Ints Narrow(Floats low, Floats high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT)),
                              _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT), 1);
  }
  FMOE_INLINE Sums Dot(Ints weights, Ints values, Sums sums) {
    return Narrow(MultiplyAdd(Widen(weights, 0), Widen(values, 0), Widen(sums, 0)),
                  MultiplyAdd(Widen(weights, 1), Widen(values, 1), Widen(sums, 1)));
  }
  FMOE_INLINE Sums AddHalves(Sums a, Sums b) {
    return Narrow(Add(Widen(a, 0), Widen(b, 0)), Add(Widen(a, 1), Widen(b, 1)));
  }
#endif

  FMOE_INLINE Floats Finish(Sums first, Sums second) {
    const Sums both = AddHalves(first, second);
    const Sums sums = AddHalves(both, _mm512_rol_epi32(both, 16));
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(sums));
  }

  /// e4m3 bits << 7 are an f16 of 2^-8 of the value, subnormal numbers included.
  template <WeightKernel kWeight>
  FMOE_INLINE void Decode(const uint8_t* vector, int, Ints* pairs) {
    const Ints mask = _mm512_set1_epi16((short)0xbf80);
    Unroll<2>([&](int half) FMOE_FLAT {
      const Ints wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(vector + 32 * half)));
      pairs[half] = IntAnd(_mm512_slli_epi16(wide, 7), mask);
    });
  }
};

template <>
struct FloatUnit<kTileBf16> {
  using Type = Bf16Unit;
};
template <>
struct FloatUnit<kTileBf16Pair> {
  using Type = Bf16Unit;
};
template <>
struct FloatUnit<kTileF16> {
  using Type = F16Unit;
};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
