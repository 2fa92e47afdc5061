#include "weights/steps/flashinfer.hpp"

#include <cstring>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "weights/steps/layout_step.hpp"

namespace fusedmoe {
namespace {

/// The steps on each expert, stacked again.
Result<Tensor> ForEachExpert(TensorView stacked, std::span<const LayoutStep> steps) {
  if (stacked.rank() != 3 || stacked.dim(0) < 1) {
    return Status::BadInput(
        fmt::format("the weights are {}; [experts, rows, columns] is required", stacked.shape().ToString()));
  }
  Tensor result;
  for (int64_t expert = 0; expert < stacked.dim(0); ++expert) {
    Tensor matrix = Tensor::Borrow(stacked[expert], nullptr);
    for (const LayoutStep& step : steps) {
      FMOE_ASSIGN_OR_RETURN(matrix, ApplyStep(step, matrix.view()));
    }
    if (expert == 0) {
      std::vector<int64_t> dims = {stacked.dim(0)};
      dims.insert(dims.end(), matrix.shape().dims().begin(), matrix.shape().dims().end());
      FMOE_ASSIGN_OR_RETURN(result, Tensor::Allocate(matrix.dtype(), Shape(std::span<const int64_t>(dims))));
    }
    const int64_t bytes = matrix.view().total_bytes();
    std::memcpy(result.mutable_view().data() + expert * bytes, matrix.view().data(),
                static_cast<size_t>(bytes));
  }
  return result;
}

}  // namespace

Result<AlignedFp8Weights> AlignFp8MoeWeights(TensorView gate_up, TensorView down, bool gated) {
  if (down.rank() != 3 || gate_up.rank() != 3 || gate_up.dim(1) != (gated ? 2 : 1) * down.dim(2)) {
    return Status::BadInput(fmt::format("gate_up {} and down {} do not belong together",
                                        gate_up.shape().ToString(), down.shape().ToString()));
  }
  AlignedFp8Weights aligned;
  const int64_t intermediate = down.dim(2);
  aligned.intermediate = RoundUp(intermediate, gated ? 16 : 128);
  const LayoutStep rows = {
      LayoutOp::kPadRows, "gate_up", {gated ? 2 : 1, intermediate, aligned.intermediate, 0}};
  const LayoutStep columns = {LayoutOp::kPadColumns, "down", {intermediate, aligned.intermediate, 0, 0}};
  FMOE_ASSIGN_OR_RETURN(aligned.gate_up, ForEachExpert(gate_up, {&rows, 1}));
  FMOE_ASSIGN_OR_RETURN(aligned.down, ForEachExpert(down, {&columns, 1}));
  return aligned;
}

Result<Tensor> SwapGateAndUp(TensorView gate_up) {
  const LayoutStep swap = {LayoutOp::kSwapHalves, "gate_up", {}};
  return ForEachExpert(gate_up, {&swap, 1});
}

Result<RotatedWeights> RotateWeightsForTrtllmFp8(TensorView gate_up, TensorView down, bool gated) {
  std::vector<LayoutStep> steps;
  if (gated) {
    steps.push_back({LayoutOp::kInterleaveRows, "gate_up", {1, 0, 0, 0}});
  }
  steps.push_back({LayoutOp::kShuffleRows, "gate_up", {128, 0, 0, 0}});
  RotatedWeights rotated;
  FMOE_ASSIGN_OR_RETURN(rotated.gate_up, ForEachExpert(gate_up, steps));
  FMOE_ASSIGN_OR_RETURN(rotated.down, ForEachExpert(down, std::span(steps).last(1)));
  return rotated;
}

Result<FlashInferFp8Weights> PrepareFp8ForFlashInfer(TensorView gate_up, TensorView down,
                                                     TensorView gate_up_block_scale,
                                                     TensorView down_block_scale, bool gated, bool trtllm) {
  FlashInferFp8Weights made;
  const bool blocks = !gate_up_block_scale.empty();
  if (blocks != !down_block_scale.empty()) {
    return Status::BadInput("block scales of gate_up and down come together; one of them is missing");
  }
  if (blocks) {
    std::vector<LayoutStep> matrix, scale;
    if (gated) {
      matrix.push_back({LayoutOp::kSwapHalves, "gate_up", {}});
      scale.push_back({LayoutOp::kSwapHalves, "gate_up_block_scale", {}});
    }
    scale.push_back({LayoutOp::kClampScales, "gate_up_block_scale", {}});
    if (trtllm) {
      matrix.push_back({LayoutOp::kShuffleRows, "gate_up", {64, 0, 0, 0}});
      matrix.push_back({LayoutOp::kBlockMajorK, "gate_up", {128, 0, 0, 0}});
    }
    const std::span<const LayoutStep> down_matrix = std::span(matrix).last(trtllm ? 2 : 0);
    made.intermediate = down.rank() == 3 ? down.dim(2) : 0;
    FMOE_ASSIGN_OR_RETURN(made.gate_up, ForEachExpert(gate_up, matrix));
    FMOE_ASSIGN_OR_RETURN(made.down, ForEachExpert(down, down_matrix));
    FMOE_ASSIGN_OR_RETURN(made.gate_up_block_scale, ForEachExpert(gate_up_block_scale, scale));
    FMOE_ASSIGN_OR_RETURN(made.down_block_scale, ForEachExpert(down_block_scale, std::span(scale).last(1)));
    return made;
  }
  FMOE_ASSIGN_OR_RETURN(AlignedFp8Weights aligned, AlignFp8MoeWeights(gate_up, down, gated));
  made.intermediate = aligned.intermediate;
  made.down = std::move(aligned.down);
  made.gate_up = std::move(aligned.gate_up);
  if (gated) {
    FMOE_ASSIGN_OR_RETURN(made.gate_up, SwapGateAndUp(made.gate_up.view()));
  }
  if (trtllm) {
    FMOE_ASSIGN_OR_RETURN(RotatedWeights rotated,
                          RotateWeightsForTrtllmFp8(made.gate_up.view(), made.down.view(), gated));
    made.gate_up = std::move(rotated.gate_up);
    made.down = std::move(rotated.down);
  }
  return made;
}

}  // namespace fusedmoe
