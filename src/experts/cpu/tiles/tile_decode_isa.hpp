#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/scale_layout_isa.hpp"
#include "experts/cpu/tiles/tile_table_isa.hpp"
#include "experts/cpu/tiles/tile_unit_isa.hpp"
#include "weights/packed_bits.hpp"

/// Panels to the rows of weight tiles. A row of a tile holds a pair of k (bf16) or four k (int8) of all 16
/// weight rows. Panels keep four k of a row in 32 bits, so that decoded words are the pairs (0, 2) and (1, 3)
/// of every four; tokens are packed in that order instead of shuffling weights.
///
///   f16 to bf16 without a conversion: (bits >> 3) keeps sign, exponent and 7 bits of mantissa, and read as
///   bf16 it is the value times 2^-112. Tokens carry 2^96 and the end 2^16: exact, and nothing is subnormal
///   on the way, which matrix units take for zero. Tokens must stay below 2^31.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Where things stand in a panel, and what becomes of them.
template <WeightKernel kWeight, TileWeights kForm>
struct TilePanel : ScaleLayout<kWeight> {
  using ScaleLayout<kWeight>::kSuper, ScaleLayout<kWeight>::kGroup128, ScaleLayout<kWeight>::kUnits;
  using ScaleLayout<kWeight>::kInFront, ScaleLayout<kWeight>::GroupStride, ScaleLayout<kWeight>::UnitsBytes;
  static constexpr bool kBytes = kForm == kInt8Weights;
  static constexpr bool kRounded = kForm == kRoundedInF16 || kForm == kRoundedInF32;
  static constexpr bool kBook = HasCodebook(kWeight);
  static constexpr bool kIntegers = kWeight >= kWeightU4;
  static constexpr int kBits = kCodeTraits[kWeight].bits;
  static constexpr bool kNibbles = kWeight >= kWeightNvfp4 && kBits == 4;
  static constexpr bool kU4 = kIntegers && kBits == 4;
  static constexpr bool kU8 = kIntegers && kBits == 8;
  static constexpr bool kBf16 = kWeight == kWeightBf16;
  static constexpr bool kFloat6 = kWeight == kWeightMxfp6;
  static constexpr bool kE4m3Scaled = kWeight == kWeightE4m3Scaled || kInFront;
  static constexpr bool kGroup32 = kWeight == kWeightU4Group32 || kWeight == kWeightU8Group32;
  static constexpr bool kGrouped = kIntegers && kWeight != kWeightU4 && kWeight != kWeightU8;
  static constexpr int kUnitBytes = 128 * kBits;
  static constexpr bool kE8m0 = kWeight == kWeightMxfp4 || kFloat6 || kWeight == kWeightMxfp8;
  static constexpr int kScaleBytes = kWeight == kWeightNvfp4        ? 64
                                     : kE8m0                        ? 32
                                     : kWeight == kWeightE4m3Scaled ? 64
                                                                    : 0;
  static constexpr int kCodeBytes = kUnits * kUnitBytes;
  static constexpr int kUnitGroups =
      kGrouped ? 64 / kCodeTraits[kWeight].group : 1;  // of 64 k, or of a block
  static constexpr int kBlockGroups = kUnitGroups * (kSuper ? 2 : 1);
  /// The bytes of a block; of integers in groups as many as they may have with 16-bit scales, and where zero
  /// points may be numbers or minima, with these.
  static constexpr int kUsualBytes = kCodeBytes + (!kGrouped                ? kScaleBytes
                                                   : kSuper                 ? 64 + kBlockGroups * 32
                                                   : kForm == kRoundedInF32 ? kBlockGroups * 128
                                                                            : kBlockGroups * 48);
  /// Scales that bf16 cannot take into the weights without loss: sums are scaled in fp32 after this many k.
  static constexpr int kFlush = kRounded                  ? 0
                                : kGroup32                ? 32
                                : kGroup128               ? 128
                                : kGrouped || kE4m3Scaled ? 64
                                                          : 0;

  FMOE_INLINE int64_t BlockBytes(GroupScales scales) {
    return kGrouped ? kCodeBytes + UnitsBytes(scales) + kBlockGroups * GroupStride(scales) : kUsualBytes;
  }
};

/// f16 bits as bf16, times 2^-112.
FMOE_INLINE Words HalvesToBf16(Words halves) {
  return And(ShiftRightArithmetic<3>(halves), SetWords(0x8fff));
}

/// Four k of codes that share bytes (weights/packed_bits.hpp), number kFour of those from `packed` on: as
/// bytes, from bit kAt on.
template <int kBits, int kFour, int kAt = 0>
FMOE_INLINE Words BytesOfPacked(const uint8_t* packed) {
  constexpr PackedSet kSet = PackedSetOf(kBits);
  constexpr int kInSet = kFour % kSet.fours;
  const uint8_t* set = packed + kFour / kSet.fours * kSet.vectors * 64;
  Words bytes;
  Unroll<PackedPiecesOf(kBits, kInSet).count>([&](auto i) FMOE_FLAT {
    constexpr PackedPiece kPiece = PackedPiecesOf(kBits, kInSet).of[decltype(i)()];
    constexpr int kTo = kAt + kPiece.at, kMask = ((1 << kPiece.count) - 1) * 0x0101 << kTo;
    Words x = LoadWords(set + kPiece.vector * 64);
    if constexpr (kPiece.from > kTo) {
      x = ShiftRight<kPiece.from - kTo>(x);
    } else if constexpr (kPiece.from < kTo) {
      x = ShiftLeft<kTo - kPiece.from>(x);
    }
    x = And(x, SetWords(kMask));
    bytes = i == 0 ? x : Or(bytes, x);
  });
  return bytes;
}
/// The same of floats of six bits in a unit: the low two bits of a code above the others.
template <int kFour>
FMOE_INLINE Words BytesOfFloat6(const uint8_t* unit) {
  return Or(BytesOfPacked<4, kFour>(unit), BytesOfPacked<2, kFour, 4>(unit + 512));
}

/// Row `row` of the two tiles that hold 64 k: tiles of two stripes alternate.
FMOE_INLINE void PutRow(uint8_t* tiles, int row, Words values) {
  StoreWords(tiles + row / 16 * 2048 + row % 16 * 64, values);
}

/// Scale and zero point of a group of 4-bit or 8-bit integers.
FMOE_INLINE void LoadScaleAndZero(const uint8_t* p, GroupScales type, float implied_zero, Reals* scale,
                                  Reals* zero) {
  *scale = type.type == kRowBf16  ? LoadBf16Reals(p)
           : type.type == kRowF16 ? LoadF16Reals(p)
                                  : LoadReals((const float*)p);
  *zero = type.zeros == kZeroBytes ? LoadByteReals(p + GroupScaleBytes(type)) : SetReals(implied_zero);
}

/// Decodes 8 k of 16 rows at a time. Unit<i>: k 8i .. 8i + 7 of the 64 at `codes`, which are number `index`
/// of their block, whose scales stand at `scales`; units come in ascending order.
template <WeightKernel kWeight, TileWeights kForm>
struct TileDecoder {
  using Panel = TilePanel<kWeight, kForm>;
  static constexpr bool kBytes = Panel::kBytes, kRounded = Panel::kRounded;
  static constexpr bool kHalves =
      kWeight == kWeightNvfp4 || kWeight == kWeightE4m3 || Panel::kE4m3Scaled || (Panel::kU8 && !kBytes);
  static constexpr bool kPermuted = !Panel::kBf16 && !kBytes;
  static constexpr bool kFloatScaled = Panel::kE4m3Scaled && kRounded;
  static constexpr int kShift = kHalves && !kFloatScaled ? 96 : 0;
  /// Of a decoded value: times this it is what the vector kernels decode to (KernelOutputScale).
  static constexpr float kPost = kWeight == kWeightNvfp4                        ? 65536.0F / 128
                                 : kWeight == kWeightMxfp4                      ? 2.0F
                                 : kFloatScaled                                 ? 1.0F / (16 * 256)
                                 : kWeight == kWeightE4m3 || Panel::kE4m3Scaled ? 4096.0F / 256
                                 : kWeight == kWeightMxfp8                      ? 1.0F / 256
                                 : Panel::kFloat6                               ? 16.0F
                                 : kHalves                                      ? 65536.0F
                                                                                : 1.0F;
  Words table, scale;
  Words offset, exponent;  // kRounded; kBytes: offset holds the zero points; kFloat6: the table goes on
  GroupScales type;

  FMOE_INLINE void Start(TileDecoder& d, GroupScales type) {
    d.type = type;
    alignas(64) uint16_t words[32] = {};
    // 2^8 e2m1 as f16; e2m1 as bf16 with an exponent 125 too large; the numbers 0..8 as f16, 0..15 as bf16.
    constexpr uint16_t kE2m1Halves[8] = {0, 0x5800, 0x5c00, 0x5e00, 0x6000, 0x6200, 0x6400, 0x6600};
    constexpr uint16_t kE2m1Bf16[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
    constexpr uint16_t kHalves4[9] = {0, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700, 0x4800};
    constexpr uint16_t kIntegers[16] = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                        0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    for (int i = 0; i < 32; ++i) {
      const int magnitude = i & 7, sign = (i & 8) << 12;
      if constexpr (kWeight == kWeightNvfp4) {
        words[i] = (uint16_t)(kE2m1Halves[magnitude] | (magnitude == 0 ? 0 : sign));
      } else if constexpr (kWeight == kWeightMxfp4) {
        words[i] = magnitude == 0 ? 0 : (uint16_t)((kE2m1Bf16[magnitude] + (125 << 7)) | sign);
      } else if constexpr (kWeight == kWeightU4 || (Panel::kU4 && kRounded)) {
        const int value = (i & 15) - 8;
        const uint16_t* of = kRounded ? kHalves4 : kIntegers;
        words[i] = (uint16_t)(value < 0 ? of[-value] | 0x8000 : of[value]);
      } else if constexpr (Panel::kU4) {
        words[i] = kIntegers[i & 15];
      } else if constexpr (kWeight == kWeightE4m3 || Panel::kE4m3Scaled || kWeight == kWeightMxfp8) {
        words[i] = (uint16_t)(i / 2 + 16 * (i & 1));  // the first two k of a row beside its last two
      }
    }
    d.table = LoadWords(words);
    d.scale = d.offset = d.exponent = d.table;
    if constexpr (Panel::kFloat6) {
      Float6Table(type.numbers, &d.table, &d.offset);
    }
  }

  template <int kUnit>
  FMOE_NESTED void Unit(TileDecoder& d, const uint8_t* codes, const uint8_t* scales, int /*index*/,
                        uint8_t* tiles) {
    if constexpr (kBytes && Panel::kU4) {
      BytesOfU4<kUnit>(d, codes, scales, tiles);
    } else if constexpr (kBytes) {
      Unroll<2>([&](int i) FMOE_FLAT {
        const Words x = LoadWords(codes + kUnit * 128 + i * 64);
        PutRow(tiles, kUnit * 2 + i, SubtractBytes(x, SetWords(0x8080)));
      });
    } else if constexpr (Panel::kNibbles) {
      LoadNibbleScales<kUnit>(d, scales);
      const Words x = LoadWords(codes + kUnit * 64);
      PutRow(tiles, kUnit * 4, NibblesToBf16(d, x));
      PutRow(tiles, kUnit * 4 + 1, NibblesToBf16(d, ShiftRight<8>(x)));
      PutRow(tiles, kUnit * 4 + 2, NibblesToBf16(d, ShiftRight<4>(x)));
      PutRow(tiles, kUnit * 4 + 3, NibblesToBf16(d, ShiftRight<12>(x)));
    } else if constexpr (Panel::kU8) {
      Unroll<2>([&](int i) FMOE_FLAT {
        const Words x = LoadWords(codes + kUnit * 128 + i * 64);
        PutRow(tiles, kUnit * 4 + 2 * i, U8ToBf16(And(x, SetWords(0x00ff))));
        PutRow(tiles, kUnit * 4 + 2 * i + 1, U8ToBf16(ShiftRight<8>(x)));
      });
    } else if constexpr (Panel::kFloat6) {
      LoadE8m0Scales<kUnit, 123, 131>(d, scales);
      Unroll<2>([&](auto i) FMOE_FLAT {
        const Words x = BytesOfFloat6<2 * kUnit + i>(codes);
        PutRow(tiles, kUnit * 4 + 2 * i, Float6ToBf16(d, x));
        PutRow(tiles, kUnit * 4 + 2 * i + 1, Float6ToBf16(d, ShiftRight<8>(x)));
      });
    } else {
      LoadE4m3Scales<kUnit>(d, scales);
      Unroll<2>([&](int i) FMOE_FLAT {
        const Words x = LookUp(d.table, LoadWords(codes + kUnit * 128 + i * 64));
        PutRow(tiles, kUnit * 4 + 2 * i, E4m3ToBf16(d, ShiftLeft<8>(x)));
        PutRow(tiles, kUnit * 4 + 2 * i + 1, E4m3ToBf16(d, x));
      });
    }
  }

 private:
  /// int8 codes without their zero points: -16 to 15.
  template <int kUnit>
  FMOE_INLINE void BytesOfU4(TileDecoder& d, const uint8_t* codes, const uint8_t* scales, uint8_t* tiles) {
    if constexpr (kUnit == 0) {
      d.offset =
          d.type.zeros == kZeroBytes ? SpreadBytesToFour(scales + GroupScaleBytes(d.type)) : SetWords(0x0808);
    }
    const Words x = LoadWords(codes + kUnit * 64);
    PutRow(tiles, kUnit * 2, SubtractBytes(And(x, SetWords(0x0f0f)), d.offset));
    PutRow(tiles, kUnit * 2 + 1, SubtractBytes(And(ShiftRight<4>(x), SetWords(0x0f0f)), d.offset));
  }

  /// Where a unit begins a group.
  template <int kUnit>
  FMOE_INLINE void LoadNibbleScales(TileDecoder& d, const uint8_t* scales) {
    if constexpr (kWeight == kWeightNvfp4 && kUnit % 2 == 0) {
      // e4m3 bits << 7 are the f16 value times 2^-8, subnormals included.
      d.scale = ShiftLeft<7>(SpreadBytes(scales + kUnit / 2 * 16));
    } else if constexpr (kWeight == kWeightMxfp4 && kUnit % 4 == 0) {
      // What the table is too large by. Larger scales than 2^125 would take 6 beyond fp32.
      const Words exponent = MinSigned(SpreadBytes(scales + kUnit / 4 * 16), SetWords(252));
      d.scale = ShiftLeft<7>(SubtractWords(SetWords(252), exponent));
    }
    if constexpr (kRounded && kUnit % 4 == 0) {
      const int64_t group = Panel::kGroup32 ? kUnit / 4 * GroupBytes(d.type) : 0;
      Reals scale, zero;
      LoadScaleAndZero(scales + group, d.type, 8.0F, &scale, &zero);
      // From the middle of the codes, as the table has them: an offset of at most 8 scales of BF16 is exact
      // in f16. Of zero points themselves it took up to 2^-7 of a scale off every weight of a group.
      SplitScale(scale, SubtractReals(zero, SetReals(8.0F)), &d.scale, &d.offset, &d.exponent);
    }
  }

  /// The low four bits of every 16.
  FMOE_INLINE Words NibblesToBf16(const TileDecoder& d, Words index) {
    Words value = LookUp(index, d.table);
    if constexpr (kRounded) {
      // To 11 bits, then to 8, half a step added: what is zero becomes 2^-15 of the scale.
      value = MultiplyAddHalves(value, d.scale, d.offset);
      value = AddWords(HalvesToBf16(AddWords(value, SetWords(4))), d.exponent);
    }
    if constexpr (kWeight == kWeightNvfp4) {
      value = HalvesToBf16(MultiplyHalves(value, d.scale));
    } else if constexpr (kWeight == kWeightMxfp4) {
      value = SubtractSaturated(value, d.scale);  // zero stays zero
    }
    return value;
  }

  FMOE_INLINE Words U8ToBf16(Words integers) {
    Words halves = IntegersToHalves(integers);
    if constexpr (!Panel::kGrouped) {
      halves = SubtractHalves(halves, SetWords(0x5800));  // 128
    }
    return HalvesToBf16(halves);
  }

  /// The 64 values as bf16: of the codes without and with the upper one of their lowest two bits, which
  /// BytesOfFloat6 leaves at the top.
  FMOE_INLINE void Float6Table(const uint8_t* factors, Words* first, Words* second) {
    alignas(64) uint16_t words[64];
    for (int i = 0; i < 64; ++i) {
      const int n = i & 15;
      const float value = (float)((factors[n] | i >> 4) * (int8_t)factors[16 + n]) * 0.0625F;
      uint32_t bits;
      __builtin_memcpy(&bits, &value, 4);
      words[i] = (uint16_t)(bits >> 16);
    }
    *first = LoadWords(words);
    *second = LoadWords(words + 32);
  }

  /// The low six bits of every 16.
  FMOE_INLINE Words Float6ToBf16(const TileDecoder& d, Words index) {
    return AddToNonZero(LookUpOfTwo(index, d.table, d.offset), d.scale);
  }

  /// What goes to exponents, so that those that lie from kLeast to kMost stay normal, where a unit begins a
  /// group.
  template <int kUnit, int kLeast, int kMost>
  FMOE_INLINE void LoadE8m0Scales(TileDecoder& d, const uint8_t* scales, uint16_t bias = 127) {
    if constexpr (kUnit % 4 == 0) {
      const Words exponent = SubtractWords(SpreadBytes(scales + kUnit / 4 * 16), SetWords(bias));
      d.scale = ShiftLeft<7>(
          MinSigned(MaxSigned(exponent, SetWords((uint16_t)(1 - kLeast))), SetWords(254 - kMost)));
    }
  }

  /// Where a unit begins a group.
  template <int kUnit>
  FMOE_INLINE void LoadE4m3Scales(TileDecoder& d, const uint8_t* scales) {
    if constexpr (kWeight == kWeightMxfp8) {
      LoadE8m0Scales<kUnit, 10, 27>(d, scales, 19);  // for 2^-9 to 448
    }
    if constexpr (kRounded && kUnit % 4 == 0) {
      const Reals scale = Panel::kInFront ? SetReals(*(const float*)scales) : LoadReals((const float*)scales);
      SplitScale(scale, SetReals(0.0F), &d.scale, &d.offset, &d.exponent);
      d.scale = MultiplyHalves(d.scale, SetWords(0x6c00));  // 2^12, as below
    }
  }

  /// The upper eight bits of every 16.
  FMOE_INLINE Words E4m3ToBf16(const TileDecoder& d, Words codes) {
    const Words halves = And(ShiftRightArithmetic<1>(codes), SetWords(0xbf80));
    Words value;
    if constexpr (kRounded) {
      // To 11 bits, then to 8, half a step added.
      value = HalvesToBf16(AddWords(MultiplyHalves(halves, d.scale), SetWords(4)));
      value = AddToNonZero(value, d.exponent);
    } else {
      // times 2^12: e4m3 subnormals become normal
      value = HalvesToBf16(MultiplyHalves(halves, SetWords(0x6c00)));
    }
    if constexpr (kWeight == kWeightMxfp8) {
      value = AddToNonZero(value, d.scale);
    }
    return value;
  }
};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
