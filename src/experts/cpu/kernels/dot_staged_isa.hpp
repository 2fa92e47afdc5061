#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/dot_float_isa.hpp"

/// Short tiles of 8-bit floats in fp32 on cores of Intel, where decoding takes as long as reading: two ports
/// do all of it, and a conversion from f16 takes a cycle of both.
///
///     64 bytes = 4 k of 16 rows  ->  f16 | k 0 | k 2 |  and  | k 1 | k 3 |  ->  fp32 of k 0, 1, 2, 3
///                                    products, masks: 4     halves apart: 2     conversions: 8
///
/// Through L1 the halves need no shuffles. The two units that come next are staged there while two are
/// multiplied, so that no load waits for a store. Lines ahead are prefetched twice, beside each
/// vector, as those of integers are (PrefetchTwice). docs/kernels_reading.md has the figures.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Two adjacent units at a time.
template <WeightKernel kWeight>
struct Staging {
  using Panel = FloatPanel<kWeight, F32Unit>;
  static constexpr int64_t kBytes = 2 * Panel::kBlockBytes;
  static constexpr int kUnitHalves = Panel::kVectors * 128;

  /// A vector of both units, of kUnitBytes each at `out`.
  FMOE_INLINE void Put(const uint8_t* vector, uint8_t* out) {
    Unroll<2>([&](int unit) FMOE_FLAT {
      Ints halves[2];
      DecodeHalves<kWeight == kWeightE5m2>(vector + unit * Panel::kBlockBytes, halves);
      StoreInts(out + unit * kUnitHalves, halves[0]);
      StoreInts(out + unit * kUnitHalves + 64, halves[1]);
    });
  }
  FMOE_INLINE void Take(const uint8_t* staged, Floats* words) {
    Unroll<4>([&](auto k) FMOE_FLAT {
      words[k] = LoadF16((const uint16_t*)(staged + decltype(k){} % 2 * 64 + decltype(k){} / 2 * 32));
    });
  }
};

/// The units at `staged` with a tile, while those at `next` go to `staging`, if there are any, and lines
/// ahead are prefetched. Sums as ShortUnits has them.
template <WeightKernel kWeight, int kHeight, bool kNext>
FMOE_INLINE void StagedUnits(const uint8_t* staged, const uint8_t* group_scales, const uint8_t* next,
                             uint8_t* staging, PrefetchPair next_pair, const int32_t* words, Floats* totals) {
  using Panel = FloatPanel<kWeight, F32Unit>;
  Floats scaled[2][kHeight];
  Unroll<Panel::kGroups>([&](int group) FMOE_FLAT {
    Floats sums[2][1][kHeight][2];
    Unroll<4 * kHeight>([&](int i) FMOE_FLAT { (&sums[0][0][0][0])[i] = Zero(); });
    for (int v = 0; v < Panel::kVectors / Panel::kGroups; ++v, staged += 128, words += 4 * kHeight) {
      Unroll<2>([&](int unit) FMOE_FLAT { PrefetchTwice(next_pair, sums[unit][0][0][0]); });
      Floats weights[2][4];
      Unroll<2>([&](int unit) FMOE_FLAT {
        Staging<kWeight>::Take(staged + unit * Staging<kWeight>::kUnitHalves, weights[unit]);
      });
      if constexpr (kNext) {
        Staging<kWeight>::Put(next, staging);
        next += 64;
        staging += 128;
      }
      Unroll<8>([&](int i) FMOE_FLAT {
        const int word = i / 2, unit = i % 2;
        DotWord<kTileF32, 1, kHeight, kHeight>(word, weights[unit] + word,
                                               words + (unit * Panel::kWords + word) * kHeight, sums[unit]);
      });
    }
    Unroll<2 * kHeight>([&](int i) FMOE_FLAT {
      const int unit = i / kHeight, token = i % kHeight;
      const auto& chains = sums[unit][0][token];
      scaled[unit][token] =
          Panel::AddGroup(Add(chains[0], chains[1]), group_scales + unit * Panel::kScaleStride, group, 0,
                          scaled[unit][token]);
    });
  });
  Unroll<2>([&](int unit) FMOE_FLAT {
    Unroll<kHeight>([&](int t) FMOE_FLAT { totals[t] = Add(totals[t], scaled[unit][t]); });
  });
}

/// FloatDot where the tile says so. Prefetch distances count from the units that are staged.
template <WeightKernel kWeight, int kHeight>
void StagedDot(const uint8_t* stripes, int64_t num_stripes, int64_t blocks, const TileView* tile,
               float* out) {
  using Panel = FloatPanel<kWeight, F32Unit>;
  constexpr int64_t kPair = Staging<kWeight>::kBytes;
  if (tile->short_tile.prefetch_far == 0 || blocks < 2) {
    FloatDot<kWeight, kTileF32, kHeight>(stripes, num_stripes, blocks, tile, out);
    return;
  }
  alignas(64) uint8_t buffers[2][2 * Staging<kWeight>::kUnitHalves];
  const int64_t header = Panel::HeaderBytes(blocks);
  for (int v = 0; v < Panel::kVectors; ++v) {
    Staging<kWeight>::Put(stripes + header + v * 64, buffers[0] + v * 128);
  }
  const uint8_t* staged = buffers[0];
  uint8_t* staging = buffers[1];
  const int64_t last = blocks % 2 * Panel::kBlockBytes;  // a unit that has no other
  for (int64_t stripe = 0; stripe < num_stripes; ++stripe, out += kHeight * 16) {
    const int32_t* words = (const int32_t*)tile->codes;
    Floats totals[kHeight];
    Unroll<kHeight>([&](int t) FMOE_FLAT { totals[t] = Zero(); });
    const uint8_t* const stripe_begin = stripes;
    PrefetchBlock<true, 0, 0>(stripes + kPair, header, tile);
    stripes += header;
    for (int64_t block = 0; block + 2 <= blocks; block += 2, words += 2 * Panel::kWords * kHeight) {
      const uint8_t* const read = stripes + kPair;
      const PrefetchPair next_pair =
          PrefetchPairFrom(read, PrefetchBlock<true, kPair, 2 * Panel::kVectors * 64>(read, kPair, tile));
      const bool ends = block + 4 > blocks;
      const uint8_t* scales = Panel::ScalesOf(stripe_begin, stripes, block);
      const uint8_t* next = read + (ends ? last + header : 0);
      if (!ends || stripe + 1 < num_stripes) {
        StagedUnits<kWeight, kHeight, true>(staged, scales, next, staging, next_pair, words, totals);
      } else {
        StagedUnits<kWeight, kHeight, false>(staged, scales, next, staging, next_pair, words, totals);
      }
      const uint8_t* done = staged;
      staged = staging;
      staging = (uint8_t*)done;
      stripes += kPair;
    }
    if (last > 0) {
      PrefetchBlock<true, 0, 0>(stripes + kPair, last, tile);
      ShortUnits<kWeight, kTileF32, kHeight, 1, false>(
          stripes, Panel::ScalesOf(stripe_begin, stripes, blocks - 1), {}, 0, words, tile->scale, totals);
      stripes += last;
    }
    Unroll<kHeight>([&](int t) FMOE_FLAT { Store(out + t * 16, totals[t]); });
    tile = tile->short_tile.next_stripe_tile == 0 ? tile : tile->short_tile.next_stripe_tile;
  }
}

template <WeightKernel kWeight>
constexpr void SetStagedDots(KernelTable& table) {
  table.dot[kWeight][kTileF32][0] = &StagedDot<kWeight, 1>;
  table.dot[kWeight][kTileF32][1] = &StagedDot<kWeight, 2>;
  table.prefetches_twice[kWeight][kTileF32] = true;
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
