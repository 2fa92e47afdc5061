#pragma once

#include "experts/cuda/prefill/prefill_gemm_sm90.cuh"

/// One format's GEMM kernels; each format has a file of its own (prefill_<name>.cu), so that they compile
/// apart.
namespace fusedmoe::cuda {

template <FragmentFormat kFormat, int kTileTokens, bool kIntegers>
PrefillKernels::Tile PrefillTileOf() {
  using S = PrefillShape<kFormat, kTileTokens, kIntegers>;
  PrefillKernels::Tile tile;
  if constexpr (kIntegers || kTileTokens == 64 || HasLargeTiles(kFormat)) {
    if constexpr (!kIntegers) {  // whose scales are those of whole rows
      tile.panel = &PrefillGemm<kFormat, PrefillEpilogue::kPanel, kTileTokens, kIntegers>;
    }
    tile.rows16 = &PrefillGemm<kFormat, PrefillEpilogue::kRows16, kTileTokens, kIntegers>;
    if constexpr (kIntegers || kTileTokens == 64 || !PromotesGroups(kFormat)) {
      tile.rows_f32 = &PrefillGemm<kFormat, PrefillEpilogue::kRowsF32, kTileTokens, kIntegers>;
    }
    tile.threads = S::kThreads;
    tile.shared_bytes = S::kBytes;
    tile.slabs = S::kSlabs;
    tile.cluster = S::kPairs ? 2 : 1;
  }
  return tile;
}

}  // namespace fusedmoe::cuda

#define FMOE_PREFILL_KERNELS(id)                              \
  namespace fusedmoe::cuda {                                  \
  PrefillKernels PrefillKernels_##id() {                      \
    return {PrefillTileOf<FragmentFormat::id, 64, false>(),   \
            PrefillTileOf<FragmentFormat::id, 128, false>()}; \
  }                                                           \
  }

#define FMOE_PREFILL_INTEGER_KERNELS(id)                                                                    \
  namespace fusedmoe::cuda {                                                                                \
  PrefillKernels PrefillCodeKernels_##id() {                                                                \
    return {PrefillTileOf<FragmentFormat::id, 64, true>(), PrefillTileOf<FragmentFormat::id, 128, true>()}; \
  }                                                                                                         \
  }
