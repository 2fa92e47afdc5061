#pragma once

#include <stdint.h>
#include <string.h>

#include "experts/cpu/kernels/integer_panel_isa.hpp"
#include "experts/cpu/kernels/kernel_table_isa.hpp"
#include "experts/cpu/kernels/lines_isa.hpp"
#include "weights/packed_bits.hpp"

/// Rows of canonical codes to the lines of a stripe (weights/panel.hpp draws the layout). Every format is the
/// same step: sixteen rows of eight 32-bit words become eight lines of sixteen words. Around it 4-bit codes
/// exchange nibbles, codes of 2, 3, 5 and 6 bits come to share bytes, and formats that are widened by f16
/// conversions part the two 16-bit words of a lane.
///
///     row 0   w00 w01 .. w07            line 0   w00 w10 w20 .. wf0
///     row 1   w10 w11 .. w17     ->     line 1   w01 w11 w21 .. wf1
///     ..                                ..
///
/// Columns in an order of their own (activation order) take two steps, by way of a buffer in which a column
/// is sixteen bytes (eight of nibbles), so that their order costs a load for each:
///
///     lines ─► columns   k 0: r0 r1 .. rf   k 1: r0 r1 .. rf   ..        four are one line of the panel
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Bytes of each row that a step takes, and the lines that it gives.
constexpr int64_t StepBytes(PanelTransform transform) {
  return transform == kPanelSixBits ? 48 : 32;
}
constexpr int64_t StepLines(PanelTransform transform) {
  return transform == kPanelSixBits ? 16 : 8;
}
/// Lines of one unit of 64 k.
constexpr int64_t UnitLines(PanelTransform transform) {
  return transform == kPanelNibbles                                 ? 8
         : transform == kPanelWords || transform == kPanelHalfWords ? 32
         : transform == kPanelFloats                                ? 64
                                                                    : 16;
}
/// Bits of a code that shares bytes; else 0.
constexpr int PackedBits(PanelTransform transform) {
  return transform == kPanelU2                                 ? 2
         : transform == kPanelU3                               ? 3
         : transform == kPanelU5                               ? 5
         : transform == kPanelU6 || transform == kPanelSixBits ? 6
                                                               : 0;
}
constexpr bool SplitsLanes(PanelTransform transform) {
  return transform == kPanelHalfLanes || transform == kPanelHalfWords;
}

/// put(v, line) of the lines of a step, codes as the panel has them; kAsStored: but for the order of nibbles.
/// kSplit: for StoreLine that parts words.
template <PanelTransform kTransform, bool kSplit, bool kAsStored = false, typename Put>
FMOE_INLINE void TransposeStep(const PanelArguments* a, int64_t at, Put put) {
  if constexpr (kTransform == kPanelSixBits) {
    LoadSixBits(a->rows, at, put);
  } else {
    Ints line[8 * kHalves];  // [line][half of its rows]
    const Ints flip = IntSet(a->flip);
    LoadTransposed<kSplit>(a->rows, at, line);
    Unroll<8>([&](int v) FMOE_FLAT {
      Unroll<kHalves>([&](int half) FMOE_FLAT {
        Ints& x = line[v * kHalves + half];
        x = IntXor(kTransform == kPanelNibbles && !kAsStored ? ShuffleNibbles(x) : x, flip);
      });
      put(v, line + v * kHalves);
    });
  }
}

/// What stands behind the codes of a block.
FMOE_INLINE void CopyParams(uint8_t* out, const uint8_t* params, int64_t bytes) {
  for (; bytes >= 64; bytes -= 64, out += 64, params += 64) {
    memcpy(out, params, 64);
  }
  for (; bytes > 0; bytes -= 16, out += 16, params += 16) {
    memcpy(out, params, 16);
  }
}

/// Whether the next stripe is prefetched line by line: where packing takes longer than memory does. With
/// 256-bit registers that is so for every transform (Zen 3, codes alone, of a copy: INT8 94 instead of 84 %,
/// FP8 93 instead of 87, BF16 87 instead of 84).
constexpr bool PrefetchesLineByLine(PanelTransform transform) {
  return kPrefetchesAllLineByLine || transform == kPanelNibbles || transform == kPanelSixBits;
}

/// Whether, for columns in an order of their own, the first step (TransposeCodes) prefetches the first eight
/// rows of the next stripe and the second step (PackColumns) the others, instead of the first all (Zen 3,
/// codes alone, INT8 84 instead of 77 % of a copy, nibbles 74 instead of 70).
constexpr bool kPrefetchesInBothSteps = kPrefetchesAllLineByLine;

/// Sixteen rows are sixteen streams, which hardware prefetchers follow badly, so they are prefetched. Where
/// packing takes longer than memory (PrefetchesLineByLine): the next stripe, in the order of memory, a line
/// beside each line that is packed.
///
///     row 0   [ 0  1  2  .. ]           of the stripe behind the present one
///     row 1   [ .. ..       ]
///
/// So a stripe is read while another one is packed: 201 MB of nibbles in 6.3 ms instead of 8 to 9.5 by
/// pieces; packing alone takes 4.3, plain reading 4.9. Into fresh pages, from pages that are known
/// (PrefetchPages), that is 93 % of the rate of a copy instead of 77 to 85, of 6 bits 76 instead of 73 (Zen
/// 5).
class LinesAhead {
 public:
  FMOE_FLAT LinesAhead(const PanelArguments* a, int64_t bytes) : LinesAhead(a->next, bytes, 0) {}
  FMOE_FLAT LinesAhead(const uint8_t* const* next, int64_t bytes, int64_t first_row)
      : next_(next), bytes_(bytes), row_(first_row), at_(next[first_row]), end_(at_ + bytes) {}

  template <int64_t kBytes>
  FMOE_FLAT void Step(int64_t) {}

  /// Beside line `v` of a step that packs kBytes of sixteen rows.
  template <int64_t kBytes>
  FMOE_FLAT void Line(int v, Ints& line) {
    if (v < kBytes / 4) {
      Next(line);
    }
  }
  FMOE_FLAT void Next(Ints& line) {
    PrefetchBeside(at_, line);
    at_ += 64;
    if (at_ >= end_) {
      row_ = (row_ + 1) % 16;
      at_ = next_[row_];
      end_ = at_ + bytes_;
    }
  }

 private:
  const uint8_t* const* next_;
  int64_t bytes_, row_;
  const uint8_t *at_, *end_;
};

/// Others: a piece of up to 512 bytes ahead of where they are packed, row after row:
///
///     row 0   [ packed ][ 0 .. 7  ][           first lines of the next stripe behind the last piece
///     row 1   [ packed ][ 8 .. 15 ][
///     ..
///
/// Two pieces and what becomes of them stay in L1. Prefetched in the order of memory, a whole stripe ahead,
/// FP8 in blocks packed at 81 instead of 92 % of the rate of a copy, INT8 at 79 instead of 86 (Zen 5): steps
/// that are faster than memory meet lines whose prefetches were dropped, and wait for them. Longer pieces
/// come too late.
class PiecesAhead {
 public:
  FMOE_FLAT PiecesAhead(const PanelArguments* a, int64_t bytes)
      : rows_(a->rows), next_(a->next), bytes_(bytes) {
    const int64_t pieces = (bytes + kPiece - 1) / kPiece;
    lines_ = pieces == 0 ? 0 : ((bytes + pieces - 1) / pieces + 63) / 64;  // of equal pieces
  }

  /// Prefetches as many lines as a step reads that packs kBytes of sixteen rows from `at` on.
  template <int64_t kBytes>
  FMOE_FLAT void Step(int64_t at) {
    if (at >= piece_end_) {
      piece_end_ += lines_ * 64;
      const bool last = piece_end_ >= bytes_;
      ahead_ = last ? next_ : rows_;
      offset_ = last ? 0 : piece_end_;
      row_ = line_ = 0;
    }
    if (lines_ == kBytes / 4) {
      const uint8_t* row = ahead_[row_] + offset_;
      row_ = (row_ + 1) % 16;
      Unroll<kBytes / 4>([&](int i) FMOE_FLAT { Prefetch(row + 64 * i); });
      return;
    }
    for (int64_t i = 0; i < kBytes / 4; ++i) {
      Prefetch(ahead_[row_] + offset_ + line_ * 64);
      if (++line_ == lines_) {
        line_ = 0;
        row_ = (row_ + 1) % 16;
      }
    }
  }

  template <int64_t kBytes>
  FMOE_FLAT void Line(int, Ints&) {}

 private:
  static constexpr int64_t kPiece = 512;
  const uint8_t* const* rows_;
  const uint8_t* const* next_;
  int64_t bytes_, lines_;
  int64_t piece_end_ = 0;
  const uint8_t* const* ahead_ = 0;  ///< the rows that are prefetched
  int64_t offset_ = 0;               ///< of the piece in them
  int64_t row_ = 0, line_ = 0;
};

template <bool kByLines>
struct Ahead {
  using Type = PiecesAhead;
};
template <>
struct Ahead<true> {
  using Type = LinesAhead;
};

/// Rows that have had a code 0x7f or 0xff. Kernels read it as 480 (they widen e4m3 as if it had no NaN), so
/// whoever packs makes the scale of such a row NaN. Other transforms need no check.
template <PanelTransform kTransform, bool kSplit>
class NanRows {
 public:
  FMOE_FLAT NanRows() {
    Unroll<kHalves>([&](int half) FMOE_FLAT { found_[half] = IntZero(); });
  }
  /// A line holds a word of each row.
  FMOE_FLAT void Take(const Ints* line) {
    if constexpr (kChecks) {
      Unroll<kHalves>([&](int half) FMOE_FLAT {
        const Ints magnitude = IntAnd(line[half], IntSet(0x7f7f7f7f));
        found_[half] = IntOr(found_[half], IntAdd(magnitude, IntSet(0x01010101)));
      });
    }
  }
  FMOE_FLAT void AddTo(uint32_t* rows) const {
    if constexpr (kChecks) {
      alignas(64) uint16_t words[32];  // two of each row: side by side, or parted
      StoreLine<kSplit>((uint8_t*)words, found_);
      for (int row = 0; row < 16; ++row) {
        const int both = kSplit ? words[row] | words[16 + row] : words[2 * row] | words[2 * row + 1];
        *rows |= (both & 0x8080) != 0 ? 1U << row : 0U;
      }
    }
  }

 private:
  static constexpr bool kChecks = kTransform == kPanelHalfLanes;
  Ints found_[kHalves];
};

/// Vector kVector of a set (weights/packed_bits.hpp): its pieces of bits [kAt, kAt + kBits) of the codes of a
/// line for each four k.
template <int kBits, int kAt, int kVector>
FMOE_INLINE Ints JoinPieces(const Ints (*line)[kHalves], int half) {
  constexpr int kMost = sizeof(PackedPieces::of) / sizeof(PackedPiece);
  Ints joined = IntZero();
  Unroll<PackedSetOf(kBits).fours * kMost>([&](auto i) FMOE_FLAT {
    constexpr int kFour = decltype(i)() / kMost, kIndex = decltype(i)() % kMost;
    constexpr PackedPieces kPieces = PackedPiecesOf(kBits, kFour);
    if constexpr (kIndex < kPieces.count && kPieces.of[kIndex].vector == kVector) {
      constexpr PackedPiece kPiece = kPieces.of[kIndex];
      joined = IntOr(joined, MoveBits<kAt + kPiece.at, kPiece.from, kPiece.count>(line[kFour][half]));
    }
  });
  return joined;
}

/// All vectors of kLines lines.
template <int kLines, int kBits, int kAt>
FMOE_INLINE void StorePacked(const Ints (*line)[kHalves], uint8_t* out) {
  constexpr PackedSet kSet = PackedSetOf(kBits);
  Unroll<kLines / kSet.fours * kSet.vectors>([&](auto v) FMOE_FLAT {
    constexpr int kVector = decltype(v)() % PackedSetOf(kBits).vectors;
    const Ints(*set)[kHalves] = line + v / kSet.vectors * kSet.fours;
    Ints joined[kHalves];
    Unroll<kHalves>([&](int half) FMOE_FLAT { joined[half] = JoinPieces<kBits, kAt, kVector>(set, half); });
    StoreLine<false>(out + 64 * v, joined);
  });
}

/// Lines that are packed together: whole sets.
template <PanelTransform kTransform>
constexpr int kPackedLines = kTransform == kPanelSixBits ? 4 : 8;

/// Those that begin at `k` of their unit. Floats of six bits have their upper four bits in front.
template <PanelTransform kTransform>
FMOE_INLINE void StoreCodes(const Ints (*line)[kHalves], int64_t k, uint8_t* unit) {
  constexpr int kLines = kPackedLines<kTransform>, kBits = PackedBits(kTransform);
  if constexpr (kTransform == kPanelSixBits) {
    StorePacked<kLines, 4, 2>(line, unit + k * 8);
    StorePacked<kLines, 2, 0>(line, unit + 512 + k * 4);
  } else {
    StorePacked<kLines, kBits, 0>(line, unit + k * kBits * 2);
  }
}

/// Blocks one after the other, so that the panel is written once, from its beginning to its end: scales that
/// came after the codes of a whole stripe found their lines in L2 again.
template <PanelTransform kTransform>
void PackPanel(const PanelArguments* a) {
  constexpr int64_t kBytes = StepBytes(kTransform), kLines = StepLines(kTransform);
  constexpr bool kSplit = SplitsLanes(kTransform);
  const int64_t steps = a->units_per_block * UnitLines(kTransform) / kLines;
  typename Ahead<PrefetchesLineByLine(kTransform)>::Type ahead(a, a->blocks * steps * kBytes);
  NanRows<kTransform, kSplit> nan_rows;
  uint8_t* out = a->out;
  const uint8_t* params = a->params;
  int64_t at = 0;
  for (int64_t block = 0; block < a->blocks; ++block) {
    for (int64_t step = 0; step < steps; ++step, at += kBytes) {
      ahead.template Step<kBytes>(at);
      if constexpr (PackedBits(kTransform) != 0) {
        constexpr int kAtOnce = kPackedLines<kTransform>, kUnitSteps = 16 / kLines;
        const int64_t in_unit = step % kUnitSteps;
        Ints lines[kAtOnce][kHalves];
        TransposeStep<kTransform, false>(a, at, [&](int v, Ints* line) FMOE_FLAT {
          ahead.template Line<kBytes>(v, line[0]);
          Unroll<kHalves>([&](int half) FMOE_FLAT { lines[v % kAtOnce][half] = line[half]; });
          if (v % kAtOnce + 1 == kAtOnce) {
            StoreCodes<kTransform>(lines, (in_unit * kLines + v + 1 - kAtOnce) * 4, out);
          }
        });
        out += in_unit + 1 == kUnitSteps ? 128 * PackedBits(kTransform) : 0;
        continue;
      }
      TransposeStep<kTransform, kSplit>(a, at, [&](int v, Ints* line) FMOE_FLAT {
        ahead.template Line<kBytes>(v, line[0]);
        nan_rows.Take(line);
        StoreLine<kSplit>(out + 64 * v, line);
      });
      out += kLines * 64;
    }
    if (params != 0) {
      CopyParams(out, params, a->param_bytes);
      params += a->param_bytes;
    }
    out += a->param_bytes;
  }
  nan_rows.AddTo(a->nan_rows);
}

/// Columns of sixteen codes, one for each k; nibbles have row r in the low and row r + 8 in the high half of
/// byte r, and come in the order 0 2 4 6 1 3 5 7.
template <PanelTransform kTransform>
void TransposeCodes(const PanelArguments* a) {
  constexpr int64_t kBytes = StepBytes(kTransform), kLines = StepLines(kTransform);
  const int64_t steps = a->blocks * UnitLines(kTransform) / kLines;
  typename Ahead<PrefetchesLineByLine(kTransform)>::Type ahead(a, steps * kBytes);
  NanRows<kTransform, false> nan_rows;
  uint8_t* out = a->out;
  for (int64_t step = 0; step < steps; ++step, out += kLines * 64) {
    ahead.template Step<kBytes>(step * kBytes);
    TransposeStep<kTransform, false, true>(a, step * kBytes, [&](int v, Ints* line) FMOE_FLAT {
      if (!kPrefetchesInBothSteps || v % 2 == 0) {
        ahead.template Line<kBytes>(v, line[0]);
      }
      nan_rows.Take(line);
      if constexpr (kTransform == kPanelNibbles) {
        TransposeHalves(line);
        ExchangeNibbles(line);
      } else {
        TransposeBytes(line);
      }
      StoreLine<false>(out + 64 * v, line);
    });
  }
  nan_rows.AddTo(a->nan_rows);
}

/// The blocks of a stripe from columns in any order.
template <PanelTransform kTransform>
void PackColumns(const ColumnsArguments* a) {
  constexpr bool kSplit = SplitsLanes(kTransform);
  const int64_t lines = a->units_per_block * UnitLines(kTransform);
  const uint8_t* transposed = a->transposed;
  const int32_t* columns = a->columns;
  uint8_t* out = a->out;
  const uint8_t* params = a->params;
  LinesAhead ahead(a->next, a->row_bytes, 8);
  for (int64_t block = 0; block < a->blocks; ++block) {
    for (int64_t i = 0; i < lines; ++i, out += 64) {
      Ints line[kHalves];
      if constexpr (kTransform == kPanelNibbles) {
        LoadColumns(transposed, columns, line);
        ExchangeNibbles(line);
        TransposeHalvesBack(line);
        columns += 8;
      } else {
        WordsOfColumns<kSplit>(transposed, columns, line);
        columns += 4;
      }
      if (kPrefetchesInBothSteps && i % 2 == 0) {
        ahead.Next(line[0]);
      }
      StoreLine<kSplit>(out, line);
    }
    if (params != 0) {
      CopyParams(out, params, a->param_bytes);
      params += a->param_bytes;
    }
    out += a->param_bytes;
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
