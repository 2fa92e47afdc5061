#pragma once

#include "experts/cpu/kernels/simd_avx2_isa.hpp"

/// Sixteen rows to lines of a panel and back, in 256-bit registers (lines_isa.hpp).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

constexpr bool kPrefetchesAllLineByLine = true;  // panel_isa.hpp

/// Registers as one sequence whose halves are interleaved, words (kSize 2) or lanes, in both halves of the
/// registers. Twice that is a transposition of 4 x 4 lanes, three times one of 8 x 8 words.
template <int kSize, int kCount>
FMOE_INLINE void Interleave(Ints* x) {
  Ints y[kCount];
  Unroll<kCount / 2>([&](int i) FMOE_FLAT {
    const Ints first = x[i], second = x[i + kCount / 2];
    y[2 * i] = kSize == 2 ? _mm256_unpacklo_epi16(first, second) : _mm256_unpacklo_epi32(first, second);
    y[2 * i + 1] = kSize == 2 ? _mm256_unpackhi_epi16(first, second) : _mm256_unpackhi_epi32(first, second);
  });
  Unroll<kCount>([&](int i) FMOE_FLAT { x[i] = y[i]; });
}

/// Sixteen bytes of two rows. The second load takes no unit that shuffles.
FMOE_INLINE Ints LoadRowPair(const uint8_t* lower, const uint8_t* upper) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)lower)),
                                 _mm_loadu_si128((const __m128i*)upper), 1);
}

/// change(x) of sixteen bytes of each row, then their four lines. kSplit: the low words of all rows, then the
/// high ones; else rows 0-7, then 8-15.
template <bool kSplit, typename Change>
FMOE_INLINE void LoadFourLines(const uint8_t* const* rows, int64_t at, Change change, Ints* line) {
  if constexpr (kSplit) {
    Unroll<8>([&](int r) FMOE_FLAT { line[r] = change(LoadRowPair(rows[r] + at, rows[r + 8] + at)); });
    Unroll<3>([&](auto) FMOE_FLAT { Interleave<2, 8>(line); });
    return;
  }
  Unroll<2>([&](int half) FMOE_FLAT {
    Ints x[4];
    Unroll<4>([&](int r) FMOE_FLAT {
      x[r] = change(LoadRowPair(rows[8 * half + r] + at, rows[8 * half + r + 4] + at));
    });
    Unroll<2>([&](auto) FMOE_FLAT { Interleave<4, 4>(x); });
    Unroll<4>([&](int v) FMOE_FLAT { line[2 * v + half] = x[v]; });
  });
}

/// 32 bytes of each row to eight lines. Whole lines take rows one by one: in pairs they would cost two
/// shuffles a register instead of three, but meet every line of memory twice as often (Zen 3, whole experts
/// of INT4 g128, three runs: 51.1, 51.1, 48.9 instead of 48.5, 50.9, 48.6 ms for 256 MB).
template <bool kSplit = false>
FMOE_INLINE void LoadTransposed(const uint8_t* const* rows, int64_t at, Ints* line) {
  if constexpr (kSplit) {
    Unroll<2>([&](int four) FMOE_FLAT {
      LoadFourLines<true>(
          rows, at + 16 * four, [](Ints x) FMOE_FLAT { return x; }, line + 8 * four);
    });
    return;
  }
  Unroll<2>([&](int half) FMOE_FLAT {
    Ints x[8];
    Unroll<8>([&](int r) FMOE_FLAT { x[r] = LoadInts(rows[8 * half + r] + at); });
    Unroll<2>([&](auto) FMOE_FLAT {
      Interleave<4, 4>(x);
      Interleave<4, 4>(x + 4);
    });
    Unroll<4>([&](int i) FMOE_FLAT {
      line[2 * i + half] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x20);
      line[2 * (i + 4) + half] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x31);
    });
  });
}

/// k 0..7 of a word of nibbles in the order 0 4 1 5 2 6 3 7: the low nibbles of the bytes are k 0-3.
FMOE_INLINE Ints ShuffleNibbles(Ints x) {
  x = _mm256_shuffle_epi8(
      x, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)));
  const Ints t = IntAnd(IntXor(x, ShiftRight<4>(x)), IntSet(0x00f000f0));
  return IntXor(x, IntXor(t, ShiftLeft<4>(t)));
}

/// Lines of kSplit come with their words parted.
template <bool kSplit>
FMOE_INLINE void StoreLine(uint8_t* p, const Ints* line) {
  StoreInts(p, line[0]);
  StoreInts(p + 32, line[1]);
}

/// Each byte keeps the bits of `mask`, and is raised to those of `least` if it is below.
FMOE_INLINE Ints LimitBytes(Ints x, int32_t mask, int32_t least) {
  return _mm256_max_epu8(_mm256_and_si256(x, _mm256_set1_epi32(mask)), _mm256_set1_epi32(least));
}

/// Four bytes of each of four rows to four times the bytes of four rows, in every 16 bytes.
FMOE_INLINE Ints TransposeFours(Ints x) {
  return _mm256_shuffle_epi8(
      x, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
}

/// The same of eight rows in each half of a line, and the way back.
FMOE_INLINE void TransposeHalves(Ints* line) {
  const Ints lanes = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  Unroll<2>([&](int half)
                FMOE_FLAT { line[half] = _mm256_permutevar8x32_epi32(TransposeFours(line[half]), lanes); });
}
FMOE_INLINE void TransposeHalvesBack(Ints* line) {
  const Ints lanes = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  Unroll<2>([&](int half)
                FMOE_FLAT { line[half] = TransposeFours(_mm256_permutevar8x32_epi32(line[half], lanes)); });
}

/// The same of sixteen rows.
FMOE_INLINE void TransposeBytes(Ints* line) {
  TransposeHalves(line);
  // Each half now has 8 bytes of its rows for each of the four: they alternate.
  const Ints low = _mm256_unpacklo_epi64(line[0], line[1]), high = _mm256_unpackhi_epi64(line[0], line[1]);
  line[0] = _mm256_permute2x128_si256(low, high, 0x20);
  line[1] = _mm256_permute2x128_si256(low, high, 0x31);
}

/// The high nibbles of the first half of a line change places with the low ones of the second.
FMOE_INLINE void ExchangeNibbles(Ints* line) {
  const Ints low = IntSet(0x0f0f0f0f), first = line[0], second = line[1];
  line[0] = IntOr(IntAnd(first, low), _mm256_andnot_si256(low, ShiftLeft<4>(second)));
  line[1] = IntOr(IntAnd(ShiftRight<4>(first), low), _mm256_andnot_si256(low, second));
}

/// Eight columns of eight bytes.
FMOE_INLINE void LoadColumns(const uint8_t* columns, const int32_t* at, Ints* line) {
  const auto pair = [&](int i) FMOE_FLAT {
    const __m128i first = _mm_loadl_epi64((const __m128i*)(columns + at[i]));
    return _mm_castpd_si128(_mm_loadh_pd(_mm_castsi128_pd(first), (const double*)(columns + at[i + 1])));
  };
  line[0] = _mm256_set_m128i(pair(2), pair(0));
  line[1] = _mm256_set_m128i(pair(6), pair(4));
}

/// The way back: words of sixteen rows, a byte from each of four columns of sixteen.
template <bool kSplit>
FMOE_INLINE void WordsOfColumns(const uint8_t* columns, const int32_t* at, Ints* line) {
  if constexpr (kSplit) {
    const Ints even = LoadRowPair(columns + at[0], columns + at[2]);
    const Ints odd = LoadRowPair(columns + at[1], columns + at[3]);
    const Ints low = _mm256_unpacklo_epi8(even, odd), high = _mm256_unpackhi_epi8(even, odd);
    line[0] = _mm256_permute2x128_si256(low, high, 0x20);
    line[1] = _mm256_permute2x128_si256(low, high, 0x31);
    return;
  }
  const auto column = [&](int i) FMOE_FLAT { return _mm_loadu_si128((const __m128i*)(columns + at[i])); };
  const __m128i x[4] = {column(0), column(1), column(2), column(3)};
  const __m128i low[2] = {_mm_unpacklo_epi8(x[0], x[1]), _mm_unpacklo_epi8(x[2], x[3])};
  const __m128i high[2] = {_mm_unpackhi_epi8(x[0], x[1]), _mm_unpackhi_epi8(x[2], x[3])};
  line[0] = _mm256_set_m128i(_mm_unpackhi_epi16(low[0], low[1]), _mm_unpacklo_epi16(low[0], low[1]));
  line[1] = _mm256_set_m128i(_mm_unpackhi_epi16(high[0], high[1]), _mm_unpacklo_epi16(high[0], high[1]));
}

/// Sixteen 6-bit codes in twelve bytes of each half, from byte kFrom on, to a byte each. Of the bytes b0 b1
/// b2 the words b0 b1 and b1 b2 hold two codes each. A shift is a multiplication, for which Zen 3 has units
/// beside the two that shuffle and shift.
template <int kFrom>
FMOE_INLINE Ints BytesOfSixBits(Ints x) {
  const auto broadcast = [](__m128i bytes) FMOE_FLAT { return _mm256_broadcastsi128_si256(bytes); };
  const __m128i words = _mm_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11);
  x = _mm256_shuffle_epi8(x, broadcast(_mm_add_epi8(words, _mm_set1_epi8(kFrom))));
  x = _mm256_blend_epi16(x, _mm256_mulhi_epu16(x, _mm256_set1_epi16(0x1000)), 0xaa);
  return IntOr(IntAnd(x, IntSet(0x003f003f)), IntAnd(ShiftLeft<2>(x), IntSet(0x3f003f00)));
}

/// put(v, line) of the sixteen lines of 48 bytes of each row. Codes are spread while they stand in rows: the
/// three words of sixteen codes, transposed first, had to be joined again.
template <typename Put>
FMOE_INLINE void LoadSixBits(const uint8_t* const* rows, int64_t at, Put put) {
  Unroll<4>([&](auto four) FMOE_FLAT {
    constexpr int kFrom = four == 3 ? 4 : 0;  // nothing behind the row is read
    Ints line[8];
    LoadFourLines<false>(
        rows, at + 12 * four - kFrom, [](Ints x) FMOE_FLAT { return BytesOfSixBits<kFrom>(x); }, line);
    Unroll<4>([&](int v) FMOE_FLAT { put(4 * four + v, line + 2 * v); });
  });
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
