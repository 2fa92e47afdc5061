#include "weights/steps/recipes.hpp"

#include <string>

#include "core/checked_math.hpp"
#include "weights/steps/recipe_builder.hpp"

namespace fusedmoe {
namespace {

using recipes::Builder;
using recipes::HasTiledScales;
using recipes::IsBlockFp8;
using recipes::IsNvfp4;

constexpr int64_t kBlock = 128;  // of block-wise FP8

const char* FoldTarget(const WeightFormat& format) {
  return format.has_block_scale() ? "gate_up_block_scale" : "gate_up";
}

int64_t AlignedIntermediate(const LayoutProblem& problem) {
  if (IsBlockFp8(problem.format)) {
    return problem.intermediate;
  }
  if (!HasTiledScales(problem.format)) {
    return RoundUp(problem.intermediate, problem.gated ? 16 : 128);
  }
  // Twice the padded size must fill whole tiles of 128 rows, or the scales of up begin inside a tile.
  return RoundUp(problem.intermediate, problem.gated ? 64 : 128);
}

/// Rows in canonical order or up first, tiled scales; no shuffle: what CUTLASS kernels read.
void CutlassSteps(Builder& builder, bool swap) {
  const WeightFormat& format = builder.problem().format;
  for (const std::string name : {"gate_up", "down"}) {
    builder.PadRowsOf(name);
    builder.PadColumnsOf(name, false);
    if (swap) {
      builder.Swap(name);
    }
    if (format.has_channel_scale) {
      builder.PadRowsOf(name + "_channel_scale");
    }
    if (format.has_block_scale()) {
      const std::string scale = name + "_block_scale";
      if (HasTiledScales(format)) {
        builder.PadRowsOf(scale);
        builder.PadColumnsOf(scale, true);
      }
      if (swap) {
        builder.Swap(scale);
      }
      if (HasTiledScales(format)) {
        builder.Swizzle(scale);
      } else if (swap) {
        builder.recipe.Add(LayoutOp::kClampScales, scale);
      }
    }
    if (builder.problem().has_bias) {
      builder.PadRowsOf(name + "_bias");
      if (swap) {
        builder.Swap(name + "_bias");
      }
    }
  }
}

PaddedSizes CutlassSizes(const LayoutProblem& problem) {
  const bool tiled = HasTiledScales(problem.format) || IsBlockFp8(problem.format);
  return {tiled ? problem.hidden : RoundUp(problem.hidden, 16), AlignedIntermediate(problem)};
}

PaddedSizes FlashInferTrtllmSizes(const LayoutProblem& problem) {
  int64_t hidden = problem.hidden;
  if (IsNvfp4(problem.format)) {
    hidden = RoundUp(hidden, 256);
  } else if (HasTiledScales(problem.format)) {
    hidden = RoundUp(hidden, 128);  // rows of down fill whole tiles of scales
  } else if (!IsBlockFp8(problem.format)) {
    hidden = RoundUp(hidden, 32);  // rows of down are shuffled by 32
  }
  return {hidden, AlignedIntermediate(problem)};
}

}  // namespace

LayoutRecipe FlashInferTrtllmRecipe(const LayoutProblem& problem) {
  const WeightFormat& format = problem.format;
  Builder builder(problem, FlashInferTrtllmSizes(problem));
  builder.FoldTensorScales(FoldTarget(format));
  const bool block = IsBlockFp8(format);
  for (const std::string name : {"gate_up", "down"}) {
    builder.PadRowsOf(name);
    builder.PadColumnsOf(name, false);
    builder.Swap(name);
    if (block) {
      builder.Shuffle(name, 64);
      builder.recipe.Add(LayoutOp::kBlockMajorK, name, {kBlock});
      builder.Swap(name + "_block_scale");
      builder.recipe.Add(LayoutOp::kClampScales, name + "_block_scale");
      continue;
    }
    builder.Interleave(name, 1);
    builder.Shuffle(name, 128);
    if (HasTiledScales(format)) {
      const std::string scale = name + "_block_scale";
      builder.PadRowsOf(scale);
      builder.PadColumnsOf(scale, true);
      builder.Swap(scale);
      builder.Interleave(scale, 1);
      builder.Shuffle(scale, 128);
      builder.Swizzle(scale);
    }
  }
  builder.OneScaleForAll();
  return builder.recipe;
}

LayoutRecipe FlashInferCutlassRecipe(const LayoutProblem& problem) {
  Builder builder(problem, CutlassSizes(problem));
  builder.FoldTensorScales(FoldTarget(problem.format));
  CutlassSteps(builder, /*swap=*/true);
  builder.OneScaleForAll();
  return builder.recipe;
}

LayoutRecipe FlashInferCuteDslRecipe(const LayoutProblem& problem, bool batched) {
  Builder builder(problem, CutlassSizes(problem));
  builder.FoldTensorScales(FoldTarget(problem.format));
  if (batched) {
    CutlassSteps(builder, /*swap=*/false);
  } else {
    for (const std::string name : {"gate_up", "down", "gate_up_block_scale", "down_block_scale"}) {
      const bool scale = name.ends_with("_block_scale");
      builder.PadRowsOf(name);
      builder.PadColumnsOf(name, scale);
      builder.Swap(name);
      builder.Interleave(name, 64);
      if (scale) {
        builder.Swizzle(name);
      }
    }
  }
  builder.OneScaleForAll();
  return builder.recipe;
}

LayoutRecipe VllmCutlassRecipe(const LayoutProblem& problem) {
  Builder builder(problem, CutlassSizes(problem));
  builder.FoldTensorScales(FoldTarget(problem.format));
  CutlassSteps(builder, /*swap=*/false);
  if (problem.has_input_scales && problem.max_gate_up) {
    builder.recipe.Add(LayoutOp::kMaxInputScale, "input_tensor_scale");
  }
  builder.OutputScales();
  return builder.recipe;
}

}  // namespace fusedmoe
