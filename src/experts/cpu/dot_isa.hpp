#pragma once

#include <stdint.h>

#include "experts/cpu/kernel_table_isa.hpp"
#include "experts/cpu/simd_isa.hpp"

/// The micro-kernels: 16 rows of weights times a tile of 1 to 16 tokens, K innermost.
///
///              K ->                          one unit = 64 k
///     stripe   [codes | scales] [codes | scales] ...      one stream, prefetched twice
///     tile     [64 k x tokens ] [64 k x tokens ] ...      broadcast, from L1 or L2
///     result   [token][16 rows]                           registers until the stripe ends
///
/// Every format decodes in registers and every token runs through the
/// same sequence of operations whatever the height of its tile, so that neighbours never change its bits.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

// Distances of the two prefetches along the stripe, in bytes. The near one moves lines from L2 to L1, the far
// one from memory to L2, which can wait for more of them at a time. Measured with NVFP4 at one token:
// docs/kernels.md.
constexpr int64_t kPrefetchNear = 4608;
constexpr int64_t kPrefetchFar = 9216;
/// Tiles above this height are bound by arithmetic; a far prefetch would only take load slots.
constexpr int kFarPrefetchHeight = 4;

template <int kHeight, int64_t kBytes>
FMOE_INLINE void PrefetchBlock(const uint8_t* block) {
  for (int64_t line = 0; line < kBytes; line += 64) {
    Prefetch(block + kPrefetchNear + line);
    if constexpr (kHeight <= kFarPrefetchHeight) {
      PrefetchFar(block + kPrefetchFar + line);
    }
  }
}

// ------------------------------------------------------------------------------------------------- integer
// formats

/// Where things stand in a block of an integer format.
template <WeightKernel kWeight>
struct IntegerPanel {
  static constexpr bool kE2m1 = kWeight == kWeightNvfp4 || kWeight == kWeightMxfp4;
  static constexpr bool kNibbles = kWeight < kWeightU8;
  static constexpr bool kZeroPoints = kWeight != kWeightU4 && kWeight != kWeightU8 && !kE2m1;
  static constexpr bool kGroup32 = kWeight == kWeightU4Group32 || kWeight == kWeightU8Group32;
  static constexpr bool kGroup128 = kWeight == kWeightU4Group128 || kWeight == kWeightU8Group128;
  static constexpr int kGroup = kWeight == kWeightNvfp4 ? 16 : kWeight == kWeightMxfp4 || kGroup32 ? 32 : 64;
  static constexpr int kUnits = kGroup128 ? 2 : 1;  // of 64 k in a block
  static constexpr int kUnitBytes = kNibbles ? 512 : 1024;
  static constexpr int kScaleBytes = kE2m1 ? 16 * 64 / kGroup : !kZeroPoints ? 0 : kGroup32 ? 128 : 64;
  static constexpr int kBlockBytes = kUnits * kUnitBytes + kScaleBytes;
  static constexpr int kLargestCode = kE2m1 ? 24 : kNibbles ? 15 : 255;

  /// 16 k as four vectors of unsigned bytes.
  FMOE_INLINE void Decode(const uint8_t* unit, int step, int half, Ints table, Ints* out) {
    if constexpr (kE2m1) {
      DecodeE2m1(unit + step * 128, half, table, out);
      DecodeE2m1(unit + step * 128 + 64, half, table, out + 2);
    } else if constexpr (kNibbles) {
      DecodeU4(unit + step * 128, half, out);
      DecodeU4(unit + step * 128 + 64, half, out + 2);
    } else {
      Unroll<4>([&](auto q) FMOE_FLAT { out[q] = LoadBytes(unit + step * 256 + q * 64, half); });
    }
  }
};

/// sums[t] += four vectors of weights times 16 k of token t, for kCount tokens `height` words apart.
template <int kLargestCode, int kCount>
FMOE_INLINE void Dot16(Ints* sums, const Ints* weights, const int32_t* words, int height) {
  if constexpr (kHasByteDot) {
    // Chains of different tokens alternate: one chain after the other fills the scheduler with waiting
    // operations and ran at 60-90 % of this order (Emerald Rapids).
    Unroll<4>([&](auto q) FMOE_FLAT {
      Unroll<kCount>(
          [&](auto t) FMOE_FLAT { sums[t] = ByteDot(sums[t], weights[q], IntSet(words[q * height + t])); });
    });
  } else if constexpr (kLargestCode <= 24) {
    // Words hold the sum of eight products: 8 * 24 * 127 = 24384.
    Unroll<kCount>([&](auto t) FMOE_FLAT {
      Ints words16 = MultiplyAddPairs(weights[0], IntSet(words[t]));
      Unroll<3>([&](auto q) FMOE_FLAT {
        words16 = AddWords(words16, MultiplyAddPairs(weights[q + 1], IntSet(words[(q + 1) * height + t])));
      });
      sums[t] = IntAdd(sums[t], MultiplyAddWords(words16, 1));
    });
  } else {
    // Bytes up to 255 would overflow words: their nibbles go separately, 8 * 15 * 127 = 15240 each.
    Ints low[4], high[4];
    Unroll<4>([&](auto q) FMOE_FLAT {
      low[q] = LowNibbles(weights[q]);
      high[q] = HighNibbles(weights[q]);
    });
    Unroll<kCount>([&](auto t) FMOE_FLAT {
      Ints sum_low = MultiplyAddPairs(low[0], IntSet(words[t]));
      Ints sum_high = MultiplyAddPairs(high[0], IntSet(words[t]));
      Unroll<3>([&](auto q) FMOE_FLAT {
        sum_low = AddWords(sum_low, MultiplyAddPairs(low[q + 1], IntSet(words[(q + 1) * height + t])));
        sum_high = AddWords(sum_high, MultiplyAddPairs(high[q + 1], IntSet(words[(q + 1) * height + t])));
      });
      sums[t] = IntAdd(sums[t], IntAdd(MultiplyAddWords(sum_low, 1), MultiplyAddWords(sum_high, 16)));
    });
  }
}

/// Tokens whose sums live in registers at the same time. Two planes need two sums each; groups below 64 also
/// keep fp32 sums of the unit for every token.
template <TileKind kKind, int kGroup, int kHeight>
constexpr int TokensAtOnce() {
  constexpr int kPlanes = Planes(kKind);
  constexpr int kRegisters = kHalves == 1 ? (kPlanes > 1 && kGroup < 64 ? 4
                                             : kPlanes == 3             ? 4
                                                                        : 8)
                                          : (kPlanes > 1 ? 2 : 4);
  return kHeight < kRegisters ? kHeight : kRegisters;
}

/// One group of k of one unit for tokens [first, first + kCount): integer sums as fp32, exact below 2^24.
template <WeightKernel kWeight, TileKind kKind, int kHeight, int kCount>
FMOE_INLINE void GroupSums(const uint8_t* unit, int group, int half, Ints table, const int32_t* words,
                           const int32_t* correction, int first, Floats* sums) {
  using Panel = IntegerPanel<kWeight>;
  constexpr int kSteps = Panel::kGroup / 16;
  constexpr int kStepWords = Planes(kKind) * 4 * kHeight;
  Ints sum[Planes(kKind)][kCount];  // of each plane, the highest first
  Unroll<kCount>([&](auto t) FMOE_FLAT {
    Unroll<Planes(kKind)>([&](auto plane) FMOE_FLAT { sum[plane][t] = IntZero(); });
    if constexpr (!Panel::kZeroPoints) {
      sum[Planes(kKind) - 1][t] = IntSet(correction[first + t]);
      if constexpr (kKind == kTileA24) {
        sum[0][t] = IntSet(correction[kHeight + first + t]);
      }
    }
  });
  Unroll<kSteps>([&](auto step) FMOE_FLAT {
    Ints weights[4];
    Panel::Decode(unit, group * kSteps + step, half, table, weights);
    const int32_t* at = words + step * kStepWords + first;
    Unroll<Planes(kKind)>([&](auto plane) FMOE_FLAT {
      Dot16<Panel::kLargestCode, kCount>(sum[plane], weights, at + plane * 4 * kHeight, kHeight);
    });
  });
  Unroll<kCount>([&](auto t) FMOE_FLAT {
    constexpr int kLast = Planes(kKind) - 1;
    Ints low = sum[kLast][t];
    if constexpr (kLast > 0) {
      low = IntAdd(ShiftLeft<7>(sum[kLast - 1][t]), low);
    }
    sums[t] = ToFloats(low);
    if constexpr (kKind == kTileA24) {  // three planes in 32 bits would overflow
      sums[t] = MultiplyAdd(ToFloats(sum[0][t]), Set(16384.0F), sums[t]);
    }
  });
}

/// One unit of 64 k for one half of the rows: adds to accumulators[token].
template <WeightKernel kWeight, TileKind kKind, int kHeight>
FMOE_INLINE void IntegerUnit(const uint8_t* unit, const uint8_t* scales, int half, Ints table,
                             const int32_t* words, const int32_t* correction, const float* activation_scale,
                             Floats* accumulators) {
  using Panel = IntegerPanel<kWeight>;
  constexpr int kGroups = 64 / Panel::kGroup;
  constexpr int kCount = TokensAtOnce<kKind, Panel::kGroup, kHeight>();
  constexpr int kGroupWords = Panel::kGroup / 16 * Planes(kKind) * 4 * kHeight;
  constexpr bool kUnitSums =
      kGroups > 1 && kKind != kTileA4;  // one activation scale for several weight groups
  Floats unit_sums[kHeight];
  if constexpr (kUnitSums) {
    Unroll<kHeight>([&](auto t) FMOE_FLAT { unit_sums[t] = Zero(); });
  }
  auto one_group = [&](auto group) FMOE_FLAT {
    Floats scale = Set(1.0F), zero = Zero();
    if constexpr (kWeight == kWeightNvfp4) {
      scale = LoadE4m3Scales(scales + group * 16, half);
    } else if constexpr (kWeight == kWeightMxfp4) {
      scale = LoadE8m0Scales(scales + group * 16, half);
    } else if constexpr (Panel::kZeroPoints) {
      const Ints bits = Bits(LoadFloatScales(scales + group * 64, half));
      scale = FromBits(IntAnd(bits, IntSet(~255)));
      zero = ToFloats(IntAnd(bits, IntSet(255)));
    }
    const int32_t* group_correction = correction + group * Corrections(kKind) * kHeight;
    Unroll<kHeight / kCount>([&](auto part) FMOE_FLAT {
      constexpr int kFirst = decltype(part)() * kCount;
      Floats sums[kCount];
      GroupSums<kWeight, kKind, kHeight, kCount>(unit, group, half, table, words + group * kGroupWords,
                                                 group_correction, kFirst, sums);
      Unroll<kCount>([&](auto i) FMOE_FLAT {
        constexpr int t = kFirst + decltype(i)();
        Floats sum = sums[i];
        if constexpr (Panel::kZeroPoints) {
          sum = NegativeMultiplyAdd(zero, Set(((const float*)group_correction)[t]), sum);
        }
        if constexpr (kKind == kTileA4) {
          const Floats both = Multiply(scale, Set(activation_scale[group * kHeight + t]));
          accumulators[t] = MultiplyAdd(sum, both, accumulators[t]);
        } else if constexpr (kUnitSums) {
          unit_sums[t] = MultiplyAdd(sum, scale, unit_sums[t]);
        } else {
          if constexpr (Panel::kZeroPoints) {
            sum = Multiply(sum, scale);
          }
          accumulators[t] = MultiplyAdd(sum, Set(activation_scale[t]), accumulators[t]);
        }
      });
    });
  };
  if constexpr (kHeight <= 2) {
    Unroll<kGroups>(one_group);
  } else {
    for (int group = 0; group < kGroups; ++group) {
      one_group(group);
    }
  }
  if constexpr (kUnitSums) {
    Unroll<kHeight>([&](auto t) FMOE_FLAT {
      accumulators[t] = MultiplyAdd(unit_sums[t], Set(activation_scale[t]), accumulators[t]);
    });
  }
}

template <WeightKernel kWeight, TileKind kKind, int kHeight>
void IntegerDot(const uint8_t* stripes, int64_t num_stripes, int64_t blocks, const TileView* tile,
                float* out) {
  using Panel = IntegerPanel<kWeight>;
  constexpr int kUnitWords = 4 * Planes(kKind) * 4 * kHeight;
  constexpr int kUnitCorrections = 64 / Panel::kGroup * Corrections(kKind) * kHeight;
  constexpr int kUnitScales = (kKind == kTileA4 ? 64 / Panel::kGroup : 1) * kHeight;
  const Ints table = Panel::kE2m1 ? E2m1Table() : IntZero();
  for (int64_t stripe = 0; stripe < num_stripes; ++stripe) {
    const int32_t* words = (const int32_t*)tile->codes;
    const int32_t* correction = tile->correction;
    const float* scale = tile->scale;
    Floats accumulators[kHalves][kHeight];
    Unroll<kHalves * kHeight>([&](auto i) FMOE_FLAT { (&accumulators[0][0])[i] = Zero(); });
    for (int64_t block = 0; block < blocks; ++block, stripes += Panel::kBlockBytes) {
      PrefetchBlock<kHeight, Panel::kBlockBytes>(stripes);
      const uint8_t* unit = stripes;
      for (int index = 0; index < Panel::kUnits; ++index, unit += Panel::kUnitBytes) {
        for (int half = 0; half < kHalves; ++half) {
          Floats sums[kHeight];  // a copy, since registers cannot be indexed by a half
          Unroll<kHeight>([&](auto t) FMOE_FLAT { sums[t] = accumulators[half][t]; });
          IntegerUnit<kWeight, kKind, kHeight>(unit, stripes + Panel::kUnits * Panel::kUnitBytes, half, table,
                                               words, correction, scale, sums);
          Unroll<kHeight>([&](auto t) FMOE_FLAT { accumulators[half][t] = sums[t]; });
        }
        words += kUnitWords;
        correction += kUnitCorrections;
        scale += kUnitScales;
      }
    }
    Unroll<kHalves * kHeight>([&](auto i) FMOE_FLAT {
      constexpr int kHalf = decltype(i)() / kHeight, kToken = decltype(i)() % kHeight;
      Store(out + kToken * 16 + kHalf * kLanes, accumulators[kHalf][kToken]);
    });
    out += kHeight * 16;
  }
}

// --------------------------------------------------------------------------------------------------- float
// formats

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

/// Up to this height two blocks run side by side; above, their sums would not fit the registers.
constexpr int kSideBySideTokens = kHalves == 1 ? 4 : 2;

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

template <WeightKernel kWeight, int kHeight>
void FloatDot(const uint8_t* stripes, int64_t num_stripes, int64_t blocks, const TileView* tile, float* out) {
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
      PrefetchBlock<kHeight, 2 * kBytes>(stripes);
      for (int half = 0; half < kHalves; ++half) {
        FloatSums<kHeight> mine;  // a copy, since registers cannot be indexed by a half
        CopySums(all[half], mine);
        if constexpr (kHeight <= kSideBySideTokens) {
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

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
