#pragma once

#include "experts/cuda/prefill/prefill_codes_sm90.cuh"

/// The kernels of a format that multiply codes by codes; each format has a file of its own.
namespace fusedmoe::cuda {

template <FragmentFormat kFormat, int kTileTokens>
PrefillKernels::Tile PrefillCodesTileOf() {
  PrefillKernels::Tile tile;
  tile.panel = &PrefillGemmOfCodes<kFormat, PrefillEpilogue::kPanel, kTileTokens>;
  tile.rows16 = &PrefillGemmOfCodes<kFormat, PrefillEpilogue::kRows16, kTileTokens>;
  tile.rows_f32 = &PrefillGemmOfCodes<kFormat, PrefillEpilogue::kRowsF32, kTileTokens>;
  tile.threads = CodesShape<kFormat, kTileTokens>::kThreads;
  tile.shared_bytes = CodesShape<kFormat, kTileTokens>::kBytes;
  tile.slabs = 1;
  tile.cluster = CodesShape<kFormat, kTileTokens>::kPairs ? 2 : 1;
  return tile;
}

}  // namespace fusedmoe::cuda

#define FMOE_PREFILL_CODE_KERNELS(id)                                                                     \
  namespace fusedmoe::cuda {                                                                              \
  PrefillKernels PrefillCodeKernels_##id() {                                                              \
    return {PrefillCodesTileOf<FragmentFormat::id, 64>(), PrefillCodesTileOf<FragmentFormat::id, 128>()}; \
  }                                                                                                       \
  }
