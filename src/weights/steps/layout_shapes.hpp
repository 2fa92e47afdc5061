#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <fusedmoe/dtype.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

#include "weights/steps/fused_expert.hpp"

/// What a recipe leaves behind, without moving a byte: so that memory is there before the first expert is,
/// and so that a file is refused before anything in it is believed.
namespace fusedmoe {

/// A tensor of one expert, as it will be.
struct TensorPlan {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  int64_t bytes() const;
  bool operator==(const TensorPlan&) const = default;
};

/// What an expert has beyond what its format says.
struct FusedParts {
  bool bias = false;
  bool zero_points = false;
  bool input_scales = false;
  bool group_index = false;
};
FusedParts PartsOf(const CanonicalExpert& expert);

/// The tensors of FuseExpert, in its order.
std::vector<TensorPlan> FusedTensors(const FusedShape& shape, const FusedParts& parts);

/// The tensors behind all steps: those that are kept under "canonical.*" first, in the order of names, then
/// the others in that of `fused`, derived ones last. kBadInput names the step that does not fit its tensor or
/// has a parameter out of range; nothing is allocated, whatever the parameters are.
Result<std::vector<TensorPlan>> PlannedTensors(const LayoutRecipe& recipe, std::vector<TensorPlan> fused);

}  // namespace fusedmoe
