#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/dot_slab_isa.hpp"

/// Three or four tokens and integer weights at levels that lack `vpdpbusd`: an expert with no more of them.
/// Storing a slab (dot_slab_isa.hpp) for a single pass costs as much as multiplying two tokens; here weights
/// are decoded in registers, and multiplied as slabs are. Four tokens, weights in L2, by slabs -> so, GMAC/s
/// (Zen 3): NVFP4 40 -> 49, MXFP4 42 -> 51, INT4 g128 44 -> 54, INT8 g32 39 -> 49, `a8` 67 -> 79, 73 -> 89,
/// 82 -> 95, 41 -> 50. Codes that share bytes go through slabs: instances for them would double what GCC
/// takes for these codes.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// A unit of a pair of vectors as the panel holds it, with the names of a SlabUnit.
template <WeightKernel kWeight, bool kHasWords>
struct PanelUnit {
  using Panel = IntegerPanel<kWeight>;
  using Slab = typename SlabOf<kWeight, false, kHasWords>::Type;
  static constexpr int kGroup = Slab::kGroup, kGroups = Slab::kGroups, kAdded = Slab::kAdded;
  static constexpr bool kScales = Slab::kScales, kMinima = Panel::kSuper, kWords = kHasWords;

  const uint8_t* codes;
  QuantParams params;
  int64_t stride;  ///< from the stripe of one vector to that of the other
  typename Panel::Table table;

  FMOE_INLINE bool HasZeros(const PanelUnit& unit) {
    return Panel::kGrouped && unit.params.type.zeros != kZeroNone;
  }
  FMOE_INLINE Ints Codes(const PanelUnit& unit, int first, int index, int v) {
    constexpr int kPerFour = kWords ? 2 : 1;  // vectors of codes of four k
    const int four_k = index / kPerFour;      // from those of `first` on
    const int eight = first / (2 * kPerFour) + four_k / 2;
    Ints bytes[2];
    Panel::template DecodeEight<0>(unit.codes + Offset(unit, v), eight, HalfOf(v), unit.table, bytes);
    const Ints four = bytes[four_k % 2];
    return !kWords ? four : index % 2 == 0 ? EvenBytes(four) : OddBytes(four);
  }
  FMOE_INLINE Floats Scale(const PanelUnit& unit, int group, int v) {
    return LoadGroupScale<kWeight>(ParamsOf(unit, v), group, HalfOf(v));
  }
  FMOE_INLINE Floats ZeroPoint(const PanelUnit& unit, int group, int v) {
    return HasZeros(unit) ? LoadGroupZero<kWeight>(ParamsOf(unit, v), group, HalfOf(v)) : Zero();
  }

 private:
  FMOE_INLINE int HalfOf(int v) { return kHalves == 2 ? v : 0; }
  FMOE_INLINE int64_t Offset(const PanelUnit& unit, int v) { return kHalves == 2 ? 0 : v * unit.stride; }
  FMOE_INLINE QuantParams ParamsOf(const PanelUnit& unit, int v) {
    const int64_t offset = Offset(unit, v);
    return {unit.params.groups + offset, unit.params.units + offset, unit.params.type};
  }
};

/// Those of a pair from `first` on.
template <WeightKernel kWeight, bool kHasWords>
struct PanelUnits {
  using Panel = IntegerPanel<kWeight>;

  const uint8_t* stripe;
  int64_t stride, first;
  GroupScales type;

  FMOE_FLAT PanelUnit<kWeight, kHasWords> operator[](int64_t index) const {
    const int64_t unit = first + index;
    const uint8_t* block = stripe + unit / Panel::kUnits * Panel::BlockBytes(type);
    const int in_block = (int)(unit % Panel::kUnits);
    return {block + in_block * Panel::kUnitBytes, Panel::ParamsOf(block, in_block, type), stride,
            Panel::TableOf(type)};
  }
};

/// As SlabStripes with one tile of kTokens. Activations become words for both stripes at once.
template <WeightKernel kWeight, TileKind kKind, int kTokens>
FMOE_KERNEL void FewStripes(const uint8_t* stripes, int num_stripes, int64_t stride, int64_t units,
                            const TileView& tile, float* out) {
  constexpr bool kWords = HasWordSlabs<kWeight, kKind>();
  constexpr int64_t kStripeSums = kMaxHeight * 16;
  constexpr int64_t kApart = kHalves == 2 ? kLanes : kStripeSums;
  const int64_t at_once = kWords ? kSlabUnitsOf<true> : units;
  SlabWords<kKind> expanded;
  const int pairs = kHalves == 2 ? num_stripes : 1;
  NextLines next = LinesOf(tile, units * pairs);
  for (int64_t begin = 0, count = 0; begin < units; begin += count) {
    count = units - begin < at_once ? units - begin : at_once;
    if constexpr (kWords) {
      ExpandTokens<kKind>(tile, kTokens, begin, count, expanded);
    }
    for (int pair = 0; pair < pairs; ++pair) {
      const PanelUnits<kWeight, kWords> from = {stripes + pair * stride, stride, begin, tile.group_scales};
      MultiplySlab<PanelUnit<kWeight, kWords>, kKind, kTokens>(from, units, begin, count, tile, 0, &expanded,
                                                               kApart, next, out + pair * kStripeSums);
    }
  }
}

/// A BatchKernel.
template <WeightKernel kWeight, TileKind kKind>
void FewOrSlabBatch(const uint8_t* stripes, int64_t num_stripes, int64_t stride, int64_t blocks,
                    const TileView* tiles, int64_t num_tiles, float* out) {
  if constexpr (!IntegerPanel<kWeight>::kPacked) {
    const int tokens = num_tiles == 1 ? tiles[0].tokens : 0;
    if (tokens == 3 || tokens == 4) {
      constexpr int64_t kStripeSums = kMaxHeight * 16;
      const auto few = tokens == 3 ? &FewStripes<kWeight, kKind, 3> : &FewStripes<kWeight, kKind, 4>;
      const int64_t units = blocks * IntegerPanel<kWeight>::kUnits;
      for (; num_stripes >= 2; num_stripes -= 2, stripes += 2 * stride, out += 2 * kStripeSums) {
        few(stripes, 2, stride, units, tiles[0], out);
      }
    }
  }
  if (num_stripes > 0) {
    SlabBatch<kWeight, kKind>(stripes, num_stripes, stride, blocks, tiles, num_tiles, out);
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
