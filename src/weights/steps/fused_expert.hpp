#pragma once

#include <cstddef>
#include <string_view>

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

/// The sizes and format of an expert.
FusedShape ShapeOf(const CanonicalExpert& expert);

/// What FuseExpert refuses, before it is asked (kUnsupported): smoothing factors, gate and up that differ in
/// more than their values.
Status CheckFusable(const CanonicalExpert& expert);

/// The tensors of an expert, gate rows above up rows (up alone where there is no gate):
///   gate_up, down                              codes [2I, H], [H, I]
///   *_block_scale, *_zero_point                blocks of gate above those of up
///   *_channel_scale, *_bias                    F32 [rows, 1]
///   *_group_index                              I32 [1, columns], of gate and up the same
///   gate_up_tensor_scale, down_tensor_scale    F32 [1, 2], [1, 1]
///   input_tensor_scale, mid_tensor_scale       F32 [1, 2], [1, 1]: of the inputs of gate, up and down
/// Scales that the format does not have are left out. kUnsupported: what CheckFusable says, and slices that
/// begin inside a block.
Result<ExpertTensors> FuseExpert(const CanonicalExpert& expert);

struct TensorPlan;
/// One of these tensors into memory of `plan.bytes()` (see FusedTensors).
Status FuseTensor(const CanonicalExpert& expert, const TensorPlan& plan, std::byte* out);
/// Lets go of what FuseTensor of that name read.
void ReleaseTensor(CanonicalExpert& expert, std::string_view name);

/// The inverse. Shares the memory of `tensors`.
Result<CanonicalExpert> SplitExpert(const FusedShape& shape, const ExpertTensors& tensors);

}  // namespace fusedmoe
