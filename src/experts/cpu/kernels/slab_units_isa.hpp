#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/integer_panel_isa.hpp"

/// What slabs hold: weights of two stripes, decoded into L1, and the tokens that they meet
/// (dot_slab_isa.hpp).
///
///     bytes   [k/4][2][rows][4 k]                          with VNNI; else codes up to 24 and one plane
///     words   [k/4][k 0 and 2; 1 and 3][2][rows][2 k]      all others
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Vectors of rows that meet a word of activations together: halves of a stripe, or two stripes.
constexpr int kSlabVectors = 2;
/// Pairs of vectors in two stripes.
constexpr int kSlabPairs = kHalves;
/// 16 KiB of codes, beside the tokens of a tile.
template <bool kWords>
constexpr int kSlabUnitsOf = kWords ? 4 : 8;

template <WeightKernel kWeight, TileKind kKind>
constexpr bool HasWordSlabs() {
  using Panel = IntegerPanel<kWeight>;
  return Panel::kProducts ||
         (!kHasByteDot && (VectorsInWords(Panel::kLargestCode) == 0 || Planes(kKind) > 1));
}

/// Vectors of four k that follow each other without a loop, and whose products words add up where bytes have
/// no dot product: of a group at most.
template <WeightKernel kWeight>
constexpr int SlabFours() {
  constexpr int kFours = IntegerPanel<kWeight>::kGroup / 4;
  constexpr int kMost = kHasByteDot ? 8 : VectorsInWords(IntegerPanel<kWeight>::kLargestCode);
  return kFours < kMost ? kFours : kMost;
}

/// A unit of a pair of vectors as L1 holds it. Formats that look alike share it, and what multiplies it.
/// kAdded: vectors of codes whose products are added up before sums take them.
template <int kGroupK, bool kHasScales, bool kHasZeros, bool kHasMinima, bool kHasWords, int kAdds>
struct alignas(64) SlabUnit {
  static constexpr int kGroup = kGroupK, kGroups = 64 / kGroup;
  static constexpr bool kScales = kHasScales, kZeros = kHasZeros, kMinima = kHasMinima, kWords = kHasWords;
  static constexpr int kAdded = kAdds;

  uint8_t codes[kWords ? 32 : 16][kSlabVectors][4 * kLanes];
  float scales[kScales ? kGroups : 1][kSlabVectors][kLanes];
  float zeros[kZeros ? kGroups : 1][kSlabVectors][kLanes];

  FMOE_INLINE bool HasZeros(const SlabUnit&) { return kZeros; }
  /// Codes `first` + index of vector v. `first` is a multiple of kAdded.
  FMOE_INLINE Ints Codes(const SlabUnit& unit, int first, int index, int v) {
    return LoadInts(unit.codes[first + index][v]);
  }
  FMOE_INLINE Floats Scale(const SlabUnit& unit, int group, int v) {
    return kScales ? Load(unit.scales[group][v]) : Zero();
  }
  FMOE_INLINE Floats ZeroPoint(const SlabUnit& unit, int group, int v) {
    return kZeros ? Load(unit.zeros[group][v]) : Zero();
  }
};

/// The units of a slab, of one pair.
template <class Slab>
using SlabPair = Slab[kSlabUnitsOf<Slab::kWords>];

template <WeightKernel kWeight, bool kHasZeros, bool kWords>
struct SlabOf {
  using Panel = IntegerPanel<kWeight>;
  using Type = SlabUnit<Panel::kGroup, Panel::kSmallFloats || Panel::kGrouped, kHasZeros,
                        kHasZeros && Panel::kSuper, kWords, kWords ? 8 : SlabFours<kWeight>()>;

  /// `count` units of a stripe from `begin` on. A function of its own, so that formats share all that is
  /// behind it.
  FMOE_KERNEL static void Decode(const uint8_t* stripe, int64_t begin, int64_t count, GroupScales type,
                                 int number, SlabPair<Type>* slabs) {
    const typename Panel::Table table = Panel::TableOf(type);
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* block = stripe + (begin + i) / Panel::kUnits * Panel::BlockBytes(type);
      const int unit = (int)((begin + i) % Panel::kUnits);
      const QuantParams params = Panel::ParamsOf(block, unit, type);
      for (int half = 0; half < kHalves; ++half) {
        Type* slab = slabs[kHalves == 2 ? number : 0] + i;
        DecodeVector(block + unit * Panel::kUnitBytes, params, half, table, kHalves == 2 ? half : number,
                     slab);
      }
    }
  }

  /// Rows of a unit of one stripe that a register holds: vector `at` of the pair.
  FMOE_NESTED void DecodeVector(const uint8_t* unit, const QuantParams& params, int half,
                                typename Panel::Table table, int at, Type* out) {
    const auto decode = [&](auto eight) FMOE_FLAT {
      constexpr int kPhase = Panel::PhaseOf(decltype(eight)()), kVectors = kWords ? 4 : 2;
      Ints weights[kVectors];
      if constexpr (kWords) {
        Panel::template DecodeWords<kPhase>(unit, eight, half, table, weights);
      } else {
        Panel::template DecodeEight<kPhase>(unit, eight, half, table, weights);
      }
      Unroll<kVectors>([&](int v) FMOE_FLAT { StoreInts(out->codes[eight * kVectors + v][at], weights[v]); });
    };
    if constexpr (Panel::kPacked) {
      Unroll<8>(decode);
    } else {
      for (int eight = 0; eight < 8; eight += 2) {
        decode(eight);
        decode(eight + 1);
      }
    }
    if constexpr (Type::kScales) {
      Unroll<Type::kGroups>(
          [&](int g) FMOE_FLAT { Store(out->scales[g][at], LoadGroupScale<kWeight>(params, g, half)); });
    }
    if constexpr (kHasZeros) {
      Unroll<Type::kGroups>(
          [&](int g) FMOE_FLAT { Store(out->zeros[g][at], LoadGroupZero<kWeight>(params, g, half)); });
    }
  }
};

/// Activations of a tile as words, in the order of weights (ExpandWords).
template <TileKind kKind>
constexpr int kSlabRow = kSlabUnitsOf<true> * 32 * WordPlanes(kKind);
template <TileKind kKind>
using SlabWords = int32_t[kMaxHeight][kSlabRow<kKind>];

/// `count` units of the first `tokens` of a tile, or as many as it can have. Tokens that do not exist repeat
/// the last one.
template <TileKind kKind>
FMOE_NESTED void ExpandTokens(const TileView& tile, int tokens, int64_t begin, int64_t count,
                              SlabWords<kKind>& expanded) {
  const int last = tile.tokens - 1;
  for (int token = 0; token < kMaxHeight && token < tokens; ++token) {
    const int32_t* row = (const int32_t*)tile.tall_tile.rows[token < last ? token : last];
    ExpandWords<1, Planes(kKind)>(row + begin * 16 * Planes(kKind), count * 4, expanded[token]);
  }
}

/// Where four tokens or three have a word: rows of SlabWords, or tiles of one token each.
template <bool kWords, TileKind kKind, int kTokens>
struct SlabTokens {
  const int32_t* at[kWords ? 1 : kTokens];

  FMOE_INLINE Ints Broadcast(const SlabTokens& tokens, int token, int64_t word) {
    return IntSet(kWords ? tokens.at[0][token * kSlabRow<kKind> + word] : tokens.at[token][word]);
  }
};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
