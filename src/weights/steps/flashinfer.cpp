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
      FMOE_ASSIGN_OR_RETURN(
          result, Tensor::Allocate(matrix.dtype(), Shape{stacked.dim(0), matrix.dim(0), matrix.dim(1)}));
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

}  // namespace fusedmoe
