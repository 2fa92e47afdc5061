// Names, types and shapes of scales that tools write and no golden checkpoint shows.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "checkpoint/raw_checkpoint.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

// ModelOpt 0.47: where down is a single block of 128 x 128 its scale is [], that of gate and up [1, 1, 1, 1].
TEST(ScaleForms, ScaleOfASingleBlock_MayBeAScalar) {
  TinyModel model("modelopt_fp8");
  model.config["quantization_config"]["quant_algo"] = "FP8_PB_WO";
  std::erase_if(model.tensors, [](const RawTensor& tensor) { return tensor.name.ends_with(".input_scale"); });
  for (RawTensor& tensor : model.tensors) {
    if (tensor.name.ends_with("gate_proj.weight_scale") || tensor.name.ends_with("up_proj.weight_scale")) {
      tensor.shape = {1, 1, 1, 1};
    }
  }
  const WrittenModel written(model);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  const auto described = written.checkpoint->Describe(0);
  ASSERT_TRUE(described.ok()) << described.status().ToString();
  EXPECT_EQ(described->scheme.name, "fp8_w8a16:block128");
}

// Groups of 32 and more: each scale becomes that of several groups of 16, so that the scales as stored must
// be those of the groups that the metadata promise.
TEST(ScaleForms, LargerGroupsOfNvfp4_MustFitTheScales) {
  TinyModel model("modelopt_nvfp4");
  auto& quantization = model.config["quantization_config"];
  quantization["quant_algo"] = "W4A16_NVFP4";
  std::erase_if(model.tensors, [](const RawTensor& tensor) { return tensor.name.ends_with(".input_scale"); });
  EXPECT_EQ(LoadEverything(model).message(), "");
  for (const int64_t group : {32, 48, 64, 65536}) {
    quantization["group_size"] = group;
    ExpectRefused(fmt::format("groups of {}", group), model,
                  {StatusCode::kBadInput, "model.layers.0.mlp.experts.0.gate_proj.weight_scale"});
  }
  quantization["group_size"] = 32;
  for (RawTensor& tensor : model.tensors) {
    if (tensor.name.ends_with(".weight_scale")) {
      tensor = Bytes(tensor.name, "F8_E4M3", {tensor.shape[0], tensor.shape[1] / 2}, 1, 0x38);
    }
  }
  EXPECT_EQ(LoadEverything(model).message(), "");
  quantization["group_size"] = 16;
  ExpectRefused("groups of 16 in a file of 32", model);
}

// The MXFP8 preset of compressed-tensors 0.20.
TEST(ScaleForms, Mxfp8OfCompressedTensors_BumpsExponentsLikeE2m1) {
  TinyModel model("ct_mxfp4");
  auto& quantization = model.config["quantization_config"];
  quantization["format"] = "mxfp8-quantized";
  auto& group = quantization["config_groups"]["group_0"];
  group["weights"]["num_bits"] = 8;
  group["weights"]["scale_dtype"] = "torch.uint8";
  group["input_activations"] = group["weights"];
  group["input_activations"]["dynamic"] = true;
  for (RawTensor& tensor : model.tensors) {
    if (!tensor.name.ends_with(".weight_packed")) {
      continue;
    }
    const std::string name = Replaced(tensor.name, ".weight_packed", ".weight");
    tensor = Bytes(name, "F8_E4M3", {tensor.shape[0], 2 * tensor.shape[1]}, 1, 0x38);
  }
  const WrittenModel written(model);
  const auto& source = written.source;
  ASSERT_TRUE(source.ok()) << source.status().ToString();
  EXPECT_EQ(source->scheme.activation.element, DType::kF8E4M3);
  EXPECT_EQ(source->scheme.activation.rule.mx_scale, MxScaleRule::kEvenE2m1);
}

// What we write of mxfp4_w4a8:group128: the type of the scales tells powers of two from fp32.
TEST(ScaleForms, GroupsOfInputsOfCompressedTensors_HaveScalesOfTheirType) {
  TinyModel model("ct_mxfp4");
  auto& input = model.config["quantization_config"]["config_groups"]["group_0"]["input_activations"];
  input = {{"num_bits", 8}, {"type", "float"}, {"strategy", "group"}, {"group_size", 128}, {"dynamic", true}};
  for (const DType scale : {DType::kF32, DType::kF8E8M0}) {
    if (scale == DType::kF8E8M0) {
      input["scale_dtype"] = "torch.uint8";
    }
    const WrittenModel written(model);
    ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
    EXPECT_EQ(written.checkpoint->Describe(0)->scheme.name, "mxfp4_w4a8:group128");
    EXPECT_EQ(written.source->scheme.activation.group, (GroupShape{1, 128}));
    EXPECT_EQ(written.source->scheme.activation.scale_dtype, scale);
  }
}

// compressed-tensors 0.20 reads both, the string for configurations that older versions wrote.
TEST(ScaleForms, BlockStructure_IsAPairOrAString) {
  TinyModel model("fp8_block");
  for (RawTensor& tensor : model.tensors) {
    tensor.name = Replaced(tensor.name, ".weight_scale_inv", ".weight_scale");
  }
  const nlohmann::ordered_json weights = {{"num_bits", 8}, {"type", "float"}, {"strategy", "block"}};
  const nlohmann::ordered_json inputs = {
      {"num_bits", 8}, {"type", "float"}, {"strategy", "group"}, {"group_size", 16}, {"dynamic", true}};
  model.config["quantization_config"] = {
      {"quant_method", "compressed-tensors"},
      {"format", "float-quantized"},
      {"config_groups",
       {{"group_0", {{"targets", {"Linear"}}, {"weights", weights}, {"input_activations", inputs}}}}}};
  auto& block = model.config["quantization_config"]["config_groups"]["group_0"]["weights"]["block_structure"];
  block = {16, 16};
  EXPECT_EQ(LoadEverything(model).message(), "");
  block = "16x16";
  EXPECT_EQ(LoadEverything(model).message(), "");
  for (const char* bad : {"128", "128x", "x128", "128x128x128", "0x128", "128 x 128", "-1x128"}) {
    block = bad;
    EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput) << bad;
  }
}

// FP8 with one scale a matrix: vLLM's names, transformers' (also of fused experts, one number each) and
// Mistral's.
TEST(ScaleForms, StaticFp8_HasSeveralNames) {
  const std::pair<std::string, std::string> names[] = {{".weight_scale", ".input_scale"},
                                                       {".weight_scale_inv", ".activation_scale"},
                                                       {".qscale_weight", ".qscale_act"}};
  for (const auto& [weight, input] : names) {
    SCOPED_TRACE(weight);
    TinyModel model("modelopt_fp8");
    model.config["quantization_config"] = {{"quant_method", "fp8"}, {"activation_scheme", "static"}};
    model.config["quantization_config"]["modules_to_not_convert"] = {"lm_head", "gate"};
    for (RawTensor& tensor : model.tensors) {
      tensor.name = Replaced(Replaced(tensor.name, ".weight_scale", weight), ".input_scale", input);
    }
    const WrittenModel written(model);
    ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
    EXPECT_EQ(written.checkpoint->Describe(0)->scheme.name, "fp8_w8a8:tensor_static");
    const auto expert = written.source->load(1);
    ASSERT_TRUE(expert.ok()) << expert.status().ToString();
    EXPECT_EQ(expert->up.tensor_scale, 0.5F);
    EXPECT_EQ(expert->up.input_tensor_scale, 0.25F);
  }

  TinyModel fused("bf16");
  std::erase_if(fused.tensors,
                [](const RawTensor& tensor) { return tensor.name.find(".experts.") != std::string::npos; });
  fused.config["quantization_config"] = {{"quant_method", "fp8"}, {"activation_scheme", "static"}};
  const std::string stem = "model.layers.0.mlp.experts.";
  fused.tensors.push_back(
      Bytes(stem + "gate_up_proj", "F8_E4M3", {kExperts, 2 * kIntermediate, kHidden}, 1, 0x38));
  fused.tensors.push_back(Bytes(stem + "down_proj", "F8_E4M3", {kExperts, kHidden, kIntermediate}, 1, 0x38));
  for (const auto& [name, value] : {std::pair("gate_up_proj", 0.5F), std::pair("down_proj", 0.125F)}) {
    fused.tensors.push_back(Floats(stem + name + "_scale_inv", {kExperts, 1, 1}, value));
    fused.tensors.push_back(Floats(stem + name + "_activation_scale", {kExperts}, value / 2));
  }
  const WrittenModel written(fused);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  const auto expert = written.source->load(1);
  ASSERT_TRUE(expert.ok()) << expert.status().ToString();
  EXPECT_EQ(expert->gate.tensor_scale, 0.5F);
  EXPECT_EQ(expert->gate.input_tensor_scale, 0.25F);
  EXPECT_EQ(expert->down.input_tensor_scale, 0.0625F);
}

// transformers 5 reads MXFP8 by the reader of FP8 blocks: powers of two as the bytes of their exponents.
TEST(ScaleForms, BytesBesideFp8_AreExponents) {
  for (const std::string method : {"fp8", "mxfp8"}) {
    SCOPED_TRACE(method);
    TinyModel model("fp8_block");
    auto& quantization = model.config["quantization_config"];
    quantization["quant_method"] = method;
    quantization["weight_block_size"] = {1, 32};
    for (RawTensor& tensor : model.tensors) {
      const bool down = tensor.name.find("down_proj") != std::string::npos;
      if (tensor.name.ends_with(".weight_scale_inv")) {
        tensor = Bytes(tensor.name, "U8",
                       {down ? kHidden : kIntermediate, (down ? kIntermediate : kHidden) / 32}, 1, 125);
      }
    }
    const WrittenModel written(model);
    ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
    EXPECT_EQ(written.checkpoint->Describe(0)->scheme.name, "mxfp8_w8a8");
    const auto expert = written.source->load(0);
    ASSERT_TRUE(expert.ok()) << expert.status().ToString();
    std::vector<float> row(static_cast<size_t>(kHidden));
    DequantizeRow(expert->gate, 3, row.data());
    EXPECT_EQ(row.back(), 0.25F);
  }
}

// config.json of MiniMax-M2 calls e4m3 by the name of torch.
TEST(ScaleForms, E4m3_HasSeveralNames) {
  TinyModel model("fp8_block");
  for (const char* name : {"e4m3", "float8_e4m3fn"}) {
    model.config["quantization_config"]["fmt"] = name;
    EXPECT_EQ(LoadEverything(model).message(), "") << name;
  }
  model.config["quantization_config"]["fmt"] = "float8_e5m2";
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace fusedmoe
