// Tensors that a layer needs, taken away one by one: each is asked for by name, none is passed over.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <regex>

#include <fmt/format.h>

#include "checkpoint/layers/families.hpp"
#include "checkpoint/layers/model_config.hpp"
#include "checkpoint/raw_checkpoint.hpp"
#include "support/files.hpp"
#include "support/test_name.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;
namespace fs = std::filesystem;

fs::path FamiliesRoot() {
  return fs::path(FMOE_GOLDEN_DIR) / "families";
}

std::vector<RawTensor> TensorsOf(const fs::path& path) {
  const std::string text = test::ReadFile(path);
  uint64_t length = 0;
  std::memcpy(&length, text.data(), sizeof(length));
  std::vector<RawTensor> tensors;
  const auto header = nlohmann::ordered_json::parse(text.substr(8, length));
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") {
      const auto begin = entry["data_offsets"][0].get<size_t>(), end = entry["data_offsets"][1].get<size_t>();
      tensors.push_back({name, entry["dtype"], entry["shape"], text.substr(8 + length + begin, end - begin)});
    }
  }
  return tensors;
}

// Whether a MoE layer computes with it. Of the experts one stands for all.
bool Counts(const RawTensor& tensor) {
  const auto has = [&](std::string_view part) { return tensor.name.find(part) != std::string::npos; };
  if (tensor.bytes.empty() || has("attn") || std::regex_search(tensor.name, std::regex("experts\\.[1-9]"))) {
    return false;
  }
  return has("experts") || (has("latent_proj") && !has("input_scale")) || has("router") || has("gate.") ||
         has("shared") || has("_linear") || has("expert_bias") || has("e_score_correction_bias") ||
         tensor.name.ends_with("mlp.bias");
}

Status LoadLayer(const fs::path& folder, int64_t layer) {
  FMOE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(folder.string()));
  FMOE_ASSIGN_OR_RETURN(const LayerDescription described, checkpoint->Describe(layer));
  FMOE_RETURN_IF_ERROR(checkpoint->LoadRouter(layer).status());
  FMOE_RETURN_IF_ERROR(checkpoint->Latent(layer).status());
  FMOE_ASSIGN_OR_RETURN(const ExpertSource experts, checkpoint->Experts(layer));
  for (int64_t expert = 0; expert < described.config.num_experts; ++expert) {
    FMOE_RETURN_IF_ERROR(experts.load(expert).status());
  }
  FMOE_ASSIGN_OR_RETURN(const auto shared, checkpoint->SharedExperts(layer));
  return shared ? shared->source.load(0).status() : Status::Ok();
}

class MissingTensors : public testing::TestWithParam<std::string> {};

TEST_P(MissingTensors, OfEveryFamily_AreAskedForByName) {
  const fs::path source = FamiliesRoot() / GetParam();
  const int64_t layer = nlohmann::json::parse(test::ReadFile(source / "case.json"))["layer"].get<int64_t>();
  const std::vector<RawTensor> tensors = TensorsOf(source / "model.safetensors");
  const TemporaryDirectory folder;
  fs::copy_file(source / "config.json", folder.path() / "config.json");
  const auto config = checkpoint::ModelConfig::Open(source.string());
  ASSERT_TRUE(config.ok());
  const bool by_caller = !checkpoint::FindFamily(config->model_types().front())->routed_by_caller.empty();
  int64_t counted = 0;
  for (const RawTensor& missing : tensors) {
    const bool of_router =
        missing.name.find("router") != std::string::npos || missing.name.find(".gate.") != std::string::npos;
    if (!Counts(missing) || (by_caller && of_router)) {
      continue;
    }
    std::vector<RawTensor> rest;
    std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(rest),
                 [&](const RawTensor& tensor) { return tensor.name != missing.name; });
    std::ofstream(folder.path() / "model.safetensors", std::ios::binary) << Safetensors(rest);
    const Status status = LoadLayer(folder.path(), layer);
    EXPECT_FALSE(status.ok()) << missing.name;
    EXPECT_FALSE(status.tensor().empty() && status.file().empty()) << status.ToString();
    ++counted;
  }
  EXPECT_GE(counted, 2);
}

INSTANTIATE_TEST_SUITE_P(Golden, MissingTensors, testing::ValuesIn(test::FoldersIn(FamiliesRoot())),
                         test::NamedAfterText);

// Two layers with experts.
TinyModel TwoLayers() {
  TinyModel model("bf16");
  model.config["num_hidden_layers"] = 2;
  const std::vector<RawTensor> first = model.tensors;
  for (RawTensor tensor : first) {
    tensor.name = Replaced(tensor.name, "layers.0.", "layers.1.");
    if (tensor.name.find("layers.1.") != std::string::npos) {
      model.tensors.push_back(std::move(tensor));
    }
  }
  return model;
}

void DropAll(TinyModel& model, std::string_view part) {
  std::erase_if(model.tensors,
                [&](const RawTensor& tensor) { return tensor.name.find(part) != std::string::npos; });
}

// Experts by whose names a layer is known: without them it is still one, and says what is missing.
TEST(MissingExperts, OfALayer_AreNotADenseLayer) {
  TinyModel model = TwoLayers();
  model.config["num_experts"] = 3;
  for (const char* layer : {"0", "1"}) {
    std::vector<RawTensor> third;
    for (const RawTensor& tensor : model.tensors) {
      if (tensor.name.find(fmt::format("layers.{}.mlp.experts.0.", layer)) != std::string::npos) {
        third.push_back(tensor);
        third.back().name = Replaced(tensor.name, "experts.0.", "experts.2.");
      } else if (tensor.name == fmt::format("model.layers.{}.mlp.gate.weight", layer)) {
        third.push_back(Bf16(tensor.name, {3, kHidden}, 0.5F));
      }
    }
    model.Drop(fmt::format("model.layers.{}.mlp.gate.weight", layer));
    std::move(third.begin(), third.end(), std::back_inserter(model.tensors));
  }
  EXPECT_TRUE(LoadEverything(model).ok()) << LoadEverything(model).ToString();
  TinyModel some = model;
  DropAll(some, "layers.0.mlp.experts.0.");
  DropAll(some, "layers.0.mlp.experts.1.");
  ExpectRefused("experts 0 and 1", some,
                {StatusCode::kBadInput, "model.layers.0.mlp.experts.0.gate_proj.weight"});
  TinyModel none = model;
  DropAll(none, "layers.0.mlp.experts.");
  ExpectRefused("all experts", none, {StatusCode::kBadInput, "model.layers.0.mlp.experts"});
  const WrittenModel written(none);
  EXPECT_EQ(written.checkpoint->moe_layers(), (std::vector<int64_t>{0, 1}));
  CheckpointOptions partial;
  partial.allow_partial = true;
  const auto opened = Checkpoint::Open(written.folder.path().string(), partial);
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ((*opened)->moe_layers(), std::vector<int64_t>{1});
}

// A folder with some layers of a model, its attention perhaps, is whole.
TEST(MissingExperts, OfLayersThatWereCutAway_AreNotMissed) {
  TinyModel model = TwoLayers();
  model.config["decoder_sparse_step"] = 1;
  DropAll(model, "layers.0.");
  model.tensors.push_back(Bf16("model.layers.0.input_layernorm.weight", {kHidden}, 1.0F));
  const WrittenModel written(model);
  EXPECT_EQ(written.checkpoint->moe_layers(), std::vector<int64_t>{1});
  EXPECT_TRUE(written.checkpoint->Describe(1).ok());
}

// The configuration decides where a dense layer has a tensor that is called like a router.
TEST(MissingExperts, OfADenseLayer_AreNotMissed) {
  TinyModel model = TwoLayers();
  DropAll(model, "layers.0.mlp.experts.");
  model.config["decoder_sparse_step"] = 2;
  EXPECT_EQ(WrittenModel(model).checkpoint->moe_layers(), std::vector<int64_t>{1});
}

// A bias of one projection alone would be lost on the way to another format.
TEST(MissingTensor, BiasBesideAnotherProjectionsBias_IsAskedFor) {
  for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
    TinyModel model("bf16");
    const int64_t rows = std::string_view(projection) == "down_proj" ? kHidden : kIntermediate;
    model.tensors.push_back(
        Bf16(fmt::format("model.layers.0.mlp.experts.1.{}.bias", projection), {rows}, 0.5F));
    ExpectRefused(projection, model);
    EXPECT_NE(LoadEverything(model).message().find("have biases"), std::string::npos) << projection;
  }
}

// GPTQ in activation order: without g_idx, columns would be taken in the order of the file.
TEST(MissingTensor, GroupIndexOfReorderedColumns_IsAskedFor) {
  TinyModel model("gptq");
  std::erase_if(model.tensors, [](const RawTensor& tensor) { return tensor.name.ends_with(".g_idx"); });
  EXPECT_TRUE(WrittenModel(model).source.ok());
  model.config["quantization_config"]["desc_act"] = true;
  ExpectRefused("desc_act without g_idx", model);
}

// llm-compressor with "re:.*mlp.gate$" left alone, on Hunyuan, whose router is mlp.gate.wg: codes stand
// there.
TEST(MissingTensor, RouterInCodes_IsNotMissing) {
  TinyModel model("ct_int4");
  model.config["quantization_config"]["ignore"] = nlohmann::json::array();
  const std::string gate = "model.layers.0.mlp.gate";
  model.Drop(gate + ".weight");
  model.tensors.push_back(Bytes(gate + ".weight_packed", "I32", {kExperts, kHidden / 8}, 4, 0x97));
  model.tensors.push_back(Bf16(gate + ".weight_scale", {kExperts, kHidden / 32}, 0.5F));
  model.tensors.push_back(Longs(gate + ".weight_shape", {kExperts, kHidden}));
  const WrittenModel written(model);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  const auto router = written.checkpoint->LoadRouter(0);
  ASSERT_TRUE(router.ok()) << router.status().ToString();
  EXPECT_EQ(router->weight.shape(), (Shape{kExperts, kHidden}));
}

// Lists and targets that miss the experts: the metadata are to blame, not the tensors.
TEST(LeftAlone, QuantizedExpertsThatTheMetadataLeaveOut_SayWhichFieldsDecide) {
  struct Case {
    const char* format;
    nlohmann::json change;  // of quantization_config
    const char* word;       // of the hint
  };
  const auto groups = [](const char* target) {
    nlohmann::json config = TinyModel("ct_int4").config["quantization_config"]["config_groups"];
    for (auto& group : config) {
      group["targets"] = {target};
    }
    return nlohmann::json{{"config_groups", config}};
  };
  for (const Case& c :
       {Case{"ct_int4", groups("FusedMoE"), "config_groups"},
        Case{"ct_nvfp4", {{"ignore", {"re:.*experts.*"}}}, "ignore"},
        Case{"modelopt_nvfp4", {{"exclude_modules", {"*experts*"}}}, "exclude_modules"},
        Case{"modelopt_nvfp4",
             {{"quant_algo", "MIXED_PRECISION"}, {"quantized_layers", nlohmann::json::object()}},
             "quantized_layers"},
        Case{"gptq", {{"dynamic", {{"-:.*gate", nlohmann::json::object()}}}}, "dynamic"},
        Case{"quark_mxfp4", {{"exclude", {"*experts*"}}}, "exclude"},
        Case{"fp8_block", {{"modules_to_not_convert", {"model.layers.0.mlp.experts"}}}, "modules_to_not"}}) {
    TinyModel model(c.format);
    model.config["quantization_config"].update(c.change);
    const Status status = LoadEverything(model);
    EXPECT_EQ(status.code(), StatusCode::kBadInput) << c.format;
    EXPECT_NE(status.message().find("leave this module unquantized"), std::string::npos) << status.ToString();
    EXPECT_NE(status.hint().find(c.word), std::string::npos) << status.ToString();
    EXPECT_EQ(status.tensor(), "model.layers.0.mlp.experts.0.gate_proj.weight") << c.format;
  }
}

}  // namespace
}  // namespace fusedmoe
