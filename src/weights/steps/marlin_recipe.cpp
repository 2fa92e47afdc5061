#include <algorithm>
#include <numeric>
#include <string>

#include "core/checked_math.hpp"
#include "weights/marlin.hpp"
#include "weights/steps/marlin_ops.hpp"
#include "weights/steps/recipe_builder.hpp"
#include "weights/steps/recipes.hpp"

namespace fusedmoe {
namespace {

using recipes::Builder;
using recipes::Groups;
using recipes::HasTiledScales;
using recipes::IsNvfp4;

bool IsE8m0(const WeightFormat& format) {
  return HasTiledScales(format) && !IsNvfp4(format);
}
bool RoundsInputs(const LayoutProblem& problem, DType dtype) {
  return problem.marlin_inputs == dtype;
}
int64_t ActivationBits(const LayoutProblem& problem) {
  return problem.marlin_inputs ? 8 : 16;
}

/// What decoding leaves over of codes with scales of 16 bits: the exponent that the scales take for it.
int64_t ScaleExponent(const LayoutProblem& problem) {
  if (problem.format.element == DType::kF8E4M3) {
    return MarlinE4m3Bias(problem.activation);
  }
  return RoundsInputs(problem, DType::kF8E4M3) ? kMarlinInt4AsE4m3Bias : 0;
}

/// Kernels read scales and biases in the type of the model.
void ScaleType(Builder& builder, const std::string& tensor, DType dtype, int64_t exponent) {
  const DType wanted = builder.problem().activation == DType::kF16 ? DType::kF16 : DType::kBF16;
  if (dtype != wanted || exponent != 0) {
    builder.recipe.Add(LayoutOp::kMarlinScaleType, tensor, {static_cast<int64_t>(wanted), exponent});
  }
}

/// The codes of a projection; gives the type that they have from then on.
DType Codes(Builder& builder, const std::string& name) {
  const LayoutProblem& problem = builder.problem();
  LayoutRecipe& recipe = builder.recipe;
  DType element = problem.format.element;
  if (problem.has_group_index) {
    recipe.Add(LayoutOp::kSortInputs, name);
  }
  if (element == DType::kI4 || element == DType::kI8) {
    recipe.Add(LayoutOp::kFlipSign, name, {static_cast<int64_t>(element)});
    element = element == DType::kI4 ? DType::kU4 : DType::kU8;
  }
  if (element == DType::kU4 && RoundsInputs(problem, DType::kF8E4M3)) {
    recipe.Add(LayoutOp::kMarlinFp8Codes, name, {problem.needs_zero_points() ? 1 : 0});
  }
  builder.PadRowsOf(name);
  builder.PadColumnsOf(name, false);
  recipe.Add(LayoutOp::kMarlinWeights, name, {static_cast<int64_t>(element), ActivationBits(problem)});
  return element;
}

void BlockScales(Builder& builder, const std::string& name, DType element) {
  const LayoutProblem& problem = builder.problem();
  const WeightFormat& format = problem.format;
  LayoutRecipe& recipe = builder.recipe;
  const bool down = Builder::IsDown(name);
  const int64_t inputs = down ? builder.sizes().intermediate : builder.sizes().hidden;
  const std::string scale = name + "_block_scale";
  if (!HasTiledScales(format)) {
    if (RoundsInputs(problem, DType::kI8) && Groups(format, inputs) > 1) {
      const DType dtype = problem.activation == DType::kF16 ? DType::kF16 : DType::kBF16;
      recipe.Add(LayoutOp::kMarlinInt8Scales, scale, {static_cast<int64_t>(dtype)});
    } else {
      ScaleType(builder, scale, format.block_scale_dtype, ScaleExponent(problem));
    }
  }
  if (format.block.row > 1) {
    const int64_t outputs = down ? problem.hidden : problem.intermediate;
    recipe.Add(LayoutOp::kRepeatRows, scale,
               {down ? 1 : problem.parts(), format.block.row, CeilDiv(outputs, format.block.row), outputs});
  }
  builder.PadRowsOf(scale);
  builder.PadColumnsOf(scale, true);
  const MarlinKind kind{DTypeBits(element), static_cast<int>(ActivationBits(problem))};
  recipe.Add(LayoutOp::kMarlinScales, scale,
             {MarlinScalesAreGrouped(inputs, format.block.col, kind) ? 1 : 0});
  if (IsNvfp4(format)) {
    const int64_t factor = down ? problem.down_factor : problem.gate_up_factor;
    const int64_t half = problem.activation == DType::kF16 ? 1 : 0;
    recipe.Add(LayoutOp::kMarlinNvfp4Scales, scale, {factor, half});
    recipe.Add(LayoutOp::kMarlinTensorScale, name + "_tensor_scale", {factor, half});
    if (problem.gated && !down) {
      recipe.Add(LayoutOp::kOneTensorScale, name + "_tensor_scale");
    }
  } else if (IsE8m0(format) && !problem.marlin_inputs) {
    recipe.Add(LayoutOp::kMarlinFours, scale);
  } else if (IsE8m0(format)) {
    constexpr int64_t kE2m1AsE4m3Bias = 6;
    recipe.Add(LayoutOp::kMarlinExponents, scale, {kE2m1AsE4m3Bias});
  }
}

/// F32 numbers of rows: scales of a channel or of a tensor, biases.
void RowNumbers(Builder& builder, const std::string& tensor, int64_t exponent) {
  ScaleType(builder, tensor, DType::kF32, exponent);
  builder.PadRowsOf(tensor);
  builder.recipe.Add(LayoutOp::kMarlinScales, tensor, {0});
}

}  // namespace

PaddedSizes MarlinSizes(const LayoutProblem& problem) {
  const WeightFormat& format = problem.format;
  if (format.element == DType::kF4E2M1 && IsE8m0(format)) {  // vLLM rounds the layer itself up
    return {RoundUp(problem.hidden, 256), RoundUp(problem.intermediate, 128)};
  }
  const int64_t group = std::max<int64_t>(format.block.col, 1);
  const int64_t hidden = RoundUp(problem.hidden, std::lcm(int64_t{64}, group));
  // Both GEMMs need 128 on one side: gate and up as outputs, intermediate as inputs of down.
  const int64_t narrow = hidden % 128 == 0 ? 64 : 128;
  return {hidden, RoundUp(problem.intermediate, std::lcm(narrow, group))};
}

LayoutRecipe MarlinRecipe(const LayoutProblem& problem) {
  const WeightFormat& format = problem.format;
  Builder builder(problem, MarlinSizes(problem));
  LayoutRecipe& recipe = builder.recipe;
  if (IsNvfp4(format)) {  // elsewhere each half keeps its own
    builder.FoldTensorScales("gate_up_block_scale");
  }
  for (const std::string name : {"gate_up", "down"}) {
    const DType element = Codes(builder, name);
    if (format.has_block_scale()) {
      BlockScales(builder, name, element);
    }
    if (format.has_channel_scale) {
      RowNumbers(builder, name + "_channel_scale", ScaleExponent(problem));
    }
    if (format.has_tensor_scale && !IsNvfp4(format)) {
      const int64_t rows = name == "down" ? problem.hidden : problem.intermediate;
      recipe.Add(LayoutOp::kTensorRows, name + "_tensor_scale", {rows});
      RowNumbers(builder, name + "_tensor_scale", ScaleExponent(problem));
    }
    if (problem.has_bias) {
      RowNumbers(builder, name + "_bias", 0);
    }
    if (problem.has_zero_points && problem.zero_points_are_implied) {
      recipe.Add(LayoutOp::kDropZeroPoints, name + "_zero_point");
    } else if (problem.has_zero_points) {
      builder.PadRowsOf(name + "_zero_point");
      builder.PadColumnsOf(name + "_zero_point", true);
      recipe.Add(LayoutOp::kMarlinZeroPoints, name + "_zero_point",
                 {static_cast<int64_t>(element), ActivationBits(problem)});
    }
  }
  if (problem.has_input_scales) {
    recipe.Add(LayoutOp::kDropInputScale, "input_tensor_scale");
    recipe.Add(LayoutOp::kDropInputScale, "mid_tensor_scale");
  }
  return recipe;
}

}  // namespace fusedmoe
