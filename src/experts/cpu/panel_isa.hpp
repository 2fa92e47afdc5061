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

/// What a line becomes that goes to a panel in another type.
template <GroupTransform kTransform>
FMOE_INLINE void PutGroupLine(uint8_t* out, const uint8_t* line) {
  if constexpr (kTransform == kGroupBf16ToFloat || kTransform == kGroupF16ToFloat) {
    Unroll<kHalves>([&](auto half) FMOE_FLAT {
      const uint16_t* words = (const uint16_t*)line + half * kLanes;
      Store((float*)out + half * kLanes, kTransform == kGroupBf16ToFloat ? LoadBf16(words) : LoadF16(words));
    });
  } else {
    memcpy(out, line, kTransform == kGroupBytes ? 16 : kTransform == kGroupWords ? 32 : 64);
  }
}

/// 32 bytes of each row at a time are turned like codes; each line goes to the groups of its column.
template <GroupTransform kTransform>
void PackGroupLines(const GroupLinesArguments* a) {
  constexpr int64_t kBytes = kTransform == kGroupBytes ? 1 : kTransform == kGroupFloats ? 4 : 2;
  constexpr int64_t kColumns = 32 / kBytes;
  alignas(64) uint8_t lines[512];
  uint8_t copies[16][32] = {};
  Places places = {a->out, a->group_bytes, a->groups_per_block, a->block_bytes, 0};
  int64_t left = a->groups;
  for (int64_t first = 0; first < a->columns; first += kColumns) {
    const int64_t count = a->columns - first < kColumns ? a->columns - first : kColumns;
    const uint8_t* rows[16];
    for (int row = 0; row < 16; ++row) {
      rows[row] = a->rows[row] + first * kBytes;
      if (a->end - rows[row] < 32) {
        memcpy(copies[row], rows[row], (size_t)(count * kBytes));
        rows[row] = copies[row];
      }
    }
    TransposeRows<false, kBytes == 2>(rows, 0, IntSet(a->flip), lines);
    if constexpr (kBytes == 1) {
      for (int v = 0; v < 8; ++v) {
        TransposeBytes(lines + 64 * v, -1, 0);
      }
    }
    for (int64_t column = 0; column < count; ++column) {
      const int64_t shared = left < a->groups_per_column ? left : a->groups_per_column;
      for (int64_t group = 0; group < shared; ++group) {
        PutGroupLine<kTransform>(Next(places), lines + column * 16 * kBytes);
      }
      left -= shared;
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
