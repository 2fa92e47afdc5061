#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/dot_prefetch_isa.hpp"
#include "experts/cpu/kernels/integer_panel_isa.hpp"

/// A unit of 64 k for both halves of the rows of a stripe, where these take two registers
/// (dot_integer_isa.hpp).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// One or two tokens where a row of a stripe takes two registers: both halves meet a word of activations
/// together, so that it is broadcast once, and two tokens share what is decoded. With the halves one after
/// the other GCC kept all words of a block in memory, and one token was bound by that traffic: NVFP4 with 15
/// bits 24.6 -> 28.3 GB/s, weights from memory (Zen 5). Two tokens, weights in L2: NVFP4 11.2 -> 13.6,
/// MXFP4 11.8 -> 14.5, INT4 g128 12.4 -> 14.6, `a8` 16.3 -> 19.5, 17.9 -> 22.2, 18.2 -> 25 GB/s (Zen 3).
/// 22 bits, a layer of Qwen3-30B-A3B with one token: INT4 g128 1.59 -> 1.28 ms, NVFP4 1.96 -> 1.61, MXFP4
/// 1.73 -> 1.38; two tokens gain 3 to 6 % over one after the other, though registers do not hold their sums.
template <WeightKernel kWeight, TileKind kKind, int kHeight>
constexpr bool HasBothHalves() {
  using Panel = IntegerPanel<kWeight>;
  return kHalves == 2 && !TakesWords<kWeight, kKind>() && kHeight <= 2 &&
         (kHasByteDot ? kHasUnsignedDot : VectorsInWords(Panel::kLargestCode) > 0);
}

/// Sums of a token, the highest plane first: one of each plane, or, where words are added up, one of the
/// lowest two.
constexpr int SumsOf(int planes) {
  return kHasByteDot ? planes : planes == 3 ? 2 : 1;
}
/// Which correction a sum starts at (TileView); of the middle one of three none.
constexpr int CorrectionOfSum(int planes, int sum) {
  return sum == SumsOf(planes) - 1 ? 0 : planes == 3 && sum == 0 ? 1 : -1;
}

/// sums[half][token] += words that have added products up, the lowest two planes as 128 * upper + lower.
template <int kPlanes, int kHeight>
FMOE_NESTED void AddWordSums(const Ints (*words16)[kHeight][kHalves],
                             Ints (*sums)[kHeight][SumsOf(kPlanes)]) {
  Unroll<kHalves * kHeight>([&](int i) FMOE_FLAT {
    const int token = i / kHalves, half = i % kHalves;
    Ints& sum = sums[half][token][SumsOf(kPlanes) - 1];
    if constexpr (kPlanes > 1) {
      sum = IntAdd(sum, MultiplyAddWords(words16[kPlanes - 2][token][half], 128));
    }
    sum = IntAdd(sum, MultiplyAddWords(words16[kPlanes - 1][token][half], 1));
    if constexpr (kPlanes == 3) {
      Ints& upper = sums[half][token][0];
      upper = IntAdd(upper, MultiplyAddWords(words16[0][token][half], 1));
    }
  });
}

/// 16 k: sums[half][token] += weights * codes. kPhase: PhaseOfStep.
template <WeightKernel kWeight, int kPlanes, int kHeight, int kPhase>
FMOE_NESTED void Dot16BothHalves(const uint8_t* unit, int step, Ints table, const int32_t* words,
                                 Ints (*sums)[kHeight][SumsOf(kPlanes)]) {
  using Panel = IntegerPanel<kWeight>;
  constexpr int kMost = kHasByteDot ? 4 : VectorsInWords(Panel::kLargestCode), kAdded = kMost < 4 ? kMost : 4;
  Ints words16[kPlanes][kHeight][kHalves];
  Unroll<2>([&](auto vector) FMOE_FLAT {
    Ints weights[kHalves][2];
    Unroll<kHalves>([&](int half) FMOE_FLAT {
      Panel::template DecodeEight<Panel::PhaseOf(2 * kPhase + vector)>(unit, 2 * step + vector, half, table,
                                                                       weights[half]);
    });
    Unroll<2>([&](int word) FMOE_FLAT {
      const int four = 2 * vector + word;
      Unroll<kPlanes * kHeight>([&](int i) FMOE_FLAT {
        const int plane = i / kHeight, token = i % kHeight;
        const Ints codes = IntSet(words[(plane * 4 + four) * kHeight + token]);
        Unroll<kHalves>([&](int half) FMOE_FLAT {
          if constexpr (kHasByteDot) {
            Ints& sum = sums[half][token][plane];
            sum = ByteDot(sum, weights[half][four % 2], codes);
            InPlace(sum);
          } else {
            Ints& sum = words16[plane][token][half];
            const Ints products = MultiplyAddPairs(weights[half][four % 2], codes);
            sum = four % kAdded == 0 ? products : AddWords(sum, products);
            InPlace(sum);
          }
        });
      });
      if (!kHasByteDot && (four + 1) % kAdded == 0) {
        AddWordSums<kPlanes, kHeight>(words16, sums);
      }
    });
  });
}

/// One unit of 64 k. What stands `ahead` of it is prefetched into L2 (PrefetchesIntegersTwice).
template <WeightKernel kWeight, TileKind kKind, int kHeight, bool kTwice>
FMOE_NESTED void IntegerUnitBothHalves(const uint8_t* unit, const QuantParams& params, Ints table,
                                       const int32_t* words, const int32_t* correction,
                                       const float* activation_scale, Distances ahead,
                                       Floats (*accumulators)[kHeight]) {
  using Panel = IntegerPanel<kWeight>;
  constexpr int kGroups = 64 / Panel::kGroup, kSteps = Panel::kGroup / 16, kPlanes = Planes(kKind);
  constexpr int kSums = SumsOf(kPlanes);
  using End = GroupEnd<kKind, kGroups, Panel::kGrouped || Panel::kSmallFloats, Panel::kSuper>;
  const bool zero_points = Panel::kGrouped && params.type.zeros != kZeroNone;
  const uint8_t* const far = kTwice ? InRegister(unit + ahead.far) : nullptr;
  Floats unit_sums[kHalves][kHeight];
  Unroll<kGroups>([&](auto group) FMOE_FLAT {
    const int32_t* const group_correction = correction + group * Corrections(kKind) * kHeight;
    Ints sums[kHalves][kHeight][kSums];
    Unroll<kHeight * kSums>([&](int i) FMOE_FLAT {
      const int t = i % kHeight, sum = i / kHeight, which = CorrectionOfSum(kPlanes, sum);
      Ints start = IntZero();
      if (which >= 0) {
        start = Panel::kGrouped && zero_points ? start : IntSet(group_correction[which * kHeight + t]);
      }
      Unroll<kHalves>([&](int half) FMOE_FLAT { sums[half][t][sum] = start; });
    });
    Unroll<kSteps>([&](auto step) FMOE_FLAT {
      constexpr int kStep = group * kSteps + step;
      if constexpr (kTwice) {
        Unroll<(Panel::kUnitBytes + 255) / 256>([&](int line) FMOE_FLAT {
          PrefetchFarBeside(far + kStep * (Panel::kUnitBytes / 4) + line * 64, sums[0][0][0]);
        });
      }
      Dot16BothHalves<kWeight, kPlanes, kHeight, Panel::PhaseOfStep(kStep)>(
          unit, kStep, table, words + kStep * kPlanes * 4 * kHeight, sums);
    });
    Unroll<kHalves>([&](int half) FMOE_FLAT {
      const Floats scale = LoadGroupScale<kWeight>(params, group, half);
      const Floats zero = zero_points ? LoadGroupZero<kWeight>(params, group, half) : Zero();
      Unroll<kHeight>([&](int t) FMOE_FLAT {
        Ints low = sums[half][t][kSums - 1];
        if constexpr (kHasByteDot && kPlanes > 1) {
          low = IntAdd(ShiftLeft<7>(sums[half][t][kSums - 2]), low);
        }
        Floats sum = ToFloats(low);
        if constexpr (kPlanes == 3) {
          sum = MultiplyAdd(ToFloats(sums[half][t][0]), Set(16384.0F), sum);
        }
        if (zero_points && !Panel::kSuper) {
          sum = End::LessZero(sum, zero, group_correction + t);
        }
        End::Add(sum, scale, zero_points, zero, group_correction + t,
                 activation_scale + (HasGroupScales(kKind) ? group * kHeight : 0) + t, group == 0,
                 unit_sums[half][t], accumulators[half][t]);
      });
    });
  });
  if constexpr (End::kUnitSums) {
    Unroll<kHalves * kHeight>([&](int i) FMOE_FLAT {
      const int half = i / kHeight, token = i % kHeight;
      Floats& sum = accumulators[half][token];
      sum = MultiplyAdd(unit_sums[half][token], Set(activation_scale[token]), sum);
    });
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
