#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/slab_units_isa.hpp"
#include "experts/cpu/kernels/tall_units_isa.hpp"

/// Tall tiles of integers by slabs: where registers hold half of a stripe or bytes have no dot product (AVX2
/// with VNNI and without, AVX-512 of before VNNI); at the levels of VNNI also for activations of 22 bits, and
/// everywhere for weights that are words. Weights of two stripes are decoded into L1 once for all tiles
/// (slab_units_isa.hpp), a slab of 4 or 8 units of 64 k at a time, and meet four tokens, 16 or 32 rows at a
/// time:
///
///     bytes   sums  += vpdpbusd(weights, 4 k)                       8 instructions for 2 x 8 x 16 k
///             where it lacks, of codes up to 24 and one plane of activations:
///             words  = vpmaddubsw(weights, 4 k) + ... four times    at most 8 * 24 * 127: no word overflows
///             sums  += vpmaddwd(words, 1)                           10 multiplications for as many
///     words   sums  += vpmaddwd(weights, 2 k)                       16 for as many, but of 15 bits
///
/// Without VNNI codes above 24 would overflow words, and 15 bits are two planes: 20 multiplications. As
/// words, both take 16, for which activations are made words too, once for both stripes (a twelfth of the
/// time). An instruction multiplies in one of two ports and adds in one of four (Zen 3), so what counts are
/// these multiplications; registers hold 8 sums, 2 vectors of weights and a broadcast.
///
/// Groups end as in all kernels of integers (GroupEnd).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Planes of activations: of words or of bytes.
template <class Slab>
constexpr int SlabPlanes(TileKind kind) {
  return Slab::kWords ? WordPlanes(kind) : Planes(kind);
}

/// dots[vector][token] += products of a group, with one of the planes.
template <class Slab, TileKind kKind, int kTokens>
FMOE_NESTED void SlabDots(const Slab& slab, int group, int plane,
                          const SlabTokens<Slab::kWords, kKind, kTokens>& tokens, Ints (*dots)[kTokens]) {
  using Tokens = SlabTokens<Slab::kWords, kKind, kTokens>;
  constexpr int kCodes = Slab::kGroup / (Slab::kWords ? 2 : 4);  // vectors of a group
  constexpr int kSixteen = Slab::kWords ? 8 : 4;                 // of 16 k, behind which planes alternate
  constexpr int kStep = Slab::kAdded, kPlanes = SlabPlanes<Slab>(kKind);
  for (int first = group * kCodes; first < (group + 1) * kCodes; first += kStep) {
    Ints words16[2][kTokens];
    Unroll<kStep>([&](int i) FMOE_FLAT {
      const Ints weights[2] = {Slab::Codes(slab, first, i, 0), Slab::Codes(slab, first, i, 1)};
      Unroll<kTokens>([&](int t) FMOE_FLAT {
        const Ints both = Tokens::Broadcast(
            tokens, t,
            first * kPlanes + i / kSixteen * (kPlanes * kSixteen) + plane * kSixteen + i % kSixteen);
        Unroll<2>([&](int v) FMOE_FLAT {
          if constexpr (Slab::kWords) {
            dots[v][t] = WordDot(dots[v][t], weights[v], both);
            InPlace(dots[v][t]);
          } else if constexpr (kHasByteDot) {
            dots[v][t] = ByteDot(dots[v][t], weights[v], both);
            InPlace(dots[v][t]);
          } else {
            const Ints products = MultiplyAddPairs(weights[v], both);
            words16[v][t] = i == 0 ? products : AddWords(words16[v][t], products);
            InPlace(words16[v][t]);
          }
        });
      });
    });
    if constexpr (!Slab::kWords && !kHasByteDot) {
      Unroll<2 * kTokens>([&](int j) FMOE_FLAT {
        const int v = j / kTokens, t = j % kTokens;
        dots[v][t] = IntAdd(dots[v][t], MultiplyAddWords(words16[v][t], 1));
      });
    }
  }
}

/// One unit of 64 k: sums[vector][token] += weights times tokens.
template <class Slab, TileKind kKind, int kTokens>
FMOE_NESTED void MultiplySlabUnit(const Slab& slab, const TallTokens<Slab, kKind, kTokens>& tokens,
                                  const SlabTokens<Slab::kWords, kKind, kTokens>& words,
                                  Floats (*sums)[kTokens]) {
  using Tokens = TallTokens<Slab, kKind, kTokens>;
  using End = GroupEnd<kKind, Slab::kGroups, Slab::kScales, Slab::kMinima>;
  const bool zeros = Slab::HasZeros(slab);
  Floats unit_sums[2][kTokens];
  Unroll<Slab::kGroups>([&](int group) FMOE_FLAT {
    constexpr int kLowest = SlabPlanes<Slab>(kKind) - 1;
    Ints dots[2][kTokens];
    // Planes from `first` to `last`, each of which counts 128 of the next one.
    const auto dots_of = [&](auto first, auto last, int correction) FMOE_FLAT {
      Unroll<last - first + 1>([&](int i) FMOE_FLAT {
        const int plane = first + i;
        Unroll<kTokens>([&](int t) FMOE_FLAT {
          const int32_t* start = Tokens::Correction(tokens, t) + group * Corrections(kKind) + correction;
          const Ints own = plane == last && !zeros ? IntSet(*start) : IntZero();
          Unroll<2>([&](int v)
                        FMOE_FLAT { dots[v][t] = i == 0 ? own : IntAdd(ShiftLeft<7>(dots[v][t]), own); });
        });
        SlabDots<Slab, kKind, kTokens>(slab, group, plane, words, dots);
      });
    };
    constexpr bool kApart = kKind == kTileA24;  // the highest: all in 32 bits would overflow
    Floats upper[2][kTokens];
    if constexpr (kApart) {
      dots_of(Index<0>(), Index<0>(), 1);
      Unroll<2 * kTokens>([&](int i) FMOE_FLAT { (&upper[0][0])[i] = ToFloats((&dots[0][0])[i]); });
    }
    dots_of(Index<kApart>(), Index<kLowest>(), 0);
    Unroll<2>([&](int v) FMOE_FLAT {
      const Floats scale = Slab::Scale(slab, group, v), zero = Slab::ZeroPoint(slab, group, v);
      Unroll<kTokens>([&](int t) FMOE_FLAT {
        const int32_t* codes = Tokens::Correction(tokens, t) + group * Corrections(kKind);
        Floats sum = ToFloats(dots[v][t]);
        if constexpr (kApart) {
          sum = MultiplyAdd(upper[v][t], Set(16384.0F), sum);
        }
        if (zeros && !Slab::kMinima) {
          sum = End::LessZero(sum, zero, codes);
        }
        End::Add(sum, scale, zeros && Slab::kMinima, zero, codes,
                 Tokens::Scale(tokens, t) + (HasGroupScales(kKind) ? group : 0), group == 0, unit_sums[v][t],
                 sums[v][t]);
      });
    });
  });
  if constexpr (End::kUnitSums) {
    Unroll<2 * kTokens>([&](int i) FMOE_FLAT {
      const int v = i % 2, t = i / 2;
      sums[v][t] = MultiplyAdd(unit_sums[v][t], Set(*Tokens::Scale(tokens, t)), sums[v][t]);
    });
  }
}

/// `units` units of a pair of vectors with kTokens tokens from `first` on, added to `out` or starting it.
/// `apart`: floats from the sums of one vector to those of the other.
template <class Slab, TileKind kKind, int kTokens, class Slabs>
FMOE_KERNEL void MultiplySlab(Slabs slabs, int64_t all_units, int64_t first_unit, int64_t units,
                              const TileView& tile, int first, const SlabWords<kKind>* expanded,
                              int64_t apart, NextLines& lines, float* out) {
  using Tokens = TallTokens<Slab, kKind, kTokens>;
  Tokens tokens = Tokens::At(tile, all_units, first_unit, first);
  NextLines next = lines;
  Floats sums[2][kTokens];
  Unroll<2 * kTokens>([&](int i) FMOE_FLAT {
    const int v = i / kTokens, t = i % kTokens;
    sums[v][t] = first_unit == 0 ? Zero() : Load(out + v * apart + t * 16);
  });
  for (int64_t unit = 0; unit < units; ++unit) {
    PrefetchLines(next);
    SlabTokens<Slab::kWords, kKind, kTokens> words;
    if constexpr (Slab::kWords) {
      words.at[0] = (*expanded)[first] + unit * (32 * WordPlanes(kKind));
    } else {
      Unroll<kTokens>([&](int t) FMOE_FLAT { words.at[t] = Tokens::Words(tokens, t); });
    }
    MultiplySlabUnit<Slab, kKind, kTokens>(slabs[unit], tokens, words, sums);
    Tokens::Advance(tokens, 1);
  }
  Unroll<2 * kTokens>([&](int i) FMOE_FLAT {
    const int v = i / kTokens, t = i % kTokens;
    Store(out + v * apart + t * 16, sums[v][t]);
  });
  lines = next;
}

/// How a stripe becomes slabs: SlabOf::Decode.
template <class Slab>
using DecodeSlabs = void (*)(const uint8_t* stripe, int64_t begin, int64_t count, GroupScales type,
                             int number, SlabPair<Slab>* slabs);

/// Two stripes, or one where registers hold halves: out[tile][stripe][token][16].
template <class Slab, TileKind kKind>
FMOE_KERNEL void SlabStripes(DecodeSlabs<Slab> decode, const uint8_t* stripes, int num_stripes,
                             int64_t stride, int64_t units, const TileView* tiles, int64_t num_tiles,
                             int64_t tile_sums, float* out) {
  constexpr bool kWords = Slab::kWords;
  constexpr int kUnits = kSlabUnitsOf<kWords>;
  constexpr int64_t kStripeSums = kMaxHeight * 16;
  constexpr int64_t kApart = kHalves == 2 ? kLanes : kStripeSums;
  SlabPair<Slab> slabs[kSlabPairs];
  SlabWords<kKind> expanded;
  const int pairs = kHalves == 2 ? num_stripes : 1;
  NextLines lines[kBatchTiles];
  for (int64_t index = 0; index < num_tiles; ++index) {
    lines[index] = LinesOf(tiles[index], units * NumPasses<kTileA8>(tiles[index].tokens) * pairs);
  }
  for (int64_t begin = 0, count = 0; begin < units; begin += count) {
    count = units - begin < kUnits ? units - begin : kUnits;
    for (int stripe = 0; stripe < num_stripes; ++stripe) {
      decode(stripes + stripe * stride, begin, count, tiles[0].group_scales, stripe, slabs);
    }
    for (int64_t index = 0; index < num_tiles; ++index) {
      const TileView& tile = tiles[index];
      NextLines& next = lines[index];
      if constexpr (kWords) {
        ExpandTokens<kKind>(tile, tile.tokens + 2, begin, count, expanded);
      }
      for (int pair = 0; pair < pairs; ++pair) {
        for (int first = 0, taken = 0; first < tile.tokens; first += taken) {
          float* place = out + index * tile_sums + pair * kStripeSums + first * 16;
          taken = NextTokens<kTileA8>(tile.tokens - first);
          if (taken == 3) {
            MultiplySlab<Slab, kKind, 3>(&slabs[pair][0], units, begin, count, tile, first, &expanded, kApart,
                                         next, place);
          } else {
            MultiplySlab<Slab, kKind, 4>(&slabs[pair][0], units, begin, count, tile, first, &expanded, kApart,
                                         next, place);
          }
        }
      }
    }
  }
}

/// A BatchKernel of weights that have zero points or have none.
template <WeightKernel kWeight, bool kHasZeros, TileKind kKind>
void AllSlabStripes(const uint8_t* stripes, int64_t num_stripes, int64_t stride, int64_t blocks,
                    const TileView* tiles, int64_t num_tiles, float* out) {
  using Of = SlabOf<kWeight, kHasZeros, HasWordSlabs<kWeight, kKind>()>;
  constexpr int64_t kStripeSums = kMaxHeight * 16;
  const int64_t tile_sums = num_stripes * kStripeSums, units = blocks * IntegerPanel<kWeight>::kUnits;
  const auto multiply = [&](const uint8_t* first, int count, int64_t apart, const TileView* with,
                            int64_t many, int64_t sums, float* to) {
    SlabStripes<typename Of::Type, kKind>(&Of::Decode, first, count, apart, units, with, many, sums, to);
  };
  int64_t stripe = 0;
  for (; stripe + 2 <= num_stripes; stripe += 2) {
    multiply(stripes + stripe * stride, 2, stride, tiles, num_tiles, tile_sums, out + stripe * kStripeSums);
  }
  if (stripe == num_stripes) {
    return;
  }
  if constexpr (kHalves == 2) {
    multiply(stripes + stripe * stride, 1, stride, tiles, num_tiles, tile_sums, out + stripe * kStripeSums);
  } else {  // a stripe without a partner meets itself
    alignas(64) float twice[2 * kStripeSums];
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      multiply(stripes + stripe * stride, 2, 0, tiles + tile, 1, 0, twice);
      for (int64_t i = 0; i < tiles[tile].tokens * 16; i += kLanes) {
        Store(out + tile * tile_sums + stripe * kStripeSums + i, Load(twice + i));
      }
    }
  }
}

/// A BatchKernel.
template <WeightKernel kWeight, TileKind kKind>
void SlabBatch(const uint8_t* stripes, int64_t num_stripes, int64_t stride, int64_t blocks,
               const TileView* tiles, int64_t num_tiles, float* out) {
  if constexpr (IntegerPanel<kWeight>::kGrouped) {
    if (tiles[0].group_scales.zeros != kZeroNone) {
      AllSlabStripes<kWeight, true, kKind>(stripes, num_stripes, stride, blocks, tiles, num_tiles, out);
      return;
    }
  }
  AllSlabStripes<kWeight, false, kKind>(stripes, num_stripes, stride, blocks, tiles, num_tiles, out);
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
