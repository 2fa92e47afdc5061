#pragma once

#include "experts/cpu/kernels/simd_avx512_isa.hpp"

/// Sixteen rows to lines of a panel and back, in 512-bit registers (lines_isa.hpp).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Eight words of rows r and r + 8 share a register, so that an 8 x 8 transposition inside its halves leaves
/// whole lines of sixteen rows. kSplit, here and in WordsOfColumns: left to StoreLine.
template <bool kSplit = false>
FMOE_INLINE void LoadTransposed(const uint8_t* const* rows, int64_t at, Ints* line) {
  Ints x[8], y[8];
  Unroll<8>([&](int r) FMOE_FLAT {
    x[r] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(rows[r] + at))),
                              _mm256_loadu_si256((const __m256i*)(rows[r + 8] + at)), 1);
  });
  Unroll<4>([&](int i) FMOE_FLAT {
    y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  });
  Unroll<2>([&](int i) FMOE_FLAT {
    Unroll<2>([&](int j) FMOE_FLAT {
      x[4 * i + 2 * j] = _mm512_unpacklo_epi64(y[4 * i + j], y[4 * i + j + 2]);
      x[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(y[4 * i + j], y[4 * i + j + 2]);
    });
  });
  const Ints low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
  const Ints high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  Unroll<4>([&](int i) FMOE_FLAT {
    line[i] = _mm512_permutex2var_epi64(x[i], low, x[i + 4]);
    line[i + 4] = _mm512_permutex2var_epi64(x[i], high, x[i + 4]);
  });
}

/// kSplit: the low words of all lanes, then the high ones.
template <bool kSplit>
FMOE_INLINE void StoreLine(uint8_t* p, const Ints* line) {
  Ints x = line[0];
  if constexpr (kSplit) {
    x = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(x)),
                           _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)), 1);
  }
  _mm512_storeu_si512(p, x);
}

/// Each byte keeps the bits of `mask`, and is raised to those of `least` if it is below.
FMOE_INLINE Ints LimitBytes(Ints x, int32_t mask, int32_t least) {
  return _mm512_max_epu8(_mm512_and_si512(x, _mm512_set1_epi32(mask)), _mm512_set1_epi32(least));
}

/// Four bytes of each of four rows to four times the bytes of four rows, in every 16 bytes.
FMOE_INLINE Ints TransposeFours(Ints x) {
  return _mm512_shuffle_epi8(
      x, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
}

/// The same of sixteen rows.
FMOE_INLINE void TransposeBytes(Ints* line) {
  const Ints lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  line[0] = _mm512_permutexvar_epi32(lanes, TransposeFours(line[0]));
}

/// The same of eight rows in each half of a line, and the way back.
FMOE_INLINE void TransposeHalves(Ints* line) {
  const Ints lanes = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  line[0] = _mm512_permutexvar_epi32(lanes, TransposeFours(line[0]));
}
FMOE_INLINE void TransposeHalvesBack(Ints* line) {
  const Ints lanes = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  line[0] = TransposeFours(_mm512_permutexvar_epi32(lanes, line[0]));
}

/// The high nibbles of the first half of a line change places with the low ones of the second.
FMOE_INLINE void ExchangeNibbles(Ints* line) {
  const Ints stay = _mm512_mask_blend_epi32(0xff00, IntSet(0x0f0f0f0f), IntSet(~0x0f0f0f0f));
  const Ints rotation = _mm512_mask_blend_epi32(0xff00, IntSet(4), IntSet(28));
  const Ints others = _mm512_rolv_epi32(_mm512_shuffle_i64x2(line[0], line[0], 0x4e), rotation);
  line[0] = _mm512_ternarylogic_epi32(stay, line[0], others, 0xca);
}

/// Eight columns of eight bytes.
FMOE_INLINE void LoadColumns(const uint8_t* columns, const int32_t* at, Ints* line) {
  const auto pair = [&](int i) FMOE_FLAT {
    const __m128i first = _mm_loadl_epi64((const __m128i*)(columns + at[i]));
    return _mm_castpd_si128(_mm_loadh_pd(_mm_castsi128_pd(first), (const double*)(columns + at[i + 1])));
  };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(pair(0)), pair(2), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(pair(4)), pair(6), 1);
  line[0] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

/// The way back: words of sixteen rows, a byte from each of four columns of sixteen.
template <bool kSplit>
FMOE_INLINE void WordsOfColumns(const uint8_t* columns, const int32_t* at, Ints* line) {
  const auto column = [&](int i) FMOE_FLAT { return _mm_loadu_si128((const __m128i*)(columns + at[i])); };
  Ints x = _mm512_castsi128_si512(column(0));
  x = _mm512_inserti32x4(x, column(1), 1);
  x = _mm512_inserti32x4(x, column(2), 2);
  x = _mm512_inserti32x4(x, column(3), 3);
  const Ints lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  line[0] = TransposeFours(_mm512_permutexvar_epi32(lanes, x));
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
