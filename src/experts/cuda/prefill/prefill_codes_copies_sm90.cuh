#pragma once

#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/device/ptx_panel.cuh"
#include "experts/cuda/prefill/prefill.hpp"
#include "experts/cuda/prefill/prefill_codes_shape.cuh"
#include "experts/cuda/prefill/prefill_tiles_sm90.cuh"

/// The four warps of prefill_codes_sm90.cuh that bring tokens and weights, each with its scales, to shared
/// memory. A stage is full once all four have copied their part of it.
namespace fusedmoe::cuda {

/// Warp 0.
template <typename S>
__device__ __forceinline__ void CopyTokenCodes(const PrefillGemmParams& p, const CodesShared<S>& shared,
                                               const typename S::Tiles& tiles, int lane) {
  const int num_tiles = tiles.Count();
  if (!p.wait_for_map) {
    GridWait();
  }
  FenceAsyncProxy();
  const uint64_t policy = EvictLastPolicy();
  RingPlace<S::kStages> stage;
  PrefillTile tile;
  for (int t = tiles.begin; t < num_tiles; t += tiles.stride) {
    tiles.Locate(t, tile);
    if (lane == 0) {
      const TokenShare share = tiles.ShareOf(tile);
      const int bytes = share.bytes;
      const uint8_t* source = p.panel + static_cast<int64_t>(tile.token) * S::kTokenBytes + share.offset;
      const float* factors = p.panel_group_scale == nullptr ? nullptr : p.panel_group_scale + tile.token;
#pragma unroll 1
      for (int left = p.num_slabs; left > 0; --left) {
        const uint32_t barrier = shared.full + 8 * stage.at;
        const uint32_t to = shared.TokensOf(stage.at) + share.offset;
        BarrierWait(shared.empty + 8 * stage.at, stage.phase ^ 1);
        BarrierExpect(barrier, factors == nullptr ? bytes : bytes + bytes / 32);
        if (factors != nullptr) {
          BulkLoad(SharedAddress(shared.TokenScalesOf(stage.at)), factors, bytes / 32, barrier, policy);
          factors += p.panel_rows;
        }
        if (share.own_bytes > 0) {
          LoadStage(share.both, to, source, share.own_bytes, barrier, policy);
        }
        source += p.panel_rows * S::kTokenBytes;
        stage.Next();
      }
    }
  }
}

/// Warps 1 to 3.
template <typename S>
__device__ __forceinline__ void CopyWeightCodes(const PrefillGemmParams& p, const CodesShared<S>& shared,
                                                const typename S::Tiles& tiles, int warp, int lane) {
  const int num_tiles = tiles.Count();
  const int num_slabs = p.num_slabs;
  WeightLane<typename S::Tiles> own(warp, lane);
  const int scale_bytes = S::kBlockScales ? own.scale_pieces * 16 : 0;
  RingPlace<S::kStages> stage;
  PrefillTile tile;
  for (int t = tiles.begin; t < num_tiles; t += tiles.stride) {
    tiles.Locate(t, tile);
    own.Open(p, tiles, tile);
    const uint8_t* source = own.source;
    const uint8_t* from_scales = own.scales;
#pragma unroll 1
    for (int c = 0; c < num_slabs; ++c) {
      const bool half = !S::kBlockScales && c + 1 == num_slabs && p.last_piece_bytes < S::kBlockBytes;
      const uint32_t barrier = shared.full + 8 * stage.at;
      BarrierWait(shared.empty + 8 * stage.at, stage.phase ^ 1);
      if (lane == 0) {
        BarrierExpect(barrier, own.pieces * S::kBlockBytes + scale_bytes);
      }
      __syncwarp();
      if (own.copies) {
        const uint32_t to = shared.WeightsOf(stage.at) + own.piece * S::kBlockBytes;
        const int bytes = half ? S::kBlockBytes / 2 : S::kBlockBytes;
        LoadStage(own.both, to, source, bytes, barrier, own.policy);
        if (half) {  // 64 k: zeros stand for the rest
          LoadStage(own.both, to + bytes, kZeroSlab, bytes, barrier, own.policy);
        }
        if (S::kBlockScales && own.brings_scales) {
          const uint32_t scale_to = SharedAddress(shared.BlockScalesOf(stage.at)) + own.piece * 4;
          LoadStage(own.both, scale_to, from_scales, 16, barrier, own.policy);
        }
      }
      source += S::kBlockBytes;
      from_scales += S::kTraits.scale_bytes();
      stage.Next();
    }
  }
}

}  // namespace fusedmoe::cuda
