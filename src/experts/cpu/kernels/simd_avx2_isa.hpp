#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/simd_x86_isa.hpp"

/// 256-bit registers: two of them hold the 16 rows of a stripe, rows 8h to 8h+7 in half h. Same names as in
/// simd_avx512_isa.hpp, so that dot_isa.hpp and its like are written once.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

using Floats = __m256;
using Ints = __m256i;
constexpr int kLanes = 8;
constexpr int kHalves = 2;
#if defined(__AVXVNNI__) || defined(FMOE_EMULATES_BYTE_DOT)
constexpr bool kHasByteDot = true;
#else
constexpr bool kHasByteDot = false;
#endif
constexpr bool kPrefetchesBesideFloats = true;  // PrefetchesPerVector
constexpr bool kSignedWeights = false;

FMOE_INLINE Floats Zero() {
  return _mm256_setzero_ps();
}
FMOE_INLINE Floats Set(float x) {
  return _mm256_set1_ps(x);
}
FMOE_INLINE Floats Load(const float* p) {
  return _mm256_loadu_ps(p);
}
FMOE_INLINE void Store(float* p, Floats x) {
  _mm256_storeu_ps(p, x);
}
FMOE_INLINE Floats Add(Floats a, Floats b) {
  return _mm256_add_ps(a, b);
}
FMOE_INLINE Floats Subtract(Floats a, Floats b) {
  return _mm256_sub_ps(a, b);
}
FMOE_INLINE Floats Multiply(Floats a, Floats b) {
  return _mm256_mul_ps(a, b);
}
FMOE_INLINE Floats Divide(Floats a, Floats b) {
  return _mm256_div_ps(a, b);
}
FMOE_INLINE Floats MultiplyAdd(Floats a, Floats b, Floats c) {
  return _mm256_fmadd_ps(a, b, c);
}
FMOE_INLINE Floats NegativeMultiplyAdd(Floats a, Floats b, Floats c) {
  return _mm256_fnmadd_ps(a, b, c);
}
FMOE_INLINE Floats Min(Floats a, Floats b) {
  return _mm256_min_ps(a, b);
}
FMOE_INLINE Floats Max(Floats a, Floats b) {
  return _mm256_max_ps(a, b);
}
FMOE_INLINE Floats RoundEven(Floats x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
FMOE_INLINE Floats Truncate(Floats x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
FMOE_INLINE Floats SelectLess(Floats a, Floats b, Floats then, Floats otherwise) {
  return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
FMOE_INLINE Floats Absolute(Floats x) {
  return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
}

FMOE_INLINE Ints IntZero() {
  return _mm256_setzero_si256();
}
FMOE_INLINE Ints IntSet(int32_t x) {
  return _mm256_set1_epi32(x);
}
FMOE_INLINE Ints IntAdd(Ints a, Ints b) {
  return _mm256_add_epi32(a, b);
}
FMOE_INLINE Ints IntSubtract(Ints a, Ints b) {
  return _mm256_sub_epi32(a, b);
}
FMOE_INLINE Ints IntAnd(Ints a, Ints b) {
  return _mm256_and_si256(a, b);
}
FMOE_INLINE Ints IntOr(Ints a, Ints b) {
  return _mm256_or_si256(a, b);
}
FMOE_INLINE Ints IntXor(Ints a, Ints b) {
  return _mm256_xor_si256(a, b);
}
FMOE_INLINE Ints IntMaxUnsigned(Ints a, Ints b) {
  return _mm256_max_epu32(a, b);
}
template <int kBits>
FMOE_INLINE Ints ShiftLeft(Ints x) {
  return _mm256_slli_epi32(x, kBits);
}
template <int kBits>
FMOE_INLINE Ints ShiftRightSigned(Ints x) {
  return _mm256_srai_epi32(x, kBits);
}
template <int kBits>
FMOE_INLINE Ints ShiftRight(Ints x) {
  return _mm256_srli_epi32(x, kBits);
}
FMOE_INLINE Ints ShiftRight16(Ints x) {
  return _mm256_srli_epi32(x, 16);
}
/// Bytes as lanes.
FMOE_INLINE Ints LoadByteLanes(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
FMOE_INLINE Ints LoadSignedByteLanes(const uint8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
FMOE_INLINE Ints LoadInts(const void* p) {
  return _mm256_loadu_si256((const __m256i*)p);
}
FMOE_INLINE void StoreInts(void* p, Ints x) {
  _mm256_storeu_si256((__m256i*)p, x);
}
FMOE_INLINE Floats ToFloats(Ints x) {
  return _mm256_cvtepi32_ps(x);
}
FMOE_INLINE Ints ToIntsEven(Floats x) {
  return _mm256_cvtps_epi32(x);
}
FMOE_INLINE Ints Bits(Floats x) {
  return _mm256_castps_si256(x);
}
FMOE_INLINE Floats FromBits(Ints x) {
  return _mm256_castsi256_ps(x);
}
/// Each lane becomes the sum of the four of its 128 bits.
FMOE_INLINE Ints SumOfQuads(Ints x) {
  x = IntAdd(x, _mm256_shuffle_epi32(x, 0x4e));
  return IntAdd(x, _mm256_shuffle_epi32(x, 0xb1));
}
FMOE_INLINE uint32_t MaxUnsignedOf(Ints x) {
  __m128i s = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  s = _mm_max_epu32(s, _mm_shuffle_epi32(s, 0x4e));
  return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(s, _mm_shuffle_epi32(s, 0xb1)));
}
FMOE_INLINE __m128i PackWords(Ints x) {
  const __m256i words =
      _mm256_packus_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)), _mm256_setzero_si256());
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0x08));
}
FMOE_INLINE void StoreBytes(int8_t* p, Ints x) {
  const __m128i words = PackWords(_mm256_and_si256(x, _mm256_set1_epi32(0xff)));
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(words, words));
}

FMOE_INLINE Floats LoadBf16(const uint16_t* p) {
  return FromBits(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
FMOE_INLINE Floats LoadF16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
FMOE_INLINE void StoreWords(uint16_t* p, Ints low_words) {
  _mm_storeu_si128((__m128i*)p, PackWords(low_words));
}
FMOE_INLINE void StoreF16(uint16_t* p, Floats x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
FMOE_INLINE Ints SelectNan(Floats x, Ints if_nan, Ints otherwise) {
  return _mm256_blendv_epi8(otherwise, if_nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

FMOE_INLINE Floats LoadE4m3Scales(const uint8_t* p, int half) {
  return _mm256_cvtph_ps(
      _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)(p + 8 * half))), 7));
}
FMOE_INLINE Floats LoadE8m0Scales(const uint8_t* p, int half) {
  return FromBits(
      _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * half))), 23));
}
FMOE_INLINE Floats LoadFloatScales(const uint8_t* p, int half) {
  return Load((const float*)p + 8 * half);
}

FMOE_INLINE Ints E2m1Table() {
  return _mm256_broadcastsi128_si256(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}
/// Sixteen bytes for each nibble of a lane.
FMOE_INLINE Ints LoadNumbers(const uint8_t* numbers) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)numbers));
}
FMOE_INLINE Ints LowNibbles(Ints x) {
  return _mm256_and_si256(x, _mm256_set1_epi8(15));
}
FMOE_INLINE Ints HighNibbles(Ints x) {
  return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15));
}
FMOE_INLINE Ints LoadBytes(const uint8_t* p, int half) {
  return LoadInts(p + 32 * half);
}
FMOE_INLINE void DecodeU4(const uint8_t* p, int half, Ints* out) {
  const Ints x = LoadBytes(p, half);
  out[0] = LowNibbles(x);
  out[1] = HighNibbles(x);
}
/// Bytes below 16, each to that byte of a table.
FMOE_INLINE Ints LookUpBytes(Ints x, Ints table) {
  return _mm256_shuffle_epi8(table, x);
}
FMOE_INLINE void DecodeByTable(const uint8_t* p, int half, Ints table, Ints* out) {
  DecodeU4(p, half, out);
  out[0] = LookUpBytes(out[0], table);
  out[1] = LookUpBytes(out[1], table);
}

FMOE_INLINE void DecodeBf16(const uint8_t* p, int half, Floats* out) {
  const Ints x = LoadBytes(p, half);
  out[0] = FromBits(_mm256_slli_epi32(x, 16));
  out[1] = FromBits(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
}
FMOE_INLINE void DecodeF16(const uint8_t* p, int half, Floats* out) {
  out[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 16 * half)));
  out[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 32 + 16 * half)));
}
/// Words of k 0-1 of the 8 rows, then of k 2-3.
FMOE_INLINE Ints LoadPairWords(const uint8_t* p, int half) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(p + 16 * half))),
                                 _mm_loadu_si128((const __m128i*)(p + 32 + 16 * half)), 1);
}
FMOE_INLINE void ConvertPairs(Ints even, Ints odd, Floats* out) {
  out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(even));
  out[1] = _mm256_cvtph_ps(_mm256_castsi256_si128(odd));
  out[2] = _mm256_cvtph_ps(_mm256_extracti128_si256(even, 1));
  out[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1));
}
FMOE_INLINE void DecodeE4m3(const uint8_t* p, int half, Floats* out) {
  const Ints x = LoadPairWords(p, half);
  const Ints mask = _mm256_set1_epi16((short)0xbf80);
  ConvertPairs(_mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 1), mask),
               _mm256_and_si256(_mm256_srai_epi16(x, 1), mask), out);
}
FMOE_INLINE void DecodeE5m2(const uint8_t* p, int half, Floats* out) {
  const Ints x = LoadPairWords(p, half);
  ConvertPairs(_mm256_slli_epi16(x, 8), _mm256_and_si256(x, _mm256_set1_epi16((short)0xff00)), out);
}

FMOE_INLINE Ints MultiplyAddPairs(Ints u, Ints s) {
  return _mm256_maddubs_epi16(u, s);
}
FMOE_INLINE Ints AddWords(Ints a, Ints b) {
  return _mm256_add_epi16(a, b);
}
FMOE_INLINE Ints MultiplyAddWords(Ints a, int16_t factor) {
  return _mm256_madd_epi16(a, _mm256_set1_epi16(factor));
}
FMOE_INLINE Ints MultiplyAddWordPairs(Ints a, Ints b) {
  return _mm256_madd_epi16(a, b);
}
/// Bytes 0 and 2 of each lane as words, and bytes 1 and 3.
FMOE_INLINE Ints EvenBytes(Ints x) {
  return _mm256_and_si256(x, _mm256_set1_epi16(0xff));
}
FMOE_INLINE Ints OddBytes(Ints x) {
  return _mm256_srli_epi16(x, 8);
}
/// Sums of four bytes each, of values.
FMOE_INLINE Ints SumsOfFours(Ints x) {
  return MultiplyAddWords(MultiplyAddPairs(IntSet(0x01010101), x), 1);
}
/// sum + the products of four unsigned bytes with four signed ones.
#if defined(FMOE_EMULATES_BYTE_DOT)
/// A product at a time: two would not fit a word. Called, not inlined, for the time that it takes to compile.
__attribute__((noinline)) Ints ByteDot(Ints sum, Ints weights, Ints values) {
  const Ints even = MultiplyAddPairs(EvenBytes(weights), values);
  const Ints odd = MultiplyAddPairs(IntXor(weights, EvenBytes(weights)), values);
  return IntAdd(sum, IntAdd(MultiplyAddWords(even, 1), MultiplyAddWords(odd, 1)));
}
#elif defined(__AVXVNNI__)
FMOE_INLINE Ints ByteDot(Ints sum, Ints weights, Ints values) {
  return _mm256_dpbusd_avx_epi32(sum, weights, values);
}
#else
FMOE_INLINE Ints ByteDot(Ints sum, Ints, Ints) {
  return sum;
}
#endif
FMOE_INLINE Ints ByteDotWord(Ints sum, Ints weights, const int32_t* word) {
  return ByteDot(sum, weights, IntSet(*word));
}

/// n is split in two, so that 2^-126 and below come out as subnormals instead of garbage exponents.
FMOE_INLINE Floats ScaleByPowerOfTwo(Floats x, Floats n) {
  const Ints bias = _mm256_set1_epi32(127);
  const Ints whole = _mm256_cvtps_epi32(n);
  const Ints half = _mm256_srai_epi32(whole, 1);
  const Floats a = FromBits(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const Floats b = FromBits(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(x, a), b);
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
