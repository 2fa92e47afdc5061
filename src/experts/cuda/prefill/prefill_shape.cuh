#pragma once

#include "experts/cuda/device/fragments.cuh"
#include "experts/cuda/prefill/prefill.hpp"
#include "experts/cuda/prefill/prefill_tiles_sm90.cuh"

/// The sizes of the grouped GEMM of prefill, by format and tile, and its small parts: prefill_gemm_sm90.cuh.
namespace fusedmoe::cuda {

/// What becomes of the accumulators.
enum class PrefillEpilogue {
  kPanel,   ///< first GEMM, gated swish kinds: activated (and quantized) into the panel of the second
  kRows16,  ///< second GEMM: BF16 [panel row][ld]
  kRowsF32  ///< either: F32 [panel row][ld], the first GEMM's outputs, activated where p.activated says so
};

template <FragmentFormat kFormat, int kTileTokens, bool kIntegers>
struct PrefillShape {
  static constexpr FragmentTraits kTraits = FragmentTraitsOf(kFormat);
  static constexpr bool kIntegerTokens = kIntegers;
  static constexpr bool kPairs = kTileTokens == 128;  ///< CTAs work in pairs
  static constexpr int kWarpgroups = kTileTokens == 64 ? 4 : 2;
  static constexpr int kRowGroups = 4 / kWarpgroups;  ///< blocks of 64 rows a warpgroup
  static constexpr int kThreads = 128 + 128 * kWarpgroups;
  /// A slab is what 128 bytes of a token row are multiplied with: 64 k, or 128 of integers by integers.
  static constexpr int kMinSlabs = kIntegers ? 1 : kTraits.unit_slabs();
  static constexpr int kUnitBytes =
      kIntegers ? 2 * kTraits.slab_code_bytes() + kTraits.scale_bytes() : kTraits.unit_bytes();
  static constexpr int kSlabBits = kIntegers ? 16 : kTraits.code_bits;
  /// Slabs of a weight slot: 32-36 KB for the small tile (235B M=64: 2 slabs of 4 bit 502 us, 4 slabs 462),
  /// half of it for the large one.
  static constexpr int kWantSlabs = (kTileTokens == 64 ? 16 : 8) / kSlabBits;
  static constexpr int kSlabs = kWantSlabs < kMinSlabs ? kMinSlabs : kWantSlabs;
  static constexpr int kUnits = kSlabs / kMinSlabs;
  static constexpr int kPieceBytes = kUnits * kUnitBytes;
  /// Of those, the scales that stand apart in memory.
  static constexpr int kApartBytes = kTraits.scales_apart() ? kUnits * kTraits.scale_bytes() : 0;
  static_assert(kApartBytes == 0 || kUnits == 1, "in its slot a unit is whole");
  static constexpr int kSlotBytes = 16 * kPieceBytes;
  static constexpr int kStages = kSlabBits == 16 && kTileTokens == 128 ? 5 : 6;
  static constexpr int kStageBytes = kTileTokens * 128;
  static constexpr int kEpilogueBytes = 32768;
  using Tiles = PrefillTiles<kTileTokens, kPairs, true>;
  static constexpr int kSlots =
      (kMostSharedBytes - Tiles::kTableBytes - 256 - kEpilogueBytes - kStages * kStageBytes) / kSlotBytes;
  static_assert(kSlots >= 2, "weights must be able to arrive while others multiply");
  static constexpr int kBytes = kStages * kStageBytes + kEpilogueBytes + kSlots * kSlotBytes +
                                (2 * kStages + 2 * kSlots) * 8 + Tiles::kTableBytes;
  static_assert(kBytes <= kMostSharedBytes, "shared memory of a CTA of sm_90");
  /// Slabs that share a token stage: small tiles put several into one. Never more than a weight slot has, so
  /// that the place of a slab in its stage is known when the loop over a slot is unrolled: counted at run
  /// time instead, 16-token tiles issue 29 % more instructions.
  static constexpr int StageShift(int tokens) {
    constexpr int kLimit = kSlabs >= 4 ? 2 : kSlabs / 2;
    const int want = kTileTokens == 128 ? (tokens <= 64 ? 1 : 0) : tokens <= 16 ? 2 : tokens <= 32 ? 1 : 0;
    return want < kLimit ? want : kLimit;
  }
  static constexpr int StageSlabs(int tokens) { return 1 << StageShift(tokens); }
  static_assert((kSlabs & (kSlabs - 1)) == 0, "whole stages fill a slot");
};

/// The shared memory of a CTA: tokens, what the epilogue stages, weights, a barrier for each stage and slot
/// that is full and one for each that is empty, the table of tiles.
template <typename S>
struct PrefillShared {
  uint8_t* stages;
  uint8_t* staging;
  uint8_t* slots;
  uint8_t* barriers;
  uint32_t full, empty;      ///< of the stages
  uint32_t w_full, w_empty;  ///< of the slots

  __device__ __forceinline__ explicit PrefillShared(uint8_t* shared)
      : stages(shared),
        staging(stages + S::kStages * S::kStageBytes),
        slots(staging + S::kEpilogueBytes),
        barriers(slots + S::kSlots * S::kSlotBytes),
        full(SharedAddress(barriers)),
        empty(full + 8 * S::kStages),
        w_full(empty + 8 * S::kStages),
        w_empty(w_full + 8 * S::kSlots) {}

  __device__ __forceinline__ uint8_t* table() const {
    return barriers + (2 * S::kStages + 2 * S::kSlots) * 8;
  }
};

/// Scale and bias of the two weight rows (fragment rows r and r + 8 of a block) that a lane holds.
struct RowPair {
  float scale[2];
  float bias[2];
};

__device__ __forceinline__ RowPair LoadRowPair(const PrefillGemmParams& p, int expert, int64_t low,
                                               int64_t high, bool two_parts) {
  RowPair rows;
  const int parts = two_parts ? 2 : 1;
  rows.scale[0] = __ldg(p.tensor_scale + expert * parts);
  rows.scale[1] = two_parts ? __ldg(p.tensor_scale + expert * parts + 1) : rows.scale[0];
  const int64_t first = static_cast<int64_t>(expert) * parts * p.scale_rows;
  const int64_t second = first + (two_parts ? p.scale_rows : 0);
  if (p.row_scale != nullptr) {
    rows.scale[0] *= __ldg(p.row_scale + first + low);
    rows.scale[1] *= __ldg(p.row_scale + second + high);
  }
  rows.bias[0] = p.bias == nullptr ? 0.0F : __ldg(p.bias + first + low);
  rows.bias[1] = p.bias == nullptr ? 0.0F : __ldg(p.bias + second + high);
  return rows;
}

}  // namespace fusedmoe::cuda
