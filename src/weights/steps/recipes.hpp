#pragma once

#include <cstdint>

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
  bool has_group_index = false;   ///< activation order
  bool has_input_scales = false;  ///< stored, of both GEMMs
  bool fold = false;              ///< gate and up differ in their tensor scales
  bool max_gate_up = false;       ///< gate and up differ in their input scales
  DType activation = DType::kBF16;
  int gate_up_factor = 0;  ///< MarlinNvfp4Factor of the largest block scale of all experts
  int down_factor = 0;
  int64_t parts() const { return gated ? 2 : 1; }
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

/// MARLIN: 16 x 64 tiles of 4- or 8-bit codes, permuted scales, no input scales.
LayoutRecipe MarlinRecipe(const LayoutProblem& problem);

}  // namespace fusedmoe
