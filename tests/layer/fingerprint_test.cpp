// What ranks must have alike: whatever would make one of them compute something else.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "layer/rank_plan.hpp"

namespace fusedmoe {
namespace {

struct Asked {
  MoeConfig config;
  LayerOptions options;
};

uint64_t FingerprintOf(const Asked& asked) {
  return LayerFingerprint(asked.config, *ParseScheme("nvfp4_w4a4"), asked.options, "CPU_FUSED");
}

// An older config.json on one machine, or an option that one rank lacks: rows came out wrong and nobody said
// so.
TEST(LayerFingerprint, KnowsWhatDecidesTheOutputs) {
  const std::vector<std::pair<std::string, std::function<void(Asked&)>>> changes = {
      {"activation", [](Asked& a) { a.config.activation.kind = ActivationKind::kGelu; }},
      {"alpha", [](Asked& a) { a.config.activation.alpha = 1.5F; }},
      {"beta", [](Asked& a) { a.config.activation.beta = 0.5F; }},
      {"limit", [](Asked& a) { a.config.activation.limit = 7.0F; }},
      {"method", [](Asked& a) { a.config.routing.method = RoutingMethod::kDefault; }},
      {"score", [](Asked& a) { a.config.routing.score = ScoreFunction::kSigmoid; }},
      {"renormalize", [](Asked& a) { a.config.routing.renormalize = false; }},
      {"groups", [](Asked& a) { a.config.routing.num_groups = 2; }},
      {"kept groups", [](Asked& a) { a.config.routing.topk_groups = 2; }},
      {"scaling", [](Asked& a) { a.config.routing.scaling_factor = 2.5F; }},
      {"epsilon", [](Asked& a) { a.config.routing.norm_epsilon = 1e-6F; }},
      {"softcap", [](Asked& a) { a.config.routing.logit_softcap = 30.0F; }},
      {"zero experts", [](Asked& a) { a.config.routing.num_zero_experts = 1; }},
      {"correction bias", [](Asked& a) { a.config.has_correction_bias = true; }},
      {"dtype", [](Asked& a) { a.config.dtype = DType::kF16; }},
      {"shared width", [](Asked& a) { a.config.shared.intermediate = 64; }},
      {"shared gate", [](Asked& a) { a.config.shared.has_gate = true; }},
      {"shared weight", [](Asked& a) { a.config.shared.weight = 0.5F; }},
      {"shared activation", [](Asked& a) { a.config.shared.activation = ActivationSpec{.limit = 7.0F}; }},
      {"latent norm", [](Asked& a) { a.config.latent_norm_epsilon = 1e-5F; }},
      {"without shared experts", [](Asked& a) { a.options.shared_experts = false; }},
      {"without projections", [](Asked& a) { a.options.latent_projections = false; }},
      {"a8", [](Asked& a) { a.options.activation = ActivationMode::kA8; }},
  };
  const Asked asked;
  EXPECT_EQ(FingerprintOf(asked), FingerprintOf(Asked()));
  for (const auto& [what, change] : changes) {
    Asked other;
    change(other);
    EXPECT_NE(FingerprintOf(other), FingerprintOf(asked)) << what;
  }
}

}  // namespace
}  // namespace fusedmoe
