// Each family of tests/golden/families through the whole library: names, layouts, routing, activation, shared
// experts.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>

#include <nlohmann/json.hpp>

#include <fusedmoe/layer.hpp>
#include <fusedmoe/safetensors.hpp>

#include "checkpoint/layers/families.hpp"
#include "checkpoint/layers/model_config.hpp"
#include "checkpoint/raw_checkpoint.hpp"
#include "support/files.hpp"
#include "support/test_name.hpp"

namespace fusedmoe {
namespace {

namespace fs = std::filesystem;

fs::path Root() {
  return fs::path(FMOE_GOLDEN_DIR) / "families";
}

class Families : public testing::TestWithParam<std::string> {};

TEST_P(Families, Layer_ComputesWhatTheModelDoes) {
  const fs::path directory = Root() / GetParam();
  const int64_t layer = nlohmann::json::parse(std::ifstream(directory / "case.json"))["layer"].get<int64_t>();
  const auto checkpoint = Checkpoint::Open(directory.string());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  ASSERT_EQ((*checkpoint)->moe_layers(), std::vector<int64_t>{layer});
  const auto io = ReadSafetensors((directory / "io" / "m5.safetensors").string());
  ASSERT_TRUE(io.ok()) << io.status().ToString();
  LayerOptions options;
  options.backend = "REFERENCE";
  options.max_tokens = 5;
  const auto loaded = MoeLayer::Load(*checkpoint, layer, options);
  ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
  auto output = Tensor::Allocate(DType::kF32, io->Find("expected_output")->shape());
  auto workspace = (*loaded)->CreateWorkspace();
  ASSERT_TRUE(output.ok() && workspace.ok());
  MoeLayer::Inputs inputs{.hidden = io->Find("hidden_states")->view()};
  const auto router = (*checkpoint)->LoadRouter(layer);
  ASSERT_TRUE(router.ok());
  if (!router->token_id_to_experts.empty()) {
    inputs.token_ids = io->Find("input_ids")->view();
  }
  if (router->weight.empty()) {  // the caller routes
    EXPECT_EQ((*loaded)->Forward(inputs, {.output = output->mutable_view()}, *workspace).code(),
              StatusCode::kUsage);
    inputs.topk_ids = io->Find("topk_ids")->view();
    inputs.topk_weights = io->Find("topk_weights")->view();
  }
  const Status status = (*loaded)->Forward(inputs, {.output = output->mutable_view()}, *workspace);
  ASSERT_TRUE(status.ok()) << status.ToString();
  const auto* expected = io->Find("expected_output")->view().as<float>();
  const auto* computed = output->view().as<float>();
  double error = 0.0, norm = 0.0;
  for (int64_t i = 0; i < output->shape().count(); ++i) {
    error += std::pow(static_cast<double>(computed[i]) - expected[i], 2);
    norm += std::pow(static_cast<double>(expected[i]), 2);
  }
  // Both sides round in fp32: a dot product of at most 48 terms, an exponential and two more products, 2^-24
  // each.
  EXPECT_LT(std::sqrt(error / norm), 5e-6);
}

INSTANTIATE_TEST_SUITE_P(All, Families, testing::ValuesIn(test::FoldersIn(Root())), test::NamedAfterText);

// Encoders of multimodal models are deeper than a small language model, and not always named after what they
// see.
TEST(LayerStacks, TheOneWithExperts_IsTheModel) {
  const test::TemporaryDirectory folder;
  testing_support::TinyModel model("bf16");
  for (int layer = 0; layer < 5; ++layer) {
    model.tensors.push_back(testing_support::Bf16(
        "model.sam_model.layers." + std::to_string(layer) + ".mlp.lin1.weight", {2, 2}, 1.0F));
  }
  model.WriteTo(folder);
  const auto checkpoint = Checkpoint::Open(folder.path().string());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  EXPECT_EQ((*checkpoint)->moe_layers(), std::vector<int64_t>{0});
}

TEST(FamilyTable, ModelTypes_BelongToOneRow) {
  std::set<std::string> seen, names;
  for (const checkpoint::Family& family : checkpoint::FamilyTable()) {
    EXPECT_TRUE(names.insert(std::string(family.name)).second) << family.name;
    EXPECT_FALSE(checkpoint::SplitWords(family.model_types).empty()) << family.name;
    for (const std::string_view type : checkpoint::SplitWords(family.model_types)) {
      EXPECT_TRUE(seen.insert(std::string(type)).second) << type;
      EXPECT_EQ(checkpoint::FindFamily(type), &family);
    }
  }
}

// What dots.llm1 calls its scores, which are sigmoids; the golden layer has defaults.
TEST(Families_Dots1, NamesItsScoresByTheirMethod) {
  const test::TemporaryDirectory folder;
  const fs::path copy = folder.path() / "dots1";
  fs::copy(Root() / "dots1-orig", copy, fs::copy_options::recursive);
  auto config = nlohmann::json::parse(std::ifstream(copy / "config.json"));
  config["scoring_func"] = "noaux_tc";
  std::ofstream(copy / "config.json") << config.dump();
  const auto checkpoint = Checkpoint::Open(copy.string());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  const auto layer = (*checkpoint)->Describe((*checkpoint)->moe_layers().front());
  ASSERT_TRUE(layer.ok()) << layer.status().ToString();
  EXPECT_EQ(layer->config.routing.score, ScoreFunction::kSigmoid);
}

// IQuest-Q1, as SGLang reads it: rows of the gate before those of up.
TEST(Families_IQuestQ1, HasStacksOfItsOwnNames) {
  testing_support::TinyModel model("bf16");
  model.config["model_type"] = "iquest_q1";
  model.config["intermediate_size"] = model.config["moe_intermediate_size"];
  model.config.erase("moe_intermediate_size");
  model.config["dense_intermediate_size"] = 128;
  std::erase_if(model.tensors, [](const auto& tensor) { return tensor.name.ends_with("_proj.weight"); });
  model.Find("model.layers.0.mlp.gate.weight").name = "model.layers.0.mlp.router.weight";
  using testing_support::kExperts, testing_support::kHidden, testing_support::kIntermediate;
  const std::string experts = "model.layers.0.mlp.experts.";
  model.tensors.push_back(
      testing_support::Bf16(experts + "fc", {kExperts, 2 * kIntermediate, kHidden}, 0.5F));
  model.tensors.push_back(testing_support::Bf16(experts + "proj", {kExperts, kHidden, kIntermediate}, 0.5F));
  EXPECT_EQ(testing_support::LoadEverything(model).message(), "");
  EXPECT_EQ(testing_support::WrittenModel(model).checkpoint->family(), "iquest_q1");
}

// MiniMax-M3, whose text calls itself minimax_m2.
TEST(FamilyTable, NameOfTheModel_ComesBeforeThatOfItsText) {
  const test::TemporaryDirectory folder;
  const fs::path copy = folder.path() / "minimax_m3";
  fs::copy(Root() / "minimax_m3_vl_text-orig", copy, fs::copy_options::recursive);
  auto text = nlohmann::json::parse(std::ifstream(copy / "config.json"));
  text["model_type"] = "minimax_m2";
  text["hidden_act"] = "swigluoai";
  std::ofstream(copy / "config.json")
      << nlohmann::json{{"model_type", "minimax_m3_vl"}, {"text_config", text}};
  const auto checkpoint = Checkpoint::Open(copy.string());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  EXPECT_EQ((*checkpoint)->family(), "minimax_m3");
  const auto layer = (*checkpoint)->Describe((*checkpoint)->moe_layers().front());
  ASSERT_TRUE(layer.ok()) << layer.status().ToString();
  EXPECT_EQ(layer->config.activation.kind, ActivationKind::kSwigluOai);
  EXPECT_EQ(layer->config.activation.limit, 7.0F);
}

// The configuration of SmallThinker-21BA3B, for one, has no model_type.
TEST(FamilyTable, ConfigurationsWithoutModelType_AreKnownByTheClassOfTheModel) {
  for (const auto& [name, family] : {std::pair{"SmallThinkerForCausalLM", "smallthinker"},
                                     std::pair{"Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"},
                                     std::pair{"PanguProMoEForCausalLM", "pangu_pro_moe"},
                                     std::pair{"DeepseekV3ForCausalLM", "deepseek_v3"}}) {
    const checkpoint::Family* found = checkpoint::FindFamilyOfClass(name);
    ASSERT_NE(found, nullptr) << name;
    EXPECT_EQ(found->name, family);
  }
  EXPECT_EQ(checkpoint::FindFamilyOfClass("LlamaForCausalLM"), nullptr);
  EXPECT_EQ(checkpoint::FindFamilyOfClass(""), nullptr);

  const auto open = [](const nlohmann::ordered_json& architectures) {
    const test::TemporaryDirectory folder;
    testing_support::TinyModel model("bf16");
    model.config.erase("model_type");
    model.config["architectures"] = architectures;
    model.WriteTo(folder);
    return testing_support::LoadEverything(folder.path());
  };
  EXPECT_TRUE(open({"Qwen3MoeForCausalLM"}).ok()) << open({"Qwen3MoeForCausalLM"}).ToString();
  const Status refused = open({"GroveMoeForCausalLM"});
  EXPECT_EQ(refused.code(), StatusCode::kUnsupported) << refused.ToString();
  EXPECT_NE(refused.message().find("the architecture 'GroveMoeForCausalLM'"), std::string::npos)
      << refused.ToString();
  EXPECT_EQ(open({"LlamaForCausalLM"}).code(), StatusCode::kUnsupported);
  for (const nlohmann::ordered_json& none :
       {nlohmann::ordered_json::array(), nlohmann::ordered_json::array({7}), nlohmann::ordered_json("x")}) {
    const Status missing = open(none);
    EXPECT_EQ(missing.code(), StatusCode::kBadInput) << none;
    EXPECT_NE(missing.message().find("'model_type' is missing"), std::string::npos) << missing.ToString();
  }
}

// Rows whose models transformers cannot write; their names and rules come from the models' own code.
TEST(FamilyTable, Rows_HaveAGoldenLayerOrAReason) {
  const std::set<std::string> without = {"grok", "arctic", "deepseek", "step3", "gigachat3_5", "iquest_q1"};
  std::set<std::string> covered;
  for (const std::string& name : test::FoldersIn(Root())) {
    const auto config = checkpoint::ModelConfig::Open((Root() / name).string());
    ASSERT_TRUE(config.ok());
    const checkpoint::Family* family = checkpoint::FindFamily(config->model_types().front());
    ASSERT_NE(family, nullptr) << name;
    covered.insert(std::string(family->name));
  }
  for (const checkpoint::Family& family : checkpoint::FamilyTable()) {
    const std::string name(family.name);
    const bool elsewhere =
        name == "qwen2_moe" || name == "qwen3_moe" || name == "deepseek_v3";  // golden/checkpoints
    EXPECT_TRUE(!family.refused.empty() || without.contains(name) || elsewhere || covered.contains(name))
        << name;
  }
}

}  // namespace
}  // namespace fusedmoe
