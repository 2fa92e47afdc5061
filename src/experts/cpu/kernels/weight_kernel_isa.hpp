#pragma once

#include <stdint.h>

/// The kernels of weights, one for each way in which the codes of a panel become numbers, in plain C terms:
/// compiled once for each instruction set, so nothing here may have external linkage (kernel_table_isa.hpp).

/// Every one of them, once. What else depends on the kernel is derived from these columns:
///
///     enumerator  of WeightKernel
///     name        in rows of costs (cpu_costs.inc): up to the first underscore the kind of the codes, as
///                 decoding costs (few bits like nibbles or bytes, indices like nibbles), at the end the k of
///                 a group; where a kernel has no row, both say which one is nearest (cpu_cost.cpp)
///     bits, group, zero, two_levels, codebook       CodeTraits
///     DType, PanelScale, group of PanelFormat       the panels that it reads (KernelFor). The type of scales
///                 of integers in groups is read from GroupScales: kBF16 stands for all of them
///
/// Weights that become floats. Scales of kWeightE4m3Scaled are fp32 for 64 k and a row, those of
/// kWeightE4m3Stripe for 64 k and a stripe, in front of the stripe: another kernel, at the same costs.
#define FMOE_FLOAT_WEIGHT_TABLE(X)                                                    \
  X(kWeightF32, "f32", 32, 0, 0, false, false, kF32, kNone, 0)                        \
  X(kWeightBf16, "bf16", 16, 0, 0, false, false, kBF16, kNone, 0)                     \
  X(kWeightF16, "f16", 16, 0, 0, false, false, kF16, kNone, 0)                        \
  X(kWeightE4m3, "e4m3", 8, 0, 0, false, false, kF8E4M3, kNone, 0)                    \
  X(kWeightE4m3Scaled, "e4m3_scaled", 8, 0, 0, false, false, kF8E4M3, kF32, 64)       \
  X(kWeightE4m3Stripe, "e4m3_scaled", 8, 0, 0, false, false, kF8E4M3, kStripeF32, 64) \
  X(kWeightMxfp8, "mxfp8", 8, 0, 0, false, false, kF8E4M3, kE8M0, 32)                 \
  X(kWeightE5m2, "e5m2", 8, 0, 0, false, false, kF8E5M2, kNone, 0)

/// Small floats that become integers: e2m1 is doubled and shifted to 0..24, e2m3 and e3m2 (kWeightMxfp6) are
/// products of two bytes (GroupScales::numbers).
#define FMOE_SMALL_FLOAT_WEIGHT_TABLE(X)                                \
  X(kWeightNvfp4, "nvfp4", 4, 16, 12, false, false, kF4E2M1, kE4M3, 16) \
  X(kWeightMxfp4, "mxfp4", 4, 32, 12, false, false, kF4E2M1, kE8M0, 32) \
  X(kWeightMxfp6, "mxfp6", 6, 32, 0, false, false, kF6E2M3, kE8M0, 32)

/// Integers: with scales of rows only; in groups, with scales and zero points of any type (GroupScales), or
/// "super", with scales and minima of bytes in units of a block of 128. kWeightBook and kWeightIq are indices
/// of bytes, kWeightIq1 of 3 bits for numbers up to 9, kWeightIq2 up to 43. kWeightU2, 3, 5 and 6 share bytes
/// (weights/packed_bits.hpp) and are otherwise as those of kWeightU8.
#define FMOE_INTEGER_WEIGHT_TABLE(X)                                                \
  X(kWeightU4, "u4", 4, 64, 8, false, false, kU4, kNone, 0)                         \
  X(kWeightU4Group16, "u4_group16", 4, 16, 8, false, false, kU4, kBF16, 16)         \
  X(kWeightU4Group32, "u4_group32", 4, 32, 8, false, false, kU4, kBF16, 32)         \
  X(kWeightU4Group64, "u4_group64", 4, 64, 8, false, false, kU4, kBF16, 64)         \
  X(kWeightU4Group128, "u4_group128", 4, 64, 8, false, false, kU4, kBF16, 128)      \
  X(kWeightU4Super16, "u4_super16", 4, 16, 8, true, false, kU4, kI8, 16)            \
  X(kWeightU4Super32, "u4_super32", 4, 32, 8, true, false, kU4, kI8, 32)            \
  X(kWeightU8, "u8", 8, 64, 128, false, false, kU8, kNone, 0)                       \
  X(kWeightU8Group16, "u8_group16", 8, 16, 128, false, false, kU8, kBF16, 16)       \
  X(kWeightU8Group32, "u8_group32", 8, 32, 128, false, false, kU8, kBF16, 32)       \
  X(kWeightU8Group64, "u8_group64", 8, 64, 128, false, false, kU8, kBF16, 64)       \
  X(kWeightU8Group128, "u8_group128", 8, 64, 128, false, false, kU8, kBF16, 128)    \
  X(kWeightU8Super16, "u8_super16", 8, 16, 128, true, false, kU8, kI8, 16)          \
  X(kWeightU8Super32, "u8_super32", 8, 32, 128, true, false, kU8, kI8, 32)          \
  X(kWeightBookGroup32, "u4_book_group32", 4, 32, 128, false, true, kU4, kBF16, 32) \
  X(kWeightBookSuper32, "u4_book_super32", 4, 32, 128, true, true, kU4, kI8, 32)    \
  X(kWeightIq1Super16, "u4_iq1_super16", 3, 16, 9, true, true, kU8, kI8, 16)        \
  X(kWeightIq1Super32, "u4_iq1_super32", 3, 32, 9, true, true, kU8, kI8, 32)        \
  X(kWeightIq2Super16, "u4_iq2_super16", 3, 16, 43, true, true, kU8, kI8, 16)       \
  X(kWeightIq2Super32, "u4_iq2_super32", 3, 32, 43, true, true, kU8, kI8, 32)       \
  X(kWeightU2Super16, "u4_bits2_super16", 2, 16, 2, true, false, kU8, kI8, 16)      \
  X(kWeightU3Super16, "u4_bits3_super16", 3, 16, 4, true, false, kU8, kI8, 16)      \
  X(kWeightU5Group32, "u8_bits5_group32", 5, 32, 16, false, false, kU8, kBF16, 32)  \
  X(kWeightU5Super32, "u8_bits5_super32", 5, 32, 16, true, false, kU8, kI8, 32)     \
  X(kWeightU6Super16, "u8_bits6_super16", 6, 16, 32, true, false, kU8, kI8, 16)

#define FMOE_WEIGHT_KERNEL_TABLE(X) \
  FMOE_FLOAT_WEIGHT_TABLE(X)        \
  FMOE_SMALL_FLOAT_WEIGHT_TABLE(X)  \
  FMOE_INTEGER_WEIGHT_TABLE(X)

namespace fusedmoe::cpu {

enum WeightKernel : int {
#define FMOE_WEIGHT_ENUMERATOR(id, ...) id,
  FMOE_WEIGHT_KERNEL_TABLE(FMOE_WEIGHT_ENUMERATOR) kNumWeightKernels
#undef FMOE_WEIGHT_ENUMERATOR
};

/// What kernels have to know of the codes of their weights.
struct CodeTraits {
  int bits;   ///< of a code in a panel (weights/panel.hpp)
  int group;  ///< k that share a scale, 64 at most; of bytes that have none, k whose products are added up;
              ///< else 0
  int zero;   ///< what codes are too large by; 0: nothing, or what their zero points say
  bool two_levels;  ///< scales are bytes in units of a block
  bool codebook;    ///< codes become bytes by a table of the panel
};

static constexpr CodeTraits kCodeTraits[kNumWeightKernels] = {
#define FMOE_CODE_TRAITS(id, name, bits, group, zero, two_levels, codebook, ...) \
  {bits, group, zero, two_levels, codebook},
    FMOE_WEIGHT_KERNEL_TABLE(FMOE_CODE_TRAITS)
#undef FMOE_CODE_TRAITS
};

/// Integers in groups (GroupScales, or two levels).
static constexpr bool IsGrouped(WeightKernel kernel) {
  return kernel > kWeightU4 && kernel != kWeightU8;
}
/// Integers in groups whose scales are bytes in units of a block.
static constexpr bool HasTwoLevels(WeightKernel kernel) {
  return kCodeTraits[kernel].two_levels;
}
/// Codes that become bytes by a table of the panel.
static constexpr bool HasCodebook(WeightKernel kernel) {
  return kCodeTraits[kernel].codebook;
}
/// Codes that share bytes otherwise than as nibbles (weights/packed_bits.hpp).
static constexpr bool IsPacked(WeightKernel kernel) {
  return kCodeTraits[kernel].bits < 8 && kCodeTraits[kernel].bits != 4;
}
/// Types of GGUF files: no scheme has them beside activations that are codes (NarrowPanelOf), so they have no
/// kernels for kTileA24.
static constexpr bool IsWeightOnly(WeightKernel kernel) {
  return HasTwoLevels(kernel) || HasCodebook(kernel) || (IsPacked(kernel) && kernel != kWeightMxfp6);
}

/// Whether integers in groups have zero points or minima (GroupScales::zeros): blocks of Q2_K and Q5_K
/// always, those of Q3_K, Q6_K and of types with a codebook never.
enum HasZeroPoints : int { kNever, kSometimes, kAlways };
static constexpr HasZeroPoints ZeroPointsOf(WeightKernel kernel) {
  return kernel == kWeightU2Super16 || kernel == kWeightU5Super32                          ? kAlways
         : HasCodebook(kernel) || kernel == kWeightU3Super16 || kernel == kWeightU6Super16 ? kNever
                                                                                           : kSometimes;
}

}  // namespace fusedmoe::cpu
