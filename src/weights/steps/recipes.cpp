#include "weights/steps/recipes.hpp"

#include <algorithm>
#include <numeric>
#include <string>

#include "core/checked_math.hpp"
#include "weights/marlin.hpp"

namespace fusedmoe {
namespace {

/// The sizes that kernels see: the logical ones, rounded up. Gate and up are padded separately.
struct PaddedSizes {
  int64_t hidden = 0;
  int64_t intermediate = 0;
};

constexpr int64_t kBlock = 128;  // of block-wise FP8

bool IsNvfp4(const WeightFormat& format) {
  return format.element == DType::kF4E2M1 && format.block_scale_dtype == DType::kF8E4M3;
}
bool IsBlockFp8(const WeightFormat& format) {
  return format.element == DType::kF8E4M3 && format.block.row > 1;
}
/// One-byte scales along K, which tensor cores read in tiles.
bool HasTiledScales(const WeightFormat& format) {
  return format.has_block_scale() && format.block.row == 1 && DTypeBits(format.block_scale_dtype) == 8;
}

/// Scale columns of `size` inputs.
int64_t Groups(const WeightFormat& format, int64_t size) {
  return format.block.col < 0 ? 1 : CeilDiv(size, format.block.col);
}

/// Builds the steps of both projections. A pad that pads nothing is left out.
class Builder {
 public:
  Builder(const LayoutProblem& problem, PaddedSizes sizes) : problem_(problem), sizes_(sizes) {}

  void PadRowsOf(const std::string& tensor) {
    const bool down = IsDown(tensor);
    Pad(tensor, down ? 1 : problem_.parts(), down ? problem_.hidden : problem_.intermediate,
        down ? sizes_.hidden : sizes_.intermediate);
  }
  void PadColumnsOf(const std::string& tensor, bool groups) {
    const bool down = IsDown(tensor);
    int64_t from = down ? problem_.intermediate : problem_.hidden;
    int64_t to = down ? sizes_.intermediate : sizes_.hidden;
    if (groups) {
      from = Groups(problem_.format, from);
      to = Groups(problem_.format, to);
    }
    if (from != to) {
      recipe.Add(LayoutOp::kPadColumns, tensor, {from, to});
    }
  }
  void Swap(const std::string& tensor) {
    if (problem_.gated && !IsDown(tensor)) {
      recipe.Add(LayoutOp::kSwapHalves, tensor);
    }
  }
  void Interleave(const std::string& tensor, int64_t group) {
    if (problem_.gated && !IsDown(tensor)) {
      recipe.Add(LayoutOp::kInterleaveRows, tensor, {group});
    }
  }
  void Shuffle(const std::string& tensor, int64_t tile) {
    recipe.Add(LayoutOp::kShuffleRows, tensor, {tile});
  }
  void Swizzle(const std::string& tensor) {
    const bool down = IsDown(tensor);
    recipe.Add(LayoutOp::kSwizzleScales, tensor,
               {128, down ? sizes_.hidden : problem_.parts() * sizes_.intermediate,
                Groups(problem_.format, down ? sizes_.intermediate : sizes_.hidden)});
  }
  void FoldTensorScales(const char* tensor) {
    if (problem_.fold) {
      recipe.Add(LayoutOp::kFoldTensorScale, tensor);
    }
  }
  /// One input scale for all experts, and the products that kernels multiply their sums by.
  void OneScaleForAll() {
    if (problem_.has_input_scales) {
      recipe.Add(LayoutOp::kMaxExpand, "input_tensor_scale");
      recipe.Add(LayoutOp::kMaxExpand, "mid_tensor_scale");
      OutputScales();
    }
  }
  void OutputScales() {
    if (problem_.has_input_scales && problem_.format.has_tensor_scale) {
      recipe.Add(LayoutOp::kOutputScale, "gate_up_output_scale");
      recipe.Add(LayoutOp::kOutputScale, "down_output_scale");
    }
  }
  const LayoutProblem& problem() const { return problem_; }
  const PaddedSizes& sizes() const { return sizes_; }
  static bool IsDown(const std::string& tensor) { return tensor.starts_with("down"); }

  LayoutRecipe recipe;

 private:
  void Pad(const std::string& tensor, int64_t parts, int64_t from, int64_t to) {
    if (from != to) {
      recipe.Add(LayoutOp::kPadRows, tensor, {parts, from, to});
    }
  }

  const LayoutProblem& problem_;
  PaddedSizes sizes_;
};

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

PaddedSizes MarlinSizes(const LayoutProblem& problem) {
  // Scale columns must stay whole groups; blocks of FP8 may be partial.
  const int64_t group = problem.format.block.row > 1 ? 1 : std::max<int64_t>(problem.format.block.col, 1);
  const int64_t multiple = std::lcm(int64_t{64}, group);
  return {RoundUp(problem.hidden, multiple), RoundUp(problem.intermediate, multiple)};
}

/// The codes of a projection; gives the type that they have from then on.
DType MarlinCodes(Builder& builder, const std::string& name) {
  LayoutRecipe& recipe = builder.recipe;
  DType element = builder.problem().format.element;
  if (builder.problem().has_group_index) {
    recipe.Add(LayoutOp::kSortInputs, name);
  }
  if (element == DType::kI4 || element == DType::kI8) {
    recipe.Add(LayoutOp::kFlipSign, name, {static_cast<int64_t>(element)});
    element = element == DType::kI4 ? DType::kU4 : DType::kU8;
  }
  builder.PadRowsOf(name);
  builder.PadColumnsOf(name, false);
  recipe.Add(LayoutOp::kMarlinWeights, name, {static_cast<int64_t>(element)});
  return element;
}

void MarlinBlockScales(Builder& builder, const std::string& name, DType element) {
  const LayoutProblem& problem = builder.problem();
  const WeightFormat& format = problem.format;
  LayoutRecipe& recipe = builder.recipe;
  const bool down = Builder::IsDown(name);
  const int64_t inputs = down ? builder.sizes().intermediate : builder.sizes().hidden;
  const int64_t outputs = down ? problem.hidden : problem.intermediate;
  const std::string scale = name + "_block_scale";
  if (format.block.row > 1) {
    recipe.Add(LayoutOp::kRepeatRows, scale,
               {down ? 1 : problem.parts(), format.block.row, CeilDiv(outputs, format.block.row), outputs});
  }
  builder.PadRowsOf(scale);
  builder.PadColumnsOf(scale, true);
  const bool grouped = MarlinScalesAreGrouped(inputs, format.block.col, {DTypeBits(element), 16});
  recipe.Add(LayoutOp::kMarlinScales, scale, {grouped ? 1 : 0});
  if (IsNvfp4(format)) {
    const int64_t factor = down ? problem.down_factor : problem.gate_up_factor;
    const int64_t half = problem.activation == DType::kF16 ? 1 : 0;
    recipe.Add(LayoutOp::kMarlinNvfp4Scales, scale, {factor, half});
    recipe.Add(LayoutOp::kMarlinTensorScale, name + "_tensor_scale", {factor, half});
  } else if (HasTiledScales(format)) {
    recipe.Add(LayoutOp::kMarlinFours, scale);
  }
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

LayoutRecipe MarlinRecipe(const LayoutProblem& problem) {
  const WeightFormat& format = problem.format;
  Builder builder(problem, MarlinSizes(problem));
  LayoutRecipe& recipe = builder.recipe;
  if (IsNvfp4(format)) {  // elsewhere each half keeps its own
    builder.FoldTensorScales(FoldTarget(format));
  }
  for (const std::string name : {"gate_up", "down"}) {
    const DType element = MarlinCodes(builder, name);
    if (format.has_block_scale()) {
      MarlinBlockScales(builder, name, element);
    }
    for (const auto& [present, suffix] :
         {std::pair(format.has_channel_scale, "_channel_scale"), std::pair(problem.has_bias, "_bias")}) {
      if (present) {
        builder.PadRowsOf(name + suffix);
        recipe.Add(LayoutOp::kMarlinScales, name + suffix, {0});
      }
    }
    if (problem.has_zero_points) {
      builder.PadRowsOf(name + "_zero_point");
      builder.PadColumnsOf(name + "_zero_point", true);
      recipe.Add(LayoutOp::kMarlinZeroPoints, name + "_zero_point", {static_cast<int64_t>(element)});
    }
  }
  if (problem.has_input_scales) {
    recipe.Add(LayoutOp::kDropInputScale, "input_tensor_scale");
    recipe.Add(LayoutOp::kDropInputScale, "mid_tensor_scale");
  }
  return recipe;
}

}  // namespace fusedmoe
