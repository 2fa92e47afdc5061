#pragma once

#include <stdint.h>

#include "experts/cpu/dot_integer_isa.hpp"

/// Several tall tiles of one expert at a time: integer weights are decoded once for all of them.
///
///              k ->                    64 k = one unit
///     stripes  [codes | scales] x 3    --decode-->  bytes and fp32 scales, 3 to 6 KB of L1
///     tiles    [64 k x 8 tokens] x n   broadcast from L2, each word for three stripes
///     sums     [n][3][8][16] fp32      in L1; integers and sums of the unit in registers
///
/// A micro-kernel that meets one tile decodes again for every eight tokens and broadcasts a word for one or
/// two stripes: look-ups and loads, not `vpdpbusd`, held it at 60 to 64 % of the VNNI peak. Sums pass through
/// L1 once for 64 k here, which costs a load and a store for every 16 to 32 multiplications.
///
/// Every sum runs through the operations of IntegerUnit in their order: a token has the same bits in both.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// What remains of an integer format once its codes are bytes.
template <int kGroupK, bool kHasScales, bool kHasZeros>
struct DecodedFormat {
  static constexpr int kGroup = kGroupK, kGroups = 64 / kGroupK;
  static constexpr bool kScales = kHasScales, kZeros = kHasZeros;
};
template <WeightKernel kWeight>
using DecodedOf = DecodedFormat<IntegerPanel<kWeight>::kGroup,
                                IntegerPanel<kWeight>::kE2m1 || IntegerPanel<kWeight>::kGrouped,
                                IntegerPanel<kWeight>::kGrouped>;

/// One unit of kStripes stripes.
template <class Format, int kStripes>
struct alignas(64) DecodedUnit {
  uint8_t codes[16][kStripes][64];  ///< four k of sixteen rows, as `vpdpbusd` takes them
  float scales[Format::kGroups][kStripes][16];
  float zeros[Format::kGroups][kStripes][16];
};

template <WeightKernel kWeight, int kStripes>
FMOE_INLINE void DecodeUnit(const uint8_t* unit, const uint8_t* scales, GroupScales type,
                            int64_t stripe_stride, Ints table,
                            DecodedUnit<DecodedOf<kWeight>, kStripes>* decoded) {
  using Format = DecodedOf<kWeight>;
  for (int stripe = 0; stripe < kStripes; ++stripe) {
    const int64_t offset = stripe * stripe_stride;
    Unroll<4>([&](auto step) FMOE_FLAT {
      Ints weights[4];
      IntegerPanel<kWeight>::Decode(unit + offset, step, 0, table, weights);
      Unroll<4>([&](auto q) FMOE_FLAT { StoreInts(decoded->codes[step * 4 + q][stripe], weights[q]); });
    });
    if constexpr (Format::kScales) {
      Unroll<Format::kGroups>([&](auto group) FMOE_FLAT {
        Floats scale, zero;
        LoadGroupScale<kWeight>(scales + offset, type, group, 0, scale, zero);
        Store(decoded->scales[group][stripe], scale);
        if constexpr (Format::kZeros) {
          Store(decoded->zeros[group][stripe], zero);
        }
      });
    }
  }
}

/// Tokens whose sums of three stripes live in registers. Eight, where the registers would hold them, were
/// slower (INT4 per channel 836 against 905 GOP/s): the next sums could not start while the last were stored.
template <TileKind kKind>
constexpr int kBatchTokens = 4 / Planes(kKind);

/// sums[stripe][token][16] += one decoded unit times 64 k of tokens [first, first + kTokens) of a tile.
template <class Format, TileKind kKind, int kStripes, int kTokens>
FMOE_INLINE void MultiplyUnit(const DecodedUnit<Format, kStripes>& unit, const int32_t* words,
                              const int32_t* correction, const float* activation_scale, float* sums) {
  constexpr int kHeight = kMaxHeight, kPlanes = Planes(kKind), kSteps = Format::kGroup / 16;
  constexpr bool kInGroups = kKind == kTileA4;                   // an activation scale for each weight group
  constexpr bool kUnitSums = Format::kGroups > 1 && !kInGroups;  // one for several weight groups
  Floats kept[kStripes][kTokens];                                // sums of the unit, or those of the tile
  Unroll<kStripes * kTokens>([&](auto i) FMOE_FLAT {
    constexpr int s = decltype(i)() / kTokens, t = decltype(i)() % kTokens;
    if constexpr (kUnitSums) {
      kept[s][t] = Zero();
    } else if constexpr (Format::kGroups > 1) {
      kept[s][t] = Load(sums + (s * kHeight + t) * 16);
    }
  });
  Unroll<Format::kGroups>([&](auto group) FMOE_FLAT {
    Ints dots[kPlanes][kStripes][kTokens];
    Unroll<kStripes * kTokens>([&](auto i) FMOE_FLAT {
      constexpr int s = decltype(i)() / kTokens, t = decltype(i)() % kTokens;
      Unroll<kPlanes>([&](auto plane) FMOE_FLAT {
        dots[plane][s][t] =
            Format::kZeros || plane + 1 < kPlanes ? IntZero() : IntSet(correction[group * kHeight + t]);
      });
    });
    Unroll<kSteps * 4>([&](auto i) FMOE_FLAT {
      constexpr int kStep = decltype(group)() * kSteps + decltype(i)() / 4, q = decltype(i)() % 4;
      Ints weights[kStripes];
      Unroll<kStripes>([&](auto s) FMOE_FLAT { weights[s] = LoadInts(unit.codes[kStep * 4 + q][s]); });
      Unroll<kPlanes * kTokens>([&](auto j) FMOE_FLAT {
        constexpr int plane = decltype(j)() / kTokens, t = decltype(j)() % kTokens;
        const Ints word = IntSet(words[(kStep * kPlanes * 4 + plane * 4 + q) * kHeight + t]);
        Unroll<kStripes>([&](auto s)
                             FMOE_FLAT { dots[plane][s][t] = ByteDot(dots[plane][s][t], weights[s], word); });
      });
    });
    Floats scale[kStripes], zero[kStripes];
    Unroll<kStripes>([&](auto s) FMOE_FLAT {
      scale[s] = Format::kScales ? Load(unit.scales[group][s]) : Zero();
      zero[s] = Format::kZeros ? Load(unit.zeros[group][s]) : Zero();
      if constexpr (Format::kGroups == 1) {  // with several, the registers hold the sums of the unit
        scale[s] = InRegister(scale[s]);
        zero[s] = InRegister(zero[s]);
      }
    });
    Unroll<kTokens>([&](auto t) FMOE_FLAT {
      const Floats input_sum = Format::kZeros ? Set(((const float*)correction)[group * kHeight + t]) : Zero();
      const Floats input_scale = Set(activation_scale[kInGroups ? group * kHeight + t : t]);
      Unroll<kStripes>([&](auto s) FMOE_FLAT {
        Ints whole = dots[kPlanes - 1][s][t];
        if constexpr (kPlanes == 2) {
          whole = IntAdd(ShiftLeft<7>(dots[0][s][t]), whole);
        }
        Floats sum = ToFloats(whole);
        if constexpr (Format::kZeros) {
          sum = NegativeMultiplyAdd(zero[s], input_sum, sum);
        }
        if constexpr (kUnitSums) {
          kept[s][t] = MultiplyAdd(sum, scale[s], kept[s][t]);
        } else if constexpr (kInGroups) {
          kept[s][t] = MultiplyAdd(sum, Multiply(scale[s], input_scale), kept[s][t]);
        } else {
          float* place = sums + (s * kHeight + t) * 16;
          Store(place,
                MultiplyAdd(Format::kScales ? Multiply(sum, scale[s]) : sum, input_scale, Load(place)));
        }
      });
    });
  });
  if constexpr (Format::kGroups > 1) {
    Unroll<kStripes * kTokens>([&](auto i) FMOE_FLAT {
      constexpr int s = decltype(i)() / kTokens, t = decltype(i)() % kTokens;
      float* place = sums + (s * kHeight + t) * 16;
      Store(place, kUnitSums ? MultiplyAdd(kept[s][t], Set(activation_scale[t]), Load(place)) : kept[s][t]);
    });
  }
}

/// The same for the eight tokens of a tile. A function of its own, since formats share it.
template <class Format, TileKind kKind, int kStripes>
__attribute__((noinline)) void MultiplyTile(const DecodedUnit<Format, kStripes>& unit, const int32_t* words,
                                            const int32_t* correction, const float* activation_scale,
                                            float* sums) {
  constexpr int kTokens = kBatchTokens<kKind>;
  for (int first = 0; first < kMaxHeight; first += kTokens) {
    MultiplyUnit<Format, kKind, kStripes, kTokens>(unit, words + first, correction + first,
                                                   activation_scale + first, sums + first * 16);
  }
}

template <WeightKernel kWeight, TileKind kKind, int kStripes>
FMOE_INLINE void BatchOfStripes(const uint8_t* stripes, int64_t stripe_stride, int64_t blocks,
                                const TileView* tiles, int64_t num_tiles, int64_t tile_sums, float* out) {
  using Panel = IntegerPanel<kWeight>;
  using Format = DecodedOf<kWeight>;
  DecodedUnit<Format, kStripes> decoded;
  const Ints table = Panel::kE2m1 ? E2m1Table() : IntZero();
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    for (int i = 0; i < kStripes * kMaxHeight; ++i) {
      Store(out + tile * tile_sums + i * 16, Zero());
    }
  }
  // Lines of the next blocks are asked for between tiles: all at once they would hold up the loads of tiles.
  constexpr int64_t kLines = (Panel::kLeastBytes + 63) / 64;
  const GroupScales type = tiles->group_scales;
  const int64_t block_bytes = Panel::BlockBytes(type);
  const int64_t steps = Panel::kUnits * num_tiles;
  const int64_t lines_at_once = (kStripes * kLines + steps - 1) / steps;
  const int64_t blocks_ahead = num_tiles >= 4 ? 1 : 2;
  int64_t words = 0, corrections = 0, scales = 0;
  for (int64_t block = 0; block < blocks; ++block, stripes += block_bytes) {
    const int64_t ahead = block + blocks_ahead;
    const uint8_t* next = stripes + blocks_ahead * block_bytes;
    if (ahead >= blocks) {  // of the stripes behind these, or where the task goes on
      next = InStretch(next + kStripes * stripe_stride - blocks * block_bytes, tiles);
    }
    int64_t line = 0;
    for (int index = 0; index < Panel::kUnits; ++index) {
      DecodeUnit<kWeight, kStripes>(stripes + index * Panel::kUnitBytes, stripes + Panel::kCodeBytes, type,
                                    stripe_stride, table, &decoded);
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        for (const int64_t end = line + lines_at_once; line < end; ++line) {
          Prefetch(next + line / kLines * stripe_stride + line % kLines * 64);
        }
        const TileView& view = tiles[tile];
        MultiplyTile<Format, kKind, kStripes>(decoded, (const int32_t*)view.codes + words,
                                              view.correction + corrections, view.scale + scales,
                                              out + tile * tile_sums);
      }
      words += 16 * Planes(kKind) * kMaxHeight;
      corrections += Format::kGroups * kMaxHeight;
      scales += (kKind == kTileA4 ? Format::kGroups : 1) * kMaxHeight;
    }
  }
}

template <WeightKernel kWeight, TileKind kKind>
void IntegerBatch(const uint8_t* stripes, int64_t num_stripes, int64_t stripe_stride, int64_t blocks,
                  const TileView* tiles, int64_t num_tiles, float* out) {
  constexpr int kStripeSums = kMaxHeight * 16;
  const int64_t tile_sums = num_stripes * kStripeSums;
  while (num_stripes > 0) {
    int64_t taken = num_stripes == 4 ? 2 : num_stripes < 3 ? num_stripes : 3;
    if (taken == 3) {
      BatchOfStripes<kWeight, kKind, 3>(stripes, stripe_stride, blocks, tiles, num_tiles, tile_sums, out);
    } else if (taken == 2) {
      BatchOfStripes<kWeight, kKind, 2>(stripes, stripe_stride, blocks, tiles, num_tiles, tile_sums, out);
    } else {
      BatchOfStripes<kWeight, kKind, 1>(stripes, stripe_stride, blocks, tiles, num_tiles, tile_sums, out);
    }
    num_stripes -= taken;
    stripes += taken * stripe_stride;
    out += taken * kStripeSums;
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
