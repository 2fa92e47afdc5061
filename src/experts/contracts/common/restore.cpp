#include "experts/contracts/common/restore.hpp"

namespace fusedmoe {
namespace {

/// The tensors of one expert of prepared weights, sharing their memory.
ExpertTensors TensorsOfExpert(const PreparedWeights& weights, int64_t expert) {
  ExpertTensors tensors;
  for (const PreparedWeights::Named& named : weights.tensors) {
    tensors.Set(named.name, Tensor::Borrow(named.tensor.view()[expert], named.tensor.owner()));
  }
  return tensors;
}

}  // namespace

Result<CanonicalExpert> RestoreExpert(const PreparedWeights& weights, const FusedShape& shape,
                                      int64_t expert) {
  FMOE_ASSIGN_OR_RETURN(const LayoutRecipe recipe, LayoutRecipe::Parse(weights.recipe));
  ExpertTensors tensors = TensorsOfExpert(weights, expert);
  FMOE_RETURN_IF_ERROR(recipe.Invert(tensors));
  return SplitExpert(shape, tensors);
}

}  // namespace fusedmoe
