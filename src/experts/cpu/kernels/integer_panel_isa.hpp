#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/kernel_table_isa.hpp"
#include "experts/cpu/kernels/scale_layout_isa.hpp"
#include "experts/cpu/kernels/simd_isa.hpp"
#include "weights/packed_bits.hpp"

/// What short and tall tiles of formats that become bytes share: where things stand in a panel, how codes
/// become bytes, and how groups of k end.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// A level whose registers hold a stripe, and that multiplies bytes in one instruction.
constexpr bool kHasWideDot = kHasByteDot && kHalves == 1;
/// A level whose dot product takes the bytes of all weights as they are.
constexpr bool kHasUnsignedDot = kHasByteDot && !kSignedWeights;

/// What stands beside the codes of 64 k: scales and zero points of its groups; and, of two levels, the units
/// of both.
struct QuantParams {
  const uint8_t* groups;
  const uint8_t* units;
  GroupScales type;
};

/// Eight k of codes that share bytes (weights/packed_bits.hpp), number `eight` of those from `packed` on.
/// kPhase: of `eight`, modulo 4.
template <int kBits, int kPhase>
FMOE_NESTED void DecodePacked(const uint8_t* packed, int eight, int half, Ints* out) {
  constexpr PackedSet kSet = PackedSetOf(kBits);
  const uint8_t* set = packed + eight / (kSet.fours / 2) * (kSet.vectors * 64);
  Unroll<2>([&](auto q) FMOE_FLAT {
    constexpr int kFour = (2 * kPhase + q) % PackedSetOf(kBits).fours;
    Unroll<PackedPiecesOf(kBits, kFour).count>([&](auto i) FMOE_FLAT {
      constexpr PackedPiece kPiece = PackedPiecesOf(kBits, kFour).of[i];
      const Ints piece =
          MoveBits<kPiece.from, kPiece.at, kPiece.count>(LoadBytes(set + kPiece.vector * 64, half));
      out[q] = i == 0 ? piece : IntOr(out[q], piece);
    });
  });
}

/// How many vectors of codes words can add up, two products with bytes (-128 at most) of each vector: 24 * 5,
/// 15 * 8, 31 * 4, 63 * 2 and 127 times 2 * 128 are below 2^15. 0: larger codes, of which no two fit.
constexpr int VectorsInWords(int largest_code) {
  return largest_code > 127 ? 0 : largest_code > 63 ? 1 : largest_code > 31 ? 2 : largest_code > 15 ? 4 : 8;
}

/// By which codes become numbers: a table of bytes, where there is one, or two whose bytes are multiplied.
struct FactorTables {
  Ints first, second;
};
template <WeightKernel kWeight>
struct CodeTable {
  using Type = Ints;
};
template <>
struct CodeTable<kWeightMxfp6> {
  using Type = FactorTables;
};

/// Where things stand in a block of an integer format.
template <WeightKernel kWeight>
struct IntegerPanel : ScaleLayout<kWeight> {
  using ScaleLayout<kWeight>::kSuper, ScaleLayout<kWeight>::kUnits;
  using ScaleLayout<kWeight>::GroupStride, ScaleLayout<kWeight>::UnitsBytes;
  using Table = typename CodeTable<kWeight>::Type;
  static constexpr bool kE2m1 = kWeight == kWeightNvfp4 || kWeight == kWeightMxfp4;
  /// Codes that become words, products of two bytes: up to 448 for e3m2 in sixteenths.
  static constexpr bool kProducts = kWeight == kWeightMxfp6;
  static constexpr bool kSmallFloats = kE2m1 || kProducts;  // below scales of a byte
  static constexpr bool kBook = HasCodebook(kWeight);
  static constexpr int kBits = kCodeTraits[kWeight].bits;
  static constexpr bool kNibbles = kBits == 4;
  static constexpr bool kPacked = IsPacked(kWeight);
  /// What decoding eight k has to know of their number: with fewer answers, fewer copies are compiled.
  static constexpr int PhaseOf(int eight) { return kPacked ? eight % 4 : 0; }
  static constexpr int PhaseOfStep(int step) { return kPacked ? step % 2 : 0; }
  /// The same of a group.
  static constexpr int PhaseOfGroup(int group) { return kPacked && kGroup == 16 ? group % 2 : 0; }
  static constexpr bool kGrouped = kWeight != kWeightU4 && kWeight != kWeightU8 && !kSmallFloats;
  static constexpr int kGroup = kCodeTraits[kWeight].group;
  static constexpr int kUnitBytes = 128 * kBits;
  static constexpr int kCodeBytes = kUnits * kUnitBytes;
  static constexpr int kBlockGroups = 64 / kGroup * (kSuper ? 2 : 1);  // GroupScales in a block
  static constexpr int kLargestCode = kE2m1              ? 24
                                      : kProducts        ? 127
                                      : kBook && kPacked ? 2 * kCodeTraits[kWeight].zero
                                      : kBook            ? 255
                                                         : (1 << kBits) - 1;
  /// Codes are multiplied less 128, which makes them signed.
  static constexpr bool kLess128 = kSignedWeights && kLargestCode > 127;
  /// The bytes of a block, at least.
  static constexpr int kLeastBytes = kCodeBytes + (kSmallFloats ? 16 * 64 / kGroup
                                                   : kSuper     ? 32 + 16 * kBlockGroups
                                                   : kGrouped   ? 32 * kBlockGroups
                                                                : 0);

  FMOE_INLINE int64_t BlockBytes(GroupScales scales) {
    return kGrouped ? kCodeBytes + UnitsBytes(scales) + kBlockGroups * GroupStride(scales) : kLeastBytes;
  }
  /// Of the unit of 64 k that is number `index` of its block.
  FMOE_INLINE QuantParams ParamsOf(const uint8_t* block, int index, GroupScales type) {
    const uint8_t* params = block + kCodeBytes;
    const int64_t groups = kSuper ? UnitsBytes(type) + index * (64 / kGroup) * GroupStride(type) : 0;
    return {params + groups, params, type};
  }

  /// By which codes become bytes, unsigned or less 128; else nothing.
  FMOE_INLINE Table TableOf(GroupScales scales) {
    if constexpr (kProducts) {
      return {LoadNumbers(scales.numbers), LoadNumbers(scales.numbers + 16)};
    } else if constexpr (kBook) {
      const Ints numbers = LoadNumbers(scales.numbers);
      return kLess128 ? IntXor(numbers, IntSet((int32_t)0x80808080)) : numbers;
    } else if constexpr (kE2m1) {
      return E2m1Table();
    } else {
      return IntZero();
    }
  }

  /// Eight k as two vectors of unsigned bytes, or less 128. kPhase: where codes share bytes (kPacked),
  /// `eight` modulo 4.
  template <int kPhase>
  FMOE_NESTED void DecodeEight(const uint8_t* unit, int eight, int half, Table table, Ints* out) {
    if constexpr (kPacked) {
      DecodePacked<kBits, kPhase>(unit, eight, half, out);
      if constexpr (kBook) {
        Unroll<2>([&](int q) FMOE_FLAT { out[q] = LookUpBytes(out[q], table); });
      }
    } else if constexpr (kE2m1 || kBook) {
      DecodeByTable(unit + eight * 64, half, table, out);
    } else if constexpr (kNibbles) {
      DecodeU4(unit + eight * 64, half, out);
    } else {
      Unroll<2>([&](int q) FMOE_FLAT { out[q] = LoadBytes(unit + eight * 128 + q * 64, half); });
      if constexpr (kLess128) {
        Unroll<2>([&](int q) FMOE_FLAT { out[q] = IntXor(out[q], IntSet((int32_t)0x80808080)); });
      }
    }
  }
  /// 16 k as four of them. kPhase: of `step`, modulo 2.
  template <int kPhase>
  FMOE_NESTED void Decode(const uint8_t* unit, int step, int half, Table table, Ints* out) {
    Unroll<2>([&](auto i) FMOE_FLAT {
      DecodeEight<PhaseOf(2 * kPhase + i)>(unit, 2 * step + i, half, table, out + 2 * i);
    });
  }
  /// Eight k as words: [k/4][k 0 and 2; 1 and 3]. Small floats as (first[nibble] + low bits) * second[nibble]
  /// (Float6Factors): of each pair of bytes one is left out, so that what adds products up gives one.
  template <int kPhase>
  FMOE_NESTED void DecodeWords(const uint8_t* unit, int eight, int half, Table table, Ints* out) {
    Ints bytes[2];
    if constexpr (kProducts) {
      Ints second[2], low[2];
      DecodeByTable(unit + eight * 64, half, table.first, bytes);
      DecodeByTable(unit + eight * 64, half, table.second, second);
      DecodePacked<2, kPhase>(unit + 512, eight, half, low);
      Unroll<2>([&](int q) FMOE_FLAT {
        const Ints first = IntOr(bytes[q], low[q]);
        out[2 * q] = MultiplyAddPairs(IntAnd(first, IntSet(0x00ff00ff)), second[q]);
        out[2 * q + 1] = MultiplyAddPairs(IntAnd(first, IntSet((int32_t)0xff00ff00)), second[q]);
      });
    } else {
      DecodeEight<kPhase>(unit, eight, half, table, bytes);
      Unroll<2>([&](int q) FMOE_FLAT {
        out[2 * q] = EvenBytes(bytes[q]);
        out[2 * q + 1] = OddBytes(bytes[q]);
      });
    }
  }
};

/// Whether activations are made words of two k (ExpandWords) before they meet weights: those that are words
/// themselves, and, in 15 bits, bytes above 63. Those would go as two nibbles in two planes, 13 operations
/// for 32 weights instead of 6: INT8 in groups of 128 on Zen 3, weights in L2, one token and two, 18 -> 25
/// and 13 -> 19 GB/s.
template <WeightKernel kWeight, TileKind kKind>
constexpr bool TakesWords() {
  using Panel = IntegerPanel<kWeight>;
  return Panel::kProducts || (!kHasByteDot && kKind == kTileA16 && VectorsInWords(Panel::kLargestCode) < 2);
}

/// A byte of each row times its unit, exactly.
FMOE_INLINE Floats LoadInUnits(const uint8_t* bytes, const uint8_t* units, int half) {
  return Multiply(ToFloats(LoadSignedByteLanes(bytes + half * kLanes)),
                  LoadF16((const uint16_t*)units + half * kLanes));
}

/// The scale of a group; 1 where the panel has none.
template <WeightKernel kWeight>
FMOE_INLINE Floats LoadGroupScale(const QuantParams& params, int group, int half) {
  using Panel = IntegerPanel<kWeight>;
  const uint8_t* at =
      params.groups + (Panel::kSmallFloats ? group * 16 : group * Panel::GroupStride(params.type));
  if constexpr (kWeight == kWeightNvfp4) {
    return LoadE4m3Scales(at, half);
  } else if constexpr (kWeight == kWeightMxfp4 || kWeight == kWeightMxfp6) {
    return LoadE8m0Scales(at, half);
  } else if constexpr (Panel::kSuper) {
    return LoadInUnits(at, params.units, half);
  } else if constexpr (Panel::kGrouped) {
    if (params.type.type == kRowBf16) {
      return LoadBf16((const uint16_t*)at + half * kLanes);
    }
    if (params.type.type == kRowF16) {
      return LoadF16((const uint16_t*)at + half * kLanes);
    }
    return Load((const float*)at + half * kLanes);
  } else {
    return Set(1.0F);
  }
}

/// Its zero point, or its minimum (two levels), where the type has some.
template <WeightKernel kWeight>
FMOE_INLINE Floats LoadGroupZero(const QuantParams& params, int group, int half) {
  using Panel = IntegerPanel<kWeight>;
  const uint8_t* at = params.groups + group * Panel::GroupStride(params.type);
  if constexpr (Panel::kSuper) {
    return LoadInUnits(at + 16, params.units + 32, half);
  } else {
    at += GroupScaleBytes(params.type);
    if (params.type.zeros == kZeroFloats) {
      return Load((const float*)at + half * kLanes);
    }
    return ToFloats(LoadByteLanes(at + half * kLanes));
  }
}

/// How the sum `x` of a group of k becomes part of the sum of a token: the same operations in the same order
/// in every kernel, which is why a token has the same bits in all of them.
///
///     zero points             x    -= zero * sum of the token's codes
///     scales of groups        sum  += x * (scale * activation scale of the group)
///     several groups a unit   unit += x * scale            of two levels, then: unit -= zero * sum of codes
///                             sum  += unit * activation scale                   behind the last of them
///     one                     sum  += x * scale * activation scale
template <TileKind kKind, int kGroups, bool kScales, bool kSuper>
struct GroupEnd {
  static constexpr bool kUnitSums = kGroups > 1 && !HasGroupScales(kKind);

  /// `codes`: the sum of the token's codes, fp32.
  FMOE_INLINE Floats LessZero(Floats x, Floats zero, const int32_t* codes) {
    return NegativeMultiplyAdd(zero, Set(*(const float*)codes), x);
  }
  /// `first`: of a unit.
  FMOE_INLINE void Add(Floats x, Floats scale, bool zeros, Floats zero, const int32_t* codes,
                       const float* activation_scale, bool first, Floats& unit, Floats& sum) {
    if constexpr (HasGroupScales(kKind)) {
      sum = MultiplyAdd(x, Multiply(scale, Set(*activation_scale)), sum);
    } else if constexpr (kUnitSums) {
      unit = first ? Multiply(x, scale) : MultiplyAdd(x, scale, unit);
      if (kSuper && zeros) {
        unit = LessZero(unit, zero, codes);
      }
    } else {
      sum = MultiplyAdd(kScales ? Multiply(x, scale) : x, Set(*activation_scale), sum);
    }
  }
};

/// Planes of `steps` times 16 k of kHeight tokens that stand side by side as words: [k/16][word plane]
/// [k/4][token][k 0 and 2; 1 and 3]. Words hold 15 bits; of 22 the uppermost stand in a plane of their own.
constexpr int WordPlanes(TileKind kind) {
  return kind == kTileA24 ? 2 : 1;
}
template <int kHeight, int kPlanes>
FMOE_NESTED void ExpandWords(const int32_t* planes, int64_t steps, int32_t* out) {
  const int8_t* codes = (const int8_t*)planes;
  constexpr int kPlane = 16 * kHeight, kApart = kPlanes == 3 ? kPlane : 0;
  for (int64_t step = 0; step < steps; ++step, codes += kPlane * kPlanes) {
    for (int i = 0; i < kApart; i += 16, out += 8) {
      StoreWordPairs(out, codes + i, 0);
    }
    for (int i = kApart; i < kApart + kPlane; i += 16, out += 8) {
      StoreWordPairs(out, codes + i, kPlanes > 1 ? codes + kPlane + i : 0);
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
