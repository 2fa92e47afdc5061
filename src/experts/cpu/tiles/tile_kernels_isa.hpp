#pragma once

#include <stdint.h>

#include "experts/cpu/tiles/tile_dot_isa.hpp"
#include "experts/cpu/tiles/tile_finish_isa.hpp"
#include "experts/cpu/tiles/tile_pack_isa.hpp"

/// What a matrix unit exports (TileKernels), for each weight format.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

template <WeightKernel kWeight, TileWeights kForm>
void RunTileGemm(const TileGemm* gemm) {
  if constexpr (TilePanel<kWeight, kForm>::kE4m3Scaled && kForm == kExactWeights) {
    if (gemm->weight_group == 128 && gemm->scale_group % 128 == 0) {
      TileEngine<kWeight, kForm, 4> engine(*gemm);
      engine.Run();
      return;
    }
  }
  TileEngine<kWeight, kForm> engine(*gemm);
  engine.Run();
}

template <WeightKernel kWeight, TileWeights kForm>
constexpr void SetFormat(TileKernels& kernels) {
  using Engine = TileEngine<kWeight, kForm>;
  constexpr bool kBytes = kForm == kInt8Weights;
  TileFormat& format = kernels.formats[kForm][kWeight];
  format.gemm = &RunTileGemm<kWeight, kForm>;
  format.shift = kBytes ? 0 : Engine::Decoder::kShift;
  format.permuted = Engine::Decoder::kPermuted;
  format.post = kBytes ? 1.0F : Engine::Decoder::kPost;
  format.sum_group = Engine::kSums ? Engine::Panel::kFlush : 0;
  format.scale_group = Engine::Panel::kFlush;
}

/// Those of integers in groups.
template <WeightKernel kWeight>
constexpr void SetGrouped(TileKernels& kernels) {
  if constexpr (IsGrouped(kWeight)) {
    SetFormat<kWeight, kRoundedInF32>(kernels);
  }
}

template <TileSums kSums>
constexpr void SetFinishers(TileKernels& kernels) {
  kernels.scale[kSums] = &ScaleSums<kSums>;
  kernels.add[kSums] = &FinishRows<kSums, false>;
  kernels.put[kSums] = &FinishRows<kSums, true>;
  kernels.silu_rows[kSums] = &SiluToRows<kSums>;
}

/// kInF32: GEMMs of kRoundedInF32; else those of all other weights. They are compiled apart, since each of
/// them takes its time: 2 to 5 s.
template <bool kInF32>
constexpr TileKernels MakeTileKernels(const char* name) {
  TileKernels kernels = {};
  kernels.name = name;
  if constexpr (kInF32) {
#define FMOE_SET_GROUPED(id, ...) SetGrouped<id>(kernels);
    FMOE_INTEGER_WEIGHT_TABLE(FMOE_SET_GROUPED)
#undef FMOE_SET_GROUPED
  } else {
    SetFormat<kWeightBf16, kExactWeights>(kernels);
    SetFormat<kWeightE4m3, kExactWeights>(kernels);
    SetFormat<kWeightE4m3Scaled, kExactWeights>(kernels);
    SetFormat<kWeightE4m3Stripe, kExactWeights>(kernels);
    SetFormat<kWeightMxfp8, kExactWeights>(kernels);
    SetFormat<kWeightNvfp4, kExactWeights>(kernels);
    SetFormat<kWeightMxfp4, kExactWeights>(kernels);
    SetFormat<kWeightMxfp6, kExactWeights>(kernels);
    SetFormat<kWeightU4, kExactWeights>(kernels);
    SetFormat<kWeightU4Group32, kExactWeights>(kernels);
    SetFormat<kWeightU4Group64, kExactWeights>(kernels);
    SetFormat<kWeightU4Group128, kExactWeights>(kernels);
    SetFormat<kWeightU8, kExactWeights>(kernels);
    SetFormat<kWeightU8Group32, kExactWeights>(kernels);
    SetFormat<kWeightU8Group64, kExactWeights>(kernels);
    SetFormat<kWeightU8Group128, kExactWeights>(kernels);
    SetFormat<kWeightU4Group128, kInt8Weights>(kernels);
    SetFormat<kWeightU8, kInt8Weights>(kernels);
    SetFormat<kWeightU8Group128, kInt8Weights>(kernels);
    SetFormat<kWeightU4Group32, kRoundedInF16>(kernels);
    SetFormat<kWeightU4Group64, kRoundedInF16>(kernels);
    SetFormat<kWeightU4Group128, kRoundedInF16>(kernels);
    SetFormat<kWeightE4m3Scaled, kRoundedInF16>(kernels);
    SetFormat<kWeightE4m3Stripe, kRoundedInF16>(kernels);
  }
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
