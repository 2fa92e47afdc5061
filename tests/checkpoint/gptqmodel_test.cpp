// What GPTQModel writes: GPTQ, AWQ and an FP8 of its own, with patterns for single modules.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/raw_checkpoint.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

Status LoadModel(const TinyModel& model) {
  const TemporaryDirectory folder;
  model.WriteTo(folder);
  return LoadEverything(folder.path());
}

// GPTQModel 7 and auto-round 0.16 list what they left alone there: routers, as a rule.
TEST(GptqModel, DynamicOfGptq_NamesWhatIsLeftAlone) {
  TinyModel model("gptq");
  auto& dynamic = model.config["quantization_config"]["dynamic"];
  dynamic = {{"-:.*model\\.layers\\.0\\.mlp\\.gate.*", nlohmann::ordered_json::object()}};
  EXPECT_EQ(LoadModel(model).message(), "");

  // Settings of their own: the first pattern that matches decides, and says what tensors must hold.
  dynamic = {{"+:.*experts\\..*", {{"bits", 4}, {"group_size", 32}}}, {".*", {{"bits", 8}}}};
  EXPECT_EQ(LoadModel(model).message(), "");
  dynamic = {{".*experts\\..*", {{"bits", 8}}}};
  EXPECT_EQ(LoadModel(model).code(), StatusCode::kBadInput);
  dynamic = {{".*experts\\..*", {{"bits", 9}}}};
  EXPECT_EQ(LoadModel(model).code(), StatusCode::kUnsupported);
  dynamic = {{"-:.*experts\\.[", nlohmann::ordered_json::object()}};
  EXPECT_EQ(LoadModel(model).code(), StatusCode::kBadInput);
  dynamic = {"-:.*gate.*"};
  EXPECT_EQ(LoadModel(model).code(), StatusCode::kBadInput);

  TinyModel plain("bf16");
  plain.config["quantization_config"] = TinyModel("gptq").config["quantization_config"];
  EXPECT_EQ(LoadModel(plain).code(), StatusCode::kBadInput);
  plain.config["quantization_config"]["dynamic"] = {{"-:.*experts.*", nlohmann::ordered_json::object()}};
  EXPECT_EQ(LoadModel(plain).message(), "");
}

// GPTQModel 7 stores what it multiplied weights by, under DeepSeek's name of the tensor and of the method:
// scales were used upside down.
TEST(GptqModel, Fp8OfGptqModel_DividesByItsScales) {
  const auto first = [](const TinyModel& model) {
    const WrittenModel written(model);
    EXPECT_TRUE(written.source.ok()) << written.source.status().ToString();
    const auto described = written.checkpoint->Describe(0);
    EXPECT_TRUE(described.ok()) << described.status().ToString();
    const auto expert = written.source->load(0);
    EXPECT_TRUE(expert.ok()) << expert.status().ToString();
    std::vector<float> row(static_cast<size_t>(kHidden));
    if (expert.ok())
      DequantizeRow(expert->gate, 0, row.data());
    return std::pair(described.ok() ? described->scheme.name : "", row);
  };
  TinyModel deepseek("fp8_block"), gptq = deepseek;
  for (TinyModel* model : {&deepseek, &gptq}) {
    for (RawTensor& tensor : model->tensors) {
      if (tensor.name.ends_with(".weight_scale_inv"))
        tensor = Floats(tensor.name, tensor.shape, model == &gptq ? 4.0F : 0.25F);
    }
  }
  auto& quantization = gptq.config["quantization_config"];
  quantization = {{"quant_method", "fp8"},
                  {"bits", 8},
                  {"format", "float8_e4m3fn"},
                  {"checkpoint_format", "float8_e4m3fn"},
                  {"weight_block_size", {16, 16}},
                  {"weight_scale_method", "block"},
                  {"weight_scale_semantics", "inverse"}};
  const auto expected = first(deepseek), blocks = first(gptq);
  EXPECT_EQ(expected.second, blocks.second);
  EXPECT_NE(expected.second[0], 0.0F);
  EXPECT_EQ(blocks.first, "fp8_w8a16:block16");  // inputs stay as they are

  for (const bool by_row : {true, false}) {
    SCOPED_TRACE(by_row);
    quantization.erase("weight_block_size");
    quantization["weight_scale_method"] = by_row ? "row" : "tensor";
    TinyModel model = gptq;
    for (RawTensor& tensor : model.tensors) {
      const bool down = tensor.name.find("down_proj") != std::string::npos;
      if (tensor.name.ends_with(".weight_scale_inv"))
        tensor = Floats(tensor.name,
                        by_row ? std::vector{down ? kHidden : kIntermediate} : std::vector<int64_t>{}, 4.0F);
    }
    const auto found = first(model);
    EXPECT_EQ(found.second, expected.second);
    EXPECT_EQ(found.first, by_row ? "fp8_w8a16" : "fp8_w8a16:tensor");
    for (const float bad : {0.0F, std::numeric_limits<float>::infinity(), -1.0F}) {
      RawTensor& scale = model.Find("model.layers.0.mlp.experts.1.up_proj.weight_scale_inv");
      scale = Floats(scale.name, scale.shape, bad);
      EXPECT_EQ(LoadModel(model).code(), StatusCode::kBadInput) << bad;
    }
  }
  quantization["format"] = "float8_e5m2";
  EXPECT_EQ(LoadModel(gptq).code(), StatusCode::kUnsupported);
  quantization["format"] = "float8_e4m3fn";
  quantization["weight_scale_semantics"] = "direct";
  EXPECT_EQ(LoadModel(gptq).code(), StatusCode::kUnsupported);
}

// GPTQModel 7 has `dynamic` in every format.
TEST(GptqModel, DynamicOfGptqModel_HoldsForAwqAndFp8) {
  for (const std::string format : {"awq", "fp8_block"}) {
    SCOPED_TRACE(format);
    TinyModel model("bf16");
    auto& quantization = model.config["quantization_config"];
    quantization = TinyModel(format).config["quantization_config"];
    if (format == "fp8_block")
      quantization["weight_scale_method"] = "block";
    EXPECT_EQ(LoadModel(model).code(), format == "awq" ? StatusCode::kBadInput : StatusCode::kOk);
    quantization["dynamic"] = {{"-:.*experts.*", nlohmann::ordered_json::object()}};
    EXPECT_EQ(LoadModel(model).message(), "");
    quantization["dynamic"] = {{".*experts.*", 1}};
    EXPECT_EQ(LoadModel(model).code(), StatusCode::kBadInput);
  }
}

}  // namespace
}  // namespace fusedmoe
