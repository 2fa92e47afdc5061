#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/dot_prefetch_isa.hpp"
#include "experts/cpu/kernels/float_units_isa.hpp"
#include "experts/cpu/kernels/scale_layout_isa.hpp"

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
/// Tall tiles come together: a block of two stripes (of one, where registers hold half of it) is decoded once
/// into 4 to 16 KiB of L1 and meets all tokens of the expert, four at a time (16 sums in registers: an
/// instruction takes 4 to 6 cycles, and two begin in each; AVX2 has 8, one chain after the other), before the
/// next block. Totals stay in L1 beside it.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

template <WeightKernel kWeight, typename Unit>
struct FloatPanel : ScaleLayout<kWeight> {
  using ScaleLayout<kWeight>::kUnits, ScaleLayout<kWeight>::kInFront;
  static constexpr bool kDirect = VectorK(kWeight) == Unit::kWordK;  // words stand in the panel
  static constexpr int kWords = 64 / Unit::kWordK;                   // of a unit
  static constexpr int kVectorWords = VectorK(kWeight) / Unit::kWordK;
  static constexpr int kVectors = 64 / VectorK(kWeight);
  static constexpr int kUnitBytes = kVectors * 64;
  static constexpr int kCodeBytes = kUnits * kUnitBytes;
  static constexpr bool kE8m0 = kWeight == kWeightMxfp8 || kWeight == kWeightMxfp4;
  static constexpr bool kInteger = kWeight > kWeightU4;  // in groups, with scales of bf16
  static constexpr bool kScaled =
      kE8m0 || kInteger || kInFront || kWeight == kWeightNvfp4 || kWeight == kWeightE4m3Scaled;
  /// Of sums in a unit.
  static constexpr int kGroups = kE8m0 || kWeight == kWeightU4Group32 ? 2 : kWeight == kWeightNvfp4 ? 4 : 1;
  static constexpr int kGroupBytes = !kScaled || kInFront               ? 0
                                     : kInteger                         ? 32
                                     : kE8m0 || kWeight == kWeightNvfp4 ? 16
                                                                        : 64;
  static constexpr int kBlockBytes = kCodeBytes + kGroups * kGroupBytes;
  static constexpr int kScaleStride = kInFront ? 4 : kBlockBytes;  // from the scales of a block to the next

  /// Of a block of a stripe.
  FMOE_INLINE const uint8_t* ScalesOf(const uint8_t* stripe, const uint8_t* block_codes, int64_t block) {
    return kInFront ? stripe + block * kScaleStride : block_codes + kCodeBytes;
  }
  FMOE_INLINE Floats Scale(const uint8_t* scales, int half) {
    if constexpr (kE8m0) {
      return LoadE8m0Scales(scales, half);
    } else if constexpr (kWeight == kWeightNvfp4) {
      return LoadE4m3Scales(scales, half);
    } else if constexpr (kInteger) {
      return LoadBf16((const uint16_t*)scales + half * kLanes);
    } else if constexpr (kInFront) {
      return Set(*(const float*)scales);
    } else {
      return LoadFloatScales(scales, half);
    }
  }

  /// The sum of a group of a unit with its scales, beside the row scales that wait for the end. `so_far`:
  /// that of the groups before.
  FMOE_INLINE Floats AddGroup(Floats sum, const uint8_t* scales, int group, int half, Floats so_far) {
    if constexpr (!kScaled) {
      return sum;
    } else {
      const Floats scale = Scale(scales + group * kGroupBytes, half);
      return group == 0 ? Multiply(sum, scale) : MultiplyAdd(sum, scale, so_far);
    }
  }
};

/// The total with the sum of a unit. `token_scale` counts for 16-bit tiles.
template <TileKind kKind>
FMOE_INLINE Floats AddUnit(Floats total, Floats sum, const float* token_scale) {
  return kKind == kTileF32 ? Add(total, sum) : MultiplyAdd(sum, Set(*token_scale), total);
}

/// One word of one or two stripes with kTokens tokens of a tile of kHeight.
template <TileKind kKind, int kStripes, int kTokens, int kHeight, typename Word, typename Sums>
FMOE_INLINE void DotWord(int word, const Word* weights, const int32_t* words, Sums (*sums)[kTokens][2]) {
  using Unit = typename FloatUnit<kKind>::Type;
  Unroll<Planes(kKind)>([&](auto plane) FMOE_FLAT {
    const int chain = Planes(kKind) == 2 ? (int)plane : word % 2;
    Unroll<kTokens>([&](auto t) FMOE_FLAT {
      const Word value = Unit::Broadcast(words + plane * kHeight + t);
      Unroll<kStripes>(
          [&](auto s) FMOE_FLAT { sums[s][t][chain] = Unit::Dot(weights[s], value, sums[s][t][chain]); });
    });
  });
}

/// Whether both halves of a stripe are decoded together, where a register holds one.
template <WeightKernel kWeight>
constexpr bool DecodesRows() {
  return kHasRowDecode && (kWeight == kWeightE4m3 || kWeight == kWeightE4m3Scaled ||
                           kWeight == kWeightE4m3Stripe || kWeight == kWeightMxfp8);
}

/// Whether lines that come later are asked for beside the vectors of a unit, as those of integers are
/// (AsksBySteps), not all at the beginning of a block. Kernels alone on `vdpbf16ps`, weights from memory,
/// share of a plain read (Zen 5): with two tokens INT4 g128 71 -> 98 %, g32 98 -> 100, NVFP4 96 -> 99, MXFP4
/// 96 -> 98, with one 0 to 3 less; FP8 in blocks, which took two at a time before, 98 -> 102 with one and 101
/// -> 104 with two, MXFP8 99 -> 101 and 97 -> 101; FP8 without scales and BF16 the same.
template <WeightKernel kWeight, TileKind kKind, int kHeight>
constexpr bool AsksByVectors() {
  constexpr bool kScaledBytes =
      kWeight == kWeightE4m3Scaled || kWeight == kWeightE4m3Stripe || kWeight == kWeightMxfp8;
  if (kKind == kTileF32) {
    return DecodesRows<kWeight>() && kHeight <= 2;
  }
  return (kKind == kTileBf16 || kKind == kTileBf16Pair) && kHeight <= 2 &&
         (kScaledBytes || (VectorK(kWeight) == 8 && kHeight == 2));
}

/// kUnits adjacent units of a stripe for a short tile, decoded as they are met, one half of the rows. Units
/// have sums of their own: side by side, their chains of additions overlap.
template <WeightKernel kWeight, TileKind kKind, int kHeight, int kUnits>
FMOE_INLINE void ShortUnits(const uint8_t* unit, const uint8_t* group_scales, int64_t ahead, int half,
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
  constexpr bool kAsks = AsksByVectors<kWeight, kKind, kHeight>();
  const uint8_t* asked = kAsks ? InRegister(unit + ahead) : nullptr;
  Floats scaled[kUnits][kHeight];  // later units wait, so that additions keep their order
  Unroll<Panel::kGroups>([&](auto group) FMOE_FLAT {
    typename Unit::Sums sums[kUnits][1][kHeight][2];
    Unroll<kUnits * kHeight * 2>([&](auto i) FMOE_FLAT { (&sums[0][0][0][0])[i] = Unit::Start(); });
    const uint8_t* vectors = unit + group * kGroupVectors * 64;
    for (int v = 0; v < kGroupVectors; v += kStep, vectors += kStep * 64, words += kStepWords * kWordWords) {
      if constexpr (kAsks) {
        Unroll<kUnits>([&](auto i) FMOE_FLAT { PrefetchBeside(asked + i * 64, sums[i][0][0][0]); });
        asked += kUnits * 64;
      }
      typename Unit::Word weights[kUnits][kStepWords];
      Unroll<kUnits>([&](auto b) FMOE_FLAT {
        Unroll<kStep>([&](auto i) FMOE_FLAT {
          Unit::template Decode<kWeight>(vectors + b * kStride + i * 64, half,
                                         weights[b] + i * Panel::kVectorWords);
        });
      });
      Unroll<kStepWords * kUnits>([&](auto i) FMOE_FLAT {
        constexpr int kWord = decltype(i)() / kUnits, kIndex = decltype(i)() % kUnits;
        DotWord<kKind, 1, kHeight, kHeight>(kWord, weights[kIndex] + kWord,
                                            words + (kIndex * Panel::kWords + kWord) * kWordWords,
                                            sums[kIndex]);
      });
    }
    Unroll<kUnits * kHeight>([&](auto i) FMOE_FLAT {
      constexpr int kIndex = decltype(i)() / kHeight, kToken = decltype(i)() % kHeight;
      const auto& chains = sums[kIndex][0][kToken];
      scaled[kIndex][kToken] =
          Panel::AddGroup(Unit::Finish(chains[0], chains[1]), group_scales + kIndex * kScaleStride, group,
                          half, scaled[kIndex][kToken]);
    });
  });
  Unroll<kUnits>([&](auto b) FMOE_FLAT {
    Unroll<kHeight>([&](auto t) FMOE_FLAT {
      totals[t] = AddUnit<kKind>(totals[t], scaled[b][t], scales + b * kHeight + t);
    });
  });
}

/// Whether a tile takes two units at a time. One of 16 or 32 bits a value takes longer to arrive than one or
/// two tokens' chains of additions: there, two units are only two streams to read, and BF16 got 85 % of the
/// read rate instead of 95 (Zen 5). Smaller groups have chains of their own.
template <WeightKernel kWeight, TileKind kKind, int kHeight>
constexpr bool IsSideBySide() {
  using Panel = FloatPanel<kWeight, typename FloatUnit<kKind>::Type>;
  return kHeight <= 2 && (VectorK(kWeight) == 4 ? !AsksByVectors<kWeight, kKind, kHeight>()
                                                : VectorK(kWeight) == 8 && Panel::kGroups == 1);
}

/// One unit of a stripe for a short tile, both halves of the rows: the additions of ShortUnits in their
/// order.
template <WeightKernel kWeight, int kHeight>
FMOE_INLINE void ShortUnitRows(const uint8_t* unit, const uint8_t* group_scales, int64_t ahead,
                               const int32_t* words, Floats (*totals)[kHeight]) {
  using Panel = FloatPanel<kWeight, F32Unit>;
  constexpr int kBoth = 2;  // halves; where there are none, nobody calls this
  constexpr int kGroupVectors = Panel::kVectors / Panel::kGroups;
  Floats scaled[kBoth][kHeight];
  Unroll<Panel::kGroups>([&](auto group) FMOE_FLAT {
    Floats sums[kBoth][1][kHeight][2];
    Unroll<kBoth * kHeight * 2>([&](auto i) FMOE_FLAT { (&sums[0][0][0][0])[i] = Zero(); });
    for (int v = 0; v < kGroupVectors; ++v, unit += 64, words += 4 * kHeight) {
      Prefetch(unit + ahead);
      Ints pairs[2][kBoth];
      DecodeE4m3Rows(unit, pairs);
      Unroll<4>([&](auto word) FMOE_FLAT {
        Unroll<kBoth>([&](auto half) FMOE_FLAT {
          const Floats weights = WordOfPair<word % 2>(pairs[word / 2][half]);
          DotWord<kTileF32, 1, kHeight, kHeight>(word, &weights, words + word * kHeight, sums[half]);
        });
      });
    }
    Unroll<kHeight>([&](auto t) FMOE_FLAT {
      Floats of_group[kBoth];
      Unroll<kBoth>([&](auto half) FMOE_FLAT {
        of_group[half] = F32Unit::Finish(sums[half][0][t][0], sums[half][0][t][1]);
      });
      RowsInOrder(of_group[0], of_group[1]);
      Unroll<kBoth>([&](auto half) FMOE_FLAT {
        scaled[half][t] = Panel::AddGroup(of_group[half], group_scales, group, half, scaled[half][t]);
      });
    });
  });
  Unroll<kBoth * kHeight>([&](auto i) FMOE_FLAT {
    (&totals[0][0])[i] = AddUnit<kTileF32>((&totals[0][0])[i], (&scaled[0][0])[i], 0);
  });
}

/// Tokens of a tall tile that meet two vectors of rows at a time: two stripes, or the halves of one.
constexpr int kPairTokens = 4;

/// sums[vector][token][chain] += a group of words from `first` on. `from`: words that are decoded, or the
/// unit itself.
template <WeightKernel kWeight, TileKind kKind, int kVectors, int kHeight, bool kDecoded, typename Sums>
FMOE_INLINE void TallGroup(const uint8_t* const* from, int first, const int32_t* words,
                           Sums (*sums)[kPairTokens][2]) {
  using Unit = typename FloatUnit<kKind>::Type;
  using Panel = FloatPanel<kWeight, Unit>;
  constexpr int kWordWords = Planes(kKind) * kHeight, kGroupWords = Panel::kWords / Panel::kGroups;
  for (int word = 0; word < kGroupWords; word += 2, words += 2 * kWordWords) {
    typename Unit::Word both[kVectors][2];
    if constexpr (!kDecoded) {
      Unroll<kVectors>([&](auto v) FMOE_FLAT {
        Unit::template Decode<kWeight>(from[v] + (first + word) / 2 * 64, 0, both[v]);
      });
    }
    Unroll<2>([&](auto i) FMOE_FLAT {
      typename Unit::Word weights[kVectors];
      Unroll<kVectors>([&](auto v) FMOE_FLAT {
        weights[v] = kDecoded ? Unit::LoadWord(from[v] + (first + word + i) * 64) : both[v][i];
      });
      DotWord<kKind, kVectors, kPairTokens, kHeight>(i, weights, words + i * kWordWords, sums);
    });
  }
}

/// The same of one chain: sixteen registers hold the sums of no more than that.
template <WeightKernel kWeight, TileKind kKind, int kVectors, int kHeight, typename Sums>
FMOE_INLINE void TallChain(const uint8_t* const* from, int first, const int32_t* words, int chain,
                           Sums (*sums)[kPairTokens][2]) {
  using Unit = typename FloatUnit<kKind>::Type;
  using Panel = FloatPanel<kWeight, Unit>;
  constexpr int kGroupWords = Panel::kWords / Panel::kGroups, kStep = 8;  // words in one piece of text
  static_assert(Planes(kKind) == 1, "planes are chains");
  Sums of_chain[kVectors][kPairTokens];
  Unroll<kVectors * kPairTokens>([&](auto i) FMOE_FLAT { (&of_chain[0][0])[i] = Unit::Start(); });
  for (int word = chain; word < kGroupWords; word += kStep) {
    Unroll<kStep / 2>([&](auto i) FMOE_FLAT {
      typename Unit::Word weights[kVectors];
      Unroll<kVectors>([&](auto v)
                           FMOE_FLAT { weights[v] = Unit::LoadWord(from[v] + (first + word + 2 * i) * 64); });
      Unroll<kPairTokens>([&](auto t) FMOE_FLAT {
        const auto value = Unit::Broadcast(words + (word + 2 * i) * kHeight + t);
        Unroll<kVectors>([&](auto v)
                             FMOE_FLAT { of_chain[v][t] = Unit::Dot(weights[v], value, of_chain[v][t]); });
      });
    });
  }
  Unroll<kVectors * kPairTokens>([&](auto i) FMOE_FLAT {
    constexpr int kVector = decltype(i)() / kPairTokens, kToken = decltype(i)() % kPairTokens;
    sums[kVector][kToken][chain] = of_chain[kVector][kToken];
  });
}

/// Four tokens of a tile of kHeight with one unit of kVectors vectors of rows, into their totals.
template <WeightKernel kWeight, TileKind kKind, int kVectors, int kHeight, bool kDecoded>
FMOE_INLINE void TallUnit(const uint8_t* const* from, const uint8_t* const* group_scales,
                          const int32_t* words, const float* scales, float* out) {
  using Unit = typename FloatUnit<kKind>::Type;
  using Panel = FloatPanel<kWeight, Unit>;
  constexpr int kGroupWords = Panel::kWords / Panel::kGroups;
  Floats scaled[kVectors][kPairTokens];
  Unroll<Panel::kGroups>([&](auto group) FMOE_FLAT {
    typename Unit::Sums sums[kVectors][kPairTokens][2];
    if constexpr (kHalves == 1) {
      Unroll<kVectors * kPairTokens * 2>([&](auto i) FMOE_FLAT { (&sums[0][0][0])[i] = Unit::Start(); });
      TallGroup<kWeight, kKind, kVectors, kHeight, kDecoded>(from, group * kGroupWords, words, sums);
    } else {
      TallChain<kWeight, kKind, kVectors, kHeight>(from, group * kGroupWords, words, 0, sums);
      TallChain<kWeight, kKind, kVectors, kHeight>(from, group * kGroupWords, words, 1, sums);
    }
    words += kGroupWords * Planes(kKind) * kHeight;
    Unroll<kPairTokens>([&](auto t) FMOE_FLAT {
      Floats of_group[kVectors];
      Unroll<kVectors>([&](auto v) FMOE_FLAT { of_group[v] = Unit::Finish(sums[v][t][0], sums[v][t][1]); });
      if constexpr (DecodesRows<kWeight>()) {
        RowsInOrder(of_group[0], of_group[1]);
      }
      Unroll<kVectors>([&](auto v) FMOE_FLAT {
        scaled[v][t] =
            Panel::AddGroup(of_group[v], group_scales[v], group, kHalves == 2 ? v : 0, scaled[v][t]);
      });
    });
  });
  constexpr int kApart = kHalves == 2 ? kLanes : kMaxHeight * 16;  // from a vector's totals to the next ones
  Unroll<kVectors * kPairTokens>([&](auto i) FMOE_FLAT {
    constexpr int kVector = decltype(i)() / kPairTokens, kToken = decltype(i)() % kPairTokens;
    float* total = out + kVector * kApart + kToken * 16;
    Store(total, AddUnit<kKind>(Load(total), scaled[kVector][kToken], scales + kToken));
  });
}

/// Words of a unit, where tall tiles load them. A function of its own: inlined, its tables and masks took the
/// registers of the sums, at half of the speed.
template <WeightKernel kWeight, typename Unit>
__attribute__((noinline)) void DecodeUnit(const uint8_t* unit, uint8_t* words) {
  using Panel = FloatPanel<kWeight, Unit>;
  for (int v = 0; v < Panel::kVectors; ++v, unit += 64) {
    if constexpr (DecodesRows<kWeight>()) {
      Ints pairs[2][2];
      DecodeE4m3Rows(unit, pairs);
      Unroll<8>([&](auto i) FMOE_FLAT {
        constexpr int kWord = decltype(i)() / 2, kHalf = decltype(i)() % 2;
        Unit::StoreWord(words + 64 * kWord + 32 * kHalf, WordOfPair<kWord % 2>(pairs[kWord / 2][kHalf]));
      });
    } else {
      Unroll<kHalves>([&](auto half) FMOE_FLAT {
        typename Unit::Word weights[Panel::kVectorWords];
        Unit::template Decode<kWeight>(unit, half, weights);
        Unroll<Panel::kVectorWords>(
            [&](auto i) FMOE_FLAT { Unit::StoreWord(words + 64 * i + 32 * half, weights[i]); });
      });
    }
    words += 64 * Panel::kVectorWords;
  }
}

/// As many lines as stand in front of a stripe, ahead of it: blocks ask for as many as they have themselves.
template <typename Panel>
FMOE_INLINE void AskForHeader(const uint8_t* stripe, int64_t blocks, const TileView* tile) {
  const uint8_t* ahead = InStretch(stripe + tile->prefetch, tile);
  for (int64_t at = 0; at < Panel::HeaderBytes(blocks); at += 64) {
    Prefetch(ahead + at);
  }
}

/// Whether four tokens meet words that are decoded once and stand in L1, as tall tiles have them: where
/// decoding takes longer than four multiplications, whose sums leave it no registers (Zen 3, e4m3, weights in
/// L2: 5.6 -> 7.6 GB/s).
template <WeightKernel kWeight, int kHeight>
constexpr bool StoresWords() {
  return kHeight == kPairTokens && DecodesRows<kWeight>();
}

template <int kHeight>
FMOE_INLINE void StoreTotals(const Floats (*totals)[kHeight], float* out) {
  Unroll<kHalves * kHeight>([&](auto i) FMOE_FLAT {
    constexpr int kHalf = decltype(i)() / kHeight, kToken = decltype(i)() % kHeight;
    Store(out + kToken * 16 + kHalf * kLanes, totals[kHalf][kToken]);
  });
}

/// Short tiles: stripes one after the other.
template <WeightKernel kWeight, TileKind kKind, int kHeight>
void FloatDot(const uint8_t* stripes, int64_t num_stripes, int64_t blocks, const TileView* tile, float* out) {
  using Panel = FloatPanel<kWeight, typename FloatUnit<kKind>::Type>;
  constexpr bool kRows = DecodesRows<kWeight>(), kStored = StoresWords<kWeight, kHeight>();
  constexpr int kAtOnce = IsSideBySide<kWeight, kKind, kHeight>() && !kRows ? 2 : 1;  // units
  constexpr int kBlocks = kAtOnce > Panel::kUnits ? kAtOnce / Panel::kUnits : 1;
  constexpr int kUnitWords = Panel::kWords * Planes(kKind) * kHeight;
  alignas(64) uint8_t stored[kStored ? Panel::kWords * 64 : 64];
  for (int64_t stripe = 0; stripe < num_stripes; ++stripe, out += kHeight * 16) {
    const int32_t* words = (const int32_t*)tile->codes;
    const float* scales = tile->scale;
    Floats totals[kHalves][kHeight];
    Unroll<kHalves * kHeight>([&](auto i) FMOE_FLAT { (&totals[0][0])[i] = Zero(); });
    if constexpr (kStored) {
      StoreTotals<kHeight>(totals, out);
    }
    const uint8_t* const stripe_begin = stripes;
    AskForHeader<Panel>(stripes, blocks, tile);
    stripes += Panel::HeaderBytes(blocks);
    int64_t block = 0;
    for (; block + kBlocks <= blocks; block += kBlocks) {
      const uint8_t* const group_scales = Panel::ScalesOf(stripe_begin, stripes, block);
      constexpr int kFirst = AsksByVectors<kWeight, kKind, kHeight>() ? kBlocks * Panel::kCodeBytes : 0;
      const int64_t ahead =
          PrefetchBlock<kBlocks * Panel::kBlockBytes, kFirst>(stripes, kBlocks * Panel::kBlockBytes, tile);
      for (int unit = 0; unit < Panel::kUnits; unit += kAtOnce) {
        if constexpr (kStored) {
          DecodeUnit<kWeight, F32Unit>(stripes + unit * Panel::kUnitBytes, stored);
          const uint8_t* const from[kHalves] = {stored, stored + 32};
          const uint8_t* const of_halves[kHalves] = {group_scales, group_scales};
          TallUnit<kWeight, kKind, kHalves, kHeight, true>(from, of_halves, words, scales, out);
        } else if constexpr (kRows) {
          ShortUnitRows<kWeight, kHeight>(stripes + unit * Panel::kUnitBytes, group_scales, ahead, words,
                                          totals);
        } else {
          Unroll<kHalves>([&](auto half) FMOE_FLAT {
            ShortUnits<kWeight, kKind, kHeight, kAtOnce>(stripes + unit * Panel::kUnitBytes, group_scales,
                                                         ahead, half, words, scales, totals[half]);
          });
        }
        words += kAtOnce * kUnitWords;
        scales += kAtOnce * kHeight;
      }
      stripes += kBlocks * Panel::kBlockBytes;
    }
    if (kBlocks > 1 && block < blocks) {
      const int64_t ahead = InStretch(stripes + tile->prefetch, tile) - stripes;
      const uint8_t* const group_scales = Panel::ScalesOf(stripe_begin, stripes, block);
      Unroll<kHalves>([&](auto half) FMOE_FLAT {
        ShortUnits<kWeight, kKind, kHeight, 1>(stripes, group_scales, ahead, half, words, scales,
                                               totals[half]);
      });
      stripes += Panel::kBlockBytes;
    }
    if constexpr (!kStored) {
      StoreTotals<kHeight>(totals, out);
    }
    tile = tile->turn == 0 ? tile : tile->turn;
  }
}

template <WeightKernel kWeight, TileKind kKind, int kStripes, bool kDecoded>
FMOE_INLINE void TallTiles(const uint8_t* stripes, int64_t stripe_stride, int64_t blocks,
                           const TileView* tiles, int64_t num_tiles, int64_t tile_sums, float* out) {
  using Unit = typename FloatUnit<kKind>::Type;
  using Panel = FloatPanel<kWeight, Unit>;
  constexpr bool kBuffered = kDecoded && !Panel::kDirect;
  constexpr int kUnitWords = Panel::kWords * Planes(kKind) * kMaxHeight;
  constexpr int kVectors = kStripes * kHalves;
  alignas(64) uint8_t buffer[kStripes][kBuffered ? Panel::kWords * 64 : 64];
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    for (int i = 0; i < kVectors * kMaxHeight; ++i) {
      Store(out + tile * tile_sums + i * kLanes, Zero());
    }
  }
  const int64_t units = blocks * Panel::kUnits;
  const int64_t lines_at_once = LinesOf(tiles[0], units).at_once;
  for (int64_t unit = 0; unit < units; ++unit) {
    const uint8_t *group_scales[kVectors], *from[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int s = v / kHalves, half = v % kHalves;
      const uint8_t* stripe = stripes + s * stripe_stride;
      const uint8_t* block = stripe + Panel::HeaderBytes(blocks) + unit / Panel::kUnits * Panel::kBlockBytes;
      group_scales[v] = Panel::ScalesOf(stripe, block, unit / Panel::kUnits);
      from[v] = block + unit % Panel::kUnits * Panel::kUnitBytes;
      if constexpr (kBuffered) {
        if (half == 0) {
          DecodeUnit<kWeight, Unit>(from[v], buffer[s]);
        }
        from[v] = buffer[s];
      }
      from[v] += 32 * half;
    }
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int32_t* words = (const int32_t*)tiles[tile].codes + unit * kUnitWords;
      const float* scales = tiles[tile].scale + (kKind == kTileF32 ? 0 : unit * kMaxHeight);
      NextLines next = {tiles[tile].next + unit * lines_at_once * 64,
                        tiles[tile].next + tiles[tile].next_bytes, lines_at_once, tiles[tile].next_into_l2};
      PrefetchLines(next);
      for (int first = 0; first < kMaxHeight; first += kPairTokens) {
        TallUnit<kWeight, kKind, kVectors, kMaxHeight, kDecoded>(
            from, group_scales, words + first, scales + first, out + tile * tile_sums + first * 16);
      }
    }
  }
}

/// Up to so many tiles a block of 16-bit weights is faster decoded for every four tokens in fp32, two
/// operations for 32 values, than stored and loaded: 93 instead of 73 % of the fp32 peak with one tile (Zen
/// 5), 90 with eight.
constexpr int kFewTiles = 1;

template <WeightKernel kWeight, TileKind kKind, int kStripes>
FMOE_INLINE void TallStripes(const uint8_t* stripes, int64_t stripe_stride, int64_t blocks,
                             const TileView* tiles, int64_t num_tiles, int64_t tile_sums, float* out) {
  if constexpr (kKind == kTileF32 && VectorK(kWeight) == 2 && kHalves == 1) {
    if (num_tiles <= kFewTiles) {
      TallTiles<kWeight, kKind, kStripes, false>(stripes, stripe_stride, blocks, tiles, num_tiles, tile_sums,
                                                 out);
      return;
    }
  }
  TallTiles<kWeight, kKind, kStripes, true>(stripes, stripe_stride, blocks, tiles, num_tiles, tile_sums, out);
}

template <WeightKernel kWeight, TileKind kKind>
void FloatBatch(const uint8_t* stripes, int64_t num_stripes, int64_t stripe_stride, int64_t blocks,
                const TileView* tiles, int64_t num_tiles, float* out) {
  constexpr int kStripeSums = kMaxHeight * 16;
  const int64_t tile_sums = num_stripes * kStripeSums;
  constexpr int kAtOnce = 2 / kHalves;
  for (; num_stripes >= kAtOnce; num_stripes -= kAtOnce) {
    TallStripes<kWeight, kKind, kAtOnce>(stripes, stripe_stride, blocks, tiles, num_tiles, tile_sums, out);
    stripes += kAtOnce * stripe_stride;
    out += kAtOnce * kStripeSums;
  }
  if (kAtOnce == 2 && num_stripes > 0) {
    TallStripes<kWeight, kKind, 1>(stripes, stripe_stride, blocks, tiles, num_tiles, tile_sums, out);
  }
}

/// One tall tile.
template <WeightKernel kWeight, TileKind kKind>
void FloatDotTall(const uint8_t* stripes, int64_t num_stripes, int64_t blocks, const TileView* tile,
                  float* out) {
  using Panel = FloatPanel<kWeight, typename FloatUnit<kKind>::Type>;
  const int64_t stripe_stride = Panel::HeaderBytes(blocks) + blocks * Panel::kBlockBytes;
  FloatBatch<kWeight, kKind>(stripes, num_stripes, stripe_stride, blocks, tile, 1, out);
}

template <WeightKernel kWeight, TileKind kKind>
constexpr void SetFloatDots(KernelTable& table) {
  table.dot[kWeight][kKind][0] = &FloatDot<kWeight, kKind, 1>;
  table.dot[kWeight][kKind][1] = &FloatDot<kWeight, kKind, 2>;
  table.dot[kWeight][kKind][2] = &FloatDot<kWeight, kKind, 4>;
  table.dot[kWeight][kKind][3] = &FloatDotTall<kWeight, kKind>;
  table.batch[kWeight][kKind] = &FloatBatch<kWeight, kKind>;
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
