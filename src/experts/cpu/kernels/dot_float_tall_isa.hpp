#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/float_panel_isa.hpp"

/// Tall tiles of weights that become floats (dot_float_isa.hpp) come together: a block of two stripes (of
/// one, where registers hold half of it) is decoded once into 4 to 16 KiB of L1 and meets all tokens of the
/// expert, four at a time (16 sums in registers: an instruction takes 4 to 6 cycles, and two begin in each;
/// AVX2 has 8, one chain after the other), before the next block. Totals stay in L1 beside it.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

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
      Unroll<kVectors>([&](int v) FMOE_FLAT {
        Unit::template Decode<kWeight>(from[v] + (first + word) / 2 * 64, 0, both[v]);
      });
    }
    Unroll<2>([&](int i) FMOE_FLAT {
      typename Unit::Word weights[kVectors];
      Unroll<kVectors>([&](int v) FMOE_FLAT {
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
  constexpr int kGroupWords = Panel::kWords / Panel::kGroups, kStep = 8;  // words unrolled
  static_assert(Planes(kKind) == 1, "planes are chains");
  Sums of_chain[kVectors][kPairTokens];
  Unroll<kVectors * kPairTokens>([&](int i) FMOE_FLAT { (&of_chain[0][0])[i] = Unit::Start(); });
  for (int word = chain; word < kGroupWords; word += kStep) {
    Unroll<kStep / 2>([&](int i) FMOE_FLAT {
      typename Unit::Word weights[kVectors];
      Unroll<kVectors>([&](int v)
                           FMOE_FLAT { weights[v] = Unit::LoadWord(from[v] + (first + word + 2 * i) * 64); });
      Unroll<kPairTokens>([&](int t) FMOE_FLAT {
        const auto value = Unit::Broadcast(words + (word + 2 * i) * kHeight + t);
        Unroll<kVectors>([&](int v)
                             FMOE_FLAT { of_chain[v][t] = Unit::Dot(weights[v], value, of_chain[v][t]); });
      });
    });
  }
  Unroll<kVectors * kPairTokens>([&](int i) FMOE_FLAT {
    const int vector = i / kPairTokens, token = i % kPairTokens;
    sums[vector][token][chain] = of_chain[vector][token];
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
  Unroll<Panel::kGroups>([&](int group) FMOE_FLAT {
    typename Unit::Sums sums[kVectors][kPairTokens][2];
    if constexpr (kHalves == 1) {
      Unroll<kVectors * kPairTokens * 2>([&](int i) FMOE_FLAT { (&sums[0][0][0])[i] = Unit::Start(); });
      TallGroup<kWeight, kKind, kVectors, kHeight, kDecoded>(from, group * kGroupWords, words, sums);
    } else {
      TallChain<kWeight, kKind, kVectors, kHeight>(from, group * kGroupWords, words, 0, sums);
      TallChain<kWeight, kKind, kVectors, kHeight>(from, group * kGroupWords, words, 1, sums);
    }
    words += kGroupWords * Planes(kKind) * kHeight;
    Unroll<kPairTokens>([&](int t) FMOE_FLAT {
      Floats of_group[kVectors];
      Unroll<kVectors>([&](int v) FMOE_FLAT { of_group[v] = Unit::Finish(sums[v][t][0], sums[v][t][1]); });
      Unroll<kVectors>([&](int v) FMOE_FLAT {
        scaled[v][t] =
            Panel::AddGroup(of_group[v], group_scales[v], group, kHalves == 2 ? v : 0, scaled[v][t]);
      });
    });
  });
  constexpr int kApart = kHalves == 2 ? kLanes : kMaxHeight * 16;  // from a vector's totals to the next ones
  Unroll<kVectors * kPairTokens>([&](int i) FMOE_FLAT {
    const int vector = i / kPairTokens, token = i % kPairTokens;
    float* total = out + vector * kApart + token * 16;
    Store(total, AddUnit<kKind>(Load(total), scaled[vector][token], scales + token));
  });
}

/// Words of a unit, where tall tiles load them. A function of its own: inlined, its tables and masks took the
/// registers of the sums, at half of the speed.
template <WeightKernel kWeight, typename Unit>
__attribute__((noinline)) void DecodeUnit(const uint8_t* unit, uint8_t* words) {
  using Panel = FloatPanel<kWeight, Unit>;
  for (int v = 0; v < Panel::kVectors; ++v, unit += 64) {
    Unroll<kHalves>([&](int half) FMOE_FLAT {
      typename Unit::Word weights[Panel::kVectorWords];
      Unit::template Decode<kWeight>(unit, half, weights);
      Unroll<Panel::kVectorWords>([&](int i)
                                      FMOE_FLAT { Unit::StoreWord(words + 64 * i + 32 * half, weights[i]); });
    });
    words += 64 * Panel::kVectorWords;
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
      const TileView::TallTile& tall = tiles[tile].tall_tile;
      NextLines next = {tall.next + unit * lines_at_once * 64, tall.next + tall.next_bytes, lines_at_once,
                        tall.next_into_l2};
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

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
