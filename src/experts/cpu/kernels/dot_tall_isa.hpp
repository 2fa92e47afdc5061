#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/tall_units_isa.hpp"

/// Tall tiles and integer weights: two stripes meet four tokens or three (two of 15 bits) from the first k to
/// the last.
///
///              k ->                    one unit = 64 k
///     stripes  [codes | scales] x 2    --decode-->  vectors of bytes, in registers or from L1
///     tokens   [64 k] x 4              rows where they stand: each word is broadcast for both stripes
///     sums     [2][4] fp32             in registers until the stripes end
///
/// What counts on Zen 5 is the number of stores: a 512-bit store takes the place of two `vpdpbusd` (24 of
/// these and 6 stores take 18 cycles, without stores 12; the same with fused multiply-adds, not with
/// operations of two operands). Sums that passed through L1 after each 64 k cost a tenth of the speed.
/// What counts next are multiplications: two ports make `vpdpbusd`, and products of floats too.
///
/// Where the plan says so, eight units at a time are decoded into L1 for all tiles instead ("slabs"), and
/// meet twice as many tokens ("wide"), with most sums of floats in L1: on cores of Intel stores are cheap,
/// and what counts is the number of instructions beside `vpdpbusd`, since a core that is shared begins some
/// three in a cycle.
///
/// Groups end as in all kernels of integers (GroupEnd).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// out[stripe][token][16] of kTokens tokens of a tile from `first` on.
template <WeightKernel kWeight, bool kHasZeros, TileKind kKind, int kTokens>
FMOE_KERNEL void TallPass(const uint8_t* stripes, int64_t stride, int64_t blocks, const TileView& tile,
                          int first, NextLines& lines, float* out) {
  using Pair = PackedPair<kWeight, kHasZeros>;
  using Panel = IntegerPanel<kWeight>;
  using Tokens = TallTokens<Pair, kKind, kTokens>;
  Pair pair = {stripes, {}, stride, Panel::TableOf(tile.group_scales)};
  const GroupScales type = Pair::TypeOf(tile.group_scales);
  const int64_t block_bytes = Panel::BlockBytes(type);
  NextLines next = lines;
  Tokens tokens = Tokens::At(tile, blocks * Panel::kUnits, 0, first);
  Floats sums[2][kTokens];
  Unroll<2 * kTokens>([&](int i) FMOE_FLAT { (&sums[0][0])[i] = Zero(); });
  for (int64_t block = 0; block < blocks; ++block) {
    PrefetchLines(next);
    const uint8_t* first_k = stripes + block * block_bytes;
    pair.codes = first_k;
    for (int unit = 0; unit < Panel::kUnits; ++unit, pair.codes += Panel::kUnitBytes) {
      pair.params = Panel::ParamsOf(first_k, unit, type);
      TallUnit<Pair, kKind, kTokens>(pair, tokens, sums);
      Tokens::Advance(tokens, 1);
    }
  }
  Unroll<2 * kTokens>([&](int i) FMOE_FLAT {
    const int stripe = i / kTokens, token = i % kTokens;
    Store(out + (stripe * kMaxHeight + first + token) * 16, sums[stripe][token]);
  });
  lines = next;
}

/// pass(first token, Index<tokens>) for the tokens of a tile, as many at a time as meet the weights together.
/// kMayBeWide: where the tile says so, twice as many.
template <TileKind kKind, bool kMayBeWide, typename Pass>
FMOE_INLINE void ForEachPass(const TileView& tile, Pass pass) {
  for (int first = 0, count = 0; first < tile.tokens; first += count) {
    if constexpr (kMayBeWide) {
      if (tile.tall_tile.wide_slabs && tile.tokens - first > kTallTokens<kKind>) {
        count = kWideTokens<kKind>;
        pass(first, Index<kWideTokens<kKind>>());
        continue;
      }
    }
    count = NextTokens<kKind>(tile.tokens - first);
    if (count == kFewerTokens<kKind>) {
      pass(first, Index<kFewerTokens<kKind>>());
    } else {
      pass(first, Index<kTallTokens<kKind>>());
    }
  }
}

/// How often weights that are decoded once meet tokens of a tile.
template <TileKind kKind>
FMOE_INLINE int64_t SlabPasses(const TileView& tile) {
  int64_t passes = 0;
  ForEachPass<kKind, true>(tile, [&](int, auto) { ++passes; });
  return passes;
}

/// Units that are decoded for all tiles: 17 to 20 KB of L1, beside a tile.
constexpr int kSlabUnits = 8;

/// `units` decoded units with those of kTokens tokens of a tile, added to `out` or starting it.
template <class Pair, TileKind kKind, int kTokens>
FMOE_KERNEL void SlabPass(const Pair* pairs, int64_t all_units, int64_t first_unit, int64_t units,
                          const TileView& tile, int first, NextLines& lines, float* out) {
  using Tokens = TallTokens<Pair, kKind, kTokens>;
  Tokens tokens = Tokens::At(tile, all_units, first_unit, first);
  NextLines next = lines;
  float* place = out + first * 16;
  Floats sums[2][kTokens];
  Unroll<2 * kTokens>([&](int i) FMOE_FLAT {
    const int stripe = i / kTokens, token = i % kTokens;
    sums[stripe][token] = first_unit == 0 ? Zero() : Load(place + (stripe * kMaxHeight + token) * 16);
  });
  for (int64_t unit = 0; unit < units; ++unit) {
    PrefetchLines(next);
    TallUnit<Pair, kKind, kTokens>(pairs[unit], tokens, sums);
    Tokens::Advance(tokens, 1);
  }
  Unroll<2 * kTokens>([&](int i) FMOE_FLAT {
    const int stripe = i / kTokens, token = i % kTokens;
    Store(place + (stripe * kMaxHeight + token) * 16, sums[stripe][token]);
  });
  lines = next;
}

template <class Packed>
using DecodedPairOf = DecodedPair<Packed::kGroup, Packed::kScales, Packed::kZeros, Packed::kMinima>;

/// `count` units of two stripes from `first` on. A function of its own, so that formats share all that is
/// behind it.
template <WeightKernel kWeight, bool kHasZeros>
FMOE_KERNEL void DecodePairs(const uint8_t* stripes, int64_t stride, int64_t first, int64_t count,
                             GroupScales scales, DecodedPairOf<PackedPair<kWeight, kHasZeros>>* pairs) {
  using Packed = PackedPair<kWeight, kHasZeros>;
  using Panel = IntegerPanel<kWeight>;
  const GroupScales type = Packed::TypeOf(scales);
  const typename Panel::Table table = Panel::TableOf(scales);
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* block = stripes + (first + i) / Panel::kUnits * Panel::BlockBytes(type);
    const int unit = (int)((first + i) % Panel::kUnits);
    const Packed packed = {block + unit * Panel::kUnitBytes, Panel::ParamsOf(block, unit, type), stride,
                           table};
    DecodedPairOf<Packed>::Decode(packed, &pairs[i]);
  }
}
template <class Pair>
using PairDecoder = void (*)(const uint8_t* stripes, int64_t stride, int64_t first, int64_t count,
                             GroupScales scales, Pair* pairs);

/// Several tiles: out[tile][..] as of TallDot, `tile_sums` floats apart.
template <class Pair, TileKind kKind>
FMOE_KERNEL void TallSlabs(PairDecoder<Pair> decode, const uint8_t* stripes, int64_t stride, int64_t units,
                           const TileView* tiles, int64_t num_tiles, int64_t tile_sums, float* out) {
  Pair pairs[kSlabUnits];
  NextLines
      lines[kBatchTiles];  // a tile with fewer tokens makes fewer passes, and prefetches more beside each
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    lines[tile] = LinesOf(tiles[tile], units * SlabPasses<kKind>(tiles[tile]));
  }
  for (int64_t first = 0, count = 0; first < units; first += count) {
    count = units - first < kSlabUnits ? units - first : kSlabUnits;
    decode(stripes, stride, first, count, tiles[0].group_scales, pairs);
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      ForEachPass<kKind, true>(tiles[tile], [&](int token, auto tokens) {
        constexpr int kTokens = decltype(tokens)();
        SlabPass<Pair, kKind, kTokens>(pairs, units, first, count, tiles[tile], token, lines[tile],
                                       out + tile * tile_sums);
      });
    }
  }
}

/// The same with all that a format knows.
template <WeightKernel kWeight, bool kHasZeros, TileKind kKind>
void TallSlabsOf(const uint8_t* stripes, int64_t stride, int64_t blocks, const TileView* tiles,
                 int64_t num_tiles, int64_t tile_sums, float* out) {
  using Pair = DecodedPairOf<PackedPair<kWeight, kHasZeros>>;
  TallSlabs<Pair, kKind>(&DecodePairs<kWeight, kHasZeros>, stripes, stride,
                         blocks * IntegerPanel<kWeight>::kUnits, tiles, num_tiles, tile_sums, out);
}

/// One tile, stripes decoded for every pass again; those that no file has by slabs, which are compiled for
/// all that look alike.
template <WeightKernel kWeight, bool kHasZeros, TileKind kKind>
void TallDot(const uint8_t* stripes, int64_t stride, int64_t blocks, const TileView& tile, float* out) {
  if constexpr (ZeroPointsOf(kWeight) == (kHasZeros ? kNever : kAlways)) {
    TallSlabsOf<kWeight, kHasZeros, kKind>(stripes, stride, blocks, &tile, 1, 0, out);
  } else {
    NextLines lines = LinesOf(tile, blocks * NumPasses<kKind>(tile.tokens));
    ForEachPass<kKind, false>(tile, [&](int first, auto tokens) {
      constexpr int kTokens = decltype(tokens)();
      TallPass<kWeight, kHasZeros, kKind, kTokens>(stripes, stride, blocks, tile, first, lines, out);
    });
  }
}

/// Two stripes of a format with one tile, and with several.
struct TallKernels {
  void (*dot)(const uint8_t* stripes, int64_t stride, int64_t blocks, const TileView& tile, float* out);
  void (*slabs)(const uint8_t* stripes, int64_t stride, int64_t blocks, const TileView* tiles,
                int64_t num_tiles, int64_t tile_sums, float* out);
};

/// A BatchKernel. A last stripe without a partner meets itself.
FMOE_NESTED void TallStripes(const TallKernels& kernels, const uint8_t* stripes, int64_t num_stripes,
                             int64_t stride, int64_t blocks, const TileView* tiles, int64_t num_tiles,
                             float* out) {
  constexpr int64_t kStripeSums = kMaxHeight * 16;
  const int64_t tile_sums = num_stripes * kStripeSums;
  for (int64_t stripe = 0; stripe < num_stripes; stripe += 2, stripes += 2 * stride) {
    alignas(64) float twice[2 * kMaxHeight * 16];
    const bool alone = stripe + 1 == num_stripes;
    if (num_tiles >= tiles[0].tall_tile.slab_tiles && !alone) {
      kernels.slabs(stripes, stride, blocks, tiles, num_tiles, tile_sums, out + stripe * kStripeSums);
      continue;
    }
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      float* place = out + tile * tile_sums + stripe * kStripeSums;
      float* sums = alone ? twice : place;
      kernels.dot(stripes, alone ? 0 : stride, blocks, tiles[tile], sums);
      for (int64_t i = 0; alone && i < tiles[tile].tokens * 16; i += 16) {
        Store(place + i, Load(twice + i));
      }
    }
  }
}

template <WeightKernel kWeight, bool kHasZeros, TileKind kKind>
constexpr TallKernels kTallKernels = {&TallDot<kWeight, kHasZeros, kKind>,
                                      &TallSlabsOf<kWeight, kHasZeros, kKind>};

/// A BatchKernel.
template <WeightKernel kWeight, TileKind kKind>
void TallBatch(const uint8_t* stripes, int64_t num_stripes, int64_t stride, int64_t blocks,
               const TileView* tiles, int64_t num_tiles, float* out) {
  TallKernels kernels = kTallKernels<kWeight, false, kKind>;
  if constexpr (IntegerPanel<kWeight>::kGrouped) {
    if (tiles[0].group_scales.zeros != kZeroNone) {
      kernels = kTallKernels<kWeight, true, kKind>;
    }
  }
  TallStripes(kernels, stripes, num_stripes, stride, blocks, tiles, num_tiles, out);
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
