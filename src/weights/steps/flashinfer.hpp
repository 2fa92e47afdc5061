#pragma once

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// The weight functions of vLLM's flashinfer_utils as plain functions on stacked tensors [experts, rows,
/// columns] of one-byte codes. docs/upstream_map.md names the originals.
namespace fusedmoe {

struct AlignedFp8Weights {
  Tensor gate_up;            ///< [E, 2P or P, H]
  Tensor down;               ///< [E, H, P]
  int64_t intermediate = 0;  ///< P: the next multiple of 16 (128 where there is no gate)
};

/// Pads the intermediate size: each half of a gated matrix by itself, so that a kernel that splits at P finds
/// up where it looks for it.
Result<AlignedFp8Weights> AlignFp8MoeWeights(TensorView gate_up, TensorView down, bool gated);

/// Gate rows first to up rows first, for weights and for scales.
Result<Tensor> SwapGateAndUp(TensorView gate_up);

struct RotatedWeights {
  Tensor gate_up;
  Tensor down;
};

/// Interleaves the halves (where gated) and shuffles rows for an epilogue tile of 128. `gate_up` has up rows
/// first.
Result<RotatedWeights> RotateWeightsForTrtllmFp8(TensorView gate_up, TensorView down, bool gated);

struct FlashInferFp8Weights {
  Tensor gate_up, down;
  Tensor gate_up_block_scale, down_block_scale;  ///< F32; empty: one scale per tensor
  int64_t intermediate = 0;                      ///< as the kernels see it
};

/// All of an FP8 layer for FlashInfer: pads (one scale per tensor only), puts up first, and for TRTLLM
/// rotates, or, with block scales [E, rows / 128, columns / 128], shuffles by 64 and puts blocks of K first.
/// Block scales are at least 1e-10. The same steps as FlashInferCutlassRecipe and FlashInferTrtllmRecipe.
Result<FlashInferFp8Weights> PrepareFp8ForFlashInfer(TensorView gate_up, TensorView down,
                                                     TensorView gate_up_block_scale,
                                                     TensorView down_block_scale, bool gated, bool trtllm);

}  // namespace fusedmoe
