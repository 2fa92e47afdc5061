#pragma once

#include <stdint.h>
#include <string.h>

#include "experts/cpu/kernels/kernel_table_isa.hpp"
#include "experts/cpu/kernels/lines_isa.hpp"

/// Scales and zero points of sixteen rows to the lines that stand behind the codes of a block
/// (weights/panel.hpp draws the layout).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// A line as the panel has it.
template <ParamTransform kTransform>
FMOE_INLINE void PutLine(uint8_t* out, const uint8_t* line) {
  if constexpr (kTransform == kParamBf16ToFloat || kTransform == kParamF16ToFloat) {
    Unroll<kHalves>([&](int half) FMOE_FLAT {
      const uint16_t* words = (const uint16_t*)line + half * kLanes;
      Store((float*)out + half * kLanes, kTransform == kParamBf16ToFloat ? LoadBf16(words) : LoadF16(words));
    });
  } else {
    memcpy(out, line, kTransform == kParamBytes ? 16 : kTransform == kParamWords ? 32 : 64);
  }
}

/// The lines of `columns` columns to their groups.
template <ParamTransform kTransform, int64_t kLineBytes>
FMOE_INLINE uint8_t* PutLines(const ParamsArguments* a, const uint8_t* lines, int64_t columns, int64_t groups,
                              uint8_t* out) {
  if (a->groups_per_column == 1) {
    for (; columns > 0; --columns, lines += kLineBytes, out += a->stride) {
      PutLine<kTransform>(out, lines);
    }
    return out;
  }
  for (; columns > 0; --columns, lines += kLineBytes) {
    const int64_t shared = groups < a->groups_per_column ? groups : a->groups_per_column;
    for (int64_t group = 0; group < shared; ++group, out += a->stride) {
      PutLine<kTransform>(out, lines);
    }
    groups -= shared;
  }
  return out;
}

/// One column whose rows stand behind each other is a line already: scales of channels.
template <ParamTransform kTransform, int64_t kBytes>
void PackChannels(const ParamsArguments* a) {
  alignas(64) uint8_t line[64];
  memcpy(line, a->rows[0], 16 * kBytes);
  if constexpr (kBytes == 1) {
    Ints x = LoadInts(line);
    StoreInts(line, LimitBytes(IntXor(x, IntSet(a->flip)), a->mask, a->least));
  }
  PutLines<kTransform, 16 * kBytes>(a, line, 1, a->groups, a->out);
}

/// 32 bytes of each row at a time are transposed like codes; each line goes to the groups of its column, or
/// where it belongs at once if lines follow each other (then with what else came with 32 bytes).
template <ParamTransform kTransform>
void PackParams(const ParamsArguments* a) {
  constexpr int64_t kBytes = kTransform == kParamBytes ? 1 : kTransform == kParamFloats ? 4 : 2;
  constexpr int64_t kColumns = 32 / kBytes;
  constexpr bool kConverts = kTransform == kParamBf16ToFloat || kTransform == kParamF16ToFloat;
  const Ints flip = IntSet(a->flip);
  const bool in_place = !kConverts && a->groups_per_column == 1 && a->stride == 16 * kBytes;
  if (a->columns == 1 && a->rows[15] - a->rows[0] == 15 * kBytes) {
    PackChannels<kTransform, kBytes>(a);
    return;
  }
  alignas(64) uint8_t transposed[512];
  uint8_t* out = a->out;
  int64_t left = a->groups;
  for (int64_t first = 0; first < a->columns; first += kColumns) {
    uint8_t* lines = in_place ? out + first * 16 * kBytes : transposed;
    Ints line[8 * kHalves];
    LoadTransposed<kBytes == 2>(a->rows, first * kBytes, line);
    Unroll<8>([&](int v) FMOE_FLAT {
      Ints* x = line + v * kHalves;
      Unroll<kHalves>([&](int half) FMOE_FLAT {
        x[half] = IntXor(x[half], flip);
        if constexpr (kBytes == 1) {
          x[half] = LimitBytes(x[half], a->mask, a->least);
        }
      });
      if constexpr (kBytes == 1) {
        TransposeBytes(x);
      }
      StoreLine<kBytes == 2>(lines + 64 * v, x);
    });
    if (in_place) {
      continue;
    }
    const int64_t count = a->columns - first < kColumns ? a->columns - first : kColumns;
    out = PutLines<kTransform, 16 * kBytes>(a, lines, count, left, out);
    left -= count * a->groups_per_column;
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
