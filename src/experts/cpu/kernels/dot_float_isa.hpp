#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/dot_prefetch_isa.hpp"
#include "experts/cpu/kernels/float_units_isa.hpp"

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
/// With one plane the chains are words 0, 2, 4, ... and 1, 3, 5, ...: a single chain of additions would leave
/// a unit idle for most of its latency. With two planes they are the planes. The order is the same at every
/// height and for any number of tiles.
///
/// Tall tiles come together: a block of two stripes is decoded once into 8 or 16 KiB of L1 and meets all
/// tokens of the expert, four at a time (16 sums in registers: an instruction takes 4 to 6 cycles, and two
/// begin in each), before the next block. Totals stay in L1 beside it.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

template <WeightKernel kWeight, typename Unit>
struct FloatPanel {
  static constexpr bool kDirect = VectorK(kWeight) == Unit::kWordK;  // words stand in the panel
  static constexpr int kWords = 64 / Unit::kWordK;                   // of a block
  static constexpr int kVectorWords = VectorK(kWeight) / Unit::kWordK;
  static constexpr int kVectors = 64 / VectorK(kWeight);
  static constexpr int kCodeBytes = kVectors * 64;
  static constexpr bool kE8m0 = kWeight == kWeightMxfp8 || kWeight == kWeightMxfp4;
  static constexpr bool kScaled = kE8m0 || kWeight == kWeightNvfp4 || kWeight == kWeightE4m3Scaled;
  static constexpr int kGroups = kE8m0 ? 2 : kWeight == kWeightNvfp4 ? 4 : 1;  // of sums in a block
  static constexpr int kScaleBytes = !kScaled ? 0 : kE8m0 ? 32 : 64;
  static constexpr int kBlockBytes = kCodeBytes + kScaleBytes;

  FMOE_INLINE Floats Scale(const uint8_t* block, int group, int half) {
    if constexpr (kE8m0) {
      return LoadE8m0Scales(block + kCodeBytes + group * 16, half);
    } else if constexpr (kWeight == kWeightNvfp4) {
      return LoadE4m3Scales(block + kCodeBytes + group * 16, half);
    } else {
      return LoadFloatScales(block + kCodeBytes, half);
    }
  }

  /// The sum of a group of a block with its scales, beside the row scales that wait for the end. `so_far`:
  /// that of the groups before.
  FMOE_INLINE Floats AddGroup(Floats sum, const uint8_t* block, int group, int half, Floats so_far) {
    if constexpr (!kScaled) {
      return sum;
    } else {
      const Floats scale = Scale(block, group, half);
      return group == 0 ? Multiply(sum, scale) : MultiplyAdd(sum, scale, so_far);
    }
  }
};

/// The total with the sum of a block. `token_scale` counts for 16-bit tiles.
template <TileKind kKind>
FMOE_INLINE Floats AddBlock(Floats total, Floats sum, const float* token_scale) {
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

/// kBlocks adjacent blocks of a stripe for a short tile, decoded as they are met, one half of the rows.
/// Blocks have sums of their own: side by side, their chains of additions overlap.
template <WeightKernel kWeight, TileKind kKind, int kHeight, int kBlocks>
FMOE_INLINE void ShortBlocks(const uint8_t* block, int half, const int32_t* words, const float* scales,
                             Floats* totals) {
  using Unit = typename FloatUnit<kKind>::Type;
  using Panel = FloatPanel<kWeight, Unit>;
  constexpr int kStep = Panel::kVectorWords == 1 ? 2 : 1;  // vectors at a time, so that chains are constants
  constexpr int kStepWords = kStep * Panel::kVectorWords;
  constexpr int kGroupVectors = Panel::kVectors / Panel::kGroups;
  constexpr int kWordWords = Planes(kKind) * kHeight;  // of a tile, for a word of weights
  Floats scaled[kBlocks][kHeight];  // later blocks wait, so that additions keep their order
  Unroll<Panel::kGroups>([&](auto group) FMOE_FLAT {
    typename Unit::Sums sums[kBlocks][1][kHeight][2];
    Unroll<kBlocks * kHeight * 2>([&](auto i) FMOE_FLAT { (&sums[0][0][0][0])[i] = Unit::Start(); });
    const uint8_t* vectors = block + group * kGroupVectors * 64;
    for (int v = 0; v < kGroupVectors; v += kStep, vectors += kStep * 64, words += kStepWords * kWordWords) {
      typename Unit::Word weights[kBlocks][kStepWords];
      Unroll<kBlocks>([&](auto b) FMOE_FLAT {
        Unroll<kStep>([&](auto i) FMOE_FLAT {
          Unit::template Decode<kWeight>(vectors + b * Panel::kBlockBytes + i * 64, half,
                                         weights[b] + i * Panel::kVectorWords);
        });
      });
      Unroll<kStepWords * kBlocks>([&](auto i) FMOE_FLAT {
        constexpr int kWord = decltype(i)() / kBlocks, kBlock = decltype(i)() % kBlocks;
        DotWord<kKind, 1, kHeight, kHeight>(kWord, weights[kBlock] + kWord,
                                            words + (kBlock * Panel::kWords + kWord) * kWordWords,
                                            sums[kBlock]);
      });
    }
    Unroll<kBlocks * kHeight>([&](auto i) FMOE_FLAT {
      constexpr int kBlock = decltype(i)() / kHeight, kToken = decltype(i)() % kHeight;
      const auto& chains = sums[kBlock][0][kToken];
      scaled[kBlock][kToken] =
          Panel::AddGroup(Unit::Finish(chains[0], chains[1]), block + kBlock * Panel::kBlockBytes, group,
                          half, scaled[kBlock][kToken]);
    });
  });
  Unroll<kBlocks>([&](auto b) FMOE_FLAT {
    Unroll<kHeight>([&](auto t) FMOE_FLAT {
      totals[t] = AddBlock<kKind>(totals[t], scaled[b][t], scales + b * kHeight + t);
    });
  });
}

/// Whether a tile takes two blocks at a time. A block of 16 or 32 bits a value takes longer to arrive than
/// one or two tokens' chains of additions: there, two blocks are only two streams to read, and BF16 got 85 %
/// of the read rate instead of 95 (Zen 5).
template <WeightKernel kWeight, int kHeight>
constexpr bool IsSideBySide() {
  return kHeight <= 2 && VectorK(kWeight) == 4;
}

/// Short tiles: stripes one after the other.
template <WeightKernel kWeight, TileKind kKind, int kHeight>
void FloatDot(const uint8_t* stripes, int64_t num_stripes, int64_t blocks, const TileView* tile, float* out) {
  using Panel = FloatPanel<kWeight, typename FloatUnit<kKind>::Type>;
  constexpr int kBlocks = IsSideBySide<kWeight, kHeight>() ? 2 : 1;
  constexpr int kBlockWords = Panel::kWords * Planes(kKind) * kHeight;
  for (int64_t stripe = 0; stripe < num_stripes; ++stripe, out += kHeight * 16) {
    const int32_t* words = (const int32_t*)tile->codes;
    const float* scales = tile->scale;
    Floats totals[kHalves][kHeight];
    Unroll<kHalves * kHeight>([&](auto i) FMOE_FLAT { (&totals[0][0])[i] = Zero(); });
    int64_t block = 0;
    for (; block + kBlocks <= blocks; block += kBlocks) {
      PrefetchBlock<kBlocks * Panel::kBlockBytes>(stripes, kBlocks * Panel::kBlockBytes, tile);
      Unroll<kHalves>([&](auto half) FMOE_FLAT {
        ShortBlocks<kWeight, kKind, kHeight, kBlocks>(stripes, half, words, scales, totals[half]);
      });
      stripes += kBlocks * Panel::kBlockBytes;
      words += kBlocks * kBlockWords;
      scales += kBlocks * kHeight;
    }
    if (block < blocks) {
      Unroll<kHalves>([&](auto half) FMOE_FLAT {
        ShortBlocks<kWeight, kKind, kHeight, 1>(stripes, half, words, scales, totals[half]);
      });
      stripes += Panel::kBlockBytes;
    }
    Unroll<kHalves * kHeight>([&](auto i) FMOE_FLAT {
      constexpr int kHalf = decltype(i)() / kHeight, kToken = decltype(i)() % kHeight;
      Store(out + kToken * 16 + kHalf * kLanes, totals[kHalf][kToken]);
    });
    tile = tile->turn == 0 ? tile : tile->turn;
  }
}

/// Tokens of a tall tile that meet two stripes at a time.
constexpr int kPairTokens = 4;

/// Four tokens of a tall tile with one block of kStripes stripes, into their totals. `from`: words that are
/// decoded, or the block itself.
template <WeightKernel kWeight, TileKind kKind, int kStripes, bool kDecoded>
FMOE_INLINE void TallBlock(const uint8_t* const* from, const uint8_t* const* blocks, const int32_t* words,
                           const float* scales, float* out) {
  using Unit = typename FloatUnit<kKind>::Type;
  using Panel = FloatPanel<kWeight, Unit>;
  constexpr int kWordWords = Planes(kKind) * kMaxHeight, kGroupWords = Panel::kWords / Panel::kGroups;
  Floats scaled[kStripes][kPairTokens];
  Unroll<Panel::kGroups>([&](auto group) FMOE_FLAT {
    typename Unit::Sums sums[kStripes][kPairTokens][2];
    Unroll<kStripes * kPairTokens * 2>([&](auto i) FMOE_FLAT { (&sums[0][0][0])[i] = Unit::Start(); });
    for (int first = group * kGroupWords; first < (group + 1) * kGroupWords; first += 2) {
      typename Unit::Word both[kStripes][2];
      if constexpr (!kDecoded) {
        Unroll<kStripes>(
            [&](auto s) FMOE_FLAT { Unit::template Decode<kWeight>(from[s] + first / 2 * 64, 0, both[s]); });
      }
      Unroll<2>([&](auto word) FMOE_FLAT {
        typename Unit::Word weights[kStripes];
        Unroll<kStripes>([&](auto s) FMOE_FLAT {
          weights[s] = kDecoded ? Unit::LoadWord(from[s] + (first + word) * 64) : both[s][word];
        });
        DotWord<kKind, kStripes, kPairTokens, kMaxHeight>(word, weights, words + word * kWordWords, sums);
      });
      words += 2 * kWordWords;
    }
    Unroll<kStripes * kPairTokens>([&](auto i) FMOE_FLAT {
      constexpr int kStripe = decltype(i)() / kPairTokens, kToken = decltype(i)() % kPairTokens;
      const auto& chains = sums[kStripe][kToken];
      Floats& into = scaled[kStripe][kToken];
      into = Panel::AddGroup(Unit::Finish(chains[0], chains[1]), blocks[kStripe], group, 0, into);
    });
  });
  Unroll<kStripes * kPairTokens>([&](auto i) FMOE_FLAT {
    constexpr int kStripe = decltype(i)() / kPairTokens, kToken = decltype(i)() % kPairTokens;
    float* total = out + (kStripe * kMaxHeight + kToken) * 16;
    Store(total, AddBlock<kKind>(Load(total), scaled[kStripe][kToken], scales + kToken));
  });
}

/// Words of a block, where tall tiles load them. A function of its own: inlined, its tables and masks took
/// the registers of the sums, at half of the speed.
template <WeightKernel kWeight, typename Unit>
__attribute__((noinline)) void DecodeBlock(const uint8_t* block, uint8_t* words) {
  using Panel = FloatPanel<kWeight, Unit>;
  for (int v = 0; v < Panel::kVectors; ++v, block += 64) {
    typename Unit::Word weights[Panel::kVectorWords];
    Unit::template Decode<kWeight>(block, 0, weights);
    Unroll<Panel::kVectorWords>([&](auto i) FMOE_FLAT { Unit::StoreWord(words + 64 * i, weights[i]); });
    words += 64 * Panel::kVectorWords;
  }
}

template <WeightKernel kWeight, TileKind kKind, int kStripes, bool kDecoded>
FMOE_INLINE void TallTiles(const uint8_t* stripes, int64_t stripe_stride, int64_t blocks,
                           const TileView* tiles, int64_t num_tiles, int64_t tile_sums, float* out) {
  using Unit = typename FloatUnit<kKind>::Type;
  using Panel = FloatPanel<kWeight, Unit>;
  constexpr bool kBuffered = kDecoded && !Panel::kDirect;
  constexpr int kBlockWords = Panel::kWords * Planes(kKind) * kMaxHeight;
  alignas(64) uint8_t buffer[2][kBuffered ? Panel::kWords * 64 : 64];
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    for (int i = 0; i < kStripes * kMaxHeight; ++i) {
      Store(out + tile * tile_sums + i * 16, Zero());
    }
  }
  const int64_t lines_at_once = LinesOf(tiles[0], blocks).at_once;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t offset = block * Panel::kBlockBytes;
    const uint8_t *at[2], *from[2];
    for (int s = 0; s < kStripes; ++s) {
      at[s] = from[s] = stripes + s * stripe_stride + offset;
      if constexpr (kBuffered) {
        from[s] = buffer[s];
        DecodeBlock<kWeight, Unit>(at[s], buffer[s]);
      }
    }
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int32_t* words = (const int32_t*)tiles[tile].codes + block * kBlockWords;
      const float* scales = tiles[tile].scale + (kKind == kTileF32 ? 0 : block * kMaxHeight);
      NextLines next = {tiles[tile].next + block * lines_at_once * 64,
                        tiles[tile].next + tiles[tile].next_bytes, lines_at_once, tiles[tile].next_into_l2};
      PrefetchLines(next);
      for (int first = 0; first < kMaxHeight; first += kPairTokens) {
        TallBlock<kWeight, kKind, kStripes, kDecoded>(from, at, words + first, scales + first,
                                                      out + tile * tile_sums + first * 16);
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
  if constexpr (kKind == kTileF32 && VectorK(kWeight) == 2) {
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
  for (; num_stripes >= 2; num_stripes -= 2, stripes += 2 * stripe_stride, out += 2 * kStripeSums) {
    TallStripes<kWeight, kKind, 2>(stripes, stripe_stride, blocks, tiles, num_tiles, tile_sums, out);
  }
  if (num_stripes > 0) {
    TallStripes<kWeight, kKind, 1>(stripes, stripe_stride, blocks, tiles, num_tiles, tile_sums, out);
  }
}

/// One tall tile.
template <WeightKernel kWeight, TileKind kKind>
void FloatDotTall(const uint8_t* stripes, int64_t num_stripes, int64_t blocks, const TileView* tile,
                  float* out) {
  using Panel = FloatPanel<kWeight, typename FloatUnit<kKind>::Type>;
  FloatBatch<kWeight, kKind>(stripes, num_stripes, blocks * Panel::kBlockBytes, blocks, tile, 1, out);
}

template <WeightKernel kWeight, TileKind kKind>
constexpr void SetFloatDots(KernelTable& table) {
  table.dot[kWeight][kKind][0] = &FloatDot<kWeight, kKind, 1>;
  table.dot[kWeight][kKind][1] = &FloatDot<kWeight, kKind, 2>;
  table.dot[kWeight][kKind][2] = &FloatDot<kWeight, kKind, 4>;
  if constexpr (kHalves == 1) {  // eight tokens need the 32 registers of AVX-512
    table.dot[kWeight][kKind][3] = &FloatDotTall<kWeight, kKind>;
    table.batch[kWeight][kKind] = &FloatBatch<kWeight, kKind>;
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
