#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/kernel_table_isa.hpp"
#include "experts/cpu/kernels/unroll_isa.hpp"

namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Where the scales of a panel stand (weights/panel.hpp draws it), whatever its codes become.
template <WeightKernel kWeight>
struct ScaleLayout {
  static constexpr bool kSuper = HasTwoLevels(kWeight);
  static constexpr bool kGroup128 = kWeight == kWeightU4Group128 || kWeight == kWeightU8Group128;
  static constexpr int kUnits = kGroup128 || kSuper ? 2 : 1;  // of 64 k in a block
  /// Scales of FP8 in blocks: of stripes, in front of all units; those of rows stand behind each unit.
  static constexpr bool kInFront = kWeight == kWeightE4m3Stripe;

  /// What stands in front of the blocks of a stripe.
  FMOE_INLINE int64_t HeaderBytes(int64_t blocks) { return kInFront ? (blocks * 4 + 63) / 64 * 64 : 0; }
  /// Integers in groups: from a group to the next one, and of the units in front of all groups of a block.
  FMOE_INLINE int64_t GroupStride(GroupScales scales) {
    return !kSuper ? GroupBytes(scales) : scales.zeros == kZeroNone ? 16 : 32;
  }
  FMOE_INLINE int64_t UnitsBytes(GroupScales scales) { return kSuper ? 2 * GroupStride(scales) : 0; }
};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
