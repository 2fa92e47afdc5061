#pragma once

/// Sixteen rows to lines of a panel and back, under the same names for each kind of registers:
///
///     LoadTransposed           words of sixteen rows as lines
///     LoadSixBits              the same of codes of six bits, as bytes whose upper two bits are anything
///     ShuffleNibbles           k 0 4 1 5 2 6 3 7 of a word
///     StoreLine                a line; kSplit: the low words of all lanes, then the high ones
///     LimitBytes               of every byte the bits of a mask, and so much at least
///     TransposeBytes           four bytes of each of sixteen rows to a row of each byte
///     TransposeHalves          the same of twice eight rows; TransposeHalvesBack: the way back
///     ExchangeNibbles          high nibbles of the first half for low ones of the second
///     LoadColumns              eight columns of eight bytes; WordsOfColumns: the way back
#if defined(__aarch64__)
#include "experts/cpu/kernels/lines_neon_isa.hpp"
#elif defined(__AVX512BW__)
#include "experts/cpu/kernels/lines_avx512_isa.hpp"
#else
#include "experts/cpu/kernels/lines_avx2_isa.hpp"
#endif

// What is the same for 512-bit registers and NEON; 256-bit registers have a way of their own.
#if defined(__AVX512BW__) || defined(__aarch64__)
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

constexpr bool kPrefetchesAllLineByLine = false;  // panel_isa.hpp

/// k 0..7 of a word of nibbles in the order 0 4 1 5 2 6 3 7: the low nibbles of the bytes are k 0-3.
FMOE_INLINE Ints ShuffleNibbles(Ints x) {
  Ints t = IntAnd(IntXor(x, ShiftRight<8>(x)), IntSet(0x0000ff00));
  x = IntXor(x, IntXor(t, ShiftLeft<8>(t)));
  t = IntAnd(IntXor(x, ShiftRight<4>(x)), IntSet(0x00f000f0));
  return IntXor(x, IntXor(t, ShiftLeft<4>(t)));
}

/// The four 6-bit codes in the lower 24 bits of each lane as its four bytes.
FMOE_INLINE Ints BytesOfSixBits(Ints x) {
#if defined(__AVX512VBMI__)
  const Ints begins = _mm512_set1_epi64(0x322c2620120c0600);  // of each code
  return _mm512_multishift_epi64_epi8(begins, x);
#else
  const Ints low = IntOr(IntAnd(x, IntSet(0x3f)), IntAnd(ShiftLeft<2>(x), IntSet(0x3f00)));
  const Ints high =
      IntOr(IntAnd(ShiftLeft<4>(x), IntSet(0x3f0000)), IntAnd(ShiftLeft<6>(x), IntSet(0x3f000000)));
  return IntOr(low, high);
#endif
}

/// put(v, line) of the sixteen lines of 48 bytes of each row: twelve words, sixteen codes in each three of
/// them. Words 0 to 7, then 4 to 11, so that nothing behind the row is read.
template <typename Put>
FMOE_INLINE void LoadSixBits(const uint8_t* const* rows, int64_t at, Put put) {
  Unroll<2>([&](int load) FMOE_FLAT {
    Ints line[8 * kHalves];  // [line][half of its rows]
    LoadTransposed(rows, at + 16 * load, line);
    Unroll<2>([&](int three) FMOE_FLAT {
      const Ints* words = line + (2 * load + 3 * three) * kHalves;
      Ints codes[4 * kHalves];
      Unroll<kHalves>([&](int half) FMOE_FLAT {
        const Ints w0 = words[half], w1 = words[kHalves + half], w2 = words[2 * kHalves + half];
        const Ints packed[4] = {w0, IntOr(ShiftRight<24>(w0), ShiftLeft<8>(w1)),
                                IntOr(ShiftRight<16>(w1), ShiftLeft<16>(w2)), ShiftRight<8>(w2)};
        Unroll<4>([&](int i) FMOE_FLAT { codes[i * kHalves + half] = BytesOfSixBits(packed[i]); });
      });
      Unroll<4>([&](int i) FMOE_FLAT { put(8 * load + 4 * three + i, codes + i * kHalves); });
    });
  });
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
#endif
