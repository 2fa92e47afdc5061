#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/dot_prefetch_isa.hpp"
#include "experts/cpu/kernels/float_units_isa.hpp"
#include "experts/cpu/kernels/scale_layout_isa.hpp"

/// What short and tall tiles of floats share: where things stand in a panel, and how a word of it meets a
/// tile.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

template <WeightKernel kWeight, typename Unit>
struct FloatPanel : ScaleLayout<kWeight> {
  using ScaleLayout<kWeight>::kUnits, ScaleLayout<kWeight>::kInFront;
  static constexpr bool kDirect = VectorK(kWeight) == Unit::kWordK;  // words stand in the panel
  static constexpr int kWords = 64 / Unit::kWordK;                   // of a unit
  static constexpr int kVectorWords = VectorK(kWeight) / Unit::kWordK;
  static constexpr int kVectors = 64 / VectorK(kWeight);
  static constexpr int kUnitBytes = kVectors * 64;
  static constexpr int kCodeBytes = kUnits * kUnitBytes;
  static constexpr bool kE8m0 = kWeight == kWeightMxfp8 || kWeight == kWeightMxfp4;
  static constexpr bool kInteger = kWeight > kWeightU4;  // in groups, with scales of bf16
  static constexpr bool kScaled =
      kE8m0 || kInteger || kInFront || kWeight == kWeightNvfp4 || kWeight == kWeightE4m3Scaled;
  /// Of sums in a unit.
  static constexpr int kGroups = kE8m0 || kWeight == kWeightU4Group32 ? 2 : kWeight == kWeightNvfp4 ? 4 : 1;
  static constexpr int kGroupBytes = !kScaled || kInFront               ? 0
                                     : kInteger                         ? 32
                                     : kE8m0 || kWeight == kWeightNvfp4 ? 16
                                                                        : 64;
  static constexpr int kBlockBytes = kCodeBytes + kGroups * kGroupBytes;
  static constexpr int kScaleStride = kInFront ? 4 : kBlockBytes;  // from the scales of a block to the next

  /// Of a block of a stripe.
  FMOE_INLINE const uint8_t* ScalesOf(const uint8_t* stripe, const uint8_t* block_codes, int64_t block) {
    return kInFront ? stripe + block * kScaleStride : block_codes + kCodeBytes;
  }
  FMOE_INLINE Floats Scale(const uint8_t* scales, int half) {
    if constexpr (kE8m0) {
      return LoadE8m0Scales(scales, half);
    } else if constexpr (kWeight == kWeightNvfp4) {
      return LoadE4m3Scales(scales, half);
    } else if constexpr (kInteger) {
      return LoadBf16((const uint16_t*)scales + half * kLanes);
    } else if constexpr (kInFront) {
      return Set(*(const float*)scales);
    } else {
      return LoadFloatScales(scales, half);
    }
  }

  /// The sum of a group of a unit with its scales, beside the row scales that wait for the end. `so_far`:
  /// that of the groups before.
  FMOE_INLINE Floats AddGroup(Floats sum, const uint8_t* scales, int group, int half, Floats so_far) {
    if constexpr (!kScaled) {
      return sum;
    } else {
      const Floats scale = Scale(scales + group * kGroupBytes, half);
      return group == 0 ? Multiply(sum, scale) : MultiplyAdd(sum, scale, so_far);
    }
  }
};

/// The total with the sum of a unit. `token_scale` counts for 16-bit tiles.
template <TileKind kKind>
FMOE_INLINE Floats AddUnit(Floats total, Floats sum, const float* token_scale) {
  return kKind == kTileF32 ? Add(total, sum) : MultiplyAdd(sum, Set(*token_scale), total);
}

/// One word of one or two stripes with kTokens tokens of a tile of kHeight.
template <TileKind kKind, int kStripes, int kTokens, int kHeight, typename Word, typename Sums>
FMOE_INLINE void DotWord(int word, const Word* weights, const int32_t* words, Sums (*sums)[kTokens][2]) {
  using Unit = typename FloatUnit<kKind>::Type;
  Unroll<Planes(kKind)>([&](int plane) FMOE_FLAT {
    const int chain = Planes(kKind) == 2 ? (int)plane : word % 2;
    Unroll<kTokens>([&](int t) FMOE_FLAT {
      const Word value = Unit::Broadcast(words + plane * kHeight + t);
      Unroll<kStripes>(
          [&](int s) FMOE_FLAT { sums[s][t][chain] = Unit::Dot(weights[s], value, sums[s][t][chain]); });
    });
  });
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
