#pragma once

#include "experts/cpu/kernels/simd_neon_isa.hpp"

/// Sixteen rows to lines of a panel and back, in pairs of 128-bit registers (lines_isa.hpp).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// A 4 x 4 transposition.
FMOE_INLINE void Transpose4(int32x4_t* x) {
  const auto wide = [](int32x4_t y) FMOE_FLAT { return vreinterpretq_s64_s32(y); };
  const int64x2_t even[2] = {wide(vtrn1q_s32(x[0], x[1])), wide(vtrn1q_s32(x[2], x[3]))};
  const int64x2_t odd[2] = {wide(vtrn2q_s32(x[0], x[1])), wide(vtrn2q_s32(x[2], x[3]))};
  x[0] = vreinterpretq_s32_s64(vtrn1q_s64(even[0], even[1]));
  x[1] = vreinterpretq_s32_s64(vtrn1q_s64(odd[0], odd[1]));
  x[2] = vreinterpretq_s32_s64(vtrn2q_s64(even[0], even[1]));
  x[3] = vreinterpretq_s32_s64(vtrn2q_s64(odd[0], odd[1]));
}

/// Four words of eight rows at a time. kSplit, here and in WordsOfColumns: left to StoreLine.
template <bool kSplit = false>
FMOE_INLINE void LoadTransposed(const uint8_t* const* rows, int64_t at, Ints* line) {
  Unroll<4>([&](int i) FMOE_FLAT {
    const int half = i / 2, words = i % 2 * 4;
    int32x4_t low[4], high[4];
    Unroll<4>([&](int r) FMOE_FLAT {
      low[r] = SignedOf(vld1q_u8(rows[8 * half + r] + at + 4 * words));
      high[r] = SignedOf(vld1q_u8(rows[8 * half + 4 + r] + at + 4 * words));
    });
    Transpose4(low);
    Transpose4(high);
    Unroll<4>([&](int w) FMOE_FLAT { line[2 * (words + w) + half] = {low[w], high[w]}; });
  });
}

/// kSplit: the low words of all lanes, then the high ones.
template <bool kSplit>
FMOE_INLINE void StoreLine(uint8_t* p, const Ints* line) {
  Unroll<2>([&](int half) FMOE_FLAT {
    if constexpr (kSplit) {
      StoreWords((uint16_t*)(p + 16 * half), line[half]);
      StoreWords((uint16_t*)(p + 32 + 16 * half), ShiftRight<16>(line[half]));
    } else {
      StoreInts(p + 32 * half, line[half]);
    }
  });
}

/// Each byte keeps the bits of `mask`, and is raised to those of `least` if it is below.
FMOE_INLINE Ints LimitBytes(Ints x, int32_t mask, int32_t least) {
  const Ints masked = IntAnd(x, IntSet(mask));
  const uint8x16_t floor = vreinterpretq_u8_s32(vdupq_n_s32(least));
  return {SignedOf(vmaxq_u8(BytesOf(masked.low), floor)), SignedOf(vmaxq_u8(BytesOf(masked.high), floor))};
}

/// Four bytes of each of four rows to four times the bytes of four rows, in every 16 bytes.
FMOE_INLINE Ints TransposeFours(Ints x) {
  constexpr uint8_t kOrder[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  const uint8x16_t order = vld1q_u8(kOrder);
  return {SignedOf(vqtbl1q_u8(BytesOf(x.low), order)), SignedOf(vqtbl1q_u8(BytesOf(x.high), order))};
}

/// The same of eight rows in each half of a line, and the way back.
FMOE_INLINE void TransposeHalves(Ints* line) {
  Unroll<2>([&](int half) FMOE_FLAT {
    const Ints x = TransposeFours(line[half]);
    line[half] = {vzip1q_s32(x.low, x.high), vzip2q_s32(x.low, x.high)};
  });
}
FMOE_INLINE void TransposeHalvesBack(Ints* line) {
  Unroll<2>([&](int half) FMOE_FLAT {
    const Ints x = line[half];
    line[half] = TransposeFours({vuzp1q_s32(x.low, x.high), vuzp2q_s32(x.low, x.high)});
  });
}

/// The same of sixteen rows.
FMOE_INLINE void TransposeBytes(Ints* line) {
  TransposeHalves(line);
  // Each half now has 8 bytes of its rows for each of the four: they alternate.
  const auto alternate = [](int32x4_t a, int32x4_t b) FMOE_FLAT {
    const int64x2_t x = vreinterpretq_s64_s32(a), y = vreinterpretq_s64_s32(b);
    return Ints{vreinterpretq_s32_s64(vtrn1q_s64(x, y)), vreinterpretq_s32_s64(vtrn2q_s64(x, y))};
  };
  const Ints first = alternate(line[0].low, line[1].low);
  line[1] = alternate(line[0].high, line[1].high);
  line[0] = first;
}

/// The high nibbles of the first half of a line change places with the low ones of the second.
FMOE_INLINE void ExchangeNibbles(Ints* line) {
  const Ints low = IntSet(0x0f0f0f0f), upper = IntSet((int32_t)0xf0f0f0f0), first = line[0], second = line[1];
  line[0] = IntOr(IntAnd(first, low), IntAnd(ShiftLeft<4>(second), upper));
  line[1] = IntOr(IntAnd(ShiftRight<4>(first), low), IntAnd(second, upper));
}

/// Eight columns of eight bytes.
FMOE_INLINE void LoadColumns(const uint8_t* columns, const int32_t* at, Ints* line) {
  const auto pair = [&](int i) FMOE_FLAT {
    return SignedOf(vcombine_u8(vld1_u8(columns + at[i]), vld1_u8(columns + at[i + 1])));
  };
  line[0] = {pair(0), pair(2)};
  line[1] = {pair(4), pair(6)};
}

/// The way back: words of sixteen rows, a byte from each of four columns of sixteen.
template <bool kSplit>
FMOE_INLINE void WordsOfColumns(const uint8_t* columns, const int32_t* at, Ints* line) {
  const uint8x16_t x[4] = {vld1q_u8(columns + at[0]), vld1q_u8(columns + at[1]), vld1q_u8(columns + at[2]),
                           vld1q_u8(columns + at[3])};
  const auto words = [](uint8x16_t a, uint8x16_t b) FMOE_FLAT {
    const uint16x8_t y = vreinterpretq_u16_u8(a), z = vreinterpretq_u16_u8(b);
    return Ints{SignedOf(vzip1q_u16(y, z)), SignedOf(vzip2q_u16(y, z))};
  };
  line[0] = words(vzip1q_u8(x[0], x[1]), vzip1q_u8(x[2], x[3]));
  line[1] = words(vzip2q_u8(x[0], x[1]), vzip2q_u8(x[2], x[3]));
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
