#include <optional>
#include <utility>

#include <fusedmoe/layer.hpp>

#include "layer/layer_impl.hpp"

namespace fusedmoe {

Result<std::unique_ptr<MoeLayer>> MoeLayer::Load(std::shared_ptr<const Checkpoint> checkpoint, int64_t layer,
                                                 const LayerOptions& options) {
  FMOE_ASSIGN_OR_RETURN(const LayerDescription description, checkpoint->Describe(layer));
  FMOE_ASSIGN_OR_RETURN(const RouterWeights router, checkpoint->LoadRouter(layer));
  FMOE_ASSIGN_OR_RETURN(const ExpertSource experts, checkpoint->Experts(layer));
  std::optional<SharedExpertWeights> shared;
  if (options.shared_experts) {
    FMOE_ASSIGN_OR_RETURN(shared, checkpoint->SharedExperts(layer));
  }
  FMOE_ASSIGN_OR_RETURN(std::unique_ptr<MoeLayer> loaded,
                        Create(description.config, experts, router, options, shared ? &*shared : nullptr));
  loaded->impl_->checkpoint = std::move(checkpoint);
  return loaded;
}

}  // namespace fusedmoe
