// Matrices of MLX: how they are listed and what they decode to, and files that lie about them. The values of
// whole layers stand in golden/formats.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "checkpoint/raw_checkpoint.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

const std::string kStack = "model.layers.0.mlp.switch_mlp.";

// The plain model with stacks of experts: down is affine, 4 bits in groups of 32, codes 1, 2, 1, 2, ... for
// code / 2 - 1; gate and up are as they were.
struct MlxModel : TinyModel {
  MlxModel() : TinyModel("bf16") {
    config["quantization"] = {{"group_size", 32}, {"bits", 4}};
    std::erase_if(tensors, [](const RawTensor& tensor) {
      return tensor.name.find(".mlp.experts.") != std::string::npos;
    });
    for (const char* name : {"gate_proj", "up_proj"}) {
      tensors.push_back(Bf16(kStack + name + ".weight", {kExperts, kIntermediate, kHidden}, 0.25F));
    }
    tensors.push_back(Bytes(kStack + "down_proj.weight", "U32", {kExperts, kHidden, 4}, 4, 0x21));
    tensors.push_back(Bf16(kStack + "down_proj.scales", {kExperts, kHidden, 1}, 0.5F));
    tensors.push_back(Bf16(kStack + "down_proj.biases", {kExperts, kHidden, 1}, -1.0F));
  }
};

// Gemma 4.
TEST(Mlx, ExpertsBelowSwitchGlu_AreFound) {
  MlxModel model;
  for (RawTensor& tensor : model.tensors) {
    if (const size_t at = tensor.name.find("switch_mlp"); at != std::string::npos) {
      tensor.name.replace(at, std::string("switch_mlp").size(), "experts.switch_glu");
    }
  }
  const WrittenModel written(model);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  EXPECT_TRUE(written.source->load(1).ok());
}

TEST(Mlx, AffineMatrices_AreListedAndReadAsWhatTheyDecodeTo) {
  const WrittenModel written((MlxModel()));
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  EXPECT_EQ(written.source->scheme.name, "unquantized");
  EXPECT_EQ(written.checkpoint->producer(), "mlx");
  bool listed = false;
  for (const TensorInfo& info : written.checkpoint->tensors()) {
    EXPECT_FALSE(info.name.ends_with("scales") || info.name.ends_with("biases")) << info.name;
    if (info.name == kStack + "down_proj.weight") {
      listed = true;
      EXPECT_EQ(info.dtype, DType::kBF16);
      EXPECT_EQ(info.shape, (Shape{kExperts, kHidden, kIntermediate}));
    }
  }
  EXPECT_TRUE(listed);
  const auto expert = written.source->load(1);
  ASSERT_TRUE(expert.ok()) << expert.status().ToString();
  const Tensor& codes = expert->down.codes;
  ASSERT_EQ(codes.shape(), (Shape{kHidden, kIntermediate}));
  for (int64_t i = 0; i < codes.shape().count(); ++i) {
    const auto bits = static_cast<uint32_t>(codes.view().as<uint16_t>()[i]) << 16;
    float value = 0.0F;
    std::memcpy(&value, &bits, sizeof(value));
    ASSERT_EQ(value, i % 2 == 0 ? -0.5F : 0.0F) << i;
  }
}

// mlx-lm has a module for the router of some families: Bailing, Laguna, Step-3.5 with its bias.
TEST(Mlx, RoutersOfModulesOfTheirOwn_AreFound) {
  const std::string gate = "model.layers.0.mlp.gate.";
  for (const char* word : {"gate_proj.weight", "proj.weight", "gate.weight"}) {
    MlxModel model;
    model.Find(gate + "weight").name = gate + word;
    EXPECT_TRUE(LoadEverything(model).ok()) << LoadEverything(model).ToString();
  }
  MlxModel model;
  model.config["model_type"] = "step3p5";
  model.Find(gate + "weight").name = gate + "gate.weight";
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput) << "its routers have a bias";
  model.tensors.push_back(Bf16(gate + "router_bias", {kExperts}, 0.5F));
  const WrittenModel written(model);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  const auto router = written.checkpoint->LoadRouter(0);
  ASSERT_TRUE(router.ok()) << router.status().ToString();
  EXPECT_FALSE(router->correction_bias.empty());
}

TEST(Mlx, FilesThatContradictThemselves_AreNamed) {
  ASSERT_EQ(LoadEverything(MlxModel()).message(), "");
  const auto expect = [](const TinyModel& model, const std::string& word) {
    CountMalformed();
    const Status status = LoadEverything(model);
    EXPECT_EQ(status.code(), StatusCode::kBadInput) << word;
    EXPECT_EQ(status.tensor(), kStack + "down_proj.weight") << status.ToString();
    EXPECT_NE(status.message().find(word), std::string::npos) << status.ToString();
  };
  const std::string scales = kStack + "down_proj.scales", biases = kStack + "down_proj.biases";
  MlxModel lost;
  lost.Drop(biases);
  expect(lost, "biases like the scales are needed");
  MlxModel wide;
  wide.Find(biases) = Floats(biases, {kExperts, kHidden, 1}, -1.0F);
  expect(wide, "biases like the scales are needed");
  MlxModel few;
  few.Find(scales) = Bf16(scales, {kExperts, kHidden - 1, 1}, 0.5F);
  expect(few, "do not fit scales");
  MlxModel none;
  none.Find(scales) = Bf16(scales, {kExperts, kHidden, 0}, 0.5F);
  expect(none, "do not fit scales");
  MlxModel bytes;
  bytes.Find(scales) = Bytes(scales, "U8", {kExperts, kHidden, 4}, 1, 0x70);
  expect(bytes, "groups of 32 bits");
  MlxModel group;
  group.config["quantization"]["group_size"] = 48;
  expect(group, "groups of 48 would have 128 bits");
  MlxModel narrow;
  narrow.config["quantization"]["model.layers.0.mlp.switch_mlp.down_proj"] = {{"group_size", 16},
                                                                              {"bits", 8}};
  expect(narrow, "[64, 32] is needed");
  MlxModel bits;
  bits.config["quantization"]["bits"] = 8;
  expect(bits, "the tensors are affine of 4 bits in groups of 32, and 'quantization' says: affine of 8 bits");
  MlxModel mode;
  mode.config["quantization"]["mode"] = "mxfp4";
  expect(mode, "says: mxfp4 of 4 bits in groups of 32");
  MlxModel plain;
  plain.config["quantization"]["model.layers.0.mlp.switch_mlp.down_proj"] = false;
  expect(plain, "says: not quantized");
  MlxModel unknown;
  unknown.config["quantization"]["mode"] = "nf4";
  ExpectRefused("an unknown mode", unknown, {StatusCode::kUnsupported, ""});
  for (const auto& [name, what] : {std::pair(scales, "the scale of"), std::pair(biases, "the bias of")}) {
    MlxModel infinite;
    infinite.Find(name) = Bf16(name, {kExperts, kHidden, 1}, INFINITY);
    expect(infinite, what);
  }
  for (const char* where : {"group_size", "model.layers.0.mlp.switch_mlp.down_proj"}) {
    MlxModel wrong;
    wrong.config["quantization"][where] = nlohmann::ordered_json{{"group_size", "x"}};
    CountMalformed();
    const Status status = LoadEverything(wrong);
    EXPECT_EQ(status.code(), StatusCode::kBadInput);
    EXPECT_NE(status.message().find("'group_size'"), std::string::npos) << status.ToString();
  }
}

}  // namespace
}  // namespace fusedmoe
