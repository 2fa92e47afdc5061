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

/// k 0..7 of a word of nibbles in the order 0 4 1 5 2 6 3 7: the low nibbles of the bytes are k 0-3.
FMOE_INLINE Ints ShuffleNibbles(Ints x) {
  Ints t = IntAnd(IntXor(x, ShiftRight<8>(x)), IntSet(0x0000ff00));
  x = IntXor(x, IntXor(t, ShiftLeft<8>(t)));
  t = IntAnd(IntXor(x, ShiftRight<4>(x)), IntSet(0x00f000f0));
  return IntXor(x, IntXor(t, ShiftLeft<4>(t)));
}

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

/// kGroups of 32 bytes of each row are one unit of 64 k.
template <int kGroups, bool kNibbles, bool kSplit>
void PackPanel(const PanelArguments* a) {
  const Ints flip = IntSet(a->flip);
  const int64_t unit_bytes = kGroups * 8 * 64;
  for (int64_t unit = 0; unit < a->units; ++unit) {
    uint8_t* lines =
        a->out + unit / a->units_per_block * a->block_bytes + unit % a->units_per_block * unit_bytes;
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
      TransposeBytes(lines + 64 * v, (int32_t)a->flip);
    }
    const int64_t count = a->units - unit < kUnits ? a->units - unit : kUnits;
    for (int64_t i = 0; i < count; ++i) {
      memcpy(a->out + (unit + i) * a->block_bytes, lines + i * kPerUnit * 16, kPerUnit * 16);
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
