#pragma once

#include <stdint.h>

#include "experts/cpu/dot_prefetch_isa.hpp"
#include "experts/cpu/kernel_table_isa.hpp"

/// Micro-kernels of formats that become fp32: 16 and 32 bits, fp8 (dot_isa.hpp).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

template <WeightKernel kWeight>
struct FloatPanel {
  /// k in one 64-byte vector.
  static constexpr int kVectorK = kWeight == kWeightF32                             ? 1
                                  : kWeight == kWeightBf16 || kWeight == kWeightF16 ? 2
                                                                                    : 4;
  static constexpr int kCodeBytes = 64 * 64 / kVectorK;
  /// k after which sums are scaled; 0: not before the end.
  static constexpr int kGroup = kWeight == kWeightE4m3Scaled ? 64 : kWeight == kWeightMxfp8 ? 32 : 0;
  static constexpr int kScaleBytes = kWeight == kWeightE4m3Scaled ? 64 : kWeight == kWeightMxfp8 ? 32 : 0;
  static constexpr int kBlockBytes = kCodeBytes + kScaleBytes;

  FMOE_INLINE void Decode(const uint8_t* vector, int half, Floats* out) {
    if constexpr (kWeight == kWeightF32) {
      out[0] = LoadFloatScales(vector, half);
    } else if constexpr (kWeight == kWeightBf16) {
      DecodeBf16(vector, half, out);
    } else if constexpr (kWeight == kWeightF16) {
      DecodeF16(vector, half, out);
    } else if constexpr (kWeight == kWeightE5m2) {
      DecodeE5m2(vector, half, out);
    } else {
      DecodeE4m3(vector, half, out);
    }
  }
  FMOE_INLINE Floats Scale(const uint8_t* block, int group, int half) {
    if constexpr (kWeight == kWeightMxfp8) {
      return LoadE8m0Scales(block + kCodeBytes + group * 16, half);
    } else {
      return LoadFloatScales(block + kCodeBytes, half);
    }
  }
};

/// Even and odd k, in even and odd blocks, have sums of their own: a single chain of additions would leave an
/// FMA unit idle for most of its latency. Four sums a token at every height, so that bits do not depend on
/// it.
constexpr int kChains = 2;
constexpr int kBlockChains = 2;

/// Up to this height two blocks run side by side; above, their sums would not fit the registers. A block of
/// 16 or 32 bits a value takes longer to arrive than one or two tokens' chains of additions: there, two
/// blocks are only two streams to read, and BF16 got 85 % of the read rate instead of 95 (Zen 5).
template <WeightKernel kWeight, int kHeight>
constexpr bool IsSideBySide() {
  if (kHalves == 2) {
    return kHeight <= 2;
  }
  return kHeight <= 4 && (FloatPanel<kWeight>::kVectorK == 4 || kHeight > 2);
}

/// One group of k of kBlocks adjacent blocks: sums[block][token][chain] += weights * values for kHeight
/// tokens.
template <WeightKernel kWeight, int kHeight, int kBlocks>
FMOE_INLINE void FloatGroup(const uint8_t* vectors, int count, int half, const float* values,
                            Floats (*sums)[kHeight][kChains]) {
  using Panel = FloatPanel<kWeight>;
  constexpr int kStep = Panel::kVectorK == 1 ? 2 : 1;  // vectors at a time, so that chains are constants
  constexpr int kStepK = kStep * Panel::kVectorK;
  for (int vector = 0; vector < count; vector += kStep, vectors += kStep * 64, values += kStepK * kHeight) {
    Floats weights[kBlocks][kStepK];
    Unroll<kBlocks>([&](auto b) FMOE_FLAT {
      Unroll<kStep>([&](auto v) FMOE_FLAT {
        Panel::Decode(vectors + b * Panel::kBlockBytes + v * 64, half, weights[b] + v * Panel::kVectorK);
      });
    });
    Unroll<kStepK>([&](auto k) FMOE_FLAT {
      Unroll<kBlocks>([&](auto b) FMOE_FLAT {
        Unroll<kHeight>([&](auto t) FMOE_FLAT {
          const Floats value = Set(values[(b * 64 + k) * kHeight + t]);
          sums[b][t][k % kChains] = MultiplyAdd(weights[b][k], value, sums[b][t][k % kChains]);
        });
      });
    });
  }
}

/// kBlocks blocks from `block` on, for one half of the rows and kHeight tokens. Formats with scales empty
/// their sums into `totals` after each group.
template <WeightKernel kWeight, int kHeight, int kBlocks>
FMOE_INLINE void FloatBlocks(const uint8_t* block, int half, const float* values,
                             Floats (*sums)[kHeight][kChains], Floats* totals) {
  using Panel = FloatPanel<kWeight>;
  constexpr bool kScaled = Panel::kGroup != 0;
  constexpr int kGroupK = kScaled ? Panel::kGroup : 64;
  constexpr int kVectors = kGroupK / Panel::kVectorK;
  Floats scaled[kBlocks][kHeight];  // totals of the later blocks wait, so that additions keep their order
  Unroll<64 / kGroupK>([&](auto group) FMOE_FLAT {
    FloatGroup<kWeight, kHeight, kBlocks>(block + group * kVectors * 64, kVectors, half,
                                          values + group * kGroupK * kHeight, sums);
    if constexpr (kScaled) {
      Unroll<kBlocks>([&](auto b) FMOE_FLAT {
        const Floats scale = Panel::Scale(block + b * Panel::kBlockBytes, group, half);
        Unroll<kHeight>([&](auto t) FMOE_FLAT {
          const Floats sum = Add(sums[b][t][0], sums[b][t][1]);
          scaled[b][t] = group == 0 ? Multiply(sum, scale) : MultiplyAdd(sum, scale, scaled[b][t]);
          sums[b][t][0] = Zero();
          sums[b][t][1] = Zero();
        });
      });
    }
  });
  if constexpr (kScaled) {
    Unroll<kBlocks>([&](auto b) FMOE_FLAT {
      Unroll<kHeight>([&](auto t) FMOE_FLAT { totals[t] = Add(totals[t], scaled[b][t]); });
    });
  }
}

/// The running sums of a stripe for one half of its rows.
template <int kHeight>
struct FloatSums {
  Floats sums[kBlockChains][kHeight][kChains];
  Floats totals[kHeight];
};

template <int kHeight>
FMOE_INLINE void CopySums(const FloatSums<kHeight>& from, FloatSums<kHeight>& to) {
  Unroll<kHeight>([&](auto t) FMOE_FLAT {
    to.totals[t] = from.totals[t];
    Unroll<kBlockChains>([&](auto b) FMOE_FLAT {
      Unroll<kChains>([&](auto c) FMOE_FLAT { to.sums[b][t][c] = from.sums[b][t][c]; });
    });
  });
}

/// One block of two stripes for kTokens tokens: each value is broadcast once for 32 rows, so that the loads,
/// one for two multiply-adds, keep up with two multiply-adds a cycle. BF16, weights from memory, Zen 5,
/// GFLOP/s with one stripe -> two: 174 -> 214 at 16 tokens, 186 -> 241 at 64 (peak 270).
template <WeightKernel kWeight, int kTokens, int kHeight>
FMOE_INLINE void FloatBlockPair(const uint8_t* block, int64_t stripe_bytes, const float* values, int first,
                                Floats (*sums)[kTokens][kChains], Floats (*totals)[kTokens]) {
  using Panel = FloatPanel<kWeight>;
  constexpr bool kScaled = Panel::kGroup != 0;
  constexpr int kGroupK = kScaled ? Panel::kGroup : 64;
  constexpr int kStep = Panel::kVectorK == 1 ? 2 : 1;
  constexpr int kStepK = kStep * Panel::kVectorK;
  constexpr int kVectors = kGroupK / Panel::kVectorK;
  Floats scaled[2][kTokens];
  Unroll<64 / kGroupK>([&](auto group) FMOE_FLAT {
    const uint8_t* vectors = block + group * kVectors * 64;
    const float* at = values + group * kGroupK * kHeight + first;
    for (int vector = 0; vector < kVectors; vector += kStep, vectors += kStep * 64, at += kStepK * kHeight) {
      Floats weights[2][kStepK];
      Unroll<2>([&](auto s) FMOE_FLAT {
        Unroll<kStep>([&](auto v) FMOE_FLAT {
          Panel::Decode(vectors + s * stripe_bytes + v * 64, 0, weights[s] + v * Panel::kVectorK);
        });
      });
      Unroll<kStepK>([&](auto k) FMOE_FLAT {
        Unroll<kTokens>([&](auto t) FMOE_FLAT {
          const Floats value = Set(at[k * kHeight + t]);
          Unroll<2>([&](auto s) FMOE_FLAT {
            sums[s][t][k % kChains] = MultiplyAdd(weights[s][k], value, sums[s][t][k % kChains]);
          });
        });
      });
    }
    if constexpr (kScaled) {
      Unroll<2>([&](auto s) FMOE_FLAT {
        const Floats scale = Panel::Scale(block + s * stripe_bytes, group, 0);
        Unroll<kTokens>([&](auto t) FMOE_FLAT {
          const Floats sum = Add(sums[s][t][0], sums[s][t][1]);
          scaled[s][t] = group == 0 ? Multiply(sum, scale) : MultiplyAdd(sum, scale, scaled[s][t]);
          sums[s][t][0] = Zero();
          sums[s][t][1] = Zero();
        });
      });
    }
  });
  if constexpr (kScaled) {
    Unroll<2>([&](auto s) FMOE_FLAT {
      Unroll<kTokens>([&](auto t) FMOE_FLAT { totals[s][t] = Add(totals[s][t], scaled[s][t]); });
    });
  }
}

/// Two stripes, four tokens at a time, with the additions of FloatDot in their order.
template <WeightKernel kWeight, int kHeight>
void FloatDotPair(const uint8_t* stripes, int64_t blocks, const TileView* tile, float* out) {
  using Panel = FloatPanel<kWeight>;
  constexpr int kTokens = kPairTokens;
  constexpr int kParts = kHeight / kTokens;
  const int64_t stripe_bytes = blocks * Panel::kBlockBytes;
  const float* values = (const float*)tile->codes;
  Floats kept[kBlockChains][kParts][2][kTokens][kChains], totals[kParts][2][kTokens];
  Unroll<kBlockChains * 2 * kHeight * kChains>([&](auto i) FMOE_FLAT { (&kept[0][0][0][0][0])[i] = Zero(); });
  Unroll<2 * kHeight>([&](auto i) FMOE_FLAT { (&totals[0][0][0])[i] = Zero(); });
  for (int64_t block = 0; block < blocks; ++block, values += 64 * kHeight) {
    const int64_t offset = block * Panel::kBlockBytes;
    PrefetchPair<Panel::kBlockBytes>(stripes, offset, stripe_bytes, tile);
    for (int part = 0; part < kParts; ++part) {
      Floats(*mine)[kTokens][kChains] = kept[block % kBlockChains][part];
      Floats sums[2][kTokens][kChains];  // a copy, since registers cannot be indexed
      Unroll<2 * kTokens * kChains>([&](auto i) FMOE_FLAT { (&sums[0][0][0])[i] = (&mine[0][0][0])[i]; });
      FloatBlockPair<kWeight, kTokens, kHeight>(stripes + offset, stripe_bytes, values, part * kTokens, sums,
                                                totals[part]);
      Unroll<2 * kTokens * kChains>([&](auto i) FMOE_FLAT { (&mine[0][0][0])[i] = (&sums[0][0][0])[i]; });
    }
  }
  Unroll<2 * kHeight>([&](auto i) FMOE_FLAT {
    constexpr int kPart = decltype(i)() / (2 * kTokens), kStripe = decltype(i)() / kTokens % 2;
    constexpr int kToken = decltype(i)() % kTokens;
    const auto& even_sums = kept[0][kPart][kStripe][kToken];
    const auto& odd_sums = kept[1][kPart][kStripe][kToken];
    const Floats even = Add(even_sums[0], even_sums[1]), odd = Add(odd_sums[0], odd_sums[1]);
    Store(out + (kStripe * kHeight + kPart * kTokens + kToken) * 16,
          Panel::kGroup != 0 ? totals[kPart][kStripe][kToken] : Add(even, odd));
  });
}

/// Stripes one after the other.
template <WeightKernel kWeight, int kHeight, FarPrefetch kFar>
FMOE_INLINE void FloatStripes(const uint8_t* stripes, int64_t num_stripes, int64_t blocks,
                              const TileView* tile, float* out) {
  using Panel = FloatPanel<kWeight>;
  constexpr int64_t kBytes = Panel::kBlockBytes;
  for (int64_t stripe = 0; stripe < num_stripes; ++stripe, out += kHeight * 16) {
    const float* values = (const float*)tile->codes;
    FloatSums<kHeight> all[kHalves];
    Unroll<kHalves>([&](auto half) FMOE_FLAT {
      Unroll<kHeight>([&](auto t) FMOE_FLAT {
        all[half].totals[t] = Zero();
        Unroll<kBlockChains>([&](auto b) FMOE_FLAT {
          Unroll<kChains>([&](auto c) FMOE_FLAT { all[half].sums[b][t][c] = Zero(); });
        });
      });
    });
    int64_t block = 0;
    for (; block + 2 <= blocks; block += 2, stripes += 2 * kBytes, values += 2 * 64 * kHeight) {
      PrefetchBlock<kFar, 2 * kBytes>(stripes, tile);
      for (int half = 0; half < kHalves; ++half) {
        FloatSums<kHeight> mine;  // a copy, since registers cannot be indexed by a half
        CopySums(all[half], mine);
        if constexpr (IsSideBySide<kWeight, kHeight>()) {
          FloatBlocks<kWeight, kHeight, 2>(stripes, half, values, mine.sums, mine.totals);
        } else {
          FloatBlocks<kWeight, kHeight, 1>(stripes, half, values, mine.sums, mine.totals);
          FloatBlocks<kWeight, kHeight, 1>(stripes + kBytes, half, values + 64 * kHeight, mine.sums + 1,
                                           mine.totals);
        }
        CopySums(mine, all[half]);
      }
    }
    if (block < blocks) {
      for (int half = 0; half < kHalves; ++half) {
        FloatBlocks<kWeight, kHeight, 1>(stripes, half, values, all[half].sums, all[half].totals);
      }
      stripes += kBytes;
    }
    Unroll<kHalves * kHeight>([&](auto i) FMOE_FLAT {
      constexpr int kHalf = decltype(i)() / kHeight, kToken = decltype(i)() % kHeight;
      const auto& sums = all[kHalf].sums;
      const Floats even = Add(sums[0][kToken][0], sums[0][kToken][1]);
      const Floats odd = Add(sums[1][kToken][0], sums[1][kToken][1]);
      Store(out + kToken * 16 + kHalf * kLanes,
            Panel::kGroup != 0 ? all[kHalf].totals[kToken] : Add(even, odd));
    });
  }
}

template <WeightKernel kWeight, int kHeight>
void FloatDot(const uint8_t* stripes, int64_t num_stripes, int64_t blocks, const TileView* tile, float* out) {
  if (kHalves == 1 && kHeight > kPairTokens && num_stripes == 2) {
    FloatDotPair<kWeight, kHeight>(stripes, blocks, tile, out);
    return;
  }
  if constexpr (kHeight <= kTwoLoopsHeight) {
    if (tile->prefetch_far != 0) {
      FloatStripes<kWeight, kHeight, FarPrefetch::kAlways>(stripes, num_stripes, blocks, tile, out);
    } else {
      FloatStripes<kWeight, kHeight, FarPrefetch::kNever>(stripes, num_stripes, blocks, tile, out);
    }
  } else {
    constexpr FarPrefetch kFar = kHeight <= kFarPrefetchHeight ? FarPrefetch::kAsked : FarPrefetch::kNever;
    FloatStripes<kWeight, kHeight, kFar>(stripes, num_stripes, blocks, tile, out);
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
