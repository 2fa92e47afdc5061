#include <optional>
#include <utility>

#include <fusedmoe/layer.hpp>

#include "checkpoint/access.hpp"
#include "layer/layer_impl.hpp"
#include "layer/rank_plan.hpp"

namespace fusedmoe {
Result<std::unique_ptr<MoeLayer>> MoeLayer::Load(std::shared_ptr<const Checkpoint> checkpoint, int64_t layer,
                                                 const LayerOptions& options) {
  return AgreeOn(LoadAlone(std::move(checkpoint), layer, options), options);
}

Result<std::unique_ptr<MoeLayer>> MoeLayer::LoadAlone(std::shared_ptr<const Checkpoint> checkpoint,
                                                      int64_t layer, const LayerOptions& asked_options) {
  if (checkpoint == nullptr) {
    return Status::Usage("the checkpoint is null; Checkpoint::Open gives one");
  }
  LayerOptions options = asked_options;
  FMOE_RETURN_IF_ERROR(CheckRanks(options));
  FMOE_ASSIGN_OR_RETURN(const LayerDescription description, checkpoint->Describe(layer));
  FMOE_ASSIGN_OR_RETURN(const RouterWeights router, checkpoint->LoadRouter(layer));
  std::optional<LatentWeights> latent;
  if (options.latent_projections) {
    FMOE_ASSIGN_OR_RETURN(latent, checkpoint->Latent(layer));
  }
  std::vector<int64_t> local_experts;  // empty: all
  bool has_experts = true;
  if (IsSpread(options)) {
    FMOE_ASSIGN_OR_RETURN(RankPlan plan, PlanRank(description.config, description.scheme, options.parallel));
    has_experts = plan.config.num_local_experts > 0;
    local_experts = std::move(plan.local_experts);
    options.fingerprint ^= CheckpointFingerprint(*checkpoint, layer, router);
  }
  FMOE_ASSIGN_OR_RETURN(ExpertSource experts, checkpoint->Experts(layer, options.parallel, local_experts));
  if (!has_experts) {  // more ranks than experts: this one brings tokens alone
    experts.num_local_experts = 0;
  }
  std::optional<SharedExpertWeights> shared;
  if (options.shared_experts) {
    FMOE_ASSIGN_OR_RETURN(shared, checkpoint->SharedExperts(layer));
  }
  FMOE_ASSIGN_OR_RETURN(std::unique_ptr<MoeLayer> loaded,
                        CreateAlone(description.config, experts, router, options, shared ? &*shared : nullptr,
                                    latent ? &*latent : nullptr));
  if (LayerBalance* balance = loaded->impl_->balance.get()) {
    // Experts that moved are read from their files from then on; what was sent need not be kept.
    balance->reload = [checkpoint, layer, parallel = options.parallel](const std::vector<int64_t>& local) {
      return checkpoint->Experts(layer, parallel, local);
    };
  }
  if (!description.routed_by_caller.empty()) {
    loaded->impl_->selection.notes.push_back("the caller routes; of the model's router: " +
                                             description.routed_by_caller);
  }
  if (options.shared_experts && !shared) {
    FMOE_ASSIGN_OR_RETURN(const auto context, checkpoint::Access::Context(*checkpoint, layer));
    if (context->spec.lacks_shared) {
      loaded->impl_->selection.notes.emplace_back(
          "config.json promises shared experts, and the layer has none: outputs are those of the routed "
          "experts alone");
    }
  }
  loaded->impl_->checkpoint = std::move(checkpoint);
  return loaded;
}

}  // namespace fusedmoe
