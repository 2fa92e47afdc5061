#pragma once

#include "experts/cuda/device/fragments.cuh"
#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/launch.hpp"
#include "experts/cuda/prefill/prefill_tiles_sm90.cuh"

/// The sizes of the grouped GEMM of 8-bit codes, by tile, and its shared memory: prefill_codes_sm90.cuh.
namespace fusedmoe::cuda {

/// What its end needs: prefill_codes_end_sm90.cuh.
struct CodesEndShared {
  uint32_t largest[2][64];  ///< [slab][token]
  /// [warpgroup][0: scales, 1: biases] of the 256 weight rows of its tile; gated: gate 128, up 128.
  float rows[2][2][256];
};

template <FragmentFormat kFormat, int kTileTokens>
struct CodesShape {
  static constexpr FragmentTraits kTraits = FragmentTraitsOf(kFormat);
  /// Weights have scales of 64 rows by 128 k.
  static constexpr bool kBlockScales = kTraits.scale == FragmentScale::kF32Halves;
  static_assert(!kBlockScales || kTraits.scales_apart());
  static constexpr bool kPairs = kTileTokens == 128;  ///< CTAs work in pairs
  static constexpr int kThreads = 384;
  static constexpr int kBlockBytes = 2048;  ///< codes of a row block and stage
  static constexpr int kWeightBytes = 16 * kBlockBytes;
  static constexpr int kTokenBytes = 128;  ///< codes of a token and stage
  static constexpr int kStageBytes = kWeightBytes + kTileTokens * kTokenBytes;
  static constexpr int kStages = kTileTokens == 128 ? 4 : 5;
  /// Of a stage: one a token, and those of row blocks 0, 4, 8, 12 (64 rows have the same).
  static constexpr int kTokenScaleBytes = kTileTokens * 4;
  static constexpr int kScaleBytes = kTokenScaleBytes + 64;
  using Tiles = PrefillTiles<kTileTokens, kPairs, false>;
  static constexpr int kBytes = kStages * (kStageBytes + kScaleBytes) +
                                static_cast<int>(sizeof(CodesEndShared)) + 2 * kStages * 8 +
                                Tiles::kTableBytes;
  static_assert(kBytes <= kMostSharedBytes, "shared memory of a CTA of sm_90");
};

/// The shared memory of a CTA: stages (weights, then tokens), their scales, what the end needs, a barrier for
/// each stage that is full and one for each that is empty, the table of tiles.
template <typename S>
struct CodesShared {
  uint8_t* stages;
  uint8_t* scales;
  CodesEndShared* end;
  uint8_t* barriers;
  uint32_t full, empty;

  __device__ __forceinline__ explicit CodesShared(uint8_t* shared)
      : stages(shared),
        scales(stages + S::kStages * S::kStageBytes),
        end(reinterpret_cast<CodesEndShared*>(scales + S::kStages * S::kScaleBytes)),
        barriers(reinterpret_cast<uint8_t*>(end + 1)),
        full(SharedAddress(barriers)),
        empty(full + 8 * S::kStages) {}

  __device__ __forceinline__ uint8_t* table() const { return barriers + 2 * S::kStages * 8; }
  __device__ __forceinline__ uint32_t WeightsOf(int stage) const {
    return SharedAddress(stages) + stage * S::kStageBytes;
  }
  __device__ __forceinline__ uint32_t TokensOf(int stage) const { return WeightsOf(stage) + S::kWeightBytes; }
  __device__ __forceinline__ uint8_t* TokenScalesOf(int stage) const {
    return scales + stage * S::kScaleBytes;
  }
  __device__ __forceinline__ uint8_t* BlockScalesOf(int stage) const {
    return TokenScalesOf(stage) + S::kTokenScaleBytes;
  }
};

}  // namespace fusedmoe::cuda
