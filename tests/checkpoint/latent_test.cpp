// Latent experts in checkpoints: where the projections are, how they are stored, and what is refused.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <vector>

#include <fusedmoe/layer.hpp>

#include "checkpoint/raw_checkpoint.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

constexpr int64_t kLatent = kHidden;  // the experts of TinyModel read rows of this width
constexpr int64_t kModel = 96;        // the hidden states here
const std::string kBlock = "model.layers.0.mlp.";

/// The tiny model of two experts behind projections from rows of 96.
TinyModel LatentModel(const std::string& format = "bf16") {
  TinyModel model(format);
  model.config["hidden_size"] = kModel;
  model.config["moe_latent_size"] = kLatent;
  model.Drop(kBlock + "gate.weight");
  model.tensors.push_back(Bf16(kBlock + "gate.weight", {kExperts, kModel}, 0.5F));
  model.tensors.push_back(Bf16(kBlock + "fc1_latent_proj.weight", {kLatent, kModel}, 0.25F));
  model.tensors.push_back(Bf16(kBlock + "fc2_latent_proj.weight", {kModel, kLatent}, -0.5F));
  return model;
}

Status LoadLatent(const TinyModel& model, const std::function<void(const LatentWeights&)>& look = {}) {
  const TemporaryDirectory folder;
  model.WriteTo(folder);
  FMOE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(folder.path().string()));
  FMOE_ASSIGN_OR_RETURN(const auto latent, checkpoint->Latent(0));
  if (look && latent) {
    look(*latent);
  }
  return Status::Ok();
}

void ExpectRefusal(const TinyModel& model, const std::string& tensor, const std::string& words) {
  CountMalformed();
  const Status status = LoadLatent(model);
  EXPECT_EQ(status.code(), StatusCode::kBadInput) << status.ToString();
  EXPECT_EQ(status.tensor(), tensor) << status.ToString();
  EXPECT_FALSE(status.file().empty()) << status.ToString();
  EXPECT_NE(status.message().find(words), std::string::npos) << status.ToString();
}

TEST(LatentCheckpoints, SizesAndProjections_AreRead) {
  const WrittenModel written(LatentModel());
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  const auto described = written.checkpoint->Describe(0);
  ASSERT_TRUE(described.ok()) << described.status().ToString();
  EXPECT_EQ(described->config.hidden, kModel);
  EXPECT_EQ(described->config.latent, kLatent);
  const auto expert = written.source->load(0);
  ASSERT_TRUE(expert.ok()) << expert.status().ToString();
  EXPECT_EQ(expert->up.cols, kLatent);
  EXPECT_EQ(expert->down.rows, kLatent);
  const auto latent = written.checkpoint->Latent(0);
  ASSERT_TRUE(latent.ok() && latent->has_value()) << latent.status().ToString();
  EXPECT_EQ((*latent)->to_latent.shape(), (Shape{kLatent, kModel}));
  EXPECT_EQ((*latent)->from_latent.shape(), (Shape{kModel, kLatent}));
  EXPECT_TRUE((*latent)->to_latent_bias.empty());
  EXPECT_FALSE((*WrittenModel(TinyModel("bf16")).checkpoint->Latent(0)).has_value());
}

TEST(LatentCheckpoints, BiasesOfProjections_AreRead) {
  TinyModel model = LatentModel();
  model.tensors.push_back(Bf16(kBlock + "fc1_latent_proj.bias", {kLatent}, 3.0F));
  model.tensors.push_back(Floats(kBlock + "fc2_latent_proj.bias", {kModel}, -2.0F));
  EXPECT_TRUE(LoadLatent(model, [](const LatentWeights& latent) {
                EXPECT_EQ(latent.to_latent_bias.view().as<float>()[kLatent - 1], 3.0F);
                EXPECT_EQ(latent.from_latent_bias.view().as<float>()[kModel - 1], -2.0F);
              }).ok());
  model.Find(kBlock + "fc1_latent_proj.bias") = Bf16(kBlock + "fc1_latent_proj.bias", {kLatent + 1}, 3.0F);
  ExpectRefusal(model, kBlock + "fc1_latent_proj.bias", "[65]");
}

// ModelOpt's mixed precision quantizes some projections to FP8 and leaves others alone; llm-compressor may
// pack them like any other linear module.
TEST(LatentCheckpoints, QuantizedProjections_ComeDecoded) {
  TinyModel mixed = LatentModel("modelopt_fp8");
  const std::string name = kBlock + "fc1_latent_proj";
  mixed.Drop(name + ".weight");
  mixed.tensors.push_back(Bytes(name + ".weight", "F8_E4M3", {kLatent, kModel}, 1, 0x38));  // 1.0
  mixed.tensors.push_back(Floats(name + ".weight_scale", {}, 0.125F));
  mixed.tensors.push_back(Floats(name + ".input_scale", {}, 0.5F));
  Status status = LoadLatent(mixed, [](const LatentWeights& latent) {
    EXPECT_EQ(latent.to_latent.dtype(), DType::kF32);
    EXPECT_EQ(latent.to_latent.view().as<float>()[kLatent * kModel - 1], 0.125F);
    EXPECT_EQ(latent.from_latent.dtype(), DType::kBF16);
  });
  EXPECT_TRUE(status.ok()) << status.ToString();
  mixed.Drop(name + ".weight_scale");
  ExpectRefusal(mixed, name + ".weight_scale", "missing");

  TinyModel packed = LatentModel("ct_int4");
  packed.config["quantization_config"]["ignore"] = nlohmann::json::array();
  packed.config["quantization_config"]["ignore"].push_back("re:.*mlp.gate$");
  packed.config["quantization_config"]["ignore"].push_back("re:.*fc2_latent_proj$");
  packed.Drop(name + ".weight");
  packed.tensors.push_back(Bytes(name + ".weight_packed", "I32", {kLatent, kModel / 8}, 4, 0x97));
  packed.tensors.push_back(Bf16(name + ".weight_scale", {kLatent, kModel / 32}, 0.5F));
  packed.tensors.push_back(Longs(name + ".weight_shape", {kLatent, kModel}));
  status = LoadLatent(packed, [](const LatentWeights& latent) {
    EXPECT_EQ(latent.to_latent.view().as<float>()[0], -0.5F);  // 7 - 8
    EXPECT_EQ(latent.to_latent.view().as<float>()[1], 0.5F);   // 9 - 8
  });
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST(LatentCheckpoints, MissingAndMalformedProjections_AreRefusedByName) {
  for (const char* word : {"fc1_latent_proj", "fc2_latent_proj"}) {
    const std::string name = kBlock + word + ".weight";
    TinyModel missing = LatentModel();
    missing.Drop(name);
    ExpectRefusal(missing, name, "the latent size is 64");
    TinyModel shape = LatentModel();
    shape.Find(name) = Bf16(name, {kLatent, kLatent}, 1.0F);
    ExpectRefusal(shape, name, "[64, 64]");
    TinyModel flat = LatentModel();
    flat.Find(name) = Bf16(name, {kLatent * kModel}, 1.0F);
    ExpectRefusal(flat, name, "[6144]");
    TinyModel integers = LatentModel();
    integers.Find(name) = Bytes(name, "I8", integers.Find(name).shape, 1, 1);
    ExpectRefusal(integers, name, "I8");
    TinyModel infinite = LatentModel();
    RawTensor& weight = infinite.Find(name);
    weight = Bytes(name, "BF16", weight.shape, 2, 0xff);
    ExpectRefusal(infinite, name, "nan");
  }
}

TEST(LatentCheckpoints, SizesThatDoNotFit_AreRefused) {
  for (const int64_t size : {int64_t{0}, int64_t{-4}, int64_t{1} << 40}) {
    TinyModel model = LatentModel();
    model.config["moe_latent_size"] = size;
    CountMalformed();
    const Status status = LoadLatent(model);
    EXPECT_EQ(status.code(), StatusCode::kBadInput) << size;
    EXPECT_NE(status.message().find("moe_latent_size"), std::string::npos) << status.ToString();
    EXPECT_FALSE(status.file().empty());
  }
  TinyModel text = LatentModel();
  text.config["moe_latent_size"] = "64";
  EXPECT_EQ(LoadLatent(text).code(), StatusCode::kBadInput);
  TinyModel wider = LatentModel();  // the experts know better
  wider.config["moe_latent_size"] = 48;
  ExpectRefused("experts of another width", wider);
  TinyModel silent = LatentModel();  // hidden states would go where latent rows belong
  silent.config.erase("moe_latent_size");
  ExpectRefusal(silent, kBlock + "fc1_latent_proj.weight", "no latent size is given");
  TinyModel nothing = LatentModel();
  nothing.config["moe_latent_size"] = nullptr;
  ExpectRefusal(nothing, kBlock + "fc1_latent_proj.weight", "no latent size is given");
}

// Of a model whose experts read hidden states: the size alone changes what a layer computes.
TEST(LatentCheckpoints, SizeWithoutProjections_IsRefused) {
  TinyModel model("bf16");
  model.config["moe_latent_size"] = kHidden;
  ExpectRefusal(model, kBlock + "fc1_latent_proj.weight", "the tensor is missing");
}

/// Kimi-K3 as its files are: the text model within, experts w1 to w3 below block_sparse_moe.
TinyModel KimiModel() {
  TinyModel model("bf16");
  const std::string block = "model.layers.0.block_sparse_moe.";
  model.config["model_type"] = "kimi_linear";
  model.config["hidden_size"] = kModel;
  model.config["routed_expert_hidden_size"] = kLatent;
  model.config["latent_moe_use_norm"] = true;
  model.config["rms_norm_eps"] = 1e-5;
  model.config["hidden_act"] = "situ";
  model.config["activation_situ_beta"] = 4.0;
  model.config["activation_situ_linear_beta"] = 25.0;
  model.Drop(kBlock + "gate.weight");
  for (auto& tensor : model.tensors) {
    if (tensor.name.starts_with(kBlock)) {
      tensor.name = block + tensor.name.substr(kBlock.size());
    }
  }
  model.tensors.push_back(Bf16(block + "gate.weight", {kExperts, kModel}, 0.5F));
  model.tensors.push_back(Floats(block + "gate.e_score_correction_bias", {kExperts}, 0.0F));
  model.tensors.push_back(Bf16(block + "routed_expert_down_proj.weight", {kLatent, kModel}, 0.25F));
  model.tensors.push_back(Bf16(block + "routed_expert_up_proj.weight", {kModel, kLatent}, -0.5F));
  model.tensors.push_back(Bf16(block + "routed_expert_norm.weight", {kLatent}, 1.5F));
  const auto text = model.config;
  model.config = {{"model_type", "kimi_k3"}, {"text_config", text}};
  return model;
}

Result<MoeConfig> ConfigOf(const TinyModel& model) {
  const TemporaryDirectory folder;
  model.WriteTo(folder);
  FMOE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(folder.path().string()));
  FMOE_ASSIGN_OR_RETURN(const LayerDescription layer, checkpoint->Describe(0));
  return layer.config;
}

TEST(LatentCheckpoints, KimiK3_HasANormAndBoundsOfGateAndUp) {
  const auto config = ConfigOf(KimiModel());
  ASSERT_TRUE(config.ok()) << config.status().ToString();
  EXPECT_EQ(config->hidden, kModel);
  EXPECT_EQ(config->latent, kLatent);
  EXPECT_EQ(config->latent_norm_epsilon, 1e-5F);
  EXPECT_EQ(config->activation,
            (ActivationSpec{.kind = ActivationKind::kSitu, .alpha = 4.0F, .limit = 25.0F}));
  const Status status = LoadLatent(KimiModel(), [](const LatentWeights& latent) {
    EXPECT_EQ(latent.norm.shape(), (Shape{kLatent}));
    EXPECT_EQ(latent.norm.view().as<float>()[kLatent - 1], 1.5F);
  });
  EXPECT_TRUE(status.ok()) << status.ToString();
  TinyModel unbounded = KimiModel();
  unbounded.config["text_config"]["activation_situ_beta"] = nullptr;
  unbounded.config["text_config"]["activation_situ_linear_beta"] = nullptr;
  EXPECT_EQ(ConfigOf(unbounded)->activation, (ActivationSpec{.kind = ActivationKind::kSitu}));
}

TEST(LatentCheckpoints, KimiK3_IsRefusedWhereItsNormIsInDoubt) {
  const std::string norm = "model.layers.0.block_sparse_moe.routed_expert_norm.weight";
  TinyModel missing = KimiModel();
  missing.Drop(norm);
  ExpectRefusal(missing, norm, "the tensor is missing");
  TinyModel unwanted = KimiModel();
  unwanted.config["text_config"]["latent_moe_use_norm"] = false;
  ExpectRefusal(unwanted, norm, "'latent_moe_use_norm' is false");
  TinyModel other_size = KimiModel();
  other_size.Find(norm) = Bf16(norm, {kLatent + 1}, 1.5F);
  ExpectRefusal(other_size, norm, "[65]");
  TinyModel no_epsilon = KimiModel();
  no_epsilon.config["text_config"].erase("rms_norm_eps");
  EXPECT_NE(ConfigOf(no_epsilon).status().message().find("'rms_norm_eps' is missing"), std::string::npos);
  TinyModel negative = KimiModel();
  negative.config["text_config"]["activation_situ_linear_beta"] = -25.0;
  EXPECT_NE(ConfigOf(negative).status().message().find("activation_situ_linear_beta"), std::string::npos);
  TinyModel without = KimiModel();  // the model may have none
  without.Drop(norm);
  without.config["text_config"].erase("latent_moe_use_norm");
  EXPECT_EQ(ConfigOf(without)->latent_norm_epsilon, 0.0F);
}

// transformers projects in its own module: the layer gets rows of the latent width, and gives back their
// sums.
TEST(LatentCheckpoints, LayerWithoutProjections_IsItsExpertsAlone) {
  const std::string path = std::string(FMOE_GOLDEN_DIR) + "/families/nemotron_h_latent-orig";
  const auto checkpoint = *Checkpoint::Open(path);
  LayerOptions options;
  options.backend = "REFERENCE";
  options.max_tokens = 4;
  options.latent_projections = false;
  const auto beside = MoeLayer::Load(checkpoint, 1, options);
  ASSERT_FALSE(beside.ok());
  EXPECT_EQ(beside.status().code(), StatusCode::kUsage);
  EXPECT_NE(beside.status().message().find("shared experts"), std::string::npos)
      << beside.status().ToString();
  options.shared_experts = false;
  const auto loaded = MoeLayer::Load(checkpoint, 1, options);
  ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
  EXPECT_EQ((*loaded)->config().hidden, 16);
  EXPECT_EQ((*loaded)->config().latent, 0);
  EXPECT_EQ((*loaded)->plan().latent, 0);
  RouterWeights router = *checkpoint->LoadRouter(1);
  router.weight = {};
  const auto created = MoeLayer::Create(RoutedConfig(checkpoint->Describe(1)->config),
                                        *checkpoint->Experts(1), router, options);
  ASSERT_TRUE(created.ok()) << created.status().ToString();
  Tensor rows = *Tensor::Allocate(DType::kF32, {4, 16}), logits = *Tensor::Allocate(DType::kF32, {4, 8});
  for (Tensor* tensor : {&rows, &logits}) {
    for (int64_t index = 0; index < tensor->view().count(); ++index) {
      tensor->mutable_view().as<float>()[index] = static_cast<float>((index * 37) % 17) - 8.0F;
    }
  }
  std::vector<Tensor> outputs;
  for (const auto* layer : {&*loaded, &*created}) {
    outputs.push_back(*Tensor::Allocate(DType::kF32, {4, 16}));
    const Workspace workspace = *(*layer)->CreateWorkspace();
    const MoeLayer::Inputs inputs{.hidden = rows.view(), .router_logits = logits.view()};
    const Status status = (*layer)->Forward(inputs, {.output = outputs.back().mutable_view()}, workspace);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  EXPECT_EQ(0, std::memcmp(outputs[0].view().data(), outputs[1].view().data(), 4 * 16 * sizeof(float)));
}

}  // namespace
}  // namespace fusedmoe
