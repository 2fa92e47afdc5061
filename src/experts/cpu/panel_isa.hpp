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

/// What stands behind the codes of a block.
FMOE_INLINE void CopySides(uint8_t* out, const uint8_t* sides, int64_t bytes) {
  for (; bytes >= 64; bytes -= 64, out += 64, sides += 64) {
    memcpy(out, sides, 64);
  }
  for (; bytes > 0; bytes -= 16, out += 16, sides += 16) {
    memcpy(out, sides, 16);
  }
}

/// Rows are read side by side, which hardware prefetchers follow badly, so they are asked for a piece of up
/// to 512 bytes ahead of where they are packed, row after row:
///
///     row 0   [ packed ][ 0 .. 7  ][           first lines of the next stripe behind the last piece
///     row 1   [ packed ][ 8 .. 15 ][
///     ..
///
/// Two pieces and what becomes of them stay in L1. Asked for in the order of memory, a whole stripe ahead, 16
/// KB of codes were in L2 again before they were packed, and FP8 in blocks packed at 81 instead of 92 % of
/// the rate of a copy, INT8 at 84 instead of 89, 4 bits at 75 instead of 78 (Zen 5). Longer pieces come too
/// late: requests that meet full buffers are dropped.
struct PiecesAhead {
  const uint8_t* const* rows;
  int64_t offset;  ///< of the piece in its rows
  int64_t row, line, lines;
};

/// As many lines as a step of 32 bytes of sixteen rows reads.
FMOE_INLINE void PrefetchStep(PiecesAhead& ahead) {
  for (int i = 0; i < 8; ++i) {
    Prefetch(ahead.rows[ahead.row] + ahead.offset + ahead.line * 64);
    if (++ahead.line == ahead.lines) {
      ahead.line = 0;
      ahead.row = (ahead.row + 1) % 16;
    }
  }
}

/// Blocks one after the other, so that the panel is written once, from its beginning to its end: scales that
/// came after the codes of a whole stripe found their lines in L2 again. kGroups of 32 bytes of each row are
/// one unit of 64 k.
template <int kGroups, bool kNibbles, bool kSplit>
void PackPanel(const PanelArguments* a) {
  constexpr int64_t kPiece = 512;
  const Ints flip = IntSet(a->flip);
  const int64_t groups = a->units_per_block * kGroups, bytes = a->blocks * groups * 32;
  const int64_t pieces = (bytes + kPiece - 1) / kPiece;
  const int64_t lines = pieces == 0 ? 0 : ((bytes + pieces - 1) / pieces + 63) / 64;  // of equal pieces
  uint8_t* out = a->out;
  const uint8_t* sides = a->sides;
  PiecesAhead ahead = {};
  int64_t at = 0, piece_end = 0;
  for (int64_t block = 0; block < a->blocks; ++block) {
    for (int64_t group = 0; group < groups; ++group, at += 32, out += 512) {
      if (at == piece_end) {
        piece_end += lines * 64;
        const bool last = piece_end >= bytes;
        ahead = {last ? a->next : a->rows, last ? 0 : piece_end, 0, 0, lines};
      }
      PrefetchStep(ahead);
      TransposeRows<kNibbles, kSplit>(a->rows, at, flip, out);
    }
    if (sides != 0) {
      CopySides(out, sides, a->side_bytes);
      sides += a->side_bytes;
    }
    out += a->side_bytes;
  }
}

/// A line as the panel has it.
template <SideTransform kTransform>
FMOE_INLINE void PutLine(uint8_t* out, const uint8_t* line) {
  if constexpr (kTransform == kSideBf16ToFloat || kTransform == kSideF16ToFloat) {
    Unroll<kHalves>([&](auto half) FMOE_FLAT {
      const uint16_t* words = (const uint16_t*)line + half * kLanes;
      Store((float*)out + half * kLanes, kTransform == kSideBf16ToFloat ? LoadBf16(words) : LoadF16(words));
    });
  } else {
    memcpy(out, line, kTransform == kSideBytes ? 16 : kTransform == kSideWords ? 32 : 64);
  }
}

/// 32 bytes of each row at a time are turned like codes; each line goes to the groups of its column, or
/// where it belongs at once if lines follow each other (then with what else came with 32 bytes).
template <SideTransform kTransform>
void PackSides(const SidesArguments* a) {
  constexpr int64_t kBytes = kTransform == kSideBytes ? 1 : kTransform == kSideFloats ? 4 : 2;
  constexpr int64_t kColumns = 32 / kBytes;
  constexpr bool kConverts = kTransform == kSideBf16ToFloat || kTransform == kSideF16ToFloat;
  const Ints flip = IntSet(a->flip);
  const bool in_place = !kConverts && a->groups_per_column == 1 && a->stride == 16 * kBytes;
  alignas(64) uint8_t turned[512];
  uint8_t* out = a->out;
  int64_t left = a->groups;
  for (int64_t first = 0; first < a->columns; first += kColumns) {
    uint8_t* lines = in_place ? out + first * 16 * kBytes : turned;
    TransposeRows<false, kBytes == 2>(a->rows, first * kBytes, flip, lines);
    if constexpr (kBytes == 1) {
      Unroll<8>([&](auto v) FMOE_FLAT { TransposeBytes(lines + 64 * v, a->mask, a->least); });
    }
    if (in_place) {
      continue;
    }
    const int64_t count = a->columns - first < kColumns ? a->columns - first : kColumns;
    for (int64_t column = 0; column < count; ++column) {
      const int64_t shared = left < a->groups_per_column ? left : a->groups_per_column;
      for (int64_t group = 0; group < shared; ++group, out += a->stride) {
        PutLine<kTransform>(out, lines + column * 16 * kBytes);
      }
      left -= shared;
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
