// Numbers of a configuration that no model has, and metadata that contradict each other: refused by the name
// that the file gives them.
#include <gtest/gtest.h>

#include <string>

#include "checkpoint/raw_checkpoint.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

void ExpectSays(const TinyModel& model, StatusCode code, const std::string& text) {
  const Status status = LoadEverything(model);
  EXPECT_EQ(status.code(), code) << status.ToString();
  EXPECT_NE(status.message().find(text), std::string::npos) << status.ToString();
  EXPECT_TRUE(status.file().ends_with("config.json")) << status.file();
}

TEST(ConfigNumbers, ScalingFactorsAreAboveZero) {
  for (const std::string key : {"routed_scaling_factor", "router_scaling_factor"}) {
    TinyModel model("bf16");
    for (const double wrong : {0.0, -1.0, 1e-60}) {  // the last is zero in F32
      model.config[key] = wrong;
      ExpectSays(model, StatusCode::kBadInput, "'" + key + "' is ");
    }
    model.config[key] = 1e60;
    ExpectSays(model, StatusCode::kBadInput, "'" + key + "' is ");
    model.config[key] = 2.5;
    EXPECT_EQ(LoadEverything(model).message(), "");
  }
}

TEST(ConfigNumbers, LimitsAreCalledWhatTheFileCallsThem) {
  for (const std::string key : {"swiglu_limit", "swiglu_limits", "expert_swiglu_limit_list"}) {
    TinyModel model("bf16");
    model.config[key] = 7.0;
    ExpectSays(model, StatusCode::kUnsupported, "'" + key + "' is 7: how experts of qwen3_moe clamp");
  }
  TinyModel ling("bf16");
  ling.config["model_type"] = "bailing_hybrid";
  ling.config["hidden_act"] = "gelu";
  ling.config["expert_swiglu_limit_list"] = {7.0};
  ExpectSays(ling, StatusCode::kUnsupported, "'expert_swiglu_limit_list' is 7 and 'hidden_act' gelu");
}

/// As ModelOpt 0.47 writes NVFP4 into config.json.
nlohmann::ordered_json Nvfp4Group() {
  const nlohmann::ordered_json floats = {
      {"dynamic", false}, {"num_bits", 4}, {"type", "float"}, {"group_size", 16}};
  return {{"input_activations", floats}, {"weights", floats}, {"targets", {"Linear"}}};
}

TEST(ModelOptGroups, MustSayWhatTheAlgorithmSays) {
  TinyModel model("modelopt_nvfp4");
  auto& quantization = model.config["quantization_config"];
  auto& group = quantization["config_groups"]["group_0"];
  group = Nvfp4Group();
  EXPECT_EQ(LoadEverything(model).message(), "");
  const auto refused = [&](const std::string& has) {
    CountMalformed();
    ExpectSays(model, StatusCode::kBadInput, "'quant_algo' is NVFP4, which has " + has);
    group = Nvfp4Group();
  };
  group["weights"]["num_bits"] = 8;
  refused(
      "weights as float of 4 bits in groups of 16, but 'config_groups.group_0' has them as float of 8 bits");
  group["weights"]["type"] = "int";
  refused(
      "weights as float of 4 bits in groups of 16, but 'config_groups.group_0' has them as int of 4 bits");
  group["weights"]["group_size"] = 32;
  refused("weights as float of 4 bits in groups of 16, but");
  group.erase("input_activations");  // says nothing of inputs
  EXPECT_EQ(LoadEverything(model).message(), "");
  group = Nvfp4Group();
  group["input_activations"]["num_bits"] = 8;
  refused("inputs as float of 4 bits, but 'config_groups.group_0' has them as float of 8 bits");
  quantization["config_groups"]["group_1"] = Nvfp4Group();  // not the first alone
  quantization["config_groups"]["group_1"]["weights"]["num_bits"] = 8;
  ExpectSays(model, StatusCode::kBadInput, "'config_groups.group_1'");
}

/// A group of ModelOpt 0.47 lists the modules of one algorithm.
TEST(ModelOptGroups, OfMixedPrecisionAreComparedModuleByModule) {
  TinyModel model("modelopt_nvfp4");
  auto& quantization = model.config["quantization_config"];
  quantization["quant_algo"] = "MIXED_PRECISION";
  const std::string experts = "model.layers.0.mlp.experts", other = "model.layers.0.self_attn.q_proj";
  quantization["quantized_layers"] = {{experts, {{"quant_algo", "NVFP4"}, {"group_size", 16}}},
                                      {other, {{"quant_algo", "SOMETHING_NEW"}}}};
  auto& groups = quantization["config_groups"];
  groups["group_0"] = Nvfp4Group();
  groups["group_0"]["targets"] = {experts};
  groups["group_1"] = {{"quant_algo", "SOMETHING_NEW"}, {"targets", {other}}};
  EXPECT_EQ(LoadEverything(model).message(), "");
  groups["group_0"]["weights"]["num_bits"] = 8;
  ExpectSays(model, StatusCode::kBadInput, "'quant_algo' is NVFP4, which has weights");
}

/// ModelOpt 0.47 has one description for NVFP4_AWQ and W4A8_AWQ, which is neither's.
TEST(ModelOptGroups, OfAwqAreReadAsTheyAreWritten) {
  TinyModel model("modelopt_nvfp4");
  auto& quantization = model.config["quantization_config"];
  quantization["quant_algo"] = "NVFP4_AWQ";
  auto& group = quantization["config_groups"]["group_0"];
  group = Nvfp4Group();
  group["input_activations"]["num_bits"] = 8;
  EXPECT_EQ(LoadEverything(model).message(), "");
  group["weights"]["num_bits"] = 8;
  ExpectSays(model, StatusCode::kBadInput, "'quant_algo' is NVFP4_AWQ, which has weights");
}

}  // namespace
}  // namespace fusedmoe
