#pragma once

#include <cstdint>

#include "weights/fragment.hpp"
#include "weights/fragment_six_bits.hpp"

/// Bits of the fragment layout: how codes sit in a word, how scales are stored, and how rows that stand one
/// behind the other become row blocks. The same functions arrange a block on the host and on the card.
namespace fusedmoe {

/// The bits of a code of pair `slot` (a0..a3) in its word: fragments.cuh reads them. Of the pair's first
/// column; those of the second stand 16 bits further on, around the word's end (OtherHalf).
/// e2m1: what a kernel wants is sign, exponent and mantissa under the mask 0x81c0. Slots 0, 1 and 2 come
/// there by no shift, a shift and a rotation, whose bits fit beside each other; slot 3 takes the bits left
/// over, two shifts. Nine operations for eight codes: no layout has fewer, by search over all shifts and
/// rotations.
FMOE_HOST_DEVICE constexpr uint32_t PairBits(FragmentCode code, int slot, uint32_t c) {
  switch (code) {
    case FragmentCode::kE2M1:
      return slot == 0   ? (c >> 3) << 15 | (c & 7) << 6
             : slot == 1 ? (c >> 3) << 9 | (c & 7)
             : slot == 2 ? (c >> 3) << 19 | (c & 7) << 10
                         : (c >> 3) << 13 | (c >> 2 & 1) << 14 | (c & 3) << 4;
    case FragmentCode::kInt4:
      return c << (4 * slot);
    case FragmentCode::kE4M3:
    case FragmentCode::kInt8:
      return c << (8 * (slot / 2));
    default:
      return c;
  }
}
FMOE_HOST_DEVICE constexpr uint32_t OtherHalf(uint32_t word) {
  return word << 16 | word >> 16;
}

/// The code of a pair's first column; of the second with the halves exchanged.
FMOE_HOST_DEVICE constexpr uint32_t CodeOfBits(FragmentCode code, int slot, uint32_t word) {
  switch (code) {
    case FragmentCode::kE2M1:
      return slot == 0   ? (word >> 15 & 1) << 3 | (word >> 6 & 7)
             : slot == 1 ? (word >> 9 & 1) << 3 | (word & 7)
             : slot == 2 ? (word >> 19 & 1) << 3 | (word >> 10 & 7)
                         : (word >> 13 & 1) << 3 | (word >> 14 & 1) << 2 | (word >> 4 & 3);
    case FragmentCode::kInt4:
      return word >> (4 * slot) & 15;
    case FragmentCode::kE4M3:
    case FragmentCode::kInt8:
      return word >> (8 * (slot / 2)) & 0xff;
    default:
      return word & 0xffff;
  }
}

/// Of indices, which are selectors of byte permutations: those give four bytes, and pairs are the even and
/// the odd two of them. The lowest bit, in the word.
FMOE_HOST_DEVICE constexpr int IndexBit(int slot, int column) {
  return (slot / 2 * 4 + column * 2 + slot % 2) * 4;
}

/// Byte offset, in the codes of a slab, of the word of k-step j that holds fragment register a0 + slot of a
/// lane.
FMOE_HOST_DEVICE constexpr int WordOffset(FragmentCode code, int bits, int lane, int j, int slot) {
  switch (bits) {
    case 4:
      return lane * 16 + j * 4;
    case 8:
      return code == FragmentCode::kE4M3 ? slot % 2 * 512 + BytePlace(lane) * 16 + j * 4
                                         : j / 2 * 512 + lane * 16 + (j % 2 * 2 + slot % 2) * 4;
    default:
      return j * 512 + lane * 16 + slot * 4;
  }
}

/// The same of word `word` of the three that k-step j shares with another.
FMOE_HOST_DEVICE constexpr int SixBitOffset(int lane, int j, int word) {
  return word < 2 ? lane * 16 + (j / 2 * 2 + word) * 4 : 512 + lane * 8 + j / 2 * 4;
}

/// Bytes of the stored scale of one row and group.
FMOE_HOST_DEVICE constexpr int ScaleSize(FragmentScale scale) {
  switch (scale) {
    case FragmentScale::kNone:
      return 0;
    case FragmentScale::kE4M3:
    case FragmentScale::kE8M0:
      return 1;
    case FragmentScale::kHalf:
    case FragmentScale::kBf16:
      return 2;
    default:
      return 4;
  }
}

/// Byte offset of the scale of fragment row `row` and group `group` of a unit behind its codes.
FMOE_HOST_DEVICE constexpr int ScaleOffset(FragmentScale scale, int row, int group) {
  const int r = row & 7, half = row >> 3;
  switch (scale) {
    case FragmentScale::kE4M3:  // lane 4 r + q: group q
      return (4 * r + group) * 2 + half;
    case FragmentScale::kE8M0:
      return group * 16 + r * 2 + half;
    case FragmentScale::kHalf:
      return r * 4 + half * 2;
    case FragmentScale::kBf16:
      return (group * 8 + r) * 4 + half * 2;
    case FragmentScale::kF32Zero:
    case FragmentScale::kOffset:
      return (group * 8 + r) * 8 + half * 4;
    case FragmentScale::kF32Halves:
      return half * 4;
    default:
      return 0;
  }
}

/// The kernels' multiply-add makes BF16 0x7fc0 of it, so that a scale of NaN makes its group NaN.
inline constexpr uint8_t kE5m3NaN = 0xa4;
static_assert(kE5m3NaN * 0x10 + 0x7580 == 0x7fc0);
/// As BF16 infinity; nothing finite gets this byte (LargestExponentByte).
inline constexpr int kE8m0NaN = 255;

/// What a stored e8m0 exponent is relative to: a block with the largest scale of the matrix gets this byte
/// (fragments.cuh multiplies codes of two bits of exponent by 2^126, of three by 2^124, of four by 2^120).
constexpr int LargestExponentByte(FragmentCode code) {
  return 127 + (code == FragmentCode::kE2M1 || code == FragmentCode::kE2M3 ? 126
                : code == FragmentCode::kE3M2                              ? 124
                                                                           : 120);
}

/// What a piece of staged rows becomes.
enum class FragmentPart : uint8_t { kGateUp, kUp, kDown };

/// Rows as they are staged: all codes, one row behind the other over whole units of K, then the scales of
/// each row, [group] of ScaleSize. `rows` of a matrix are whole row blocks: multiples of 64 columns of the
/// intermediate, of 16 of hidden; a gated first GEMM has those of gate, then the same ones of up.
struct StagedRows {
  const uint8_t* codes = nullptr;
  const uint8_t* scales = nullptr;
  int code_bytes = 0;  ///< of a row
  int scale_bytes = 0;
  int rows = 0;  ///< of a matrix
  FragmentPart part = FragmentPart::kDown;

  /// The staged row of fragment row `row` of row block `b`, counted from the first block of the piece.
  FMOE_HOST_DEVICE constexpr int64_t RowOf(int64_t b, int row) const {
    if (part == FragmentPart::kDown) {
      return DownSource(b, row).column;
    }
    const FragmentSource source = GateUpSource(b, row, part == FragmentPart::kGateUp);
    return (part == FragmentPart::kGateUp && source.up ? rows : 0) + source.column;
  }
};

/// Bits of the 16 codes that a lane holds of a row, from `at` on.
template <int kBits, int kWords>
FMOE_HOST_DEVICE constexpr uint32_t CodeOfRow(const uint32_t (&words)[kWords], int at) {
  const int shift = at % 32;
  uint32_t bits = words[at / 32] >> shift;
  if (shift + kBits > 32) {
    bits |= words[at / 32 + 1] << (32 - shift);
  }
  return bits & ((1U << kBits) - 1);
}

/// Of six bits: the words of two k-steps, from j on. `source`: of rows r and r + 8.
template <FragmentCode kCode>
FMOE_HOST_DEVICE inline void ArrangeSixBits(const uint32_t (&source)[2][3], int lane, int j,
                                            uint8_t* slab_codes) {
  constexpr SixBitTable kTable = SixBitTableOf(kCode);
  uint32_t words[kSixBitWords] = {};
  for (int pair = 0; pair < kSixBitPairs; ++pair) {
    const int k = 4 * (j + pair / 4) + pair % 4 / 2 * 2;
    for (int column = 0; column < 2; ++column) {
      const uint32_t code = CodeOfRow<6>(source[pair % 2], 6 * (k + column));
      for (int bit = 0; bit < 6; ++bit) {
        words[kTable.Word(pair, bit)] |= (code >> (5 - bit) & 1)
                                         << ((kTable.Bit(pair, bit) + 16 * column) % 32);
      }
    }
  }
  for (int word = 0; word < kSixBitWords; ++word) {
    *reinterpret_cast<uint32_t*>(slab_codes + SixBitOffset(lane, j, word)) = words[word];
  }
}

/// What a lane holds of slab `slab` (of the whole row) of row block `b`: its words, where they belong.
template <FragmentCode kCode, int kBits>
FMOE_HOST_DEVICE inline void ArrangeLane(const StagedRows& staged, int64_t b, int64_t slab, int lane,
                                         uint8_t* slab_codes) {
  constexpr int kWords = kBits / 2;  // of 16 codes
  uint32_t source[2][kWords];        // rows r and r + 8
  for (int half = 0; half < 2; ++half) {
    const auto* from = reinterpret_cast<const uint32_t*>(
        staged.codes + staged.RowOf(b, (lane >> 2) + 8 * half) * staged.code_bytes +
        (slab * kFragmentSlab + 16 * (lane & 3)) * kBits / 8);
    for (int i = 0; i < kWords; ++i) {
      source[half][i] = from[i];
    }
  }
  if constexpr (kBits == 6) {
    ArrangeSixBits<kCode>(source, lane, 0, slab_codes);
    ArrangeSixBits<kCode>(source, lane, 2, slab_codes);
  } else {
    for (int j = 0; j < 4; ++j) {
      uint32_t words[4] = {};
      for (int slot = 0; slot < 4; ++slot) {
        const int k = 4 * j + slot / 2 * 2;
        if constexpr (kBits == 16) {
          words[slot] = source[slot & 1][k / 2];
        } else {
          const uint32_t first = CodeOfRow<kBits>(source[slot & 1], k * kBits),
                         second = CodeOfRow<kBits>(source[slot & 1], (k + 1) * kBits);
          words[kBits == 4 ? 0 : slot & 1] |=
              kCode == FragmentCode::kIq4
                  ? first << IndexBit(slot, 0) | second << IndexBit(slot, 1)
                  : PairBits(kCode, slot, first) | OtherHalf(PairBits(kCode, slot, second));
        }
      }
      for (int slot = 0; slot < (kBits == 4 ? 1 : kBits == 8 ? 2 : 4); ++slot) {
        *reinterpret_cast<uint32_t*>(slab_codes + WordOffset(kCode, kBits, lane, j, slot)) = words[slot];
      }
    }
  }
}

/// Every 32nd of the scales of a unit, from `lane` on. `unit` counts from the first of the row.
FMOE_HOST_DEVICE inline void ArrangeScales(const FragmentTraits& traits, const StagedRows& staged, int64_t b,
                                           int64_t unit, int lane, uint8_t* unit_scales) {
  const int groups = traits.group == 0 ? 0 : traits.unit_slabs() * kFragmentSlab / traits.group;
  const int size = ScaleSize(traits.scale);
  const bool halves = traits.scale == FragmentScale::kF32Halves;
  for (int i = lane; i < kFragmentRows * groups; i += 32) {
    const int row = i / groups, group = i % groups;
    if (halves && (row & 7) != 0) {  // eight rows share one: the first is there if any is
      continue;
    }
    const uint8_t* from =
        staged.scales + staged.RowOf(b, row) * staged.scale_bytes + (unit * groups + group) * size;
    uint8_t* to = unit_scales + ScaleOffset(traits.scale, row, group);
    for (int byte = 0; byte < size; ++byte) {
      to[byte] = from[byte];
    }
    for (int byte = 0; halves && byte < size; ++byte) {
      to[8 + byte] = 0;
    }
  }
}

/// The part of slab `slab` of row block `b` that belongs to `lane`: its codes, and with the first slab of a
/// unit its share of the scales. `block`, `scales`: where the row block goes, and the scales of its first
/// unit; null where another row block brings them.
template <FragmentFormat kFormat>
FMOE_HOST_DEVICE inline void ArrangeSlab(const StagedRows& staged, int64_t b, int64_t slab, int lane,
                                         uint8_t* block, uint8_t* scales) {
  constexpr FragmentTraits kTraits = FragmentTraitsOf(kFormat);
  constexpr int kUnitSlabs = kTraits.unit_slabs();
  const int64_t unit = slab / kUnitSlabs;
  const int in_unit = static_cast<int>(slab % kUnitSlabs);
  ArrangeLane<kTraits.code, kTraits.code_bits>(
      staged, b, slab, lane, block + unit * kTraits.unit_stride() + in_unit * kTraits.slab_code_bytes());
  if (kTraits.group != 0 && in_unit == 0 && scales != nullptr) {
    ArrangeScales(kTraits, staged, b, unit, lane, scales + unit * kTraits.scale_stride());
  }
}

/// The same in a matrix: row block `b` of the staged rows becomes its row block `at`.
template <FragmentFormat kFormat>
FMOE_HOST_DEVICE inline void ArrangeSlab(const StagedRows& staged, int64_t b, int64_t slab, int lane,
                                         const FragmentPlaces& places, int64_t at, uint8_t* matrix) {
  ArrangeSlab<kFormat>(staged, b, slab, lane, matrix + places.Codes(at),
                       places.BringsScales(at) ? matrix + places.Scales(at) : nullptr);
  const int64_t end = places.bytes - places.padding;
  if (slab == 0 && places.BringsScales(at) && places.Scales(at) + places.scale_block_bytes == end) {
    for (int64_t i = 4 * lane; i < places.padding; i += 128) {
      *reinterpret_cast<uint32_t*>(matrix + end + i) = 0;
    }
  }
}

}  // namespace fusedmoe
