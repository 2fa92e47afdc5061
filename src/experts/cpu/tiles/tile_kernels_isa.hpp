#pragma once

#include <stdint.h>

#include "experts/cpu/tiles/tile_dot_isa.hpp"
#include "experts/cpu/tiles/tile_finish_isa.hpp"
#include "experts/cpu/tiles/tile_pack_isa.hpp"

/// What a matrix unit exports (TileKernels), for each weight format.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

template <WeightKernel kWeight, bool kBytes, bool kRounded>
void RunTileGemm(const TileGemm* gemm) {
  if constexpr (TilePanel<kWeight, kRounded>::kE4m3Scaled && !kRounded) {
    if (gemm->weight_group == 128 && gemm->scale_group % 128 == 0) {
      TileEngine<kWeight, kBytes, kRounded, 4> engine(*gemm);
      engine.Run();
      return;
    }
  }
  TileEngine<kWeight, kBytes, kRounded> engine(*gemm);
  engine.Run();
}

template <WeightKernel kWeight, bool kBytes, bool kRounded = false>
constexpr TileFormat MakeTileFormat() {
  using Engine = TileEngine<kWeight, kBytes, kRounded>;
  TileFormat format = {};
  format.gemm = &RunTileGemm<kWeight, kBytes, kRounded>;
  format.shift = kBytes ? 0 : Engine::Decoder::kShift;
  format.permuted = Engine::Decoder::kPermuted;
  format.post = kBytes ? 1.0F : Engine::Decoder::kPost;
  format.sum_group = Engine::kSums ? Engine::Panel::kFlush : 0;
  format.scale_group = Engine::Panel::kFlush;
  return format;
}

template <TileSums kSums>
constexpr void SetFinishers(TileKernels& kernels) {
  kernels.scale[kSums] = &ScaleSums<kSums>;
  kernels.add[kSums] = &FinishRows<kSums, false>;
  kernels.put[kSums] = &FinishRows<kSums, true>;
  kernels.silu_rows[kSums] = &SiluToRows<kSums>;
}

constexpr TileKernels MakeTileKernels(const char* name) {
  TileKernels kernels = {};
  kernels.name = name;
  kernels.bf16[kWeightBf16] = MakeTileFormat<kWeightBf16, false>();
  kernels.bf16[kWeightE4m3] = MakeTileFormat<kWeightE4m3, false>();
  kernels.bf16[kWeightE4m3Scaled] = MakeTileFormat<kWeightE4m3Scaled, false>();
  kernels.bf16[kWeightE4m3Stripe] = MakeTileFormat<kWeightE4m3Stripe, false>();
  kernels.bf16[kWeightMxfp8] = MakeTileFormat<kWeightMxfp8, false>();
  kernels.bf16[kWeightNvfp4] = MakeTileFormat<kWeightNvfp4, false>();
  kernels.bf16[kWeightMxfp4] = MakeTileFormat<kWeightMxfp4, false>();
  kernels.bf16[kWeightU4] = MakeTileFormat<kWeightU4, false>();
  kernels.bf16[kWeightU4Group32] = MakeTileFormat<kWeightU4Group32, false>();
  kernels.bf16[kWeightU4Group64] = MakeTileFormat<kWeightU4Group64, false>();
  kernels.bf16[kWeightU4Group128] = MakeTileFormat<kWeightU4Group128, false>();
  kernels.bf16[kWeightU8] = MakeTileFormat<kWeightU8, false>();
  kernels.bf16[kWeightU8Group32] = MakeTileFormat<kWeightU8Group32, false>();
  kernels.bf16[kWeightU8Group64] = MakeTileFormat<kWeightU8Group64, false>();
  kernels.bf16[kWeightU8Group128] = MakeTileFormat<kWeightU8Group128, false>();
  kernels.int8[kWeightU4Group128] = MakeTileFormat<kWeightU4Group128, true>();
  kernels.int8[kWeightU8] = MakeTileFormat<kWeightU8, true>();
  kernels.int8[kWeightU8Group128] = MakeTileFormat<kWeightU8Group128, true>();
  kernels.rounded[kWeightU4Group32] = MakeTileFormat<kWeightU4Group32, false, true>();
  kernels.rounded[kWeightU4Group64] = MakeTileFormat<kWeightU4Group64, false, true>();
  kernels.rounded[kWeightU4Group128] = MakeTileFormat<kWeightU4Group128, false, true>();
  kernels.rounded[kWeightE4m3Scaled] = MakeTileFormat<kWeightE4m3Scaled, false, true>();
  kernels.rounded[kWeightE4m3Stripe] = MakeTileFormat<kWeightE4m3Stripe, false, true>();
  kernels.pack = &PackTile;
  kernels.pack_rounded = &PackTileRounded;
  kernels.pack_nvfp4 = &PackTileNvfp4;
  kernels.pack_codes = &PackTileCodes;
  kernels.gather = &GatherTile;
  SetFinishers<kPlainSums>(kernels);
  SetFinishers<kScaledSums>(kernels);
  SetFinishers<kIntegerSums>(kernels);
  kernels.add_slots = &AddSlots;
  kernels.silu = &SiluToTiles;
  kernels.silu_nvfp4 = &SiluToNvfp4;
  kernels.pack_block = &PackTileBlock;
  return kernels;
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
