#pragma once

#include <cstdint>
#include <optional>

#include <fusedmoe/quant.hpp>

#include "weights/steps/layout_step.hpp"

namespace fusedmoe {

/// What the layout of a kernel depends on.
struct LayoutProblem {
  int64_t hidden = 0;
  int64_t intermediate = 0;
  bool gated = true;
  WeightFormat format;
  bool has_bias = false;
  bool has_zero_points = false;
  bool zero_points_are_implied = false;  ///< all are the middle of the codes
  bool needs_zero_points() const { return has_zero_points && !zero_points_are_implied; }
  bool has_group_index = false;     ///< activation order
  bool has_input_scales = false;    ///< stored, of both GEMMs
  bool fold = false;                ///< gate and up differ in their tensor scales
  bool max_gate_up = false;         ///< gate and up differ in their input scales
  DType activation = DType::kBF16;  ///< of the model; MARLIN takes F32 as BF16
  /// What MARLIN's kernels round activations to: empty, they stay. kI8 or kF8E4M3 beside INT4 weights,
  /// kF8E4M3 beside MXFP4 (vLLM's VLLM_MARLIN_INPUT_DTYPE).
  std::optional<DType> marlin_inputs;
  int gate_up_factor = 0;  ///< MarlinNvfp4Factor of the largest block scale of all experts
  int down_factor = 0;
  int64_t parts() const { return gated ? 2 : 1; }
};

/// The sizes that kernels see: the logical ones, rounded up. Gate and up are padded separately.
struct PaddedSizes {
  int64_t hidden = 0;
  int64_t intermediate = 0;
};

/// FLASHINFER_TRTLLM: up rows first, interleaved (not block FP8), shuffled; scales of 4-bit and MX weights
/// swizzled; block FP8 with blocks of K first. NVFP4, MXFP8, FP8 per tensor and 128 x 128.
LayoutRecipe FlashInferTrtllmRecipe(const LayoutProblem& problem);

/// FLASHINFER_CUTLASS: up rows first, NVFP4 scales swizzled, one input scale for all experts.
LayoutRecipe FlashInferCutlassRecipe(const LayoutProblem& problem);

/// FLASHINFER_CUTEDSL. Batched: canonical rows and swizzled scales. Otherwise up rows first, groups of 64 in
/// turn.
LayoutRecipe FlashInferCuteDslRecipe(const LayoutProblem& problem, bool batched);

/// VLLM_CUTLASS: canonical rows, NVFP4 scales swizzled, an input scale for each expert.
LayoutRecipe VllmCutlassRecipe(const LayoutProblem& problem);

/// MARLIN: tiles of 4- or 8-bit codes in the order of tensor-core fragments; scales and biases permuted, in
/// the 16-bit type of the model, those of FP8 times 2^120 (BF16) or 2^8 (F16) as its decoding asks; no input
/// scales.
LayoutRecipe MarlinRecipe(const LayoutProblem& problem);
/// Thread tiles are 64 outputs by 128 inputs or 128 by 64, and hold whole groups.
PaddedSizes MarlinSizes(const LayoutProblem& problem);

}  // namespace fusedmoe
