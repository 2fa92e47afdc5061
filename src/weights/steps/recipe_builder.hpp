#pragma once

#include <cstdint>
#include <string>

#include "core/checked_math.hpp"
#include "weights/steps/recipes.hpp"

/// What the recipes of all backends are written with.
namespace fusedmoe::recipes {

inline bool IsNvfp4(const WeightFormat& format) {
  return format.element == DType::kF4E2M1 && format.block_scale_dtype == DType::kF8E4M3;
}
inline bool IsBlockFp8(const WeightFormat& format) {
  return format.element == DType::kF8E4M3 && format.block.row > 1;
}
/// One-byte scales along K, which tensor cores read in tiles.
inline bool HasTiledScales(const WeightFormat& format) {
  return format.has_block_scale() && format.block.row == 1 && DTypeBits(format.block_scale_dtype) == 8;
}

/// Scale columns of `size` inputs.
inline int64_t Groups(const WeightFormat& format, int64_t size) {
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

}  // namespace fusedmoe::recipes
