#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/dot_prefetch_isa.hpp"
#include "experts/cpu/kernels/integer_panel_isa.hpp"

/// A unit of 64 k of weights that become bytes, with one or two tokens, or four: products, groups, and what
/// is prefetched beside them (dot_integer_isa.hpp).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// sums[t] += four vectors of weights times 16 k of token t, for kCount tokens `height` words apart.
template <int kLargestCode, int kCount>
FMOE_NESTED void Dot16(Ints* sums, const Ints* weights, const int32_t* words, int height) {
  if constexpr (kHasByteDot) {
    // Chains of different tokens alternate: one chain after the other fills the scheduler with waiting
    // operations and ran at 60-90 % of this order (Emerald Rapids).
    Unroll<4>([&](int q) FMOE_FLAT {
      Unroll<kCount>(
          [&](int t) FMOE_FLAT { sums[t] = ByteDot(sums[t], weights[q], IntSet(words[q * height + t])); });
    });
  } else if constexpr (VectorsInWords(kLargestCode) > 0) {
    constexpr int kAdded = VectorsInWords(kLargestCode) < 4 ? VectorsInWords(kLargestCode) : 4;
    Ints words16[kCount];
    Unroll<4>([&](auto q) FMOE_FLAT {
      Unroll<kCount>([&](int t) FMOE_FLAT {
        const Ints products = MultiplyAddPairs(weights[q], IntSet(words[q * height + t]));
        words16[t] = q % kAdded == 0 ? products : AddWords(words16[t], products);
        InPlace(words16[t]);
        if (q % kAdded == kAdded - 1) {
          sums[t] = IntAdd(sums[t], MultiplyAddWords(words16[t], 1));
          InPlace(sums[t]);
        }
      });
    });
  } else {
    // Bytes up to 255 would overflow words: their nibbles go separately, 8 * 15 * 127 = 15240 each.
    Ints low[4], high[4];
    Unroll<4>([&](int q) FMOE_FLAT {
      low[q] = LowNibbles(weights[q]);
      high[q] = HighNibbles(weights[q]);
    });
    Unroll<kCount>([&](int t) FMOE_FLAT {
      Ints sum_low, sum_high;
      Unroll<4>([&](int q) FMOE_FLAT {
        const Ints word = IntSet(words[q * height + t]);
        const Ints of_low = MultiplyAddPairs(low[q], word), of_high = MultiplyAddPairs(high[q], word);
        sum_low = q == 0 ? of_low : AddWords(sum_low, of_low);
        sum_high = q == 0 ? of_high : AddWords(sum_high, of_high);
        InPlace(sum_low);
        InPlace(sum_high);
      });
      sums[t] = IntAdd(sums[t], MultiplyAddWords(sum_low, 1));
      InPlace(sums[t]);
      sums[t] = IntAdd(sums[t], MultiplyAddWords(sum_high, 16));
      InPlace(sums[t]);
    });
  }
}

/// Words of a tile that 16 k of weights meet, for each token.
template <WeightKernel kWeight, TileKind kKind>
constexpr int StepWords() {
  return TakesWords<kWeight, kKind>() ? 8 * WordPlanes(kKind) : 4 * Planes(kKind);
}

/// sums[t] += eight k of weights (DecodeWords) times those of kCount tokens: words[q][t][k 0 and 2; 1 and 3].
template <int kCount>
FMOE_NESTED void DotWords8(Ints* sums, const Ints* weights, const int32_t* words, int height) {
  Unroll<4 * kCount>([&](int i) FMOE_FLAT {
    const int q = i / (2 * kCount), t = i / 2 % kCount;
    const int pair = i % 2;
    sums[t] = WordDot(sums[t], weights[2 * q + pair], IntSet(words[(q * height + t) * 2 + pair]));
    InPlace(sums[t]);
  });
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

/// Chains of additions of a token and plane. Groups of 64 are sixteen `vpdpbusd` behind each other: with one
/// token of nibbles they fill the scheduler with operations that wait, and loads of the next blocks come
/// late. Bytes take twice as long to arrive, and are read 1 to 3 % slower by kernels that run ahead of them.
template <WeightKernel kWeight, TileKind kKind, int kCount>
constexpr int SumChains() {
  using Panel = IntegerPanel<kWeight>;
  return kHasWideDot && Panel::kNibbles && Panel::kGroup == 64 && kCount <= 2 && kKind != kTileA24 ? 4 : 1;
}

/// Whether the lines ahead are prefetched beside the products of each 16 k (PrefetchBeside), not all at the
/// beginning of a block: a prefetch that finds no free line fill buffer is dropped, and 17 in a row are too
/// many where out-of-order execution has begun the next ones. Layers of Qwen3-30B-A3B with one token, at the
/// beginning of units -> by steps, share of the read rate (Zen 5): INT4 per channel 86 -> 97, g128 86 -> 98,
/// INT8 90 -> 96, g128 91 -> 97, g32 94 -> 95; four tokens as much. Kernels alone, share of a plain read, one
/// token and two: INT4 g32 88 and 81 -> 95 and 96, with zero points 95 both ways and 95 -> 98; g16 84 and 81
/// -> 95 and 97, with zero points 82 and 91 -> 98 and 101, those and scales in fp32 75 and 78 -> 83 and 87.
/// e2m1, whose groups wait for each other, gains nothing and loses up to 4 %, but for NVFP4 with two tokens.
template <WeightKernel kWeight, TileKind kKind, int kHeight>
constexpr bool PrefetchesPerStep() {
  if (!kHasWideDot || kHeight > 2) {
    return false;
  }
  return !IntegerPanel<kWeight>::kE2m1 || (kWeight == kWeightNvfp4 && kKind == kTileA16 && kHeight == 2);
}

/// One group of k of one unit for tokens [first, first + kCount): integer sums as fp32, exact below 2^24.
/// Integers in groups add their correction behind the products: chains that started at it or at zero, as
/// there are zero points or not, cost one token 2 % of the read rate (INT4, Zen 5).
/// kPhase: PhaseOfGroup.
template <WeightKernel kWeight, TileKind kKind, int kHeight, int kCount, bool kTwice, int kPhase>
FMOE_NESTED void GroupSums(const uint8_t* unit, int group, int half,
                           typename IntegerPanel<kWeight>::Table table, const int32_t* words,
                           const int32_t* correction, bool zero_points, int first, Distances ahead,
                           Floats* sums) {
  using Panel = IntegerPanel<kWeight>;
  constexpr int kSteps = Panel::kGroup / 16;
  constexpr int kStepWords = StepWords<kWeight, kKind>() * kHeight;
  constexpr int kChains = SumChains<kWeight, kKind, kCount>();
  constexpr bool kPrefetches = PrefetchesPerStep<kWeight, kKind, kHeight>();
  const uint8_t* const near = kPrefetches ? InRegister(unit + ahead.near) : nullptr;
  const uint8_t* const far = kTwice ? InRegister(unit + ahead.far) : nullptr;
  Ints sum[kChains][Planes(kKind)][kCount];  // of each plane, the highest first
  Unroll<kChains * kCount>([&](int i) FMOE_FLAT {
    const int chain = i / kCount, t = i % kCount;
    Unroll<Planes(kKind)>([&](int plane) FMOE_FLAT { sum[chain][plane][t] = IntZero(); });
    if (!Panel::kGrouped && !Panel::kLess128 && chain == 0) {
      sum[chain][Planes(kKind) - 1][t] = IntSet(correction[first + t]);
      if constexpr (kKind == kTileA24) {
        sum[chain][0][t] = IntSet(correction[kHeight + first + t]);
      }
    }
  });
  Unroll<kSteps>([&](auto step) FMOE_FLAT {
    Unroll<(Panel::kUnitBytes + 255) / 256>([&](int line) FMOE_FLAT {
      [[maybe_unused]] Ints& beside = sum[step % kChains][line % Planes(kKind)][0];
      [[maybe_unused]] const int at = (group * kSteps + step) * (Panel::kUnitBytes / 4) + line * 64;
      if constexpr (kTwice) {
        PrefetchFarBeside(far + at, beside);
      }
      if constexpr (kPrefetches) {
        PrefetchBeside(near + at, beside);
      }
    });
    Ints weights[4];
    constexpr int kStepPhase = Panel::PhaseOfStep(kPhase * kSteps + step);
    if constexpr (TakesWords<kWeight, kKind>()) {
      constexpr int kUpper = WordPlanes(kKind) - 1;
      Unroll<2>([&](auto i) FMOE_FLAT {
        Panel::template DecodeWords<Panel::PhaseOf(2 * kStepPhase + i)>(unit, 2 * (group * kSteps + step) + i,
                                                                        half, table, weights);
        const int32_t* at = words + step * kStepWords + i * (4 * kHeight) + 2 * first;
        DotWords8<kCount>(sum[0][Planes(kKind) - 1], weights, at + kUpper * (8 * kHeight), kHeight);
        if constexpr (kUpper > 0) {
          DotWords8<kCount>(sum[0][0], weights, at, kHeight);
        }
      });
    } else {
      Panel::template Decode<kStepPhase>(unit, group * kSteps + step, half, table, weights);
      const int32_t* at = words + step * kStepWords + first;
      Unroll<Planes(kKind)>([&](int plane) FMOE_FLAT {
        Dot16<Panel::kLargestCode, kCount>(sum[step % kChains][plane], weights, at + plane * 4 * kHeight,
                                           kHeight);
      });
    }
  });
  Unroll<(kChains - 1) * Planes(kKind) * kCount>([&](int i) FMOE_FLAT {
    const int chain = 1 + i / (Planes(kKind) * kCount);
    const int plane = i / kCount % Planes(kKind), t = i % kCount;
    sum[0][plane][t] = IntAdd(sum[0][plane][t], sum[chain][plane][t]);
  });
  if constexpr (Panel::kLess128) {
    // The correction of codes without zero points of their own is 128 times the same sum, and is left out.
    if (zero_points) {
      Unroll<Planes(kKind) * kCount>([&](int i) FMOE_FLAT {
        const int plane = i / kCount, t = i % kCount;
        Ints values = IntZero();
        for (int step = 0; step < kSteps; ++step) {
          const int32_t* at = words + step * kStepWords + plane * 4 * kHeight + first + t;
          for (int q = 0; q < 4; ++q) {
            values = IntAdd(values, SumsOfFours(IntSet(at[q * kHeight])));
          }
        }
        sum[0][plane][t] = IntAdd(sum[0][plane][t], ShiftLeft<7>(values));
      });
    }
  } else if (Panel::kGrouped && !zero_points) {
    Unroll<kCount>([&](int t) FMOE_FLAT {
      Ints& last = sum[0][Planes(kKind) - 1][t];
      last = IntAdd(last, IntSet(correction[first + t]));
      if constexpr (kKind == kTileA24) {
        sum[0][0][t] = IntAdd(sum[0][0][t], IntSet(correction[kHeight + first + t]));
      }
    });
  }
  Unroll<kCount>([&](int t) FMOE_FLAT {
    constexpr int kLast = Planes(kKind) - 1;
    Ints low = sum[0][kLast][t];
    if constexpr (kLast > 0) {
      low = IntAdd(ShiftLeft<7>(sum[0][kLast - 1][t]), low);
    }
    sums[t] = ToFloats(low);
    if constexpr (kKind == kTileA24) {  // three planes in 32 bits would overflow
      sums[t] = MultiplyAdd(ToFloats(sum[0][0][t]), Set(16384.0F), sums[t]);
    }
  });
}

/// One unit of 64 k for one half of the rows: adds to accumulators[token]. What stands `ahead` of it is
/// prefetched (PrefetchesPerStep, PrefetchesIntegersTwice).
template <WeightKernel kWeight, TileKind kKind, int kHeight, bool kTwice>
FMOE_NESTED void IntegerUnit(const uint8_t* unit, const QuantParams& params, int half,
                             typename IntegerPanel<kWeight>::Table table, const int32_t* words,
                             const int32_t* correction, const float* activation_scale, Distances ahead,
                             Floats* accumulators) {
  using Panel = IntegerPanel<kWeight>;
  constexpr int kGroups = 64 / Panel::kGroup;
  constexpr int kCount = TokensAtOnce<kKind, Panel::kGroup, kHeight>();
  constexpr int kGroupWords = Panel::kGroup / 16 * StepWords<kWeight, kKind>() * kHeight;
  using End = GroupEnd<kKind, kGroups, Panel::kGrouped || Panel::kSmallFloats, Panel::kSuper>;
  Floats unit_sums[kHeight];
  if constexpr (End::kUnitSums) {
    Unroll<kHeight>([&](int t) FMOE_FLAT { unit_sums[t] = Zero(); });
  }
  const bool zero_points = Panel::kGrouped && params.type.zeros != kZeroNone;
  auto one_group = [&](auto group) FMOE_FLAT {
    constexpr int kPhase = Panel::PhaseOfGroup(decltype(group)());
    const Floats scale = LoadGroupScale<kWeight>(params, group, half);
    const Floats zero = zero_points ? LoadGroupZero<kWeight>(params, group, half) : Zero();
    const int32_t* group_correction = correction + group * Corrections(kKind) * kHeight;
    Unroll<kHeight / kCount>([&](auto part) FMOE_FLAT {
      constexpr int kFirst = part * kCount;
      Floats sums[kCount];
      GroupSums<kWeight, kKind, kHeight, kCount, kTwice, kPhase>(
          unit, group, half, table, words + group * kGroupWords, group_correction, zero_points, kFirst, ahead,
          sums);
      Unroll<kCount>([&](int i) FMOE_FLAT {
        const int t = kFirst + i;
        Floats sum = sums[i];
        if (zero_points && !Panel::kSuper) {
          sum = End::LessZero(sum, zero, group_correction + t);
        }
        End::Add(sum, scale, zero_points, zero, group_correction + t,
                 activation_scale + (HasGroupScales(kKind) ? group * kHeight : 0) + t, false, unit_sums[t],
                 accumulators[t]);
      });
    });
  };
  if constexpr (kHeight <= 2 || Panel::kPacked) {
    Unroll<kGroups>(one_group);
  } else {
    for (int group = 0; group < kGroups; ++group) {
      one_group(group);
    }
  }
  if constexpr (End::kUnitSums) {
    Unroll<kHeight>([&](int t) FMOE_FLAT {
      accumulators[t] = MultiplyAdd(unit_sums[t], Set(activation_scale[t]), accumulators[t]);
    });
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
