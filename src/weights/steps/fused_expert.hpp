#pragma once

#include <fusedmoe/weights.hpp>

#include "weights/steps/layout_step.hpp"

namespace fusedmoe {

/// What turning fused tensors back into an expert needs to know.
struct FusedShape {
  int64_t hidden = 0;
  int64_t intermediate = 0;
  bool gated = true;
  WeightFormat format;
};

/// The tensors of an expert, gate rows above up rows (up alone where there is no gate):
///   gate_up, down                              codes [2I, H], [H, I]
///   *_block_scale, *_zero_point                blocks of gate above those of up
///   *_channel_scale, *_bias                    F32 [rows, 1]
///   gate_up_tensor_scale, down_tensor_scale    F32 [1, 2], [1, 1]
///   input_tensor_scale, mid_tensor_scale       F32 [1, 2], [1, 1]: of the inputs of gate, up and down
/// Scales that the format does not have are left out. kUnsupported: activation order, smoothing factors,
/// slices that begin inside a block.
Result<ExpertTensors> FuseExpert(const CanonicalExpert& expert);

/// The inverse. Shares the memory of `tensors`.
Result<CanonicalExpert> SplitExpert(const FusedShape& shape, const ExpertTensors& tensors);

}  // namespace fusedmoe
