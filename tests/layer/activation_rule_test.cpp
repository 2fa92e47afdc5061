#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/layer.hpp>

#include "quant/activation_rules.hpp"
#include "support/layer_inputs.hpp"
#include "support/random_layer.hpp"

/// LayerOptions::activation_rule.
namespace fusedmoe {
namespace {

using testing_support::MakeRandomLayer;
using testing_support::MakeRandomRouting;
using testing_support::RandomLayer;
using testing_support::RandomRouting;
using testing_support::RandomRows;

constexpr int64_t kTokens = 5, kExperts = 4;

RandomLayer Layer(const std::string& scheme) {
  MoeConfig config;
  config.num_experts = config.num_local_experts = kExperts;
  config.hidden = 128;
  config.intermediate = 64;
  config.routing.top_k = 2;
  return MakeRandomLayer(config, scheme, 7);
}

Result<std::unique_ptr<MoeLayer>> Make(const RandomLayer& from, const std::string& backend,
                                       const std::string& rule) {
  LayerOptions options;
  options.backend = backend;
  options.activation_rule = rule;
  options.max_tokens = kTokens;
  return MoeLayer::Create(from.config, from.source, RouterWeights{}, options);
}

std::vector<float> OutputOf(const RandomLayer& from, const std::string& backend, const std::string& rule) {
  const auto layer = Make(from, backend, rule);
  EXPECT_TRUE(layer.ok()) << layer.status().ToString();
  const Workspace workspace = *(*layer)->CreateWorkspace();
  const Tensor hidden = RandomRows(kTokens, from.config.hidden, DType::kBF16, 3);
  const RandomRouting routing = MakeRandomRouting(kTokens, 2, kExperts, 4);
  std::vector<float> output(static_cast<size_t>(kTokens * from.config.hidden));
  MoeLayer::Inputs inputs = testing_support::InputsOf(hidden, routing);
  MoeLayer::Outputs outputs;
  outputs.output = MutableTensorView(reinterpret_cast<std::byte*>(output.data()), DType::kF32,
                                     {kTokens, from.config.hidden});
  const Status status = (*layer)->Forward(inputs, outputs, workspace);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return output;
}

// What a caller names is what a checkpoint whose tool has that rule gets, on every backend.
TEST(ActivationRule, Named_IsTheRuleOfTheScheme) {
  for (const auto& [scheme, rule] : {std::pair{"int8_w8a8:channel", "vllm_int8_group"},
                                     {"mxfp4_w4a4", "modelopt_mxfp4"},
                                     {"mxfp8_w8a8", "modelopt_mxfp8"},
                                     {"fp8_w8a8:channel", "vllm_fp8_group_ue8m0"}}) {
    const RandomLayer plain = Layer(scheme);
    RandomLayer ruled = plain;
    ruled.source.scheme.activation.rule = *ActivationRuleByName(rule);
    for (const char* backend : {"REFERENCE", "CPU_FUSED"}) {
      const std::vector<float> named = OutputOf(plain, backend, rule);
      EXPECT_EQ(named, OutputOf(ruled, backend, "")) << scheme << " " << backend;
      EXPECT_NE(named, OutputOf(plain, backend, ""))
          << scheme << " " << backend << ": another rule, other values";
    }
    EXPECT_EQ((*Make(plain, "", rule))->scheme().activation.rule, *ActivationRuleByName(rule));
  }
}

TEST(ActivationRule, UnknownOrIdle_IsRefused) {
  const auto unknown = Make(Layer("int8_w8a8:channel"), "", "vllm_int9");
  EXPECT_EQ(unknown.status().code(), StatusCode::kUsage);
  EXPECT_NE(unknown.status().ToString().find("vllm_int8_token"), std::string::npos)
      << unknown.status().ToString();
  const auto other = Make(Layer("int8_w8a8:channel"), "", "vllm_nvfp4");
  EXPECT_EQ(other.status().code(), StatusCode::kUsage);
  EXPECT_NE(other.status().ToString().find("'vllm_nvfp4' is of NVFP4 activations; these are INT8"),
            std::string::npos)
      << other.status().ToString();
  const auto idle = Make(Layer("nvfp4_w4a16"), "", "vllm_nvfp4");
  EXPECT_EQ(idle.status().code(), StatusCode::kUsage);
  EXPECT_NE(idle.status().ToString().find("nvfp4_w4a16 leaves activations as they are"), std::string::npos)
      << idle.status().ToString();
}

}  // namespace
}  // namespace fusedmoe
