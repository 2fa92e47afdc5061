// Names and configurations that tools write and no golden checkpoint shows: found by running the tools over
// all families.
#include <gtest/gtest.h>

#include "checkpoint/layers/model_config.hpp"
#include "checkpoint/raw_checkpoint.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

// transformers 5.23: layers that differ from the rest of the model, by numbers with leading zeros.
TEST(UpstreamQuirks, PerLayerConfig_ComesBeforeTheModelsOwn) {
  TinyModel model("bf16");
  model.config["per_layer_config"] = {{"00", {{"num_experts_per_tok", 1}, {"norm_topk_prob", false}}},
                                      {"01", {{"num_experts_per_tok", 7}, {"hidden_size", 3}}}};
  model.config["num_experts_per_tok"] = 2;
  model.config["norm_topk_prob"] = true;
  const WrittenModel written(model);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  const auto described = written.checkpoint->Describe(0);
  ASSERT_TRUE(described.ok()) << described.status().ToString();
  EXPECT_EQ(described->config.routing.top_k, 1);
  EXPECT_FALSE(described->config.routing.renormalize);
  EXPECT_EQ(described->config.hidden, kHidden);
}

// llm-compressor 0.14 with transformers 5.23 on DeepSeek-V4: "gate_proj" becomes "wgate" on saving.
TEST(UpstreamQuirks, GatesCalledWgate_AreFound) {
  TinyModel model("ct_int4");
  for (RawTensor& tensor : model.tensors) {
    tensor.name = Replaced(tensor.name, ".gate_proj.", ".wgate.");
  }
  const Status status = LoadEverything(model);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

// ModelOpt 0.47 with transformers 5.23 on Nemotron-H: the mark of a renaming stays in the names of modules.
TEST(UpstreamQuirks, MarksInModelOptsNames_AreTakenAway) {
  const std::string mark(".\0backbone.pt_name_sentinel", 27);
  TinyModel plain("bf16");
  plain.config["quantization_config"] = {{"quant_method", "modelopt"},
                                         {"quant_algo", "NVFP4"},
                                         {"ignore", {"model.layers.0.mlp.experts" + mark + "*"}}};
  EXPECT_TRUE(LoadEverything(plain).ok()) << LoadEverything(plain).ToString();

  TinyModel mixed("modelopt_fp8");
  mixed.config["quantization_config"] = {
      {"quant_method", "modelopt"},
      {"quant_algo", "MIXED_PRECISION"},
      {"quantized_layers", {{"model.layers.0.mlp.experts" + mark, {{"quant_algo", "FP8"}}}}}};
  EXPECT_TRUE(LoadEverything(mixed).ok()) << LoadEverything(mixed).ToString();
}

// ModelOpt's export of a model whose KV cache alone was quantized.
TEST(UpstreamQuirks, ModelOptOfTheKvCacheAlone_QuantizesNoWeights) {
  TinyModel plain("bf16");
  plain.config["quantization_config"] = {
      {"quant_method", "modelopt"}, {"quant_algo", nullptr}, {"kv_cache_quant_algo", "FP8"}};
  EXPECT_TRUE(LoadEverything(plain).ok()) << LoadEverything(plain).ToString();
}

// AutoAWQ, GPTQModel, Quark and compressed-tensors refuse to write them; GPTQ's tools round the number of
// groups up, and so the last one is shorter.
TEST(UpstreamQuirks, GroupsThatDoNotDivideTheColumns_AreGptqsAlone) {
  for (const char* format : {"awq", "ct_int4", "gptq", "autoround"}) {
    SCOPED_TRACE(format);
    TinyModel model(format);
    auto& quantization = model.config["quantization_config"];
    auto& group = quantization.contains("config_groups")
                      ? quantization["config_groups"]["group_0"]["weights"]["group_size"]
                      : quantization["group_size"];
    ASSERT_EQ(group, 32);
    group = 48;  // two groups for 64 columns, like 32
    const bool reads = quantization["quant_method"] == "gptq" || quantization["quant_method"] == "auto-round";
    const Status status = LoadEverything(model);
    EXPECT_EQ(status.ok(), reads) << status.ToString();
    if (!reads) {
      EXPECT_EQ(status.code(), StatusCode::kBadInput);
      EXPECT_FALSE(status.file().empty());
      EXPECT_NE(status.tensor().find("experts.0.gate_proj"), std::string::npos) << status.ToString();
      EXPECT_NE(status.ToString().find("group_size 48 does not divide the 64 columns"), std::string::npos)
          << status.ToString();
    }
  }
}

// The router of PhiMoE is written for two: transformers 5 takes two of them whatever num_experts_per_tok is.
TEST(UpstreamQuirks, PhiMoe_ChoosesTwoExperts) {
  TinyModel model("bf16");
  model.config["model_type"] = "phimoe";
  for (const int count : {2, 1}) {
    model.config["num_experts_per_tok"] = count;
    const WrittenModel written(model);
    EXPECT_EQ(written.source.status().code(), count == 2 ? StatusCode::kOk : StatusCode::kUnsupported)
        << written.source.status().ToString();
  }
}

TEST(UpstreamQuirks, ModulesOfQuark_MayBeRegularExpressions) {
  TinyModel model("quark_mxfp4");
  auto& quantization = model.config["quantization_config"];
  quantization["exclude"] = {"re:^(?!.*\\.mlp\\.experts(?:\\.|$)).*$"};  // all but the experts
  EXPECT_EQ(LoadEverything(model).message(), "");
  const auto four_bit = quantization["global_quant_config"];
  quantization["global_quant_config"] = {{"weight", {{"dtype", "int8"}, {"qscheme", "per_channel"}}}};
  quantization["layer_quant_config"] = {{"re:model\\.layers\\.\\d+\\.mlp\\.experts\\.", four_bit}};
  EXPECT_EQ(LoadEverything(model).message(), "");
  quantization["exclude"] = {"re:.*experts.*"};
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput) << "quantized weights where none should be";
  quantization["exclude"] = {"re:("};
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput);
}

// Only the formats of experts must be known.
TEST(UpstreamQuirks, MixedPrecisionOfModelOpt_MayHoldOtherFormatsElsewhere) {
  TinyModel model("modelopt_nvfp4");
  auto& quantization = model.config["quantization_config"];
  quantization["quant_algo"] = "MIXED_PRECISION";
  quantization["quantized_layers"] = {
      {"model.layers.0.self_attn.q_proj", {{"quant_algo", "SOMETHING_NEW"}}},
      {"model.layers.0.mlp.experts", {{"quant_algo", "NVFP4"}, {"group_size", 16}}}};
  EXPECT_EQ(LoadEverything(model).message(), "");
  quantization["quantized_layers"]["model.layers.0.mlp.experts"]["quant_algo"] = "SOMETHING_NEW";
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported);
}

// DeepSeek-V4 by ModelOpt: the metadata of the FP8 model, with an algorithm for the routed experts alone.
TEST(UpstreamQuirks, RoutedExpertsOfAnFp8ModelInNvfp4_AreReadAsThat) {
  TinyModel model("modelopt_nvfp4");
  auto& quantization = model.config["quantization_config"];
  quantization = {{"quant_method", "fp8"},           {"fmt", "e4m3"},        {"activation_scheme", "dynamic"},
                  {"weight_block_size", {128, 128}}, {"scale_fmt", "ue8m0"}, {"moe_quant_algo", "NVFP4"}};
  model.config["expert_dtype"] = "fp4";
  const WrittenModel written(model);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  EXPECT_EQ(written.checkpoint->Describe(0)->scheme.name, "nvfp4_w4a4");
  EXPECT_EQ(LoadEverything(model).message(), "");
  quantization["moe_quant_algo"] = "INT1";
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported);
  quantization["moe_quant_algo"] = 4;
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput);
}

RoutingConfig RoutingOf(const TinyModel& model) {
  const WrittenModel written(model);
  EXPECT_TRUE(written.source.ok()) << written.source.status().ToString();
  return written.source.ok() ? written.checkpoint->Describe(0)->config.routing : RoutingConfig();
}

// Keys that vLLM's models route by.
TEST(UpstreamQuirks, RoutingKeysOfSingleFamilies_AreFollowedOrRefused) {
  const std::string block = "model.layers.0.mlp.";
  TinyModel minimax("bf16");
  minimax.config["model_type"] = "minimax_m2";
  minimax.tensors.push_back(Bf16(block + "e_score_correction_bias", {kExperts}, 0.5F));
  EXPECT_EQ(RoutingOf(minimax).method, RoutingMethod::kMiniMax2);
  minimax.config["scoring_func"] = "softmax";
  EXPECT_EQ(RoutingOf(minimax).method, RoutingMethod::kSoftmaxBias);
  minimax.config["use_routing_bias"] = true;
  EXPECT_EQ(LoadEverything(minimax).message(), "");
  minimax.config["use_routing_bias"] = false;
  ExpectRefused("a bias that is denied", minimax, {StatusCode::kBadInput, block + "e_score_correction_bias"});
  minimax.Drop(block + "e_score_correction_bias");
  EXPECT_EQ(LoadEverything(minimax).message(), "");

  TinyModel afmoe("bf16");
  afmoe.config["model_type"] = "afmoe";
  afmoe.config["route_norm"] = true;
  afmoe.tensors.push_back(Bf16(block + "expert_bias", {kExperts}, 0.5F));
  EXPECT_EQ(RoutingOf(afmoe).method, RoutingMethod::kDeepSeekV3);
  afmoe.config["n_group"] = 2;
  afmoe.config["topk_group"] = 1;
  EXPECT_EQ(RoutingOf(afmoe).num_groups, 2);
  afmoe.config["score_func"] = "softmax";
  EXPECT_EQ(RoutingOf(afmoe).score, ScoreFunction::kSoftmax);
  EXPECT_FALSE(RoutingOf(afmoe).renormalize) << "of sigmoid scores alone";
  afmoe.config["score_func"] = "tanh";
  ExpectRefused("scores of afmoe", afmoe, {StatusCode::kUnsupported, ""});

  TinyModel kimi("bf16");
  kimi.config["model_type"] = "kimi_linear";
  kimi.config["num_expert_group"] = 2;
  kimi.config["topk_group"] = 1;
  kimi.tensors.push_back(Bf16(block + "gate.e_score_correction_bias", {kExperts}, 0.5F));
  EXPECT_EQ(RoutingOf(kimi).num_groups, 2);
  kimi.config["use_grouped_topk"] = false;
  EXPECT_EQ(RoutingOf(kimi).num_groups, 1);

  TinyModel hunyuan("bf16");
  hunyuan.config["model_type"] = "hy_v3";
  hunyuan.tensors.push_back(Bf16(block + "expert_bias", {kExperts}, 0.5F));
  hunyuan.config["moe_router_use_sigmoid"] = true;
  EXPECT_EQ(LoadEverything(hunyuan).message(), "");
  hunyuan.config["moe_router_use_sigmoid"] = false;
  ExpectRefused("scores of hy_v3", hunyuan, {StatusCode::kUnsupported, ""});

  TinyModel cohere("bf16");
  cohere.config["model_type"] = "cohere2_moe";
  cohere.config["shared_expert_combination_strategy"] = "max";
  ExpectRefused("shared experts of Cohere", cohere, {StatusCode::kUnsupported, ""});
}

TEST(UpstreamQuirks, ValuesOfTheConfiguration_AreNamedWhereTheyAreRefused) {
  TinyModel model("bf16");
  model.config["hidden_act"] = "swish";
  const WrittenModel written(model);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  EXPECT_EQ(written.checkpoint->Describe(0)->config.activation.kind, ActivationKind::kSilu);
  model.config["hidden_act"] = "sine";
  EXPECT_NE(LoadEverything(model).message().find("'hidden_act'"), std::string::npos);
  EXPECT_NE(LoadEverything(model).message().find("gelu_tanh"), std::string::npos);
  model.config["hidden_act"] = "silu";
  model.config["routed_scaling_factor"] = 1e300;
  ExpectRefused("more than F32 holds", model);
  EXPECT_NE(LoadEverything(model).message().find("'routed_scaling_factor' is 1e+300"), std::string::npos)
      << LoadEverything(model).ToString();
}

// Ling 3.0: silu, which clamps where the layer has a limit. Another activation has nothing to clamp with.
TEST(UpstreamQuirks, ActivationOfBailingHybrid_IsRead) {
  TinyModel model("bf16");
  model.config["model_type"] = "bailing_hybrid";
  model.config["moe_router_enable_expert_bias"] = false;
  const auto activation = [&] {
    const WrittenModel written(model);
    EXPECT_TRUE(written.source.ok()) << written.source.status().ToString();
    return written.checkpoint->Describe(0)->config.activation;
  };
  EXPECT_EQ(activation().kind, ActivationKind::kSilu);
  model.config["hidden_act"] = "gelu";
  EXPECT_EQ(activation().kind, ActivationKind::kGelu);
  model.config["expert_swiglu_limit_list"] = nlohmann::ordered_json::array();
  for (size_t layer = 0; layer < model.config["num_hidden_layers"].get<size_t>(); ++layer) {
    model.config["expert_swiglu_limit_list"].push_back(7.0);
  }
  const Status clamped = LoadEverything(model);
  EXPECT_EQ(clamped.code(), StatusCode::kUnsupported);
  EXPECT_NE(clamped.message().find("'hidden_act' gelu"), std::string::npos) << clamped.message();
  model.config["hidden_act"] = "silu";
  EXPECT_EQ(activation(), (ActivationSpec{.kind = ActivationKind::kSwigluStep, .limit = 7.0F}));
  model.config["hidden_act"] = "sine";
  EXPECT_NE(LoadEverything(model).message().find("'hidden_act'"), std::string::npos);
}

// InternS1-Pro's key, in the metadata of families that compute something else without it.
TEST(UpstreamQuirks, ChoicesOfOtherFamilies_AreRefused) {
  TinyModel model("bf16");
  model.config["router_n_groups"] = 2;
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported);
  TinyModel clamped("bf16");
  clamped.config["swiglu_limits"] = {0.0};
  EXPECT_EQ(LoadEverything(clamped).message(), "");
  clamped.config["swiglu_limits"] = {7.0};
  EXPECT_EQ(LoadEverything(clamped).code(), StatusCode::kUnsupported) << "before silu, or behind it?";
  clamped.config["model_type"] = "glm5_next";
  clamped.config["swiglu_limits"] = {-1.0};
  clamped.tensors.push_back(Bf16("model.layers.0.mlp.gate.e_score_correction_bias", {kExperts}, 0.5F));
  const WrittenModel open(clamped);
  ASSERT_TRUE(open.source.ok()) << open.source.status().ToString();
  EXPECT_EQ(open.checkpoint->Describe(0)->config.activation.limit, 0.0F) << "below zero: none";
  clamped.config["swiglu_limits_shared"] = {-1.0};
  const WrittenModel both(clamped);
  ASSERT_TRUE(both.source.ok()) << both.source.status().ToString();
  EXPECT_EQ(both.checkpoint->Describe(0)->config.shared.activation, std::nullopt) << "none either";
  clamped.config["swiglu_limits"] = {7.0};
  clamped.config["swiglu_limits_shared"] = {5.0};
  const WrittenModel apart(clamped);
  ASSERT_TRUE(apart.source.ok()) << apart.source.status().ToString();
  EXPECT_EQ(apart.checkpoint->Describe(0)->config.activation.limit, 7.0F);
  EXPECT_EQ(apart.checkpoint->Describe(0)->config.shared.activation->limit, 5.0F);
  clamped.config["use_swiglu_clamp"] = false;
  const WrittenModel off(clamped);
  ASSERT_TRUE(off.source.ok()) << off.source.status().ToString();
  EXPECT_EQ(off.checkpoint->Describe(0)->config.activation.limit, 0.0F);
  EXPECT_EQ(off.checkpoint->Describe(0)->config.shared.activation, std::nullopt);
  clamped.config.erase("use_swiglu_clamp");
  clamped.config["swiglu_limits"] = nlohmann::json::array();
  const Status lacks = LoadEverything(clamped);
  EXPECT_EQ(lacks.code(), StatusCode::kBadInput) << "no entry for a layer of the model";
  EXPECT_NE(lacks.message().find("swiglu_limits"), std::string::npos) << lacks.message();
  TinyModel images("bf16");
  images.tensors.push_back(Bf16("model.layers.0.mlp.gate.bias_vl", {kExperts}, 0.5F));
  EXPECT_EQ(LoadEverything(images).code(), StatusCode::kUnsupported)
      << "image tokens have a bias of their own";
}

// Intern-S1-Pro takes top_k / router_n_groups experts of every group.
TEST(UpstreamQuirks, GroupsThatDoNotDivideTopK_AreRefused) {
  TinyModel model("bf16");
  model.config["model_type"] = "interns1_pro";
  model.config["router_n_groups"] = 2;
  model.config["num_experts_per_tok"] = 2;
  EXPECT_TRUE(WrittenModel(model).source.ok());
  model.config["num_experts_per_tok"] = 1;
  const WrittenModel odd(model);
  ASSERT_FALSE(odd.source.ok());
  EXPECT_EQ(odd.source.status().code(), StatusCode::kBadInput);
  EXPECT_TRUE(odd.source.status().file().ends_with("config.json")) << odd.source.status().ToString();
}

// DeepSeek-V2 in transformers 5.23, with 'mlp_bias' and no shared experts: matrices without rows, and a bias
// that each token gets.
TEST(UpstreamQuirks, BiasOfSharedExpertsWithoutRows_IsRefusedUnlessZero) {
  TinyModel model("bf16");
  model.config["model_type"] = "deepseek_v2";
  model.config["n_shared_experts"] = 0;
  model.config["mlp_bias"] = true;
  const std::string stem = "model.layers.0.mlp.shared_experts.";
  for (const std::string name : {"gate_proj", "up_proj"}) {
    model.tensors.push_back(Bf16(stem + name + ".weight", {0, kHidden}, 0.0F));
    model.tensors.push_back(Bf16(stem + name + ".bias", {0}, 0.0F));
  }
  model.tensors.push_back(Bf16(stem + "down_proj.weight", {kHidden, 0}, 0.0F));
  EXPECT_EQ(LoadEverything(model).message(), "");
  const std::string bias = stem + "down_proj.bias";
  model.tensors.push_back(Bf16(bias, {kHidden}, 0.0F));
  const WrittenModel zero(model);
  ASSERT_TRUE(zero.source.ok()) << zero.source.status().ToString();
  EXPECT_FALSE(zero.checkpoint->SharedExperts(0)->has_value());
  model.Find(bias) = Bf16(bias, {kHidden}, 0.5F);
  ExpectRefused("a bias that counts", model, {StatusCode::kUnsupported, bias});
}

// Puzzle: what a block does not say, the other lists do.
TEST(UpstreamQuirks, BlocksWithoutAType_LeaveItToTheModel) {
  const auto config = checkpoint::ModelConfig::Parse(
      R"({"block_configs": [{"block_type": "mamba"}, {"block_type": "moe"}, {"block_type": 3}, {}],
          "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]})",
      "config.json");
  ASSERT_TRUE(config.ok()) << config.status().ToString();
  EXPECT_EQ(config->SaysMoe(0), false);
  EXPECT_EQ(config->SaysMoe(1), true);
  EXPECT_EQ(config->SaysMoe(2), true);
  EXPECT_EQ(config->SaysMoe(3), false);
}

}  // namespace
}  // namespace fusedmoe
