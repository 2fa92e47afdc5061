#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/dot_float_tall_isa.hpp"

/// Micro-kernels of weights that become floats: fp32, or two k in each 32-bit lane on units for 16-bit
/// floats.
///
///     panel  | 64 k of 16 rows |  ->  words  | k 0 | k 1 | ... | k 63 |       fp32
///                                            | k 0,1 | k 2,3 | ... | 62,63 |  16 bits
///     tile   | word 0 of its tokens | word 1 | ...         each broadcast for one or two stripes
///
///     after a group:  sum[token][row] = (chain 0 + chain 1) * scale of the weights, and those before
///     after 64 k:     total[token][row] += sum * scale of the token
///
/// Blocks of 128 k are two units of 64, whose scales stand behind both. Scales that a stripe has in common
/// stand in front of all its blocks, one a unit (kInFront).
///
/// With one plane the chains are words 0, 2, 4, ... and 1, 3, 5, ...: a single chain of additions would leave
/// a unit idle for most of its latency. With two planes they are the planes. The order is the same at every
/// height and for any number of tiles.
///
/// Tall tiles: dot_float_tall_isa.hpp.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Whether one or two tokens meet both halves of the rows at a time, where a register holds one: weights of
/// 16 and 32 bits, which leave registers for the sums.
template <WeightKernel kWeight, TileKind kKind, int kHeight>
constexpr bool TakesHalves() {
  return kHalves == 2 && kKind == kTileF32 && VectorK(kWeight) <= 2 && kHeight <= 2;
}

/// Whether the lines ahead are prefetched one beside each vector of a unit, as those of integers are
/// (PrefetchesPerStep), not all at the beginning of a block. Kernels alone on `vdpbf16ps`, weights from
/// memory, share of a plain read (Zen 5): with two tokens INT4 g128 71 -> 98 %, g32 98 -> 100, NVFP4 96 ->
/// 99, MXFP4 96 -> 98, with one 0 to 3 less; FP8 in blocks, which took two at a time before, 98 -> 102 with
/// one and 101
/// -> 104 with two, MXFP8 99 -> 101 and 97 -> 101; FP8 without scales and BF16 the same.
template <WeightKernel kWeight, TileKind kKind, int kHeight>
constexpr bool PrefetchesPerVector() {
  constexpr bool kScaledBytes =
      kWeight == kWeightE4m3Scaled || kWeight == kWeightE4m3Stripe || kWeight == kWeightMxfp8;
  if (IsFloatTile(kKind)) {
    return kPrefetchesBesideFloats && (VectorK(kWeight) == 4 || TakesHalves<kWeight, kKind, kHeight>());
  }
  return (kKind == kTileBf16 || kKind == kTileBf16Pair) && kHeight <= 2 &&
         (kScaledBytes || (VectorK(kWeight) == 8 && kHeight == 2));
}

/// Whether short tiles can prefetch twice (KernelTable::prefetches_twice): units for f16, and weights of 16
/// and 32 bits in fp32. Not `vdpbf16ps`: only cores of Intel need it, and there its rate is half of that of
/// fp32.
template <WeightKernel kWeight, TileKind kKind>
constexpr bool PrefetchesFloatsTwice() {
  return kKind == kTileF16 || (kKind == kTileF32 && VectorK(kWeight) <= 2 && kHalves == 1);
}

/// kUnits adjacent units of a stripe for a short tile, decoded as they are met, one half of the rows. Units
/// have sums of their own: side by side, their chains of additions overlap.
template <WeightKernel kWeight, TileKind kKind, int kHeight, int kUnits, bool kTwice>
FMOE_INLINE void ShortUnits(const uint8_t* unit, const uint8_t* group_scales, Distances ahead, int half,
                            const int32_t* words, const float* scales, Floats* totals) {
  using Unit = typename FloatUnit<kKind>::Type;
  using Panel = FloatPanel<kWeight, Unit>;
  constexpr int kStep = Panel::kVectorWords == 1 ? 2 : 1;  // vectors at a time, so that chains are constants
  constexpr int kStepWords = kStep * Panel::kVectorWords;
  constexpr bool kInBlock = Panel::kUnits > 1;  // below the same scales
  constexpr int kStride = kInBlock ? Panel::kUnitBytes : Panel::kBlockBytes;
  constexpr int kScaleStride = kInBlock ? 0 : Panel::kScaleStride;
  constexpr int kGroupVectors = Panel::kVectors / Panel::kGroups;
  constexpr int kWordWords = Planes(kKind) * kHeight;  // of a tile, for a word of weights
  constexpr bool kPrefetches = PrefetchesPerVector<kWeight, kKind, kHeight>();
  const uint8_t* next = kPrefetches ? InRegister(unit + ahead.near) : nullptr;
  PrefetchPair next_pair = {};
  if constexpr (kTwice) {
    next_pair = PrefetchPairFrom(unit, ahead);
  }
  Floats scaled[kUnits][kHeight];  // later units wait, so that additions keep their order
  Unroll<Panel::kGroups>([&](int group) FMOE_FLAT {
    typename Unit::Sums sums[kUnits][1][kHeight][2];
    Unroll<kUnits * kHeight * 2>([&](int i) FMOE_FLAT { (&sums[0][0][0][0])[i] = Unit::Start(); });
    const uint8_t* vectors = unit + group * kGroupVectors * 64;
    for (int v = 0; v < kGroupVectors; v += kStep, vectors += kStep * 64, words += kStepWords * kWordWords) {
      if constexpr (kTwice) {
        Unroll<kStep * kUnits>([&](int i) FMOE_FLAT { PrefetchTwice(next_pair, sums[i % kUnits][0][0][0]); });
      } else if (kPrefetches && half == 0) {
        Unroll<kUnits>([&](int i) FMOE_FLAT { PrefetchBeside(next + i * 64, sums[i][0][0][0]); });
        next += kUnits * 64;
      }
      typename Unit::Word weights[kUnits][kStepWords];
      Unroll<kUnits>([&](int b) FMOE_FLAT {
        Unroll<kStep>([&](int i) FMOE_FLAT {
          Unit::template Decode<kWeight>(vectors + b * kStride + i * 64, half,
                                         weights[b] + i * Panel::kVectorWords);
        });
      });
      Unroll<kStepWords * kUnits>([&](int i) FMOE_FLAT {
        const int word = i / kUnits, index = i % kUnits;
        DotWord<kKind, 1, kHeight, kHeight>(word, weights[index] + word,
                                            words + (index * Panel::kWords + word) * kWordWords, sums[index]);
      });
    }
    Unroll<kUnits * kHeight>([&](int i) FMOE_FLAT {
      const int index = i / kHeight, token = i % kHeight;
      const auto& chains = sums[index][0][token];
      scaled[index][token] =
          Panel::AddGroup(Unit::Finish(chains[0], chains[1]), group_scales + index * kScaleStride, group,
                          half, scaled[index][token]);
    });
  });
  Unroll<kUnits>([&](int b) FMOE_FLAT {
    Unroll<kHeight>([&](int t) FMOE_FLAT {
      totals[t] = AddUnit<kKind>(totals[t], scaled[b][t], scales + b * kHeight + t);
    });
  });
}

/// Whether a tile takes two units at a time. A unit of 16- or 32-bit weights takes longer to load than to
/// multiply by one or two tokens, so interleaving two units only adds a second stream: BF16 got 85 % of the
/// read rate instead of 95 (Zen 5). Units with several groups have a chain for each as it is.
template <WeightKernel kWeight, TileKind kKind, int kHeight>
constexpr bool IsSideBySide() {
  using Panel = FloatPanel<kWeight, typename FloatUnit<kKind>::Type>;
  return kHeight <= 2 && (VectorK(kWeight) == 4 ? !PrefetchesPerVector<kWeight, kKind, kHeight>()
                                                : VectorK(kWeight) == 8 && Panel::kGroups == 1);
}

/// Both halves of a unit with one or two tokens. One half after the other, additions wait for those before
/// them, and memory for the second half (Zen 3, BF16, one and two tokens: from L2 48 and 36 GB/s, not 28 and
/// 23).
template <WeightKernel kWeight, TileKind kKind, int kHeight>
FMOE_INLINE void ShortHalves(const uint8_t* unit, int64_t ahead, const int32_t* words,
                             Floats (*totals)[kHeight]) {
  using Unit = typename FloatUnit<kKind>::Type;
  using Panel = FloatPanel<kWeight, Unit>;
  constexpr int kStep = Panel::kVectorWords == 1 ? 2 : 1, kStepWords = kStep * Panel::kVectorWords;
  Floats sums[2][kHeight][2];
  Unroll<4 * kHeight>([&](int i) FMOE_FLAT { (&sums[0][0][0])[i] = Zero(); });
  for (int v = 0; v < Panel::kVectors; v += kStep, unit += kStep * 64, words += kStepWords * kHeight) {
    if constexpr (kPrefetchesBesideFloats) {
      Unroll<kStep>([&](int i) FMOE_FLAT { PrefetchBeside(unit + ahead + i * 64, sums[i][0][0]); });
    }
    Floats weights[2][kStepWords];
    Unroll<2 * kStep>([&](int i) FMOE_FLAT {
      const int half = i % 2, vector = i / 2;
      Unit::template Decode<kWeight>(unit + vector * 64, half, weights[half] + vector * Panel::kVectorWords);
    });
    Unroll<kStepWords>([&](int word) FMOE_FLAT {
      const Floats both[2] = {weights[0][word], weights[1][word]};
      DotWord<kKind, 2, kHeight, kHeight>(word, both, words + word * kHeight, sums);
      Unroll<2 * kHeight>([&](int i) FMOE_FLAT { InPlace(sums[i / kHeight][i % kHeight][word % 2]); });
    });
  }
  Unroll<2 * kHeight>([&](int i) FMOE_FLAT {
    const int half = i / kHeight, token = i % kHeight;
    totals[half][token] = Add(totals[half][token], Unit::Finish(sums[half][token][0], sums[half][token][1]));
  });
}

/// A way of their own that weights and tiles have for a unit of a short tile, up to so many tokens
/// (dot_bytes_avx2_isa.hpp).
template <WeightKernel kWeight, TileKind kKind>
struct ShortUnit {
  static constexpr int kMostTokens = 0;
};

/// Short tiles: stripes one after the other.
template <WeightKernel kWeight, TileKind kKind, int kHeight, bool kTwice>
FMOE_INLINE void FloatStripes(const uint8_t* stripes, int64_t num_stripes, int64_t blocks,
                              const TileView* tile, float* out) {
  using Unit = typename FloatUnit<kKind>::Type;
  using Panel = FloatPanel<kWeight, Unit>;
  constexpr int kAtOnce = IsSideBySide<kWeight, kKind, kHeight>() ? 2 : 1;  // units
  constexpr int kBlocks = kAtOnce > Panel::kUnits ? kAtOnce / Panel::kUnits : 1;
  constexpr int kUnitWords = Panel::kWords * Planes(kKind) * kHeight;
  for (int64_t stripe = 0; stripe < num_stripes; ++stripe, out += kHeight * 16) {
    const int32_t* words = (const int32_t*)tile->codes;
    const float* scales = tile->scale;
    Floats totals[kHalves][kHeight];
    Unroll<kHalves * kHeight>([&](int i) FMOE_FLAT { (&totals[0][0])[i] = Zero(); });
    const uint8_t* const stripe_begin = stripes;
    const int64_t header = Panel::HeaderBytes(blocks);
    PrefetchBlock<kTwice, 0, 0>(stripes, header,
                                tile);  // blocks prefetch as many lines as they have themselves
    stripes += header;
    int64_t block = 0;
    for (; block + kBlocks <= blocks; block += kBlocks) {
      const uint8_t* const group_scales = Panel::ScalesOf(stripe_begin, stripes, block);
      constexpr bool kPrefetches = kTwice || PrefetchesPerVector<kWeight, kKind, kHeight>();
      constexpr int kBytes = kBlocks * Panel::kBlockBytes,
                    kFirst = kPrefetches ? kBlocks * Panel::kCodeBytes : 0;
      const Distances ahead = PrefetchBlock<kTwice, kBytes, kFirst>(stripes, kBytes, tile);
      for (int unit = 0; unit < Panel::kUnits; unit += kAtOnce) {
        if constexpr (kHeight <= ShortUnit<kWeight, kKind>::kMostTokens) {
          ShortUnit<kWeight, kKind>::template Add<kHeight>(stripes + unit * Panel::kUnitBytes, group_scales,
                                                           ahead.near, words, scales, totals);
        } else if constexpr (TakesHalves<kWeight, kKind, kHeight>()) {
          ShortHalves<kWeight, kKind, kHeight>(stripes + unit * Panel::kUnitBytes, ahead.near, words, totals);
        } else {
          Unroll<kHalves>([&](int half) FMOE_FLAT {
            ShortUnits<kWeight, kKind, kHeight, kAtOnce, kTwice>(
                stripes + unit * Panel::kUnitBytes, group_scales, ahead, half, words, scales, totals[half]);
          });
        }
        words += kAtOnce * kUnitWords;
        scales += kAtOnce * kHeight;
      }
      stripes += kBlocks * Panel::kBlockBytes;
    }
    if (kBlocks > 1 && block < blocks) {
      const Distances ahead = PrefetchBlock<kTwice, 0, 0>(stripes, 0, tile);  // none but those beside vectors
      const uint8_t* const group_scales = Panel::ScalesOf(stripe_begin, stripes, block);
      Unroll<kHalves>([&](int half) FMOE_FLAT {
        ShortUnits<kWeight, kKind, kHeight, 1, kTwice>(stripes, group_scales, ahead, half, words, scales,
                                                       totals[half]);
      });
      stripes += Panel::kBlockBytes;
    }
    Unroll<kHalves * kHeight>([&](int i) FMOE_FLAT {
      const int half = i / kHeight, token = i % kHeight;
      Store(out + token * 16 + half * kLanes, totals[half][token]);
    });
    tile = tile->short_tile.next_stripe_tile == 0 ? tile : tile->short_tile.next_stripe_tile;
  }
}

/// A DotKernel.
template <WeightKernel kWeight, TileKind kKind, int kHeight>
void FloatDot(const uint8_t* stripes, int64_t num_stripes, int64_t blocks, const TileView* tile, float* out) {
  if constexpr (PrefetchesFloatsTwice<kWeight, kKind>() && kHeight <= 2) {
    if (tile->short_tile.prefetch_far != 0) {
      FloatStripes<kWeight, kKind, kHeight, true>(stripes, num_stripes, blocks, tile, out);
      return;
    }
  }
  FloatStripes<kWeight, kKind, kHeight, false>(stripes, num_stripes, blocks, tile, out);
}

template <WeightKernel kWeight, TileKind kKind>
constexpr void SetFloatDots(KernelTable& table) {
  table.dot[kWeight][kKind][0] = &FloatDot<kWeight, kKind, 1>;
  table.dot[kWeight][kKind][1] = &FloatDot<kWeight, kKind, 2>;
  table.dot[kWeight][kKind][2] = &FloatDot<kWeight, kKind, 4>;
  table.dot[kWeight][kKind][3] = &FloatDotTall<kWeight, kKind>;
  table.batch[kWeight][kKind] = &FloatBatch<kWeight, kKind>;
  table.prefetches_twice[kWeight][kKind] = PrefetchesFloatsTwice<kWeight, kKind>();
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
