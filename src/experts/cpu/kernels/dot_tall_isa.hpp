#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/dot_prefetch_isa.hpp"
#include "experts/cpu/kernels/integer_panel_isa.hpp"

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

/// Tokens that meet the weights at a time. With 16 sums of integers and 8 of floats the registers are full.
template <TileKind kKind>
constexpr int kTallTokens = 4 / Planes(kKind);

/// Or one less, so that no token is computed that does not exist: 4 and 3 add up to every number from 6 on, 2
/// and 1 to all of them.
template <TileKind kKind>
constexpr int kFewerTokens = kTallTokens<kKind> - 1;

/// Tokens of a wide pass: 16 sums of integers, and most of those of floats in L1 (TileView::wide_slabs).
template <TileKind kKind>
constexpr int kWideTokens = 2 * kTallTokens<kKind>;

/// How many of the `left` last tokens of a tile meet the weights next.
template <TileKind kKind>
constexpr int NextTokens(int left) {
  const bool fewer = Planes(kKind) == 1 ? left <= 3 || left == 5 || left == 6 : left == 1;
  return fewer ? kFewerTokens<kKind> : kTallTokens<kKind>;
}

template <TileKind kKind>
constexpr int64_t NumPasses(int tokens) {
  return (tokens + kTallTokens<kKind> - 1) / kTallTokens<kKind>;
}

/// A unit of two stripes as the panel holds it, decoded in registers. kHasZeros: whether integers in groups
/// have zero points. Asked for in the loop instead, with sums that start at a correction or at zero, that
/// took 3 of 83 cycles a unit.
template <WeightKernel kWeight, bool kHasZeros>
struct PackedPair {
  using Panel = IntegerPanel<kWeight>;
  static constexpr int kGroup = Panel::kGroup, kGroups = 64 / kGroup;
  static constexpr bool kScales = Panel::kE2m1 || Panel::kGrouped, kZeros = kHasZeros;
  static constexpr bool kMinima = kHasZeros && Panel::kSuper;  // in place of zero points

  const uint8_t* codes;
  Sides sides;
  int64_t stride;  ///< from the first stripe to the second
  Ints table;

  /// With what is known when this is compiled.
  FMOE_INLINE GroupScales TypeOf(GroupScales type) {
    return Panel::kSuper ? GroupScales{kRowF32, kHasZeros ? kZeroBytes : kZeroNone, 0} : type;
  }
  FMOE_INLINE Sides SidesOf(const PackedPair& pair, int stripe, GroupScales type) {
    const int64_t offset = stripe * pair.stride;
    return {pair.sides.groups + offset, pair.sides.units + offset, type};
  }

  /// Eight k of a stripe as two vectors of bytes.
  FMOE_INLINE void Load8(const PackedPair& pair, int stripe, int eight, Ints* out) {
    const uint8_t* at = pair.codes + stripe * pair.stride;
    if constexpr (Panel::kE2m1 || Panel::kBook) {
      DecodeByTable(at + eight * 64, 0, pair.table, out);
    } else if constexpr (Panel::kNibbles) {
      DecodeU4(at + eight * 64, 0, out);
    } else {
      out[0] = LoadInts(at + eight * 128);
      out[1] = LoadInts(at + eight * 128 + 64);
    }
  }
  /// Those of kCount groups and both stripes, with one branch for their type.
  template <int kCount>
  FMOE_INLINE void LoadScales(const PackedPair& pair, int group, Floats (*out)[2]) {
    const auto load = [&](GroupScales type) FMOE_FLAT {
      Unroll<2 * kCount>([&](auto i) FMOE_FLAT {
        out[i / 2][i % 2] = LoadGroupScale<kWeight>(SidesOf(pair, i % 2, type), group + i / 2, 0);
      });
    };
    const GroupScales type = pair.sides.type;
    if (Panel::kSuper) {
      load(TypeOf(type));
    } else if (!Panel::kGrouped || type.type == kRowBf16) {
      load({kRowBf16, type.zeros, 0});
    } else if (type.type == kRowF16) {
      load({kRowF16, type.zeros, 0});
    } else {
      load({kRowF32, type.zeros, 0});
    }
  }
  /// The same of zero points.
  template <int kCount>
  FMOE_INLINE void LoadZeros(const PackedPair& pair, int group, Floats (*out)[2]) {
    const auto load = [&](GroupScales type) FMOE_FLAT {
      Unroll<2 * kCount>([&](auto i) FMOE_FLAT {
        out[i / 2][i % 2] = LoadGroupZero<kWeight>(SidesOf(pair, i % 2, type), group + i / 2, 0);
      });
    };
    const GroupScales type = pair.sides.type;
    if (Panel::kSuper) {
      load(TypeOf(type));
    } else if (type.zeros == kZeroBytes) {
      load({type.type, kZeroBytes, 0});
    } else {
      load({kRowF32, kZeroFloats, 0});
    }
  }
};

/// The same decoded. Formats that look alike share it, and what multiplies it.
template <int kGroupK, bool kHasScales, bool kHasZeros, bool kHasMinima>
struct alignas(64) DecodedPair {
  static constexpr int kGroup = kGroupK, kGroups = 64 / kGroup;
  static constexpr bool kScales = kHasScales, kZeros = kHasZeros, kMinima = kHasMinima;

  uint8_t codes[8][2][128];
  float scales[kGroups][2][16];
  float zeros[kZeros ? kGroups : 1][2][16];

  FMOE_INLINE void Load8(const DecodedPair& pair, int stripe, int eight, Ints* out) {
    out[0] = LoadInts(pair.codes[eight][stripe]);
    out[1] = LoadInts(pair.codes[eight][stripe] + 64);
  }
  template <int kCount>
  FMOE_INLINE void LoadScales(const DecodedPair& pair, int group, Floats (*out)[2]) {
    Unroll<2 * kCount>([&](auto i)
                           FMOE_FLAT { out[i / 2][i % 2] = Load(pair.scales[group + i / 2][i % 2]); });
  }
  template <int kCount>
  FMOE_INLINE void LoadZeros(const DecodedPair& pair, int group, Floats (*out)[2]) {
    Unroll<2 * kCount>([&](auto i) FMOE_FLAT { out[i / 2][i % 2] = Load(pair.zeros[group + i / 2][i % 2]); });
  }

  template <class Packed>
  FMOE_INLINE void Decode(const Packed& packed, DecodedPair* out) {
    Unroll<16>([&](auto i) FMOE_FLAT {
      constexpr int kEight = decltype(i)() / 2, kStripe = decltype(i)() % 2;
      Ints weights[2];
      Packed::Load8(packed, kStripe, kEight, weights);
      StoreInts(out->codes[kEight][kStripe], weights[0]);
      StoreInts(out->codes[kEight][kStripe] + 64, weights[1]);
    });
    if constexpr (kScales) {
      Floats scales[kGroups][2];
      Packed::template LoadScales<kGroups>(packed, 0, scales);
      Unroll<2 * kGroups>([&](auto i) FMOE_FLAT { Store(out->scales[i / 2][i % 2], scales[i / 2][i % 2]); });
    }
    if constexpr (kZeros) {
      Floats zeros[kGroups][2];
      Packed::template LoadZeros<kGroups>(packed, 0, zeros);
      Unroll<2 * kGroups>([&](auto i) FMOE_FLAT { Store(out->zeros[i / 2][i % 2], zeros[i / 2][i % 2]); });
    }
  }
};

/// A unit of some tokens, each of which is a tile of its own. Tokens that do not exist repeat the last one.
template <class Pair, TileKind kKind, int kTokens>
struct TallTokens {
  const char* rows[kTokens];
  int64_t words, correction, scale;  ///< where those of the unit stand in a row

  FMOE_INLINE TallTokens At(const TileView& tile, int64_t units, int64_t unit, int first) {
    TallTokens at;
    Unroll<kTokens>([&](auto t) FMOE_FLAT {
      const int token = first + t < tile.tokens ? first + t : tile.tokens - 1;
      at.rows[t] = (const char*)tile.rows[token];
    });
    at.words = 0;
    at.correction = units * (64 * Planes(kKind));
    at.scale = at.correction + units * (4 * Pair::kGroups);
    Advance(at, unit);
    return at;
  }
  FMOE_INLINE void Advance(TallTokens& at, int64_t units) {
    at.words += units * (64 * Planes(kKind));
    at.correction += units * (4 * Pair::kGroups);
    at.scale += units * (4 * (kKind == kTileA4 ? Pair::kGroups : 1));
  }
  FMOE_INLINE const int32_t* Words(const TallTokens& at, int token) {
    return (const int32_t*)(at.rows[token] + at.words);
  }
  FMOE_INLINE const int32_t* Correction(const TallTokens& at, int token) {
    return (const int32_t*)(at.rows[token] + at.correction);
  }
  FMOE_INLINE const float* Scale(const TallTokens& at, int token) {
    return (const float*)(at.rows[token] + at.scale);
  }
};

/// Words of a wide pass that `vpdpbusd` reads from memory by itself, once for each stripe: of every second
/// token. With fewer there are more instructions, with more there is nothing but loads.
template <TileKind kKind, int kTokens>
constexpr bool DotsMemory(int token) {
  return kTokens > kTallTokens<kKind> && token % 2 == 0;
}

/// One unit of 64 k: sums[stripe][token] += weights times tokens.
///
/// Where tokens are few, two groups of k, or two halves of one, have integers of their own, so that sixteen
/// chains of additions overlap: an instruction takes four cycles and two begin in each (INT4 per channel with
/// eight chains: 82 % of the peak, with sixteen 88).
template <class Pair, TileKind kKind, int kTokens>
FMOE_INLINE void TallUnit(const Pair& pair, const TallTokens<Pair, kKind, kTokens>& tokens,
                          Floats (*sums)[kTokens]) {
  using Tokens = TallTokens<Pair, kKind, kTokens>;
  constexpr int kPlanes = Planes(kKind), kGroups = Pair::kGroups;
  constexpr int kAtOnce = kTokens > kTallTokens<kKind> ? 1 : 2;
  constexpr int kChains = kGroups == 1 ? kAtOnce : kGroups;  // pieces of k with integers of their own
  constexpr int kEights = 8 / kChains;
  using End = GroupEnd<kKind, kGroups, Pair::kScales, Pair::kMinima>;
  Floats unit_sums[2][kTokens];
  const auto add_groups = [&](auto first, auto count, Ints(*dots)[kPlanes][2][kTokens]) FMOE_FLAT {
    constexpr int kFirst = decltype(first)(), kCount = decltype(count)();
    Floats sum[kCount][2][kTokens];
    Unroll<kCount * 2 * kTokens>([&](auto i) FMOE_FLAT {
      constexpr int g = decltype(i)() / (2 * kTokens), s = decltype(i)() / kTokens % 2,
                    t = decltype(i)() % kTokens;
      Ints whole = dots[g][kPlanes - 1][s][t];
      if constexpr (kPlanes == 2) {
        whole = IntAdd(ShiftLeft<7>(dots[g][0][s][t]), whole);
      }
      sum[g][s][t] = ToFloats(whole);
    });
    Floats zeros[kCount][2];
    if constexpr (Pair::kZeros) {
      Pair::template LoadZeros<kCount>(pair, kFirst, zeros);
    }
    if constexpr (Pair::kZeros && !Pair::kMinima) {
      Unroll<kCount * 2 * kTokens>([&](auto i) FMOE_FLAT {
        constexpr int g = decltype(i)() / (2 * kTokens), s = decltype(i)() / kTokens % 2,
                      t = decltype(i)() % kTokens;
        const int32_t* codes = Tokens::Correction(tokens, t) + kFirst + g;
        sum[g][s][t] = End::LessZero(sum[g][s][t], zeros[g][s], codes);
      });
    }
    Floats scales[kCount][2];
    Pair::template LoadScales<kCount>(pair, kFirst, scales);
    Unroll<kCount * 2 * kTokens>([&](auto i) FMOE_FLAT {
      constexpr int g = decltype(i)() / (2 * kTokens), s = decltype(i)() / kTokens % 2,
                    t = decltype(i)() % kTokens;
      constexpr int kGroup = kFirst + g;
      End::Add(sum[g][s][t], scales[g][s], Pair::kMinima, zeros[g][s], Tokens::Correction(tokens, t) + kGroup,
               Tokens::Scale(tokens, t) + (kKind == kTileA4 ? kGroup : 0), kGroup == 0, unit_sums[s][t],
               sums[s][t]);
    });
  };
  Unroll<kChains / kAtOnce>([&](auto part) FMOE_FLAT {
    Ints dots[kAtOnce][kPlanes][2][kTokens];
    Unroll<kAtOnce * kPlanes * kTokens>([&](auto i) FMOE_FLAT {
      constexpr int kChain = decltype(i)() / (kPlanes * kTokens), kPlane = decltype(i)() / kTokens % kPlanes;
      constexpr int kToken = decltype(i)() % kTokens, kAt = decltype(part)() * kAtOnce + kChain;
      Ints start = IntZero();
      if constexpr (kPlane + 1 == kPlanes && kAt < kGroups && !Pair::kZeros) {
        start = IntSet(Tokens::Correction(tokens, kToken)[kAt]);
      }
      dots[kChain][kPlane][0][kToken] = dots[kChain][kPlane][1][kToken] = start;
    });
    Unroll<kAtOnce * kEights>([&](auto i) FMOE_FLAT {
      constexpr int kChain = decltype(i)() % kAtOnce;
      constexpr int kEight = (decltype(part)() * kAtOnce + kChain) * kEights + decltype(i)() / kAtOnce;
      Ints weights[2][2];
      Unroll<2>([&](auto s) FMOE_FLAT { Pair::Load8(pair, s, kEight, weights[s]); });
      Unroll<2 * kPlanes * kTokens>([&](auto j) FMOE_FLAT {
        constexpr int q = decltype(j)() / (kPlanes * kTokens), kPlane = decltype(j)() / kTokens % kPlanes;
        constexpr int kToken = decltype(j)() % kTokens;
        constexpr int kWord = (kEight / 2 * kPlanes + kPlane) * 4 + kEight % 2 * 2 + q;
        const int32_t* word = Tokens::Words(tokens, kToken) + kWord;
        const Ints both = IntSet(*word);
        Unroll<2>([&](auto s) FMOE_FLAT {
          Ints& sum = dots[kChain][kPlane][s][kToken];
          if constexpr (DotsMemory<kKind, kTokens>(kToken)) {
            sum = ByteDotWord(sum, weights[s][q], word);
          } else {
            sum = ByteDot(sum, weights[s][q], both);
          }
        });
      });
    });
    if constexpr (kGroups == 1 && kAtOnce == 2) {
      Unroll<2 * kPlanes * kTokens>([&](auto i) FMOE_FLAT {
        Ints* first = &dots[0][0][0][0];
        first[i] = IntAdd(first[i], (&dots[1][0][0][0])[i]);
      });
      add_groups(Index<0>(), Index<1>(), dots);
    } else {
      add_groups(Index<decltype(part)() * kAtOnce>(), Index<kAtOnce>(), dots);
    }
  });
  if constexpr (End::kUnitSums) {
    Unroll<2 * kTokens>([&](auto i) FMOE_FLAT {
      constexpr int kToken = decltype(i)() / 2, kStripe = decltype(i)() % 2;
      Floats& sum = sums[kStripe][kToken];
      sum = MultiplyAdd(unit_sums[kStripe][kToken], Set(*Tokens::Scale(tokens, kToken)), sum);
    });
  }
}

/// out[stripe][token][16] of kTokens tokens of a tile from `first` on.
template <WeightKernel kWeight, bool kHasZeros, TileKind kKind, int kTokens>
__attribute__((noinline)) void TallPass(const uint8_t* stripes, int64_t stride, int64_t blocks,
                                        const TileView& tile, int first, NextLines& lines, float* out) {
  using Pair = PackedPair<kWeight, kHasZeros>;
  using Panel = IntegerPanel<kWeight>;
  using Tokens = TallTokens<Pair, kKind, kTokens>;
  Pair pair = {stripes, {}, stride, Panel::TableOf(tile.group_scales)};
  const GroupScales type = Pair::TypeOf(tile.group_scales);
  const int64_t block_bytes = Panel::BlockBytes(type);
  NextLines next = lines;
  Tokens tokens = Tokens::At(tile, blocks * Panel::kUnits, 0, first);
  Floats sums[2][kTokens];
  Unroll<2 * kTokens>([&](auto i) FMOE_FLAT { (&sums[0][0])[i] = Zero(); });
  for (int64_t block = 0; block < blocks; ++block) {
    PrefetchLines(next);
    const uint8_t* first_k = stripes + block * block_bytes;
    pair.codes = first_k;
    for (int unit = 0; unit < Panel::kUnits; ++unit, pair.codes += Panel::kUnitBytes) {
      pair.sides = Panel::SidesOf(first_k, unit, type);
      TallUnit<Pair, kKind, kTokens>(pair, tokens, sums);
      Tokens::Advance(tokens, 1);
    }
  }
  Unroll<2 * kTokens>([&](auto i) FMOE_FLAT {
    constexpr int kStripe = decltype(i)() / kTokens, kToken = decltype(i)() % kTokens;
    Store(out + (kStripe * kMaxHeight + first + kToken) * 16, sums[kStripe][kToken]);
  });
  lines = next;
}

/// pass(first token, Index<tokens>) for the tokens of a tile, as many at a time as meet the weights together.
/// kMayBeWide: where the tile says so, twice as many.
template <TileKind kKind, bool kMayBeWide, typename Pass>
FMOE_INLINE void ForEachPass(const TileView& tile, Pass pass) {
  for (int first = 0, count = 0; first < tile.tokens; first += count) {
    if constexpr (kMayBeWide) {
      if (tile.wide_slabs && tile.tokens - first > kTallTokens<kKind>) {
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

/// One tile, stripes decoded for every pass again.
template <WeightKernel kWeight, bool kHasZeros, TileKind kKind>
void TallDot(const uint8_t* stripes, int64_t stride, int64_t blocks, const TileView& tile, float* out) {
  NextLines lines = LinesOf(tile, blocks * NumPasses<kKind>(tile.tokens));
  ForEachPass<kKind, false>(tile, [&](int first, auto tokens) {
    constexpr int kTokens = decltype(tokens)();
    TallPass<kWeight, kHasZeros, kKind, kTokens>(stripes, stride, blocks, tile, first, lines, out);
  });
}

/// Units that are decoded for all tiles: 17 to 20 KB of L1, beside a tile.
constexpr int kSlabUnits = 8;

/// `units` decoded units with those of kTokens tokens of a tile, added to `out` or starting it.
template <class Pair, TileKind kKind, int kTokens>
__attribute__((noinline)) void SlabPass(const Pair* pairs, int64_t all_units, int64_t first_unit,
                                        int64_t units, const TileView& tile, int first, NextLines& lines,
                                        float* out) {
  using Tokens = TallTokens<Pair, kKind, kTokens>;
  Tokens tokens = Tokens::At(tile, all_units, first_unit, first);
  NextLines next = lines;
  float* place = out + first * 16;
  Floats sums[2][kTokens];
  Unroll<2 * kTokens>([&](auto i) FMOE_FLAT {
    constexpr int kStripe = decltype(i)() / kTokens, kToken = decltype(i)() % kTokens;
    sums[kStripe][kToken] = first_unit == 0 ? Zero() : Load(place + (kStripe * kMaxHeight + kToken) * 16);
  });
  for (int64_t unit = 0; unit < units; ++unit) {
    PrefetchLines(next);
    TallUnit<Pair, kKind, kTokens>(pairs[unit], tokens, sums);
    Tokens::Advance(tokens, 1);
  }
  Unroll<2 * kTokens>([&](auto i) FMOE_FLAT {
    constexpr int kStripe = decltype(i)() / kTokens, kToken = decltype(i)() % kTokens;
    Store(place + (kStripe * kMaxHeight + kToken) * 16, sums[kStripe][kToken]);
  });
  lines = next;
}

/// Several tiles: out[tile][..] as of TallDot, `tile_sums` floats apart.
template <WeightKernel kWeight, bool kHasZeros, TileKind kKind>
__attribute__((noinline)) void TallSlabs(const uint8_t* stripes, int64_t stride, int64_t blocks,
                                         const TileView* tiles, int64_t num_tiles, int64_t tile_sums,
                                         float* out) {
  using Packed = PackedPair<kWeight, kHasZeros>;
  using Panel = IntegerPanel<kWeight>;
  using Pair = DecodedPair<Packed::kGroup, Packed::kScales, Packed::kZeros, Packed::kMinima>;
  const int64_t passes = kMaxHeight / (tiles[0].wide_slabs ? kWideTokens<kKind> : kTallTokens<kKind>);
  Pair pairs[kSlabUnits];
  const int64_t units = blocks * Panel::kUnits;
  NextLines next = LinesOf(tiles[0], units * passes);
  const GroupScales type = Packed::TypeOf(tiles[0].group_scales);
  const Ints table = Panel::TableOf(tiles[0].group_scales);
  for (int64_t first = 0, count = 0; first < units; first += count) {
    count = units - first < kSlabUnits ? units - first : kSlabUnits;
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* block = stripes + (first + i) / Panel::kUnits * Panel::BlockBytes(type);
      const int unit = (int)((first + i) % Panel::kUnits);
      const Packed packed = {block + unit * Panel::kUnitBytes, Panel::SidesOf(block, unit, type), stride,
                             table};
      Pair::Decode(packed, &pairs[i]);
    }
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      next.at = tiles[tile].next + first * passes * next.at_once * 64;
      next.end = tiles[tile].next + tiles[tile].next_bytes;
      ForEachPass<kKind, true>(tiles[tile], [&](int token, auto tokens) {
        constexpr int kTokens = decltype(tokens)();
        SlabPass<Pair, kKind, kTokens>(pairs, units, first, count, tiles[tile], token, next,
                                       out + tile * tile_sums);
      });
    }
  }
}

/// A BatchKernel of weights that have zero points or have none. A last stripe without a partner meets itself.
template <WeightKernel kWeight, bool kHasZeros, TileKind kKind>
void TallStripes(const uint8_t* stripes, int64_t num_stripes, int64_t stride, int64_t blocks,
                 const TileView* tiles, int64_t num_tiles, float* out) {
  constexpr int64_t kStripeSums = kMaxHeight * 16;
  const int64_t tile_sums = num_stripes * kStripeSums;
  for (int64_t stripe = 0; stripe < num_stripes; stripe += 2, stripes += 2 * stride) {
    alignas(64) float twice[2 * kMaxHeight * 16];
    const bool alone = stripe + 1 == num_stripes;
    if (num_tiles >= tiles[0].slab_tiles && !alone) {
      TallSlabs<kWeight, kHasZeros, kKind>(stripes, stride, blocks, tiles, num_tiles, tile_sums,
                                           out + stripe * kStripeSums);
      continue;
    }
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      float* place = out + tile * tile_sums + stripe * kStripeSums;
      float* sums = alone ? twice : place;
      TallDot<kWeight, kHasZeros, kKind>(stripes, alone ? 0 : stride, blocks, tiles[tile], sums);
      for (int64_t i = 0; alone && i < kStripeSums; i += 16) {
        Store(place + i, Load(twice + i));
      }
    }
  }
}

/// A BatchKernel.
template <WeightKernel kWeight, TileKind kKind>
void TallBatch(const uint8_t* stripes, int64_t num_stripes, int64_t stride, int64_t blocks,
               const TileView* tiles, int64_t num_tiles, float* out) {
  if constexpr (IntegerPanel<kWeight>::kGrouped) {
    if (tiles[0].group_scales.zeros != kZeroNone) {
      TallStripes<kWeight, true, kKind>(stripes, num_stripes, stride, blocks, tiles, num_tiles, out);
      return;
    }
  }
  TallStripes<kWeight, false, kKind>(stripes, num_stripes, stride, blocks, tiles, num_tiles, out);
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
