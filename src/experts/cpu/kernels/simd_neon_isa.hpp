#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "experts/cpu/kernels/unroll_isa.hpp"

/// Two 128-bit registers as one of 256 bits: two such pairs hold the 16 rows of a stripe, rows 8h to 8h+7 in
/// half h, as in simd_avx2_isa.hpp, whose names these are. So panels are the same on all processors, and so
/// are the order of additions and the bits of results. Armv8.2 with the dot product (sdot).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

struct Floats {
  float32x4_t low, high;
};
struct Ints {
  int32x4_t low, high;
};
constexpr int kLanes = 8;
constexpr int kHalves = 2;
constexpr bool kHasByteDot = true;
constexpr bool kPrefetchesBesideFloats = false;  // PrefetchesPerVector
/// sdot takes weights for signed: those of 8 bits come to it less 128 (integer_units_isa.hpp).
constexpr bool kSignedWeights = true;

FMOE_INLINE uint8x16_t BytesOf(int32x4_t x) {
  return vreinterpretq_u8_s32(x);
}
FMOE_INLINE uint32x4_t WordsOf(int32x4_t x) {
  return vreinterpretq_u32_s32(x);
}
FMOE_INLINE int32x4_t SignedOf(uint8x16_t x) {
  return vreinterpretq_s32_u8(x);
}
FMOE_INLINE int32x4_t SignedOf(uint16x8_t x) {
  return vreinterpretq_s32_u16(x);
}
FMOE_INLINE int32x4_t SignedOf(uint32x4_t x) {
  return vreinterpretq_s32_u32(x);
}

FMOE_INLINE Floats Set(float x) {
  return {vdupq_n_f32(x), vdupq_n_f32(x)};
}
FMOE_INLINE Floats Zero() {
  return Set(0.0F);
}
FMOE_INLINE Floats Load(const float* p) {
  return {vld1q_f32(p), vld1q_f32(p + 4)};
}
FMOE_INLINE void Store(float* p, Floats x) {
  vst1q_f32(p, x.low);
  vst1q_f32(p + 4, x.high);
}
FMOE_INLINE Floats Add(Floats a, Floats b) {
  return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)};
}
FMOE_INLINE Floats Subtract(Floats a, Floats b) {
  return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)};
}
FMOE_INLINE Floats Multiply(Floats a, Floats b) {
  return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)};
}
FMOE_INLINE Floats Divide(Floats a, Floats b) {
  return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)};
}
FMOE_INLINE Floats MultiplyAdd(Floats a, Floats b, Floats c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
FMOE_INLINE Floats NegativeMultiplyAdd(Floats a, Floats b, Floats c) {
  return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)};
}
FMOE_INLINE Floats Select(uint32x4_t low, uint32x4_t high, Floats then, Floats otherwise) {
  return {vbslq_f32(low, then.low, otherwise.low), vbslq_f32(high, then.high, otherwise.high)};
}
FMOE_INLINE Floats SelectLess(Floats a, Floats b, Floats then, Floats otherwise) {
  return Select(vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high), then, otherwise);
}
/// The second where one is NaN, as on x86: fmin gives the NaN, whichever it is.
FMOE_INLINE Floats Min(Floats a, Floats b) {
  return SelectLess(a, b, a, b);
}
FMOE_INLINE Floats Max(Floats a, Floats b) {
  return SelectLess(b, a, a, b);
}
FMOE_INLINE Floats RoundEven(Floats x) {
  return {vrndnq_f32(x.low), vrndnq_f32(x.high)};
}
FMOE_INLINE Floats Truncate(Floats x) {
  return {vrndq_f32(x.low), vrndq_f32(x.high)};
}
FMOE_INLINE Floats Absolute(Floats x) {
  return {vabsq_f32(x.low), vabsq_f32(x.high)};
}

FMOE_INLINE Ints IntSet(int32_t x) {
  return {vdupq_n_s32(x), vdupq_n_s32(x)};
}
FMOE_INLINE Ints IntZero() {
  return IntSet(0);
}
FMOE_INLINE Ints IntAdd(Ints a, Ints b) {
  return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)};
}
FMOE_INLINE Ints IntSubtract(Ints a, Ints b) {
  return {vsubq_s32(a.low, b.low), vsubq_s32(a.high, b.high)};
}
FMOE_INLINE Ints IntAnd(Ints a, Ints b) {
  return {vandq_s32(a.low, b.low), vandq_s32(a.high, b.high)};
}
FMOE_INLINE Ints IntOr(Ints a, Ints b) {
  return {vorrq_s32(a.low, b.low), vorrq_s32(a.high, b.high)};
}
FMOE_INLINE Ints IntXor(Ints a, Ints b) {
  return {veorq_s32(a.low, b.low), veorq_s32(a.high, b.high)};
}
FMOE_INLINE Ints IntMaxUnsigned(Ints a, Ints b) {
  return {SignedOf(vmaxq_u32(WordsOf(a.low), WordsOf(b.low))),
          SignedOf(vmaxq_u32(WordsOf(a.high), WordsOf(b.high)))};
}
template <int kBits>
FMOE_INLINE Ints ShiftLeft(Ints x) {
  return {vshlq_n_s32(x.low, kBits), vshlq_n_s32(x.high, kBits)};
}
template <int kBits>
FMOE_INLINE Ints ShiftRightSigned(Ints x) {
  return {vshrq_n_s32(x.low, kBits), vshrq_n_s32(x.high, kBits)};
}
template <int kBits>
FMOE_INLINE Ints ShiftRight(Ints x) {
  return {SignedOf(vshrq_n_u32(WordsOf(x.low), kBits)), SignedOf(vshrq_n_u32(WordsOf(x.high), kBits))};
}
FMOE_INLINE Ints ShiftRight16(Ints x) {
  return ShiftRight<16>(x);
}
/// 16-bit words as lanes, in their low bits or, shifted by 16, in their high ones.
template <int kBits>
FMOE_INLINE Ints Widened(uint16x8_t x) {
  return {SignedOf(vshll_n_u16(vget_low_u16(x), kBits)), SignedOf(vshll_n_u16(vget_high_u16(x), kBits))};
}
/// Bytes as lanes.
FMOE_INLINE Ints LoadByteLanes(const uint8_t* p) {
  return Widened<0>(vmovl_u8(vld1_u8(p)));
}
FMOE_INLINE Ints LoadSignedByteLanes(const uint8_t* p) {
  const int16x8_t words = vmovl_s8(vld1_s8((const int8_t*)p));
  return {vmovl_s16(vget_low_s16(words)), vmovl_s16(vget_high_s16(words))};
}
FMOE_INLINE Ints LoadInts(const void* p) {
  return {SignedOf(vld1q_u8((const uint8_t*)p)), SignedOf(vld1q_u8((const uint8_t*)p + 16))};
}
FMOE_INLINE void StoreInts(void* p, Ints x) {
  vst1q_u8((uint8_t*)p, BytesOf(x.low));
  vst1q_u8((uint8_t*)p + 16, BytesOf(x.high));
}
FMOE_INLINE Floats ToFloats(Ints x) {
  return {vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)};
}
FMOE_INLINE Ints ToIntsEven(Floats x) {
  return {vcvtnq_s32_f32(x.low), vcvtnq_s32_f32(x.high)};
}
FMOE_INLINE Ints Bits(Floats x) {
  return {vreinterpretq_s32_f32(x.low), vreinterpretq_s32_f32(x.high)};
}
FMOE_INLINE Floats FromBits(Ints x) {
  return {vreinterpretq_f32_s32(x.low), vreinterpretq_f32_s32(x.high)};
}
/// Each lane becomes the sum of the four of its 128 bits.
FMOE_INLINE Ints SumOfQuads(Ints x) {
  x = {vpaddq_s32(x.low, x.low), vpaddq_s32(x.high, x.high)};
  return {vpaddq_s32(x.low, x.low), vpaddq_s32(x.high, x.high)};
}
FMOE_INLINE uint32_t MaxUnsignedOf(Ints x) {
  return vmaxvq_u32(vmaxq_u32(WordsOf(x.low), WordsOf(x.high)));
}
FMOE_INLINE uint16x8_t PackWords(Ints x) {
  return vuzp1q_u16(vreinterpretq_u16_s32(x.low), vreinterpretq_u16_s32(x.high));
}
FMOE_INLINE void StoreBytes(int8_t* p, Ints x) {
  vst1_u8((uint8_t*)p, vmovn_u16(PackWords(x)));
}

FMOE_INLINE Floats LoadBf16(const uint16_t* p) {
  return FromBits(Widened<16>(vld1q_u16(p)));
}
/// f16 as fp32.
FMOE_INLINE Floats FloatsOfF16(uint16x8_t x) {
  const float16x8_t halves = vreinterpretq_f16_u16(x);
  return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
FMOE_INLINE Floats LoadF16(const uint16_t* p) {
  return FloatsOfF16(vld1q_u16(p));
}
FMOE_INLINE float FloatOfF16(uint16_t x) {
  return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x))), 0);
}
FMOE_INLINE void StoreWords(uint16_t* p, Ints low_words) {
  vst1q_u16(p, PackWords(low_words));
}
FMOE_INLINE void StoreF16(uint16_t* p, Floats x) {
  vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high)));
}
FMOE_INLINE Ints SelectNan(Floats x, Ints if_nan, Ints otherwise) {
  return Bits(
      Select(vceqq_f32(x.low, x.low), vceqq_f32(x.high, x.high), FromBits(otherwise), FromBits(if_nan)));
}

FMOE_INLINE Floats LoadE4m3Scales(const uint8_t* p, int half) {
  return FloatsOfF16(vshll_n_u8(vld1_u8(p + 8 * half), 7));
}
FMOE_INLINE Floats LoadE8m0Scales(const uint8_t* p, int half) {
  return FromBits(ShiftLeft<23>(LoadByteLanes(p + 8 * half)));
}
FMOE_INLINE Floats LoadFloatScales(const uint8_t* p, int half) {
  return Load((const float*)p + 8 * half);
}

FMOE_INLINE Ints LookUp16(uint8x16_t table, Ints x) {
  return {SignedOf(vqtbl1q_u8(table, BytesOf(x.low))), SignedOf(vqtbl1q_u8(table, BytesOf(x.high)))};
}
FMOE_INLINE Ints E2m1Table() {
  constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  const int32x4_t table = SignedOf(vld1q_u8(kTable));
  return {table, table};
}
/// Sixteen bytes for each nibble.
FMOE_INLINE Ints LoadNumbers(const uint8_t* numbers) {
  const int32x4_t table = SignedOf(vld1q_u8(numbers));
  return {table, table};
}
FMOE_INLINE Ints LowNibbles(Ints x) {
  return IntAnd(x, IntSet(0x0f0f0f0f));
}
FMOE_INLINE Ints HighNibbles(Ints x) {
  return {SignedOf(vshrq_n_u8(BytesOf(x.low), 4)), SignedOf(vshrq_n_u8(BytesOf(x.high), 4))};
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
  return LookUp16(BytesOf(table.low), x);
}
FMOE_INLINE void DecodeByTable(const uint8_t* p, int half, Ints table, Ints* out) {
  DecodeU4(p, half, out);
  out[0] = LookUpBytes(out[0], table);
  out[1] = LookUpBytes(out[1], table);
}

FMOE_INLINE void DecodeBf16(const uint8_t* p, int half, Floats* out) {
  const Ints x = LoadBytes(p, half);
  out[0] = FromBits(ShiftLeft<16>(x));
  out[1] = FromBits(IntAnd(x, IntSet((int32_t)0xffff0000)));
}
FMOE_INLINE void DecodeF16(const uint8_t* p, int half, Floats* out) {
  out[0] = LoadF16((const uint16_t*)(p + 16 * half));
  out[1] = LoadF16((const uint16_t*)(p + 32 + 16 * half));
}
/// Words of k 0-1 of the 8 rows, then of k 2-3.
FMOE_INLINE uint16x8_t LoadPairWords(const uint8_t* p, int half, int pair) {
  return vreinterpretq_u16_u8(vld1q_u8(p + 32 * pair + 16 * half));
}
FMOE_INLINE void DecodeE4m3(const uint8_t* p, int half, Floats* out) {
  const uint16x8_t mask = vdupq_n_u16(0xbf80);
  Unroll<2>([&](int pair) FMOE_FLAT {
    const int16x8_t x = vreinterpretq_s16_u16(LoadPairWords(p, half, pair));
    const int16x8_t even = vshrq_n_s16(vshlq_n_s16(x, 8), 1), odd = vshrq_n_s16(x, 1);
    out[2 * pair] = FloatsOfF16(vandq_u16(vreinterpretq_u16_s16(even), mask));
    out[2 * pair + 1] = FloatsOfF16(vandq_u16(vreinterpretq_u16_s16(odd), mask));
  });
}
FMOE_INLINE void DecodeE5m2(const uint8_t* p, int half, Floats* out) {
  Unroll<2>([&](int pair) FMOE_FLAT {
    const uint16x8_t x = LoadPairWords(p, half, pair);
    out[2 * pair] = FloatsOfF16(vshlq_n_u16(x, 8));
    out[2 * pair + 1] = FloatsOfF16(vandq_u16(x, vdupq_n_u16(0xff00)));
  });
}

/// sum + the products of four bytes each. Of weights as signed bytes: up to 127.
FMOE_INLINE Ints ByteDot(Ints sum, Ints weights, Ints values) {
  const auto dot = [](int32x4_t s, int32x4_t a, int32x4_t b)
                       FMOE_FLAT { return vdotq_s32(s, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b)); };
  return {dot(sum.low, weights.low, values.low), dot(sum.high, weights.high, values.high)};
}
FMOE_INLINE Ints ByteDotWord(Ints sum, Ints weights, const int32_t* word) {
  return ByteDot(sum, weights, IntSet(*word));
}
/// Sums of four bytes each, of values.
FMOE_INLINE Ints SumsOfFours(Ints x) {
  return ByteDot(IntZero(), x, IntSet(0x01010101));
}
/// Words of two products each, of unsigned bytes with signed ones.
FMOE_INLINE int32x4_t MultiplyAddPairs(int32x4_t u, int32x4_t s) {
  const uint16x8_t unsigned_words = vreinterpretq_u16_s32(u);
  const int16x8_t words = vreinterpretq_s16_s32(s);
  const int16x8_t even = vmulq_s16(vreinterpretq_s16_u16(vandq_u16(unsigned_words, vdupq_n_u16(0xff))),
                                   vshrq_n_s16(vshlq_n_s16(words, 8), 8));
  const int16x8_t odd = vreinterpretq_s16_u16(vshrq_n_u16(unsigned_words, 8));
  return vreinterpretq_s32_s16(vmlaq_s16(even, odd, vshrq_n_s16(words, 8)));
}
FMOE_INLINE Ints MultiplyAddPairs(Ints u, Ints s) {
  return {MultiplyAddPairs(u.low, s.low), MultiplyAddPairs(u.high, s.high)};
}
FMOE_INLINE int32x4_t MultiplyAddWordPairs(int32x4_t a, int32x4_t b) {
  const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
  return vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
}
FMOE_INLINE Ints MultiplyAddWordPairs(Ints a, Ints b) {
  return {MultiplyAddWordPairs(a.low, b.low), MultiplyAddWordPairs(a.high, b.high)};
}
/// Bytes 0 and 2 of each lane as words, and bytes 1 and 3.
FMOE_INLINE Ints EvenBytes(Ints x) {
  return IntAnd(x, IntSet(0x00ff00ff));
}
FMOE_INLINE Ints OddBytes(Ints x) {
  return EvenBytes(ShiftRight<8>(x));
}
/// Sixteen codes, 128 * high + low where there are two planes, as words in the order 0 2 1 3 of each four.
FMOE_INLINE void StoreWordPairs(void* out, const int8_t* codes, const int8_t* low) {
  const uint8x16_t order = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
  Unroll<2>([&](int half) FMOE_FLAT {
    int16x8_t x = vmovl_s8(vld1_s8(codes + 8 * half));
    if (low != 0) {
      x = vaddq_s16(vshlq_n_s16(x, 7), vmovl_s8(vld1_s8(low + 8 * half)));
    }
    vst1q_u8((uint8_t*)out + 16 * half, vqtbl1q_u8(vreinterpretq_u8_s16(x), order));
  });
}
// Steps of a dot product of bytes where there is none.
FMOE_INLINE Ints AddWords(Ints a, Ints) {
  return a;
}
FMOE_INLINE Ints MultiplyAddWords(Ints a, int16_t) {
  return a;
}
template <typename Vector>
FMOE_INLINE void InPlace(Vector&) {}

/// n is split in two, so that 2^-126 and below come out as subnormals instead of garbage exponents.
FMOE_INLINE Floats ScaleByPowerOfTwo(Floats x, Floats n) {
  const Ints bias = IntSet(127), whole = ToIntsEven(n), half = ShiftRightSigned<1>(whole);
  const Floats a = FromBits(ShiftLeft<23>(IntAdd(half, bias)));
  const Floats b = FromBits(ShiftLeft<23>(IntAdd(IntSubtract(whole, half), bias)));
  return Multiply(Multiply(x, a), b);
}

FMOE_INLINE void Prefetch(const uint8_t* p) {
  __builtin_prefetch(p, 0, 3);
}
/// Kept at this place among the operations on `x` by an asm that claims to change it: compilers move plain
/// prefetches.
template <typename Vector>
FMOE_INLINE void PrefetchBeside(const uint8_t* p, Vector& x) {
  asm("prfm pldl1keep, %1" : "+w"(x.low) : "Q"(*p));
}
FMOE_INLINE void PrefetchFar(const uint8_t* p) {
  __builtin_prefetch(p, 0, 2);
}
template <typename Vector>
FMOE_INLINE void PrefetchFarBeside(const uint8_t* p, Vector& x) {
  asm("prfm pldl2keep, %1" : "+w"(x.low) : "Q"(*p));
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
