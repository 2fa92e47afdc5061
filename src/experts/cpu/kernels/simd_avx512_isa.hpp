#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/simd_x86_isa.hpp"

/// 512-bit registers: one register holds all 16 rows of a stripe. With VBMI a table look-up needs no masking,
/// with VNNI four products are one instruction; without them AVX-512BW does the same work in more steps.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

using Floats = __m512;
using Ints = __m512i;
constexpr int kLanes = 16;
constexpr int kHalves = 1;  // registers a row of a stripe's vectors
#if defined(__AVX512VNNI__)
constexpr bool kHasByteDot = true;
#else
constexpr bool kHasByteDot = false;
#endif
constexpr bool kPrefetchesBesideFloats = false;  // PrefetchesPerVector
constexpr bool kSignedWeights = false;

FMOE_INLINE Floats Zero() {
  return _mm512_setzero_ps();
}
FMOE_INLINE Floats Set(float x) {
  return _mm512_set1_ps(x);
}
FMOE_INLINE Floats Load(const float* p) {
  return _mm512_loadu_ps(p);
}
FMOE_INLINE void Store(float* p, Floats x) {
  _mm512_storeu_ps(p, x);
}
/// Loaded once, where the compiler would repeat the load in every operation that takes the value.
FMOE_INLINE Floats InRegister(Floats x) {
  asm("" : "+v"(x));
  return x;
}
FMOE_INLINE Floats Add(Floats a, Floats b) {
  return _mm512_add_ps(a, b);
}
FMOE_INLINE Floats Subtract(Floats a, Floats b) {
  return _mm512_sub_ps(a, b);
}
FMOE_INLINE Floats Multiply(Floats a, Floats b) {
  return _mm512_mul_ps(a, b);
}
FMOE_INLINE Floats Divide(Floats a, Floats b) {
  return _mm512_div_ps(a, b);
}
FMOE_INLINE Floats MultiplyAdd(Floats a, Floats b, Floats c) {
  return _mm512_fmadd_ps(a, b, c);
}
FMOE_INLINE Floats NegativeMultiplyAdd(Floats a, Floats b, Floats c) {
  return _mm512_fnmadd_ps(a, b, c);
}
/// The second operand where either is NaN.
FMOE_INLINE Floats Min(Floats a, Floats b) {
  return _mm512_min_ps(a, b);
}
FMOE_INLINE Floats Max(Floats a, Floats b) {
  return _mm512_max_ps(a, b);
}
FMOE_INLINE Floats RoundEven(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
FMOE_INLINE Floats Truncate(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
FMOE_INLINE Floats SelectLess(Floats a, Floats b, Floats then, Floats otherwise) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, then);
}
FMOE_INLINE Floats Absolute(Floats x) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
}

FMOE_INLINE Ints IntZero() {
  return _mm512_setzero_si512();
}
FMOE_INLINE Ints IntSet(int32_t x) {
  return _mm512_set1_epi32(x);
}
FMOE_INLINE Ints IntAdd(Ints a, Ints b) {
  return _mm512_add_epi32(a, b);
}
FMOE_INLINE Ints IntSubtract(Ints a, Ints b) {
  return _mm512_sub_epi32(a, b);
}
FMOE_INLINE Ints IntAnd(Ints a, Ints b) {
  return _mm512_and_si512(a, b);
}
FMOE_INLINE Ints IntOr(Ints a, Ints b) {
  return _mm512_or_si512(a, b);
}
FMOE_INLINE Ints IntXor(Ints a, Ints b) {
  return _mm512_xor_si512(a, b);
}
FMOE_INLINE Ints IntMaxUnsigned(Ints a, Ints b) {
  return _mm512_max_epu32(a, b);
}
template <int kBits>
FMOE_INLINE Ints ShiftLeft(Ints x) {
  return _mm512_slli_epi32(x, kBits);
}
template <int kBits>
FMOE_INLINE Ints ShiftRightSigned(Ints x) {
  return _mm512_srai_epi32(x, kBits);
}
template <int kBits>
FMOE_INLINE Ints ShiftRight(Ints x) {
  return _mm512_srli_epi32(x, kBits);
}
FMOE_INLINE Ints ShiftRight16(Ints x) {
  return _mm512_srli_epi32(x, 16);
}
/// Bytes as lanes.
FMOE_INLINE Ints LoadByteLanes(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}
FMOE_INLINE Ints LoadSignedByteLanes(const uint8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}
FMOE_INLINE Ints LoadInts(const void* p) {
  return _mm512_loadu_si512(p);
}
FMOE_INLINE void StoreInts(void* p, Ints x) {
  _mm512_storeu_si512(p, x);
}
FMOE_INLINE Floats ToFloats(Ints x) {
  return _mm512_cvtepi32_ps(x);
}
FMOE_INLINE Ints ToIntsEven(Floats x) {
  return _mm512_cvtps_epi32(x);
}
FMOE_INLINE Ints Bits(Floats x) {
  return _mm512_castps_si512(x);
}
FMOE_INLINE Floats FromBits(Ints x) {
  return _mm512_castsi512_ps(x);
}
/// Each lane becomes the sum of the four of its 128 bits.
FMOE_INLINE Ints SumOfQuads(Ints x) {
  x = IntAdd(x, _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)0x4e));
  return IntAdd(x, _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)0xb1));
}
FMOE_INLINE uint32_t MaxUnsignedOf(Ints x) {
  return _mm512_reduce_max_epu32(x);
}
/// Low bytes of the lanes.
FMOE_INLINE void StoreBytes(int8_t* p, Ints x) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x));
}

FMOE_INLINE Floats LoadBf16(const uint16_t* p) {
  return FromBits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
FMOE_INLINE Floats LoadF16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
FMOE_INLINE void StoreWords(uint16_t* p, Ints low_words) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(low_words));
}
FMOE_INLINE void StoreF16(uint16_t* p, Floats x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
FMOE_INLINE Ints SelectNan(Floats x, Ints if_nan, Ints otherwise) {
  return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), otherwise, if_nan);
}

/// 16 values x e4m3 scales without sign: bits << 7 read as f16 are the value times 2^-8, subnormals included.
FMOE_INLINE Floats LoadE4m3Scales(const uint8_t* p, int) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 7));
}
FMOE_INLINE Floats LoadE8m0Scales(const uint8_t* p, int) {
  return FromBits(_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23));
}
FMOE_INLINE Floats LoadFloatScales(const uint8_t* p, int) {
  return Load((const float*)p);
}

/// Doubled e2m1 values plus 12: unsigned, 0..24. The table repeats so that the upper bits of an index do not
/// matter.
FMOE_INLINE Ints E2m1Table() {
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm512_broadcast_i32x4(table);
}
/// Sixteen bytes for each nibble of a lane.
FMOE_INLINE Ints LoadNumbers(const uint8_t* numbers) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)numbers));
}

/// Bytes below 16, each to that byte of a table.
FMOE_INLINE Ints LookUpBytes(Ints x, Ints table) {
  return _mm512_shuffle_epi8(table, x);
}
/// 64 bytes of nibbles: k 0-3 of 16 rows, then k 4-7.
FMOE_INLINE void DecodeByTable(const uint8_t* p, int, Ints table, Ints* out) {
  const Ints x = _mm512_loadu_si512(p);
#if defined(__AVX512VBMI__)
  out[0] = _mm512_permutexvar_epi8(x, table);
  out[1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(x, 4), table);
#else
  const Ints mask = _mm512_set1_epi8(15);
  out[0] = LookUpBytes(_mm512_and_si512(x, mask), table);
  out[1] = LookUpBytes(_mm512_and_si512(_mm512_srli_epi16(x, 4), mask), table);
#endif
}

FMOE_INLINE void DecodeU4(const uint8_t* p, int, Ints* out) {
  const Ints x = _mm512_loadu_si512(p);
  const Ints mask = _mm512_set1_epi8(15);
  out[0] = _mm512_and_si512(x, mask);
  out[1] = _mm512_and_si512(_mm512_srli_epi16(x, 4), mask);
}

FMOE_INLINE Ints LoadBytes(const uint8_t* p, int) {
  return _mm512_loadu_si512(p);
}

/// One vector of a block as fp32, k after k.
FMOE_INLINE void DecodeBf16(const uint8_t* p, int, Floats* out) {
  const Ints x = _mm512_loadu_si512(p);
  out[0] = FromBits(_mm512_slli_epi32(x, 16));
  out[1] = FromBits(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)));
}
FMOE_INLINE void DecodeF16(const uint8_t* p, int, Floats* out) {
  out[0] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
  out[1] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(p + 32)));
}
/// e4m3 through f16 bits (times 2^-8): conversions take f16 subnormals at full speed, whereas shifting e4m3
/// bits to fp32 makes fp32 subnormals, which cost a microcode assist for each product on many CPUs.
/// A signed byte times 128 is its code where f16 has it, with its sign twice: a product on cores of Intel has
/// two ports, a shift one. e5m2 is the upper half of f16. In f16: k 0 and 2 of 16 rows, k 1 and 3.
template <bool kE5m2>
FMOE_INLINE void DecodeHalves(const uint8_t* p, Ints* out) {
  const Ints x = _mm512_loadu_si512(p);
  if constexpr (kE5m2) {
    out[0] = _mm512_slli_epi16(x, 8);
    out[1] = _mm512_and_si512(x, _mm512_set1_epi16((short)0xff00));
  } else {
    const Ints mask = _mm512_set1_epi16((short)0xbf80);
    out[0] = _mm512_and_si512(_mm512_maddubs_epi16(_mm512_set1_epi16(0x0080), x), mask);
    out[1] = _mm512_and_si512(_mm512_maddubs_epi16(_mm512_set1_epi16((short)0x8000), x), mask);
  }
}
template <bool kE5m2>
FMOE_INLINE void DecodeFloats8(const uint8_t* p, Floats* out) {
  Ints halves[2];
  DecodeHalves<kE5m2>(p, halves);
  out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves[0]));
  out[1] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves[1]));
  out[2] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves[0], 1));
  out[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves[1], 1));
}
FMOE_INLINE void DecodeE4m3(const uint8_t* p, int, Floats* out) {
  DecodeFloats8<false>(p, out);
}
FMOE_INLINE void DecodeE5m2(const uint8_t* p, int, Floats* out) {
  DecodeFloats8<true>(p, out);
}

FMOE_INLINE Ints MultiplyAddPairs(Ints u, Ints s) {
  return _mm512_maddubs_epi16(u, s);
}
FMOE_INLINE Ints AddWords(Ints a, Ints b) {
  return _mm512_add_epi16(a, b);
}
FMOE_INLINE Ints MultiplyAddWords(Ints a, int16_t factor) {
  return _mm512_madd_epi16(a, _mm512_set1_epi16(factor));
}
FMOE_INLINE Ints MultiplyAddWordPairs(Ints a, Ints b) {
  return _mm512_madd_epi16(a, b);
}
/// Bytes 0 and 2 of each lane as words, and bytes 1 and 3.
FMOE_INLINE Ints EvenBytes(Ints x) {
  return _mm512_and_si512(x, _mm512_set1_epi16(0xff));
}
FMOE_INLINE Ints OddBytes(Ints x) {
  return _mm512_srli_epi16(x, 8);
}
/// Sums of four bytes each, of values.
FMOE_INLINE Ints SumsOfFours(Ints x) {
  return MultiplyAddWords(MultiplyAddPairs(IntSet(0x01010101), x), 1);
}
FMOE_INLINE Ints LowNibbles(Ints x) {
  return _mm512_and_si512(x, _mm512_set1_epi8(15));
}
FMOE_INLINE Ints HighNibbles(Ints x) {
  return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15));
}
#if defined(__AVX512VNNI__)
FMOE_INLINE Ints ByteDot(Ints sum, Ints u, Ints s) {
  return _mm512_dpbusd_epi32(sum, u, s);
}
/// With a word in memory, broadcast by the instruction itself. The compiler would load it once for several.
FMOE_INLINE Ints ByteDotWord(Ints sum, Ints u, const int32_t* word) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(u), "m"(*word));
  return sum;
}
#else
FMOE_INLINE Ints ByteDot(Ints sum, Ints, Ints) {
  return sum;
}
FMOE_INLINE Ints ByteDotWord(Ints sum, Ints, const int32_t*) {
  return sum;
}
#endif

/// x times 2^n, n an integer in fp32, -150 to 128.
FMOE_INLINE Floats ScaleByPowerOfTwo(Floats x, Floats n) {
  return _mm512_scalef_ps(x, n);
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
