#pragma once

#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/device/ptx_panel.cuh"
#include "experts/cuda/device/wgmma.cuh"
#include "experts/cuda/prefill/prefill.hpp"
#include "experts/cuda/prefill/prefill_codes_shape.cuh"
#include "experts/cuda/prefill/prefill_tiles_sm90.cuh"

/// The products of prefill_codes_sm90.cuh, added up under their scales over all of K.
namespace fusedmoe::cuda {

/// Which part of a tile a warpgroup multiplies: kSlabs times 8 row blocks of 16, by 64 tokens.
struct CodesPart {
  int first_slab;  ///< row blocks from 8 * first_slab on
  int base;        ///< its first token, counted from the tile's first
};

/// One warp's, for all tiles of the CTA: its place in the ring goes on from tile to tile.
template <typename S>
class CodesProducts {
 public:
  __device__ __forceinline__ CodesProducts(const PrefillGemmParams& params, const CodesShared<S>& of_shared,
                                           int of_lane)
      : p_(params), shared_(of_shared), lane_(of_lane) {}

  /// Until the first stage of the tile is full: what wrote the tokens has ended then, so that their scales
  /// are there too.
  __device__ __forceinline__ void AwaitTokens() const {
    BarrierWait(shared_.full + 8 * stage_.at, stage_.phase);
  }

  /// `acc` += products, in the order of CodesEnd. `row`: the first of the lane's two tokens.
  template <int kSlabs>
  __device__ __forceinline__ void Run(const CodesPart& part, int row, float (&acc)[2][32 * kSlabs]) {
    Sums<kSlabs> sums{part, row, acc};
#pragma unroll
    for (auto& set : sums.products) {
#pragma unroll
      for (float& sum : set) {
        sum = 0.0F;
      }
    }
#pragma unroll 1
    for (int left = p_.num_slabs; left > 0; --left) {
      BarrierWait(shared_.full + 8 * stage_.at, stage_.phase);
      Multiply(sums, 0);
      if constexpr (Sums<kSlabs>::kSets == 2) {
        Multiply(sums, 1);
        LoadScales(sums);
        WgmmaWait<1>();
        Add(sums, 0);
      } else {
        LoadScales(sums);
        WgmmaWait<0>();
        Add(sums, 0);
        Multiply(sums, 1);
      }
      WgmmaWait<0>();
      __syncwarp();
      ReleaseStage<S::kPairs>(shared_.empty + 8 * stage_.at, lane_);
      stage_.Next();
      Add(sums, 1);
    }
  }

 private:
  template <int kSlabs>
  struct Sums {
    static constexpr int kSets = kSlabs == 2 ? 1 : 2;  ///< of products: what registers allow
    const CodesPart& part;
    int row;
    float (&acc)[2][32 * kSlabs];
    float products[kSets][32 * kSlabs];
    float factor[2] = {1.0F, 1.0F};    ///< of the stage: the scales of the two tokens
    float block_scale[2][2 * kSlabs];  ///< [h][32 weight rows]
  };

  template <int kSlabs>
  __device__ __forceinline__ void LoadScales(Sums<kSlabs>& sums) const {
    if (p_.panel_group_scale != nullptr) {
      const auto* const at = reinterpret_cast<const float*>(shared_.TokenScalesOf(stage_.at)) + sums.row;
      sums.factor[0] = at[0], sums.factor[1] = at[8];
    }
    if constexpr (S::kBlockScales) {
      const auto* const at =
          reinterpret_cast<const float2*>(shared_.BlockScalesOf(stage_.at)) + sums.part.first_slab * 4;
#pragma unroll
      for (int i = 0; i < 2 * kSlabs; ++i) {
        const float2 pair = at[2 * i];
        sums.block_scale[0][i] = pair.x, sums.block_scale[1][i] = pair.y;
      }
    }
  }

  /// Starts the products of rows 8 `half` .. 8 `half` + 7 of the row blocks with 128 k.
  template <int kSlabs>
  __device__ __forceinline__ void Multiply(Sums<kSlabs>& sums, int half) const {
    float(&products)[32 * kSlabs] = sums.products[half % Sums<kSlabs>::kSets];
    const uint32_t low = SharedDescriptorLow(shared_.WeightsOf(stage_.at));
    const uint32_t tokens = low + ((S::kWeightBytes + sums.part.base * S::kTokenBytes) >> 4);
    const uint32_t weights = low + ((sums.part.first_slab * 8 * S::kBlockBytes + half * 512) >> 4);
    WgmmaFence();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint64_t a = SharedDescriptor(tokens + 2 * j);
      const uint64_t b = ByteDescriptor(weights + ((j / 2 * 1024 + j % 2 * 32) >> 4));
      if (j == 0) {
        WgmmaBytes<64 * kSlabs>::MmaFirst(products, a, b);
      } else {
        WgmmaBytes<64 * kSlabs>::Mma(products, a, b);
      }
    }
    WgmmaCommit();
  }

  /// The products have formed: acc += products * scales.
  template <int kSlabs>
  __device__ __forceinline__ void Add(Sums<kSlabs>& sums, int half) const {
    float(&products)[32 * kSlabs] = sums.products[half % Sums<kSlabs>::kSets];
    float(&acc)[32 * kSlabs] = sums.acc[half];
#pragma unroll
    for (float& sum : products) {
      asm volatile("" : "+f"(sum)::"memory");
    }
#pragma unroll
    for (int i = 0; i < 8 * kSlabs; ++i) {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const float scale =
            S::kBlockScales ? sums.factor[v] * sums.block_scale[half][i >> 2] : sums.factor[v];
        const int at = 4 * i + 2 * v;
        acc[at] = fmaf(products[at], scale, acc[at]);
        acc[at + 1] = fmaf(products[at + 1], scale, acc[at + 1]);
      }
    }
  }

  const PrefillGemmParams& p_;
  const CodesShared<S>& shared_;
  const int lane_;
  RingPlace<S::kStages> stage_;
};

}  // namespace fusedmoe::cuda
