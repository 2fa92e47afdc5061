#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/intrinsics_isa.hpp"
#include "experts/cpu/kernels/unroll_isa.hpp"

/// The machine of the tile kernels: tile registers of 16 rows of 64 bytes, and 512-bit vectors beside them.
/// tile_emulated_isa.hpp has the same names in portable code.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

// ------------------------------------------------------------------------------------------------- tiles
//
// Own assembly: GCC's intrinsics for tile loads tell the compiler nothing about the memory they read, so that
// it may store decoded weights behind them.

/// Palette 1: every tile 16 rows of 64 bytes. The layout is that of the processor's manual.
struct alignas(64) TileShape {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// The tile registers of this thread while it lives. The system saves 8 KiB more at a switch of a thread that
/// uses tiles, so they are released before anything may wait.
struct Tiles {
  /// Tiles 0 to 5 (sums, tokens) with so many rows.
  FMOE_INLINE void Configure(int64_t rows) {
    TileShape shape;
    for (int tile = 0; tile < 6; ++tile) {
      shape.rows[tile] = (uint8_t)rows;
    }
    asm volatile("ldtilecfg %0" ::"m"(shape));
  }
  FMOE_INLINE void Release() { asm volatile("tilerelease" ::: "memory"); }
  template <int kTile>
  FMOE_INLINE void Zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  FMOE_INLINE void Load(const void* p) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(64L), "i"(kTile) : "memory");
  }
  /// Past the L1, which belongs to the other operand (measured: 74 to 99 % of the peak).
  template <int kTile>
  FMOE_INLINE void Stream(const void* p) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(64L), "i"(kTile) : "memory");
  }
  template <int kTile>
  FMOE_INLINE void Store(void* p) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(64L), "i"(kTile) : "memory");
  }
  /// A little time before the next tile instruction (TileUnit).
  FMOE_INLINE void Space() { asm volatile("nop; nop; nop; nop; nop; nop; nop; nop"); }
  /// sums += tokens (rows) x weights (columns), pairs of bf16 or quadruples of s8 x u8, or s8 x s8.
  template <int kSum, int kTokens, int kWeights>
  FMOE_INLINE void DotBf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kTokens), "i"(kWeights));
  }
  template <int kSum, int kTokens, int kWeights>
  FMOE_INLINE void DotInt8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kTokens), "i"(kWeights));
  }
  template <int kSum, int kTokens, int kWeights>
  FMOE_INLINE void DotSigned() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kTokens), "i"(kWeights));
  }
};

// ----------------------------------------------------------------------------------------------- vectors

using Words = __m512i;  // 32 words, or 16 double words
using Reals = __m512;

FMOE_INLINE Words LoadWords(const void* p) {
  return _mm512_loadu_si512(p);
}
FMOE_INLINE void StoreWords(void* p, Words x) {
  _mm512_storeu_si512(p, x);
}
FMOE_INLINE Words SetWords(uint16_t x) {
  return _mm512_set1_epi16((short)x);
}
/// first[index], or second[index - 32], of index mod 64
FMOE_INLINE Words LookUpOfTwo(Words index, Words first, Words second) {
  return _mm512_permutex2var_epi16(first, index, second);
}
/// table[index mod 32]
FMOE_INLINE Words LookUp(Words index, Words table) {
  return _mm512_permutexvar_epi16(index, table);
}
template <int kBits>
FMOE_INLINE Words ShiftRight(Words x) {
  return _mm512_srli_epi16(x, kBits);
}
template <int kBits>
FMOE_INLINE Words ShiftRightArithmetic(Words x) {
  return _mm512_srai_epi16(x, kBits);
}
template <int kBits>
FMOE_INLINE Words ShiftLeft(Words x) {
  return _mm512_slli_epi16(x, kBits);
}
FMOE_INLINE Words And(Words a, Words b) {
  return _mm512_and_si512(a, b);
}
FMOE_INLINE Words Or(Words a, Words b) {
  return _mm512_or_si512(a, b);
}
FMOE_INLINE Words SubtractSaturated(Words a, Words b) {
  return _mm512_subs_epu16(a, b);
}
/// x + y where x, but for its sign, is not zero.
FMOE_INLINE Words AddToNonZero(Words x, Words y) {
  return _mm512_mask_add_epi16(x, _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x7fff)), x, y);
}
FMOE_INLINE Words AddWords(Words a, Words b) {
  return _mm512_add_epi16(a, b);
}
FMOE_INLINE Words SubtractBytes(Words a, Words b) {
  return _mm512_sub_epi8(a, b);
}
FMOE_INLINE Words SubtractWords(Words a, Words b) {
  return _mm512_sub_epi16(a, b);
}
FMOE_INLINE Words MinSigned(Words a, Words b) {
  return _mm512_min_epi16(a, b);
}
FMOE_INLINE Words MaxSigned(Words a, Words b) {
  return _mm512_max_epi16(a, b);
}
/// f16 arithmetic.
FMOE_INLINE Words MultiplyHalves(Words a, Words b) {
  return (Words)_mm512_mul_ph((__m512h)a, (__m512h)b);
}
FMOE_INLINE Words SubtractHalves(Words a, Words b) {
  return (Words)_mm512_sub_ph((__m512h)a, (__m512h)b);
}
FMOE_INLINE Words MultiplyAddHalves(Words a, Words b, Words c) {
  return (Words)_mm512_fmadd_ph((__m512h)a, (__m512h)b, (__m512h)c);
}
FMOE_INLINE Words IntegersToHalves(Words x) {
  return (Words)_mm512_cvtepu16_ph(x);
}
/// Sixteen bytes to double words, each in both of its words.
FMOE_INLINE Words SpreadBytes(const uint8_t* p) {
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm512_or_si512(x, _mm512_slli_epi32(x, 16));
}

/// Sixteen bytes to double words, each in all four bytes.
FMOE_INLINE Words SpreadBytesToFour(const uint8_t* p) {
  const Words x = SpreadBytes(p);
  return _mm512_or_si512(x, _mm512_slli_epi32(x, 8));
}

FMOE_INLINE Reals LoadReals(const float* p) {
  return _mm512_loadu_ps(p);
}
FMOE_INLINE void StoreReals(float* p, Reals x) {
  _mm512_storeu_ps(p, x);
}
FMOE_INLINE Reals SetReals(float x) {
  return _mm512_set1_ps(x);
}
FMOE_INLINE Reals AddReals(Reals a, Reals b) {
  return _mm512_add_ps(a, b);
}
FMOE_INLINE Reals DivideReals(Reals a, Reals b) {
  return _mm512_div_ps(a, b);
}
/// The second operand where one is NaN.
FMOE_INLINE Reals MinReals(Reals a, Reals b) {
  return _mm512_min_ps(a, b);
}
FMOE_INLINE Reals MaxReals(Reals a, Reals b) {
  return _mm512_max_ps(a, b);
}
/// a 2^b, of an integer b.
FMOE_INLINE Reals ScaleReals(Reals a, Reals b) {
  return _mm512_scalef_ps(a, b);
}
FMOE_INLINE Reals MultiplyReals(Reals a, Reals b) {
  return _mm512_mul_ps(a, b);
}
FMOE_INLINE Reals MultiplyAddReals(Reals a, Reals b, Reals c) {
  return _mm512_fmadd_ps(a, b, c);
}
FMOE_INLINE Reals NegativeMultiplyAddReals(Reals a, Reals b, Reals c) {
  return _mm512_fnmadd_ps(a, b, c);
}
FMOE_INLINE Reals SubtractReals(Reals a, Reals b) {
  return _mm512_sub_ps(a, b);
}
FMOE_INLINE Reals MultiplySubtractReals(Reals a, Reals b, Reals c) {
  return _mm512_fmsub_ps(a, b, c);
}
/// Zeros where they are not wanted, without a branch.
FMOE_INLINE Reals LoadRealsUnless(bool zero, const float* p) {
  return _mm512_maskz_loadu_ps((__mmask16)((int)zero - 1), p);
}
FMOE_INLINE Reals LoadBf16Reals(const uint8_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
FMOE_INLINE Reals LoadF16Reals(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
FMOE_INLINE Reals LoadByteReals(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
FMOE_INLINE Reals LoadSignedByteReals(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
/// table[bits kBit to kBit + 3 of a double word]
template <int kBit>
FMOE_INLINE Reals LookUpBits(Words x, Reals table) {
  return _mm512_permutexvar_ps(kBit == 0 ? x : _mm512_srli_epi32(x, kBit), table);
}
/// Byte kByte of each double word, which has no sign.
template <int kByte>
FMOE_INLINE Reals ByteReals(Words x) {
  if constexpr (kByte == 0) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32(255)));
  } else if constexpr (kByte == 3) {
    return _mm512_cvtepi32_ps(_mm512_srli_epi32(x, 24));
  } else {
    constexpr int k = kByte;
    const __m128i from =
        _mm_setr_epi8(k, -1, -1, -1, k + 4, -1, -1, -1, k + 8, -1, -1, -1, k + 12, -1, -1, -1);
    return _mm512_cvtepi32_ps(_mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(from)));
  }
}
/// NaN of any payload as the usual one, which RoundPairs keeps.
FMOE_INLINE Reals QuietReals(Reals x) {
  const __m512 usual = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
  return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), usual);
}
/// To bf16, to nearest, ties away from zero: numbers of `first` in the low words. In integers, since
/// vcvtne2ps2bf16 leaves them one behind the other.
FMOE_INLINE Words RoundPairs(Reals first, Reals second) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(first), half), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_add_epi32(_mm512_castps_si512(second), half));
}
FMOE_INLINE Words SpreadHalves(Reals x) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  return _mm512_or_si512(words, _mm512_slli_epi32(words, 16));
}
/// For weights scale (q - zero) = 2^e (m q - m zero) in f16, 1 <= |m| < 2: m, -m zero and the word that adds
/// e to the exponent of a bf16 word whose bits are f16 bits >> 3; each in both words of its double word.
/// Scales below 2^-112 or above 2^107 count as those.
FMOE_INLINE void SplitScale(Reals scale, Reals zero, Words* mantissa, Words* offset, Words* exponent) {
  const __m512i bits = _mm512_castps_si512(scale);
  const __m512i fraction = _mm512_and_si512(bits, _mm512_set1_epi32((int)0x807fffff));
  const Reals m = _mm512_castsi512_ps(_mm512_or_si512(fraction, _mm512_set1_epi32(0x3f800000)));
  *mantissa = SpreadHalves(m);
  *offset = SpreadHalves(_mm512_fnmadd_ps(zero, m, _mm512_setzero_ps()));
  __m512i e = _mm512_and_si512(_mm512_srli_epi32(bits, 23), _mm512_set1_epi32(255));
  e = _mm512_sub_epi32(_mm512_max_epi32(e, _mm512_set1_epi32(15)), _mm512_set1_epi32(15));
  e = _mm512_slli_epi32(_mm512_min_epi32(e, _mm512_set1_epi32(219)), 7);
  *exponent = _mm512_or_si512(e, _mm512_slli_epi32(e, 16));
}
FMOE_INLINE Reals LoadIntegers(const void* p) {
  return _mm512_cvtepi32_ps(_mm512_loadu_si512(p));
}
FMOE_INLINE Words SpreadInteger(const int32_t* p) {
  return _mm512_set1_epi32(*p);
}
/// (integers + add) as fp32
FMOE_INLINE Reals IntegersToReals(const void* p, Words add) {
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_loadu_si512(p), add));
}
/// Sums of four codes of int8 each, on sixteen integers; and the sum of these.
FMOE_INLINE Words AddCodes(Words integers, Words codes) {
  return _mm512_dpbusd_epi32(integers, _mm512_set1_epi8(1), codes);
}
FMOE_INLINE int32_t SumIntegers(Words integers) {
  return _mm512_reduce_add_epi32(integers);
}

FMOE_INLINE Reals Magnitude(Reals x) {
  return _mm512_abs_ps(x);
}
/// Of a number without a sign.
FMOE_INLINE Reals WithSign(Reals magnitude, Reals sign) {
  const __m512i bit = _mm512_and_si512(_mm512_castps_si512(sign), _mm512_set1_epi32(INT32_MIN));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(magnitude), bit));
}
/// x >= 0 to the grid of a small float, ties to even: adding 2^23 of its steps leaves the nearest one
/// (quantize_isa.hpp). x is not above the largest value of the grid.
template <int kMantissaBits, int kMinExponent>
FMOE_INLINE Reals OnSmallGrid(Reals x) {
  __m512i step = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7f800000));
  step = _mm512_max_epi32(step, _mm512_set1_epi32((127 + kMinExponent) << 23));
  step = _mm512_add_epi32(step, _mm512_set1_epi32((23 - kMantissaBits) << 23));
  const Reals shifter = _mm512_castsi512_ps(step);
  return _mm512_sub_ps(_mm512_add_ps(x, shifter), shifter);
}
/// Lanes 4i to 4i + 3: the largest magnitude of the i-th; NaN is larger than infinity.
FMOE_INLINE Reals LargestOfFour(Reals a, Reals b, Reals c, Reals d) {
  const auto quarter = [](Reals x) FMOE_FLAT {
    __m512i m = _mm512_castps_si512(_mm512_abs_ps(x));
    m = _mm512_max_epu32(m, _mm512_shuffle_i32x4(m, m, 0x4e));
    return _mm512_max_epu32(m, _mm512_shuffle_i32x4(m, m, 0xb1));
  };
  __m512i m = _mm512_mask_mov_epi32(quarter(a), 0x00f0, quarter(b));
  m = _mm512_mask_mov_epi32(m, 0x0f00, quarter(c));
  m = _mm512_mask_mov_epi32(m, 0xf000, quarter(d));
  m = _mm512_max_epu32(m, _mm512_shuffle_epi32(m, (_MM_PERM_ENUM)0x4e));
  return _mm512_castsi512_ps(_mm512_max_epu32(m, _mm512_shuffle_epi32(m, (_MM_PERM_ENUM)0xb1)));
}
/// Every lane: the largest magnitude of all; NaN is larger than infinity.
FMOE_INLINE Reals LargestOfAll(Reals x) {
  __m512i m = _mm512_castps_si512(_mm512_abs_ps(x));
  m = _mm512_max_epu32(m, _mm512_shuffle_i32x4(m, m, 0x4e));
  m = _mm512_max_epu32(m, _mm512_shuffle_i32x4(m, m, 0xb1));
  m = _mm512_max_epu32(m, _mm512_shuffle_epi32(m, (_MM_PERM_ENUM)0x4e));
  return _mm512_castsi512_ps(_mm512_max_epu32(m, _mm512_shuffle_epi32(m, (_MM_PERM_ENUM)0xb1)));
}
/// least <= x <= most in every lane.
FMOE_INLINE bool AllWithin(Reals x, float least, float most) {
  const __mmask16 above = _mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_GE_OQ);
  return _mm512_mask_cmp_ps_mask(above, x, _mm512_set1_ps(most), _CMP_LE_OQ) == 0xffff;
}
/// Lanes 4i to 4i + 3 everywhere.
template <int kIndex>
FMOE_INLINE Reals Quarter(Reals x) {
  return _mm512_shuffle_f32x4(x, x, kIndex * 0x55);
}
/// Lane kIndex of the four, of equal quarters.
template <int kIndex>
FMOE_INLINE Reals LaneOfQuarter(Reals x) {
  return _mm512_permute_ps(x, kIndex * 0x55);
}
/// Eight values, in lanes 0 to 7.
FMOE_INLINE Reals LoadEightReals(const float* p) {
  return _mm512_zextps256_ps512(_mm256_loadu_ps(p));
}
/// Sixteen values to bf16, to nearest even; kPermuted: every four in the order 0, 2, 1, 3. Adds what is
/// stored.
template <bool kPermuted>
FMOE_INLINE Reals StoreBf16(void* p, Reals x, Reals sums, float back) {
  __m256i words = (__m256i)_mm512_cvtneps_pbh(x);
  const Reals stored = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  if constexpr (kPermuted) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    words = _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(order));
  }
  _mm256_storeu_si256((__m256i*)p, words);
  return _mm512_fmadd_ps(stored, _mm512_set1_ps(back), sums);
}
FMOE_INLINE float SumReals(Reals x) {
  return _mm512_reduce_add_ps(x);
}
FMOE_INLINE void PrefetchToL2(const uint8_t* p) {
  _mm_prefetch((const char*)p, _MM_HINT_T1);
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
