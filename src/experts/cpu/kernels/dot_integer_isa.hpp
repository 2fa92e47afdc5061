#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/integer_halves_isa.hpp"
#include "experts/cpu/kernels/integer_units_isa.hpp"

/// Short tiles of formats that become bytes: e2m1, 4-bit and 8-bit integers (dot_isa.hpp).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Whether the lines ahead are prefetched a unit of a block at a time, where steps do not do it
/// (PrefetchesPerStep): 33 prefetches in a row are more than a core of Zen 3 takes (INT8 g128, one token,
/// weights from memory: 14.9 -> 17.7 GB/s, `a8` 13.8 -> 18.7). 27 are not: codes of 5 and 6 bits in blocks of
/// 128 k, `a8`, all at once 12.7 -> 14.4 and 11.6 -> 15 GB/s with one token, 15 bits the same within 3 %; but
/// two tokens in 15 bits read a fifth less by units.
template <WeightKernel kWeight, TileKind kKind, int kHeight>
constexpr bool PrefetchesPerUnit() {
  constexpr int kMost = kKind == kTileA16 && kHeight == 2 ? 1024 : 1536;
  return IntegerPanel<kWeight>::kCodeBytes > kMost && !PrefetchesPerStep<kWeight, kKind, kHeight>();
}

/// Whether lines can be prefetched twice, beside each step into L2 and later into L1
/// (KernelTable::prefetches_twice). Tiles of 22 bits are bound by their products.
template <WeightKernel kWeight, TileKind kKind>
constexpr bool PrefetchesIntegersTwice() {
  return kKind != kTileA24 && kHasByteDot && (kHasWideDot || HasBothHalves<kWeight, kKind, 1>());
}

/// Stripes one after the other. Whether lines are prefetched twice is a template argument, not a branch in
/// each step. (Halves of a stripe always prefetch twice where they can: processors with a dot product and no
/// wide registers are of Intel, where the plan has it so. Elsewhere, `avx2_vnni` by name, the second prefetch
/// finds its line in L1 or L2.)
template <WeightKernel kWeight, TileKind kKind, int kHeight, bool kTwice>
FMOE_KERNEL void IntegerStripes(const uint8_t* stripes, int64_t num_stripes, int64_t blocks,
                                const TileView* tile, float* out) {
  using Panel = IntegerPanel<kWeight>;
  constexpr int kUnitWords = 4 * Planes(kKind) * 4 * kHeight;
  constexpr int kUnitCorrections = 64 / Panel::kGroup * Corrections(kKind) * kHeight;
  constexpr int kUnitScales = (HasGroupScales(kKind) ? 64 / Panel::kGroup : 1) * kHeight;
  const GroupScales type = tile->group_scales;
  const typename Panel::Table table = Panel::TableOf(type);
  const int64_t block_bytes = Panel::BlockBytes(type);
  for (int64_t stripe = 0; stripe < num_stripes; ++stripe) {
    const int32_t* words = (const int32_t*)tile->codes;
    const int32_t* correction = tile->correction;
    const float* scale = tile->scale;
    Floats accumulators[kHalves][kHeight];
    Unroll<kHalves * kHeight>([&](int i) FMOE_FLAT { (&accumulators[0][0])[i] = Zero(); });
    for (int64_t block = 0; block < blocks; ++block, stripes += block_bytes) {
      constexpr bool kByUnits = PrefetchesPerUnit<kWeight, kKind, kHeight>();
      constexpr int kFirst = kByUnits || PrefetchesPerStep<kWeight, kKind, kHeight>() ? Panel::kCodeBytes : 0;
      const Distances ahead =
          PrefetchBlock<kTwice, Panel::kLeastBytes, kFirst, Panel::kCodeBytes>(stripes, block_bytes, tile);
      const uint8_t* unit = stripes;
      for (int index = 0; index < Panel::kUnits; ++index, unit += Panel::kUnitBytes) {
        if constexpr (kByUnits) {
          const uint8_t* const next = InRegister(unit + ahead.near);
          Unroll<Panel::kUnitBytes / 64>([&](int line) FMOE_FLAT { Prefetch(next + 64 * line); });
        }
        const QuantParams params = Panel::ParamsOf(stripes, index, type);
        const int32_t* unit_words = words;
        constexpr bool kWords = TakesWords<kWeight, kKind>();
        alignas(64) int32_t expanded[kWords ? 4 * StepWords<kWeight, kKind>() * kHeight : 1];
        if constexpr (kWords) {
          ExpandWords<kHeight, Planes(kKind)>(words, 4, expanded);
          unit_words = expanded;
        }
        if constexpr (HasBothHalves<kWeight, kKind, kHeight>()) {
          IntegerUnitBothHalves<kWeight, kKind, kHeight, kTwice>(unit, params, table, words, correction,
                                                                 scale, ahead, accumulators);
        } else {
          for (int half = 0; half < kHalves; ++half) {
            Floats sums[kHeight];  // a copy, since registers cannot be indexed by a half
            Unroll<kHeight>([&](int t) FMOE_FLAT { sums[t] = accumulators[half][t]; });
            const int32_t* own_words = unit_words;
            if constexpr (kHalves == 2) {  // GCC 12 would load all words in front of both, into memory
              own_words = (const int32_t*)InRegister((const uint8_t*)unit_words);
            }
            IntegerUnit<kWeight, kKind, kHeight, kTwice>(unit, params, half, table, own_words, correction,
                                                         scale, ahead, sums);
            Unroll<kHeight>([&](int t) FMOE_FLAT { accumulators[half][t] = sums[t]; });
          }
        }
        words += kUnitWords;
        correction += kUnitCorrections;
        scale += kUnitScales;
      }
    }
    Unroll<kHalves * kHeight>([&](int i) FMOE_FLAT {
      const int half = i / kHeight, token = i % kHeight;
      Store(out + token * 16 + half * kLanes, accumulators[half][token]);
    });
    out += kHeight * 16;
    tile = tile->short_tile.next_stripe_tile == 0 ? tile : tile->short_tile.next_stripe_tile;
  }
}

/// A DotKernel.
template <WeightKernel kWeight, TileKind kKind, int kHeight>
void IntegerDot(const uint8_t* stripes, int64_t num_stripes, int64_t blocks, const TileView* tile,
                float* out) {
  constexpr bool kTwice = PrefetchesIntegersTwice<kWeight, kKind>() && kHeight <= 2;
  if constexpr (kTwice && kHasWideDot) {
    if (tile->short_tile.prefetch_far == 0) {
      IntegerStripes<kWeight, kKind, kHeight, false>(stripes, num_stripes, blocks, tile, out);
      return;
    }
  }
  IntegerStripes<kWeight, kKind, kHeight, kTwice>(stripes, num_stripes, blocks, tile, out);
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
