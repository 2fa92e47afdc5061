#pragma once

#include <stdint.h>
#include <string.h>

#include "experts/cpu/kernel_table_isa.hpp"
#include "experts/cpu/simd_isa.hpp"

/// Rows of canonical codes to the lines of a stripe (weights/panel.hpp draws the layout). Every format is the
/// same step: sixteen rows of eight 32-bit words become eight lines of sixteen words. Around it 4-bit codes
/// exchange nibbles, and formats that are widened by f16 conversions part the two 16-bit words of a lane.
///
///     row 0   w00 w01 .. w07            line 0   w00 w10 w20 .. wf0
///     row 1   w10 w11 .. w17     ->     line 1   w01 w11 w21 .. wf1
///     ..                                ..
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Sixteen rows of 32 bytes to eight lines, at lines[v * 64].
template <bool kNibbles, bool kSplit>
FMOE_INLINE void TransposeRows(const uint8_t* const* rows, int64_t at, Ints flip, uint8_t* lines) {
  Ints line[8 * kHalves];  // [line][half of its rows]
  LoadTransposed(rows, at, line);
  Unroll<8>([&](auto v) FMOE_FLAT {
    Unroll<kHalves>([&](auto half) FMOE_FLAT {
      Ints x = line[v * kHalves + half];
      if constexpr (kNibbles) {
        x = ShuffleNibbles(x);
      }
      line[v * kHalves + half] = IntXor(x, flip);
    });
    StoreLine<kSplit>(lines + 64 * v, line + v * kHalves);
  });
}

/// Where equal pieces go one after the other, `per_block` of them to a block. By counting: dividing their
/// numbers took a third of the time of a stripe of 4-bit codes.
struct Places {
  uint8_t* block;
  int64_t bytes, per_block, block_bytes, count;
};

FMOE_INLINE uint8_t* Next(Places& at) {
  if (at.count == at.per_block) {
    at.block += at.block_bytes;
    at.count = 0;
  }
  return at.block + at.count++ * at.bytes;
}

/// kGroups of 32 bytes of each row are one unit of 64 k.
template <int kGroups, bool kNibbles, bool kSplit>
void PackPanel(const PanelArguments* a) {
  const Ints flip = IntSet(a->flip);
  const int64_t unit_bytes = kGroups * 8 * 64;
  Places places = {a->out, unit_bytes, a->units_per_block, a->block_bytes, 0};
  for (int64_t unit = 0; unit < a->units; ++unit) {
    uint8_t* lines = Next(places);
    for (int group = 0; group < kGroups; ++group) {
      for (int line = 0; line < 8; ++line) {
        Prefetch(a->ahead + (unit * kGroups + group) * 512 + line * 64);
      }
      TransposeRows<kNibbles, kSplit>(a->rows, (unit * kGroups + group) * 32, flip, lines + group * 512);
    }
  }
}

/// Scales of one byte, kPerUnit a row and unit of 64 k (one block): 32 bytes of each row at a time fill the
/// scales of 32 / kPerUnit blocks, the last of them maybe in part.
template <int kPerUnit>
void PackPanelScales(const PanelArguments* a) {
  constexpr int kUnits = 32 / kPerUnit;
  alignas(64) uint8_t lines[512];
  for (int64_t unit = 0; unit < a->units; unit += kUnits) {
    for (int line = 0; line < 8; ++line) {
      Prefetch(a->ahead + unit * kPerUnit * 16 + line * 64);
    }
    TransposeRows<false, false>(a->rows, unit * kPerUnit, IntZero(), lines);
    for (int v = 0; v < 8; ++v) {
      TransposeBytes(lines + 64 * v, a->flip, a->least);
    }
    const int64_t count = a->units - unit < kUnits ? a->units - unit : kUnits;
    for (int64_t i = 0; i < count; ++i) {
      memcpy(a->out + (unit + i) * a->block_bytes, lines + i * kPerUnit * 16, kPerUnit * 16);
    }
  }
}

template <RowType kType>
FMOE_INLINE Floats LoadScales(const uint8_t* p) {
  if constexpr (kType == kRowF32) {
    return Load((const float*)p);
  } else if constexpr (kType == kRowBf16) {
    return LoadBf16((const uint16_t*)p);
  } else {
    return LoadF16((const uint16_t*)p);
  }
}

/// `wanted` bytes at p, of which the first `bytes` count: p itself where all may be read, else a copy.
FMOE_INLINE const uint8_t* Readable(const uint8_t* p, int64_t bytes, int64_t wanted, const uint8_t* end,
                                    uint8_t* copy) {
  if (end - p >= wanted) {
    return p;
  }
  memcpy(copy, p, (size_t)bytes);
  return copy;
}

/// Sixteen columns of sixteen rows at a time become words in L1, are turned like codes, and each line goes to
/// the groups of its column.
template <RowType kType>
void PackScaleWords(const ScaleWordsArguments* a) {
  constexpr int64_t kBytes = kType == kRowF32 ? 4 : 2;
  alignas(64) int32_t words[16][16];
  uint8_t copy[16 * kBytes] = {}, zeros_copy[16] = {};
  const uint8_t* rows[16];
  for (int row = 0; row < 16; ++row) {
    rows[row] = (const uint8_t*)words[row];
    if (a->scales[row] == 0) {
      memset(words[row], 0, sizeof(words[row]));
    }
  }
  Places places = {a->out, 64, a->groups_per_block, a->block_bytes, 0};
  for (int64_t first = 0; first < a->columns; first += 16) {
    const int64_t count = a->columns - first < 16 ? a->columns - first : 16;
    for (int row = 0; row < 16; ++row) {
      if (a->scales[row] == 0) {
        continue;
      }
      const uint8_t* scales =
          Readable(a->scales[row] + first * kBytes, count * kBytes, 16 * kBytes, a->scales_end, copy);
      const uint8_t* zeros =
          a->zeros[row] == 0 ? 0 : Readable(a->zeros[row] + first, count, 16, a->zeros_end, zeros_copy);
      Unroll<16 / kLanes>([&](auto v) FMOE_FLAT {
        Ints word = Bits(LoadScales<kType>(scales + v * kLanes * kBytes));
        if (a->beside_zero) {  // to nearest even, as PanelScaleCodes
          const Ints odd = IntAnd(ShiftRight<8>(word), IntSet(1));
          word = IntAnd(IntAdd(word, IntAdd(odd, IntSet(0x7f))), IntSet(~0xff));
          Ints zero = IntSet(a->zero);
          if (zeros != 0) {
            zero = IntXor(zero, LoadByteLanes(zeros + v * kLanes));
          }
          word = IntOr(word, zero);
        }
        StoreInts(words[row] + v * kLanes, word);
      });
    }
    for (int64_t eight = 0; eight < count; eight += 8) {
      Ints line[8 * kHalves];
      LoadTransposed(rows, eight * 4, line);
      Unroll<8>([&](auto v) FMOE_FLAT {
        if (eight + v < count) {
          const int64_t rest = a->groups - (first + eight + v) * a->groups_per_column;
          for (int64_t group = 0; group < a->groups_per_column && group < rest; ++group) {
            StoreLine<false>(Next(places), line + v * kHalves);
          }
        }
      });
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
