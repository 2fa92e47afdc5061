// Forms of auto-round that no golden checkpoint shows.
#include <gtest/gtest.h>

#include "checkpoint/raw_checkpoint.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

// auto-round 0.16 as llm_compressor: scales of groups may be negative, and no version is written, which
// compressed-tensors always does.
TEST(AutoRound, NegativeScalesWithoutAVersion_AreAutoRounds) {
  TinyModel model("ct_int4");
  for (RawTensor& tensor : model.tensors) {
    if (tensor.name.ends_with(".weight_scale")) {
      tensor = Bf16(tensor.name, tensor.shape, -0.5F);
    }
  }
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput);
  model.config["quantization_config"].erase("version");
  const WrittenModel written(model);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  const auto expert = written.source->load(0);
  ASSERT_TRUE(expert.ok()) << expert.status().ToString();
  const auto up = DequantizeMatrix(expert->up);
  ASSERT_TRUE(up.ok());
  EXPECT_EQ(up->view().as<float>()[0], 0.5F) << "code 7, of the middle 8, times -0.5";
}

// Its INT8 by rows does the same with the code -128.
TEST(AutoRound, NegativeScalesOfRows_AreAutoRoundsAlone) {
  TinyModel model("ct_int8");
  const std::string first = "model.layers.0.mlp.experts.0.gate_proj.weight_scale";
  model.Find(first) = Bf16(first, {kIntermediate, 1}, -0.5F);
  ExpectRefused("a sign that compressed-tensors does not write", model, {StatusCode::kBadInput, first});
  model.config["quantization_config"].erase("version");
  const WrittenModel written(model);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  const auto expert = written.source->load(0);
  ASSERT_TRUE(expert.ok()) << expert.status().ToString();
  const auto gate = DequantizeMatrix(expert->gate);
  ASSERT_TRUE(gate.ok());
  EXPECT_EQ(gate->view().as<float>()[0], -1.5F) << "code 3 times -0.5";
}

// Its to_standard_regex makes ".*experts.*" of the name "experts": no character there is one of patterns
// alone but the stars. Names come before patterns, wherever they stand.
TEST(AutoRound, PatternsOfStarsAndDots_AreRegularExpressions) {
  TinyModel model("autoround");
  auto& quantization = model.config["quantization_config"];
  const auto as_stored = quantization["bits"];
  quantization["bits"] = 8;
  for (const char* pattern : {".*experts.*", ".*experts.[0-9]+.*", "expert[s]", "experts.+"}) {
    quantization["extra_config"] = {{pattern, {{"bits", as_stored}}}};
    EXPECT_TRUE(LoadEverything(model).ok()) << pattern << ": " << LoadEverything(model).ToString();
  }
  quantization["extra_config"] = {{".*", {{"bits", 8}}},
                                  {"model.layers.0.mlp.experts", {{"bits", as_stored}}}};
  EXPECT_TRUE(LoadEverything(model).ok()) << LoadEverything(model).ToString();
}

// auto-round 0.16 as auto_awq: symmetric, and yet with zero points, which the kernels of AutoAWQ and vLLM
// use.
TEST(AutoRound, ZeroPointsOfAwq_AreReadWhereverTheyAre) {
  TinyModel model("awq");
  std::vector<std::string> zeros;
  for (const bool zero_point : {true, false}) {
    model.config["quantization_config"]["zero_point"] = zero_point;
    const WrittenModel written(model);
    ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
    const auto expert = written.source->load(0);
    ASSERT_TRUE(expert.ok()) << expert.status().ToString();
    ASSERT_FALSE(expert->gate.zero_point.empty()) << zero_point;
    const TensorView& view = expert->gate.zero_point.view();
    zeros.emplace_back(reinterpret_cast<const char*>(view.data()), static_cast<size_t>(view.total_bytes()));
  }
  EXPECT_EQ(zeros[0], zeros[1]);
  std::erase_if(model.tensors, [](const RawTensor& tensor) { return tensor.name.ends_with(".qzeros"); });
  const WrittenModel without(model);
  ASSERT_TRUE(without.source.ok()) << without.source.status().ToString();
  const auto expert = without.source->load(0);
  ASSERT_TRUE(expert.ok()) << expert.status().ToString();
  EXPECT_TRUE(expert->gate.zero_point.empty());
}

// The scheme BF16 of auto-round 0.16: a configuration that quantizes nothing.
TEST(AutoRound, SixteenBitsOfAutoRound_AreUntouched) {
  TinyModel model("bf16");
  model.config["quantization_config"] = {{"quant_method", "auto-round"},
                                         {"bits", 16},
                                         {"data_type", "fp"},
                                         {"group_size", 128},
                                         {"sym", true},
                                         {"packing_format", "auto_round:auto_gptq"}};
  const WrittenModel written(model);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  EXPECT_EQ(written.source->scheme.name, "unquantized");
}

// auto-round 0.16 as auto_gptq and auto_awq: the scale takes the sign of the largest weight.
TEST(AutoRound, FormatsWrittenByAutoRound_MayHaveNegativeScales) {
  for (const std::string format : {"gptq", "awq"}) {
    SCOPED_TRACE(format);
    TinyModel model(format);
    RawTensor& scales = model.Find("model.layers.0.mlp.experts.1.up_proj.scales");
    scales = Bf16(scales.name, scales.shape, -0.5F);
    EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput);
    model.config["quantization_config"]["autoround_version"] = "0.16.1";
    EXPECT_EQ(LoadEverything(model).message(), "");
  }
}

// Shared experts of DeepSeek stay in 16 bits as a rule; only a module that an entry names is concerned.
TEST(AutoRound, ExtraConfigOfAutoRound_ConcernsTheModulesThatItNames) {
  TinyModel model("autoround");
  auto& extra = model.config["quantization_config"]["extra_config"];
  const nlohmann::ordered_json untouched = {{"bits", 16}, {"data_type", "float"}}, wider = {{"bits", 8}};
  for (const std::string key : {"model.layers.0.mlp.shared_experts.up_proj", ".*mlp\\.shared_experts.*",
                                ".*layers\\.7\\.mlp\\.experts.*"}) {
    SCOPED_TRACE(key);
    extra = {{key, untouched}};
    EXPECT_EQ(LoadEverything(model).message(), "");
    extra = {{key, wider}};
    EXPECT_EQ(LoadEverything(model).message(), "");
  }
  for (const std::string key :
       {"model.layers.0.mlp.experts.1.up_proj", ".*\\.mlp\\.experts.*", "mlp\\.experts\\.1\\.up_proj$"}) {
    SCOPED_TRACE(key);
    extra = {{key, wider}};
    EXPECT_NE(LoadEverything(model).code(), StatusCode::kOk);
    extra = {{key, untouched}};
    EXPECT_NE(LoadEverything(model).code(), StatusCode::kOk) << "the tensors are quantized";
  }
  extra = {{".*experts\\.[", untouched}};
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput);
}

// Early auto-round put its address in front of its name, and what was to multiply in place of the packing.
TEST(AutoRound, EarlyAutoRound_NamesABackend) {
  TinyModel model("autoround");
  auto& quantization = model.config["quantization_config"];
  quantization["quant_method"] = "intel/auto-round";
  EXPECT_EQ(LoadEverything(model).message(), "");
  quantization.erase("packing_format");
  quantization["backend"] = "auto_round:gptq:exllamav2";
  EXPECT_EQ(LoadEverything(model).message(), "");
  quantization["backend"] = "auto_round:exllamav2";  // which does not say how zero points are stored
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported);
}

// auto-round 0.16, scheme MXFP4 in its own format: the tensors of compressed-tensors, exponents by floor.
TEST(AutoRound, MxOfAutoRound_HasTheTensorsOfCompressedTensors) {
  TinyModel model("ct_mxfp4");
  auto& quantization = model.config["quantization_config"];
  quantization = {{"quant_method", "auto-round"},
                  {"packing_format", "auto_round:llm_compressor"},
                  {"data_type", "mx_fp"},
                  {"bits", 4},
                  {"group_size", 32},
                  {"act_bits", 4},
                  {"act_data_type", "mx_fp"},
                  {"act_group_size", 32},
                  {"act_dynamic", true}};
  quantization["extra_config"] = {{".*model\\.layers\\.0\\.mlp\\.gate.*", {{"bits", 16}, {"act_bits", 16}}}};
  for (const bool ceil : {false, true}) {
    quantization["act_data_type"] = ceil ? "mx_fp_rceil" : "mx_fp";
    const WrittenModel written(model);
    const auto& source = written.source;
    ASSERT_TRUE(source.ok()) << source.status().ToString();
    EXPECT_EQ(source->scheme.name, "mxfp4_w4a4");
    EXPECT_EQ(source->scheme.activation.rule.mx_scale, ceil ? MxScaleRule::kCeil : MxScaleRule::kFloor);
    EXPECT_TRUE(source->load(0).ok());
  }
  quantization["act_bits"] = 16;
  EXPECT_EQ(LoadEverything(model).message(), "");
  quantization["bits"] = 8;
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput) << "no .weight of e4m3 there";
  quantization["group_size"] = 64;
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported);
  for (const char* type : {"nv_fp", "nvfp4_v2", "mx_int"}) {
    quantization["data_type"] = type;
    EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported) << type;
  }
}

// What an entry says of inputs counts too: the experts' alone stay in 16 bits.
TEST(AutoRound, ExtraConfigOfAutoRound_SaysWhatBecomesOfInputs) {
  TinyModel model("ct_mxfp4");
  auto& quantization = model.config["quantization_config"];
  quantization = {{"quant_method", "auto-round"},
                  {"data_type", "mx_fp"},
                  {"bits", 4},
                  {"group_size", 32},
                  {"act_bits", 4},
                  {"act_data_type", "mx_fp"}};
  quantization["extra_config"] = {{".*mlp\\.experts.*", {{"bits", 4}, {"act_bits", 16}}}};
  const WrittenModel weight_only(model);
  ASSERT_TRUE(weight_only.source.ok()) << weight_only.source.status().ToString();
  EXPECT_EQ(weight_only.source->scheme.name, "mxfp4_w4a16");
  quantization["data_type"] = "int";
  quantization["act_bits"] = 16;
  quantization["extra_config"] = {
      {".*mlp\\.experts.*", {{"data_type", "mx_fp"}, {"act_bits", 4}, {"group_size", nullptr}}}};
  const WrittenModel own_type(model);
  ASSERT_TRUE(own_type.source.ok()) << own_type.source.status().ToString();
  EXPECT_EQ(own_type.source->scheme.name, "mxfp4_w4a4");
}

// Inputs that the tool rounds to integers, and those it rotates (Hadamard, SpinQuant), would silently stay as
// they are.
TEST(AutoRound, InputsThatAutoRoundChanges_AreRefused) {
  TinyModel model("autoround");
  auto& quantization = model.config["quantization_config"];
  quantization["act_bits"] = 16;
  quantization["rotation_config"] = nullptr;
  EXPECT_EQ(LoadEverything(model).message(), "");
  quantization["act_bits"] = 4;
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported);
  quantization["act_bits"] = 16;
  for (const char* key : {"rotation_config", "spinquant_config"}) {
    quantization[key] = {{"hadamard_type", "hadamard"}};
    EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported) << key;
    quantization.erase(key);
  }
}

}  // namespace
}  // namespace fusedmoe
