#pragma once

#include <type_traits>

#include "experts/cuda/device/fragments.cuh"
#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/device/ptx_panel.cuh"
#include "experts/cuda/device/wgmma.cuh"
#include "experts/cuda/prefill/prefill.hpp"
#include "experts/cuda/prefill/prefill_shape.cuh"
#include "experts/cuda/prefill/prefill_tiles_sm90.cuh"

/// The products of prefill_gemm_sm90.cuh: a warp's rows of a tile times its tokens, over all of K.
///
///     slot       codes, scales ─► registers ─► expand to BF16 ─┐
///     stage      ──────────────────────────────────────────────┴► wgmma (A = registers, B = stage)
///
///     the next k-steps expand while the last ones multiply: at most one group of wgmma is in flight
namespace fusedmoe::cuda {

/// One warp's, for all tiles of the CTA: its places in the rings go on from tile to tile.
template <FragmentFormat kFormat, PrefillEpilogue kEpilogue, int kTileTokens, bool kIntegers>
class PrefillProducts {
  using S = PrefillShape<kFormat, kTileTokens, kIntegers>;
  using F = Fragments<kFormat>;
  static constexpr int kGroups = S::kRowGroups;
  // Quantized activations times groups with real scales: the scales act on sums, so that nothing is rounded
  // twice and the next quantization sees what the definition gives. (Folded into BF16, 5 % of the e4m3 codes
  // flip: error 1.4e-2.)
  static constexpr bool kPromote =
      !kIntegers && kEpilogue == PrefillEpilogue::kRowsF32 && PromotesGroups(kFormat);
  static constexpr MmaType kMma = kIntegers ? MmaType::kInt8 : F::kF16 ? MmaType::kF16 : MmaType::kBf16;
  /// Fragments as they are: no slab of them in registers.
  static constexpr bool kByStep = F::kTraits.code_bits == 16 || kIntegers;

 public:
  __device__ __forceinline__ PrefillProducts(const PrefillGemmParams& params,
                                             const PrefillShared<S>& of_shared, int warp, int of_lane)
      : p_(params), shared_(of_shared), row_warp_(warp & 3), warpgroup_((warp >> 2) - 1), lane_(of_lane) {}

  /// `acc[g]`: of row block 4 (warpgroup kGroups + g) + row_warp of the tile, N tokens.
  template <int N>
  __device__ __forceinline__ void Run(const PrefillTile& tile, float (&acc)[kGroups][N / 2]) {
    Sums<N> sums{tile, acc};
    Clear(sums.acc);
    Clear(sums.part);
    Clear(sums.whole);
    constexpr int kPerStage = S::StageSlabs(N);
    const uint8_t* const own_pieces = shared_.slots + (warpgroup_ * kGroups * 4 + row_warp_) * S::kPieceBytes;
    int left = p_.num_slabs;
#pragma unroll 1
    for (; left >= S::kSlabs; left -= S::kSlabs) {
      BarrierWait(shared_.w_full + 8 * slot_.at, slot_.phase);
      const uint8_t* piece = own_pieces + slot_.at * S::kSlotBytes;
#pragma unroll
      for (int s = 0; s < S::kSlabs; ++s) {
        Multiply(sums, piece, s, s % kPerStage, s % kPerStage == kPerStage - 1, std::false_type{});
      }
      NextSlot();
    }
    // The rest of K that does not fill a slot. A branch inside the loop above would make ptxas serialize all
    // of it.
    if (S::kSlabs > S::kMinSlabs && left > 0) {
      BarrierWait(shared_.w_full + 8 * slot_.at, slot_.phase);
      const uint8_t* piece = own_pieces + slot_.at * S::kSlotBytes;
#pragma unroll 1
      for (int s = 0; s < left; ++s) {
        Multiply(sums, piece, s, s % kPerStage, s % kPerStage == kPerStage - 1 || s + 1 == left,
                 std::true_type{});
      }
      NextSlot();
    }
    WgmmaWait<0>();
    ReleaseStage<S::kPairs>(shared_.empty + 8 * sums.release, lane_);
    if constexpr (kIntegers) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
          asm volatile("" : "+r"(sums.whole[g][i])::"memory");
          acc[g][i] = static_cast<float>(sums.whole[g][i]) * kIntegerFactor;
        }
      }
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        asm volatile("" : "+f"(acc[g][i])::"memory");
      }
    }
  }

 private:
  template <int N>
  struct Sums {
    const PrefillTile& tile;
    float (&acc)[kGroups][N / 2];
    float part[kPromote ? kGroups : 1][kPromote ? N / 2 : 1];       ///< of a group of scales
    int32_t whole[kIntegers ? kGroups : 1][kIntegers ? N / 2 : 1];  ///< of all of K
    int release = -1;                                               ///< stage that the next wait frees
    int group = 0;                                                  ///< of scales
  };

  template <typename Array>
  __device__ __forceinline__ static void Clear(Array& sums) {
#pragma unroll
    for (auto& row : sums) {
#pragma unroll
      for (auto& sum : row) {
        sum = 0;  // left undefined under scale-d they stay live across tiles: 224 registers
      }
    }
  }

  __device__ __forceinline__ void NextSlot() {
    __syncwarp();
    ReleaseStage<S::kPairs>(shared_.w_empty + 8 * slot_.at, lane_);
    slot_.Next();
  }

  /// Slab `s` of a slot, at `sub` of its stage. `drain` leaves no wgmma under way.
  template <int N, typename Drain>
  __device__ __forceinline__ void Multiply(Sums<N>& sums, const uint8_t* piece, int s, int sub,
                                           bool ends_stage, Drain drain) {
    constexpr int kPerStage = S::StageSlabs(N);
    // k-steps of a group of wgmma: more hide more, where registers allow it (ptxas serializes them else:
    // C7512). Four of integers leave no room for the fragments of the next group beside them.
    constexpr bool kFewRegisters =
        N == 16 && F::kTraits.code_bits == 4 && F::kTraits.scale != FragmentScale::kHalf;
    constexpr int kBatch = S::kWarpgroups == 4 && (kIntegers || kFewRegisters) ? 4 : N <= 96 ? 2 : 1;
    constexpr bool kOneGroup = S::kWarpgroups == 4 && kIntegers;
    [[maybe_unused]] typename F::Codes codes[kGroups];
    [[maybe_unused]] LaneScales scales[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if constexpr (!kByStep) {
        F::LoadCodes(piece + 4 * g * S::kPieceBytes, s, lane_, codes[g]);
        // Scales that stand apart come with every fourth piece.
        const uint8_t* const scaled = S::kApartBytes == 0 ? piece : piece - row_warp_ * S::kPieceBytes;
        F::template LoadScales<!kPromote>(scaled + 4 * g * S::kPieceBytes, s, lane_, p_.half_scale_is_f16,
                                          scales[g]);
      }
    }
    const uint32_t descriptor =
        descriptor0_ + stage_.at * (S::kStageBytes / 16) + sub * (S::kStageBytes / kPerStage / 16);
#pragma unroll
    for (int j0 = 0; j0 < 4; j0 += kBatch) {
      uint32_t a[kGroups][kBatch][4];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          if constexpr (kByStep) {
            const uint4 step = *reinterpret_cast<const uint4*>(piece + 4 * g * S::kPieceBytes +
                                                               (s * 4 + j0 + j) * 512 + lane_ * 16);
            a[g][j][0] = step.x, a[g][j][1] = step.y, a[g][j][2] = step.z, a[g][j][3] = step.w;
          } else {
            F::template Expand<!kPromote>(codes[g], j0 + j, scales[g], a[g][j]);
          }
        }
      }
      if (j0 == 0 && sub == 0) {
        BarrierWait(shared_.full + 8 * stage_.at, stage_.phase);
      }
      WgmmaFence();
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const uint64_t b = SharedDescriptor(descriptor + 2 * (j0 + j));
          if constexpr (kIntegers) {
            Wgmma<kMma, N>::Mma(sums.whole[g], a[g][j], b);
          } else if constexpr (kPromote) {
            Wgmma<kMma, N>::Mma(sums.part[g], a[g][j], b);
          } else {
            Wgmma<kMma, N>::Mma(sums.acc[g], a[g][j], b);
          }
        }
      }
      WgmmaCommit();
      // The group before is complete: its fragments are free, and its stage, if it was the last of one.
      WgmmaWait<decltype(drain)::value || kOneGroup ? 0 : 1>();
      if (j0 == 0 && sub == 0 && sums.release >= 0) {
        ReleaseStage<S::kPairs>(shared_.empty + 8 * sums.release, lane_);
        sums.release = -1;
      }
    }
    if constexpr (kPromote) {
      if ((s + 1) % F::kGroupSlabs == 0) {
        WgmmaWait<0>();
        AddGroup(sums, scales);
      }
    }
    if (ends_stage) {
      sums.release = stage_.at;
      stage_.Next();
    }
  }

  /// A group of scales is complete: they act in fp32, on its sums.
  template <int N>
  __device__ __forceinline__ void AddGroup(Sums<N>& sums, const LaneScales (&scales)[kGroups]) {
    const float* token_scale = nullptr;
    if (p_.panel_group_scale != nullptr) {
      token_scale = p_.panel_group_scale + sums.group * p_.panel_rows + sums.tile.token + 2 * (lane_ & 3);
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        asm volatile("" : "+f"(sums.part[g][i])::"memory");
      }
#pragma unroll
      for (int i = 0; i < N / 8; ++i) {
        float2 factor = make_float2(1.0F, 1.0F);
        if (token_scale != nullptr && 8 * i < sums.tile.tokens) {  // rows of a panel come in eights
          factor = __ldg(reinterpret_cast<const float2*>(token_scale + 8 * i));
        }
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const float scale = scales[g].row[v >> 1] * ((v & 1) != 0 ? factor.y : factor.x);
          sums.acc[g][4 * i + v] = fmaf(sums.part[g][4 * i + v], scale, sums.acc[g][4 * i + v]);
        }
      }
    }
    Clear(sums.part);
    ++sums.group;
  }

  const PrefillGemmParams& p_;
  const PrefillShared<S>& shared_;
  const int row_warp_;   ///< of its warpgroup
  const int warpgroup_;  ///< of those that multiply
  const int lane_;
  const uint32_t descriptor0_ = SharedDescriptorLow(SharedAddress(shared_.stages));
  RingPlace<S::kSlots> slot_;
  RingPlace<S::kStages> stage_;
};

}  // namespace fusedmoe::cuda
