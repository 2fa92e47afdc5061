// What the architectures of GGUF mean: scores that files do not state, tensors that one of them has alone.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "checkpoint/gguf/gguf_metadata.hpp"
#include "checkpoint/raw_checkpoint.hpp"
#include "checkpoint/raw_gguf.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

Result<LayerDescription> Describe(const RawGguf& model) {
  const TemporaryDirectory folder;
  folder.Write("a.gguf", model.Bytes());
  FMOE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open((folder.path() / "a.gguf").string()));
  return checkpoint->Describe(0);
}

void ExpectScores(const RawGguf& model, ScoreFunction score) {
  const auto layer = Describe(model);
  ASSERT_TRUE(layer.ok()) << layer.status().ToString();
  EXPECT_EQ(layer->config.routing.score, score);
}

RawGguf::Tensor Bias() {
  return {"blk.0.exp_probs_b.bias", {2}, kTypeF32, Raw(0.5F) + Raw(-0.5F), 0};
}

// llama.cpp's converters write the key for a bound above zero alone; the configurations of both have 10.
TEST(GgufArchitectures, ClampsThatAreNotThere_AreNone) {
  for (const std::string architecture : {"hy_v4", "glm5-next"}) {
    RawGguf model = Model(kTypeMxfp4, architecture);
    const auto none = Describe(model);
    ASSERT_TRUE(none.ok()) << none.status().ToString();
    EXPECT_EQ(none->config.activation.limit, 0.0F) << architecture;
    model.Value(architecture + ".swiglu_clamp_exp", kFloat32, Raw(7.0F));
    const auto seven = Describe(model);
    ASSERT_TRUE(seven.ok()) << seven.status().ToString();
    EXPECT_EQ(seven->config.activation.limit, 7.0F) << architecture;
  }
}

TEST(GgufArchitectures, Deepseek4WithImages_IsRefusedByTheirBias) {
  RawGguf model = Model(kTypeMxfp4, "dots1");
  EXPECT_TRUE(LoadEverything(model).ok()) << LoadEverything(model).ToString();
  model.tensors.push_back({"blk.0.exp_probs_b_vl.bias", {2}, kTypeF32, Raw(0.5F) + Raw(-0.5F), 0});
  const Status refused = LoadEverything(model);
  EXPECT_EQ(refused.code(), StatusCode::kUnsupported) << refused.ToString();
  EXPECT_EQ(refused.tensor(), "blk.0.exp_probs_b_vl.bias");
}

// GLM-4.7-Flash, and DeepSeek-V3 as transformers 5 saves it: the converter finds no scoring_func to copy.
TEST(GgufArchitectures, Deepseek2_WithABiasAndNoGatingFunctionScoresBySigmoids) {
  RawGguf model = Model(kTypeMxfp4, "deepseek2");
  ExpectScores(model, ScoreFunction::kSoftmax);
  model.tensors.push_back(Bias());
  ExpectScores(model, ScoreFunction::kSigmoid);
  model.Value("deepseek2.expert_gating_func", kUint32, Raw<uint32_t>(1));
  ExpectScores(model, ScoreFunction::kSoftmax);
}

TEST(GgufArchitectures, GatingFunctions_AreThoseOfTheirNumbers) {
  const auto with = [](uint32_t function) {
    RawGguf model = Model(kTypeMxfp4, "dots1");
    model.Value("dots1.expert_gating_func", kUint32, Raw(function));
    return model;
  };
  ExpectScores(with(1), ScoreFunction::kSoftmax);
  ExpectScores(with(2), ScoreFunction::kSigmoid);
  ExpectScores(with(4), ScoreFunction::kSqrtSoftplus);
  for (const uint32_t unknown : {0U, 5U}) {
    EXPECT_EQ(LoadEverything(with(unknown)).code(), StatusCode::kUnsupported) << unknown;
  }
}

TEST(GgufArchitectures, NewerOnes_AreThoseOfTheirFamilies) {
  const std::pair<const char*, const char*> held[] = {
      {"bailingmoe3", "bailing_hybrid"},
      {"cohere2moe", "cohere2_moe"},
      {"deepseek2-ocr", "deepseek_v2"},
      {"deepseek32", "deepseek_v3"},
      {"deepseek4", "deepseek_v4"},
      {"dots3note", "dots3_note"},
      {"glm5-next", "glm5_next"},
      {"granite_swa", "granitemoe"},
      {"hy_v3", "hy_v3"},
      {"hy_v4", "hy_v4"},
      {"laguna", "laguna"},
      {"llada-moe", "llada_moe"},
      {"maple", "maple"},
      {"mellum", "mellum"},
      {"minimax-01", "mixtral"},
      {"minimax-m3", "minimax_m3"},
      {"mistral3", "mixtral"},
      {"qwen4exp", "qwen4_exp"},
      {"rnd1", "qwen3_moe"},
  };
  for (const auto& [architecture, family] : held) {
    const TemporaryDirectory folder;
    folder.Write("a.gguf", Model(kTypeMxfp4, architecture).Bytes());
    const auto checkpoint = Checkpoint::Open((folder.path() / "a.gguf").string());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
    EXPECT_EQ((*checkpoint)->family(), family);
    EXPECT_TRUE(LoadEverything(folder.path() / "a.gguf").ok()) << architecture;
  }
}

// A layer that drafts tokens stands behind the model's own, and has experts too.
TEST(GgufArchitectures, LayersBehindTheLast_HaveTheirPlaceInTheMetadata) {
  const auto config =
      checkpoint::ModelConfig::Parse(R"({"model_type":"step3p5","num_hidden_layers":2})", "config.json");
  ASSERT_TRUE(config.ok()) << config.status().ToString();
  std::vector<checkpoint::GgufLayer> layers(2);
  layers[0].layer = 1;
  layers[1].layer = 2;
  for (checkpoint::GgufLayer& layer : layers) {
    layer.config.activation = {.kind = ActivationKind::kSwigluStep, .limit = 7.0F};
  }
  const auto entries = checkpoint::GgufMetadata(*checkpoint::FindFamily("step3p5"), *config, 2, layers);
  ASSERT_TRUE(entries.ok()) << entries.status().ToString();
  int lists = 0;
  for (const checkpoint::GgufEntry& entry : *entries) {
    if (const auto* list = std::get_if<std::vector<float>>(&entry.value)) {
      EXPECT_EQ(*list, (std::vector<float>{0.0F, 7.0F, 7.0F})) << entry.key;
      ++lists;
    }
    if (entry.key.ends_with(".block_count")) {
      EXPECT_EQ(std::get<uint32_t>(entry.value), 3U);
    }
  }
  EXPECT_EQ(lists, 2);
}

TEST(GgufArchitectures, SmallThinker_IsRoutedByTheCallerAndItsExpertsAreReglu) {
  const auto layer = Describe(Model(kTypeMxfp4, "smallthinker"));
  ASSERT_TRUE(layer.ok()) << layer.status().ToString();
  EXPECT_NE(layer->routed_by_caller, "");
  EXPECT_EQ(layer->config.routing.method, RoutingMethod::kCustom);
  EXPECT_EQ(layer->config.activation, ActivationSpec{.kind = ActivationKind::kRelu});
}

TEST(GgufArchitectures, ThoseThatComputeSomethingElse_AreRefusedWithTheReason) {
  const Status status = LoadEverything(Model(kTypeF32, "grovemoe"));
  EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.ToString();
  EXPECT_NE(status.message().find("is not supported: "), std::string::npos) << status.ToString();
  EXPECT_EQ(LoadEverything(Model(kTypeF32, "mamba")).code(), StatusCode::kUnsupported);
}

// Converters name the tensors around Kimi-K3's experts in several ways.
TEST(GgufArchitectures, KimiK3_HasLatentExpertsBehindANorm) {
  constexpr uint64_t kWide = 64;
  const auto make = [](const std::string& stem, const std::string& norm) {
    RawGguf model = Model(kTypeF32, "kimi-k3");
    for (auto& [key, bytes] : model.values) {
      if (key == "kimi-k3.embedding_length") {
        bytes = Raw(kUint32) + Raw<uint32_t>(kWide);
      }
    }
    model.Value("kimi-k3.expert_latent_length", kUint32, Raw<uint32_t>(kHiddenSize));
    model.Value("kimi-k3.attention.layer_norm_rms_epsilon", kFloat32, Raw(1e-5F));
    model.Value("kimi-k3.activation.situ_beta", kFloat32, Raw(4.0F));
    model.Value("kimi-k3.activation.situ_linear_beta", kFloat32, Raw(25.0F));
    model.Value("kimi-k3.expert_gating_func", kUint32, Raw<uint32_t>(2));
    model.Find("blk.0.ffn_gate_inp.weight") = Stack("blk.0.ffn_gate_inp.weight", {kWide, 2}, kTypeF32);
    model.tensors.push_back(Stack("blk.0.exp_probs_b.bias", {2}, kTypeF32));
    model.tensors.push_back(Stack("blk.0." + stem + "_down.weight", {kWide, kHiddenSize}, kTypeF32));
    model.tensors.push_back(Stack("blk.0." + stem + "_up.weight", {kHiddenSize, kWide}, kTypeF32));
    model.tensors.push_back(Stack("blk.0." + norm + ".weight", {kHiddenSize}, kTypeF32));
    return model;
  };
  for (const auto& [stem, norm] : {std::pair("ffn_latent", "ffn_norm_exps"),
                                   {"ffn_routed", "ffn_routed_norm"},
                                   {"ffn_latent", "ffn_latent_norm"}}) {
    const auto layer = Describe(make(stem, norm));
    ASSERT_TRUE(layer.ok()) << layer.status().ToString();
    const MoeConfig& config = layer->config;
    EXPECT_EQ(config.latent, kHiddenSize);
    EXPECT_EQ(config.latent_norm_epsilon, 1e-5F);
    EXPECT_EQ(config.activation.kind, ActivationKind::kSitu);
    EXPECT_EQ(config.activation.alpha, 4.0F);
    EXPECT_EQ(config.activation.limit, 25.0F);
    EXPECT_TRUE(LoadEverything(make(stem, norm)).ok());
  }
  RawGguf silent = make("ffn_latent", "ffn_norm_exps");
  std::erase_if(silent.values,
                [](const auto& value) { return value.first == "kimi-k3.activation.situ_beta"; });
  const Status status = LoadEverything(silent);
  EXPECT_EQ(status.code(), StatusCode::kBadInput);
  EXPECT_NE(status.message().find("'kimi-k3.activation.situ_beta' is missing"), std::string::npos);
}

// Ling 3.0 clamps behind silu, in the layers that have a limit; Maple before it, in all of them.
TEST(GgufArchitectures, ClampsOfLayers_AreRead) {
  for (const std::string architecture : {"bailingmoe3", "maple", "step35"}) {
    RawGguf model = Model(kTypeF32, architecture);
    const auto plain = Describe(model);
    ASSERT_TRUE(plain.ok()) << plain.status().ToString();
    EXPECT_EQ(plain->config.activation.limit, architecture == "maple" ? 7.0F : 0.0F);
    EXPECT_EQ(plain->config.activation.kind, ActivationKind::kSilu);
    model.Value(architecture + ".swiglu_clamp_exp", kFloat32, Raw(5.0F));
    const auto clamped = Describe(model);
    ASSERT_TRUE(clamped.ok()) << clamped.status().ToString();
    EXPECT_EQ(clamped->config.activation.limit, 5.0F);
    EXPECT_EQ(clamped->config.activation.kind,
              architecture == "maple" ? ActivationKind::kSilu : ActivationKind::kSwigluStep);
  }
}

// glm5-next and deepseek4 name the limit of the shared expert too.
TEST(GgufArchitectures, ClampsOfSharedExperts_AreTheirOwn) {
  RawGguf model = Model(kTypeF32, "glm5-next");
  for (const char* name : {"gate", "up"}) {
    model.tensors.push_back(
        Stack(std::string("blk.0.ffn_") + name + "_shexp.weight", {kHiddenSize, 32}, kTypeF32));
  }
  model.tensors.push_back(Stack("blk.0.ffn_down_shexp.weight", {32, kHiddenSize}, kTypeF32));
  model.Value("glm5-next.swiglu_clamp_exp", kFloat32, Raw(5.0F));
  EXPECT_FALSE(Describe(model)->config.shared.activation.has_value()) << "without a limit of its own";
  model.Value("glm5-next.swiglu_clamp_shexp", kFloat32, Raw(3.0F));
  const auto layer = Describe(model);
  ASSERT_TRUE(layer.ok()) << layer.status().ToString();
  ASSERT_TRUE(layer->config.shared.activation.has_value());
  EXPECT_EQ(layer->config.shared.activation->limit, 3.0F);
  EXPECT_EQ(layer->config.shared.activation->kind, ActivationKind::kSilu);
}

// afmoe and hy_v3 as vLLM and llama.cpp read them, deepseek4 too: transformers always normalizes.
TEST(GgufArchitectures, WeightsThatAreNotNormalized_StayAsTheyAre) {
  for (const std::string architecture : {"afmoe", "hy_v3", "deepseek4"}) {
    RawGguf model = Model(kTypeF32, architecture);
    EXPECT_TRUE(Describe(model)->config.routing.renormalize) << architecture;
    model.Value(architecture + ".expert_weights_norm", kBoolean, Raw<uint8_t>(0));
    EXPECT_FALSE(Describe(model)->config.routing.renormalize) << architecture;
  }
  TinyModel model("bf16");
  model.config["model_type"] = "hy_v3";
  model.config.erase("norm_topk_prob");
  model.config["route_norm"] = false;
  model.tensors.push_back(Bf16("model.layers.0.mlp.expert_bias", {kExperts}, 0.5F));
  const WrittenModel written(model);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  EXPECT_FALSE(written.checkpoint->Describe(0)->config.routing.renormalize);
}

// The first layers of DeepSeek-V4 choose experts by token ids.
TEST(GgufArchitectures, Deepseek4_NeedsItsTableOfTokens) {
  RawGguf model = Model(kTypeMxfp4, "deepseek4");
  model.Value("deepseek4.hash_layer_count", kUint32, Raw<uint32_t>(1));
  const Status missing = LoadEverything(model);
  EXPECT_EQ(missing.code(), StatusCode::kBadInput);
  EXPECT_EQ(missing.tensor(), "blk.0.ffn_gate_tid2eid.weight");
  std::string ids;
  for (int32_t token = 0; token < 8; ++token) {
    ids += Raw(token % 2);
  }
  constexpr uint32_t kTypeI32 = 26;
  model.tensors.push_back({"blk.0.ffn_gate_tid2eid.weight", {1, 8}, kTypeI32, ids, 0});
  const TemporaryDirectory folder;
  folder.Write("a.gguf", model.Bytes());
  const auto checkpoint = Checkpoint::Open((folder.path() / "a.gguf").string());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  const auto router = (*checkpoint)->LoadRouter(0);
  ASSERT_TRUE(router.ok()) << router.status().ToString();
  EXPECT_EQ(router->token_id_to_experts.shape(), (Shape{8, 1}));
}

// Granite with sliding windows keeps gate and up of the shared expert in one matrix.
TEST(GgufArchitectures, SharedExpertsWithoutAGate_HaveItInTheUpProjection) {
  RawGguf model = Model(kTypeF32, "granite_swa");
  model.tensors.push_back(Stack("blk.0.ffn_up_shexp.weight", {kHiddenSize, 64}, kTypeF32));
  model.tensors.push_back(Stack("blk.0.ffn_down_shexp.weight", {32, kHiddenSize}, kTypeF32));
  const auto layer = Describe(model);
  ASSERT_TRUE(layer.ok()) << layer.status().ToString();
  EXPECT_EQ(layer->config.shared.intermediate, 32);
  EXPECT_TRUE(LoadEverything(model).ok()) << LoadEverything(model).ToString();
}

// Only NVFP4 has scales beside its blocks; llama.cpp would multiply those of any type.
TEST(GgufArchitectures, ScalesBesideOtherTypes_AreRefused) {
  for (const uint32_t type : {kTypeF32, kTypeQ8_0, kTypeMxfp4}) {
    RawGguf model = Model(type);
    model.tensors.push_back({"blk.0.ffn_up_exps.scale", {2}, kTypeF32, Raw(2.0F) + Raw(3.0F), 0});
    const Status status = LoadEverything(model);
    EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.ToString();
    EXPECT_EQ(status.tensor(), "blk.0.ffn_up_exps.scale");
  }
}

}  // namespace
}  // namespace fusedmoe
