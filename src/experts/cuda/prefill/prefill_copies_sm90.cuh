#pragma once

#include "experts/cuda/device/ptx.cuh"
#include "experts/cuda/device/ptx_panel.cuh"
#include "experts/cuda/prefill/prefill.hpp"
#include "experts/cuda/prefill/prefill_shape.cuh"
#include "experts/cuda/prefill/prefill_tiles_sm90.cuh"

/// The four warps of prefill_gemm_sm90.cuh that bring tokens and weights to shared memory.
namespace fusedmoe::cuda {

/// Warp 0. Slabs of a tile's tokens fill stages, small tiles put several into one.
template <typename S>
__device__ __forceinline__ void CopyTokens(const PrefillGemmParams& p, const PrefillShared<S>& shared,
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
      const int shift = S::StageShift(tile.width);
      const TokenShare share = tiles.ShareOf(tile);
      const uint8_t* source = p.panel + static_cast<int64_t>(tile.token) * 128 + share.offset;
#pragma unroll 1
      for (int left = p.num_slabs; left > 0; left -= 1 << shift) {
        const int slabs = min(left, 1 << shift);
        uint32_t to = SharedAddress(shared.stages) + stage.at * S::kStageBytes + share.offset;
        const uint32_t barrier = shared.full + 8 * stage.at;
        BarrierWait(barrier + 8 * S::kStages, stage.phase ^ 1);
        BarrierExpect(barrier, share.bytes * slabs);
#pragma unroll 1
        for (int s = 0; s < slabs; ++s) {
          if (share.own_bytes > 0) {
            LoadStage(share.both, to, source, share.own_bytes, barrier, policy);
          }
          source += p.panel_rows * 128;
          to += S::kStageBytes >> shift;
        }
        stage.Next();
      }
    }
  }
}

/// Warps 1 to 3. A slot is 16 copies, one a lane: a warp issues them one after the other, some 50 clocks
/// each.
template <typename S>
__device__ __forceinline__ void CopyWeights(const PrefillGemmParams& p, const PrefillShared<S>& shared,
                                            const typename S::Tiles& tiles, int warp, int lane) {
  const int num_tiles = tiles.Count();
  const int num_chunks = (p.num_slabs + S::kSlabs - 1) / S::kSlabs;
  WeightLane<typename S::Tiles> own(warp, lane);
  RingPlace<S::kSlots> slot;
  PrefillTile tile;
  for (int t = tiles.begin; t < num_tiles; t += tiles.stride) {
    tiles.Locate(t, tile);
    own.Open(p, tiles, tile);
    const uint8_t* source = own.source;
    const uint8_t* scales = own.scales;
#pragma unroll 1
    for (int c = 0; c < num_chunks; ++c) {
      const int bytes = c + 1 < num_chunks ? S::kPieceBytes : p.last_piece_bytes;
      const bool half = S::kIntegerTokens && bytes < S::kPieceBytes;  // 64 k: zeros stand for the rest
      const uint32_t barrier = shared.w_full + 8 * slot.at;
      BarrierWait(shared.w_empty + 8 * slot.at, slot.phase ^ 1);
      if (lane == 0) {
        BarrierExpect(barrier, own.pieces * ((half ? S::kPieceBytes : bytes) - S::kApartBytes) +
                                   own.scale_pieces * S::kApartBytes);
      }
      __syncwarp();
      if (own.copies) {
        const uint32_t to =
            SharedAddress(shared.slots) + slot.at * S::kSlotBytes + own.piece * S::kPieceBytes;
        LoadStage(own.both, to, source, bytes - S::kApartBytes, barrier, own.policy);
        if (S::kApartBytes > 0 && own.brings_scales) {
          LoadStage(own.both, to + S::kPieceBytes - S::kApartBytes, scales, S::kApartBytes, barrier,
                    own.policy);
        }
        if (half) {
          LoadStage(own.both, to + bytes, kZeroSlab, S::kPieceBytes - bytes, barrier, own.policy);
        }
      }
      source += S::kPieceBytes - S::kApartBytes;
      scales += S::kApartBytes;
      slot.Next();
    }
  }
}

}  // namespace fusedmoe::cuda
