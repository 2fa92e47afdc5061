// Forms that tools write and no golden checkpoint shows: found by running the tools over all families.
#include <gtest/gtest.h>

#include <cstring>

#include "checkpoint/raw_checkpoint.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

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

// ModelOpt 0.47: where down is a single block of 128 x 128 its scale is [], that of gate and up [1, 1, 1, 1].
TEST(UpstreamQuirks, ScaleOfASingleBlock_MayBeAScalar) {
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

// auto-round 0.16 as llm_compressor: scales of groups may be negative, and no version is written, which
// compressed-tensors always does.
TEST(UpstreamQuirks, NegativeScalesWithoutAVersion_AreAutoRounds) {
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

// auto-round 0.16 as auto_awq: symmetric, and yet with zero points, which the kernels of AutoAWQ and vLLM
// use.
TEST(UpstreamQuirks, ZeroPointsOfAwq_AreReadWhereverTheyAre) {
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

// amd-quark 0.13 with pack_method "order": the eight outputs of a word from its low bits on, not in AWQ's
// order.
TEST(UpstreamQuirks, FourBitsOfQuark_LieInTheOrderThatItNames) {
  for (const std::string method : {"reorder", "order"}) {
    SCOPED_TRACE(method);
    TinyModel model("awq");
    for (RawTensor& tensor : model.tensors) {
      const auto words = static_cast<size_t>(tensor.bytes.size() / 4);
      if (tensor.name.ends_with(".qweight")) {
        tensor = Ints(Replaced(tensor.name, ".qweight", ".weight"), tensor.shape,
                      std::vector<int32_t>(words, 0x76543210));
      } else if (tensor.name.ends_with(".qzeros")) {
        tensor = Ints(Replaced(tensor.name, ".qzeros", ".weight_zero_point"), tensor.shape,
                      std::vector<int32_t>(words, 0x11111110));
      }
      tensor.name = Replaced(tensor.name, ".scales", ".weight_scale");
    }
    nlohmann::ordered_json weight = {{"dtype", "uint4"}, {"qscheme", "per_group"}, {"group_size", 32}};
    weight["symmetric"] = false;
    model.config["quantization_config"] = {{"quant_method", "quark"}, {"export", {{"pack_method", method}}}};
    model.config["quantization_config"]["global_quant_config"] = {{"weight", weight}};
    const WrittenModel written(model);
    ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
    const auto expert = written.source->load(0);
    ASSERT_TRUE(expert.ok()) << expert.status().ToString();
    // Output 1 is the second nibble of a word, or, in AWQ's order, the fifth.
    std::vector<float> row(static_cast<size_t>(kHidden));
    DequantizeRow(expert->gate, 1, row.data());
    EXPECT_EQ(row[0], method == "order" ? 0.0F : 1.5F) << "the code 1 or 4, less the zero point 1, times 0.5";
    model.config["quantization_config"]["export"]["pack_method"] = "sideways";
    EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported);
  }
}

// amd-quark 0.13 stores INT4 by channel as [out, in / 8], in groups as [in, out / 8]: square matrices were
// read turned.
TEST(UpstreamQuirks, FourBitsOfQuarkByChannel_AreRefused) {
  TinyModel model("awq");
  for (RawTensor& tensor : model.tensors) {
    tensor.name = Replaced(Replaced(tensor.name, ".qweight", ".weight"), ".scales", ".weight_scale");
    if (tensor.name.ends_with(".qzeros")) {
      tensor.name = Replaced(tensor.name, ".qzeros", ".weight_zero_point");
    }
  }
  nlohmann::ordered_json weight = {{"dtype", "uint4"}, {"qscheme", "per_group"}, {"group_size", 32}};
  weight["symmetric"] = false;
  auto& quantization = model.config["quantization_config"];
  quantization = {{"quant_method", "quark"}, {"export", {{"pack_method", "reorder"}}}};
  quantization["global_quant_config"] = {{"weight", weight}};
  EXPECT_EQ(LoadEverything(model).message(), "");
  quantization["global_quant_config"]["weight"]["qscheme"] = "per_channel";
  quantization["global_quant_config"]["weight"]["group_size"] = nullptr;
  for (RawTensor& tensor : model.tensors) {
    if (tensor.name.ends_with(".weight_scale")) {
      tensor = Floats(tensor.name, {tensor.shape[1]}, 0.5F);
    }
    if (tensor.name.ends_with(".weight_zero_point")) {
      tensor =
          Ints(tensor.name, {tensor.shape[1]}, std::vector<int32_t>(static_cast<size_t>(tensor.shape[1])));
    }
  }
  const Status status = LoadEverything(model);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.ToString();
  EXPECT_NE(status.message().find("uint4 per_channel"), std::string::npos) << status.ToString();
}

// The scheme BF16 of auto-round 0.16: a configuration that quantizes nothing.
TEST(UpstreamQuirks, SixteenBitsOfAutoRound_AreUntouched) {
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

// The MXFP8 preset of compressed-tensors 0.20.
TEST(UpstreamQuirks, Mxfp8OfCompressedTensors_BumpsExponentsLikeE2m1) {
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

// compressed-tensors 0.20 reads both, the string for configurations that older versions wrote.
TEST(UpstreamQuirks, BlockStructure_IsAPairOrAString) {
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

// auto-round 0.16 as auto_gptq and auto_awq: the scale takes the sign of the largest weight.
TEST(UpstreamQuirks, FormatsWrittenByAutoRound_MayHaveNegativeScales) {
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
TEST(UpstreamQuirks, ExtraConfigOfAutoRound_ConcernsTheModulesThatItNames) {
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
TEST(UpstreamQuirks, EarlyAutoRound_NamesABackend) {
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
TEST(UpstreamQuirks, MxOfAutoRound_HasTheTensorsOfCompressedTensors) {
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
TEST(UpstreamQuirks, ExtraConfigOfAutoRound_SaysWhatBecomesOfInputs) {
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

// config.json of MiniMax-M2 calls e4m3 by the name of torch.
// Its router is written for two: transformers 5 takes two of them whatever num_experts_per_tok is.
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

// FP8 with one scale a matrix: vLLM's names, transformers' (also of fused experts, one number each) and
// Mistral's.
TEST(UpstreamQuirks, StaticFp8_HasSeveralNames) {
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
TEST(UpstreamQuirks, BytesBesideFp8_AreExponents) {
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

TEST(UpstreamQuirks, E4m3_HasSeveralNames) {
  TinyModel model("fp8_block");
  for (const char* name : {"e4m3", "float8_e4m3fn"}) {
    model.config["quantization_config"]["fmt"] = name;
    EXPECT_EQ(LoadEverything(model).message(), "") << name;
  }
  model.config["quantization_config"]["fmt"] = "float8_e5m2";
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported);
}

// Kimi-K2.5 in INT4 stores the shapes of packed matrices in 32 bits.
TEST(UpstreamQuirks, ShapesOfPackedMatrices_MayHave32Bits) {
  TinyModel model("ct_int4");
  for (RawTensor& tensor : model.tensors) {
    if (tensor.name.ends_with(".weight_shape")) {
      int64_t shape[2];
      std::memcpy(shape, tensor.bytes.data(), sizeof shape);
      tensor = Ints(tensor.name, {2}, {static_cast<int32_t>(shape[0]), static_cast<int32_t>(shape[1])});
    }
  }
  EXPECT_EQ(LoadEverything(model).message(), "");
  for (RawTensor& tensor : model.tensors) {
    if (tensor.name.ends_with(".up_proj.weight_shape")) {
      tensor = Ints(tensor.name, {2}, {kIntermediate, kHidden + 1});
    }
  }
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput);
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

// Inputs that the tool rounds to integers, and those it rotates (Hadamard, SpinQuant), would silently stay as
// they are.
TEST(UpstreamQuirks, InputsThatAutoRoundChanges_AreRefused) {
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

// A symmetric GPTQ file says nothing by its zero points; where the metadata promise some, they must be there.
TEST(UpstreamQuirks, ZeroPointsThatArePromised_AreNeeded) {
  for (const std::string format : {"gptq", "awq", "ct_int4"}) {
    SCOPED_TRACE(format);
    TinyModel model(format);
    auto& quantization = model.config["quantization_config"];
    if (format == "gptq") {
      quantization["sym"] = false;
    }
    if (format == "ct_int4") {
      quantization["config_groups"]["group_0"]["weights"]["symmetric"] = false;
    }
    std::erase_if(model.tensors, [](const RawTensor& tensor) { return tensor.name.ends_with(".qzeros"); });
    EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput);
    if (format == "gptq") {
      quantization["sym"] = true;
      EXPECT_EQ(LoadEverything(model).message(), "");
    }
  }
}

// llm-compressor 0.14 on JetMoE, Quark 0.13 on experts that it was not told to take apart, auto-round 0.16 on
// Llama-4: the linear modules are quantized, the one parameter of all experts is as it was.
TEST(UpstreamQuirks, FusedExpertsWithoutScales_AreLeftAlone) {
  for (const std::string producer : {"ct_int4", "quark_mxfp4", "gptq", "awq", "autoround"}) {
    SCOPED_TRACE(producer);
    TinyModel model("bf16");
    model.config["quantization_config"] = TinyModel(producer).config["quantization_config"];
    EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput)
        << "matrices of single experts are linear modules";
    std::erase_if(model.tensors,
                  [](const RawTensor& tensor) { return tensor.name.find(".experts.") != std::string::npos; });
    const std::string experts = "model.layers.0.mlp.experts.";
    model.tensors.push_back(Bf16(experts + "gate_up_proj", {kExperts, 2 * kIntermediate, kHidden}, 0.5F));
    model.tensors.push_back(Bf16(experts + "down_proj", {kExperts, kHidden, kIntermediate}, 0.5F));
    EXPECT_EQ(LoadEverything(model).message(), "");
    const bool integers = producer == "gptq" || producer == "awq" || producer == "autoround";
    model.tensors.push_back(Bytes(experts + (integers ? "down_proj_scales" : "down_proj_weight_scale"), "U8",
                                  {kExperts, kHidden, 1}, 1, 127));
    EXPECT_NE(LoadEverything(model).code(), StatusCode::kOk) << "a scale without codes";
  }
}

// AutoAWQ 0.2.9 leaves out modules whose names hold a part that modules_to_not_convert lists ("layers.0.",
// "shared_exp"), and other writers leave them out without a list.
TEST(UpstreamQuirks, ModulesThatAwqAndGptqLeftOut_AreReadAsTheyAre) {
  for (const std::string format : {"gptq", "awq"}) {
    for (const char* part : {"layers.0.", "mlp.exp", ""}) {
      SCOPED_TRACE(format + " " + part);
      TinyModel model("bf16");
      auto& quantization = model.config["quantization_config"];
      quantization = TinyModel(format).config["quantization_config"];
      if (*part != '\0') {
        quantization["modules_to_not_convert"] = {part};
      }
      EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput) << "nothing is quantized";
      model.tensors.push_back(Bytes("model.layers.1.mlp.experts.0.up_proj.qweight", "I32", {1, 4}, 4, 7));
      EXPECT_EQ(LoadEverything(model).message(), "");
    }
    TinyModel halved(format);
    const std::string up = "model.layers.0.mlp.experts.0.up_proj";
    std::erase_if(halved.tensors, [&](const RawTensor& tensor) { return tensor.name == up + ".scales"; });
    halved.tensors.push_back(Bf16(up + ".weight", {kIntermediate, kHidden}, 0.5F));
    EXPECT_EQ(LoadEverything(halved).code(), StatusCode::kBadInput) << "codes without scales";
  }
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

// Kimi-K3 and InternS1-Pro, in the metadata of families that compute something else without these keys.
TEST(UpstreamQuirks, LatentExpertsAndOtherChoices_AreRefused) {
  for (const char* key : {"routed_expert_hidden_size", "router_n_groups"}) {
    TinyModel model("bf16");
    model.config[key] = 2;
    EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported) << key;
  }
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

// Quark 0.13 (Pack_fp6) and compressed-tensors 0.20 (pack_fp6_to_uint8) put code i of four at bit 6i of three
// bytes.
TEST(UpstreamQuirks, Fp6_IsPackedFourInThreeBytes) {
  struct Case {
    std::string producer, dtype;
    std::vector<float> values;  // of the codes 1, 2, 0x23, 0x3f
  };
  for (const Case& one : {Case{"quark_mxfp4", "fp6_e2m3", {0.125F, 0.25F, -0.375F, -7.5F}},
                          Case{"quark_mxfp4", "fp6_e3m2", {0.0625F, 0.125F, -0.1875F, -28.0F}},
                          Case{"ct_mxfp4", "fp6_e2m3", {0.125F, 0.25F, -0.375F, -7.5F}}}) {
    SCOPED_TRACE(one.producer + " " + one.dtype);
    TinyModel model(one.producer);
    auto& quantization = model.config["quantization_config"];
    if (one.producer == "ct_mxfp4") {
      quantization["format"] = "mxfp6-pack-quantized";
      quantization["config_groups"]["group_0"]["weights"]["num_bits"] = 6;
    } else {
      quantization["global_quant_config"]["weight"]["dtype"] = one.dtype;
    }
    for (RawTensor& tensor : model.tensors) {
      const bool codes = tensor.dtype == "U8" && !tensor.name.ends_with("_scale");
      if (!codes) {
        continue;
      }
      tensor.shape[1] = tensor.shape[1] / 2 * 3;  // from 4 to 6 bits
      tensor.bytes.clear();
      for (int64_t i = 0; i < tensor.shape[0] * tensor.shape[1]; i += 3) {
        tensor.bytes += {static_cast<char>(0x81), static_cast<char>(0x30), static_cast<char>(0xfe)};
      }
    }
    const WrittenModel written(model);
    const auto& source = written.source;
    ASSERT_TRUE(source.ok()) << source.status().ToString();
    const auto expert = source->load(1);
    ASSERT_TRUE(expert.ok()) << expert.status().ToString();
    for (const CanonicalMatrix* matrix : {&expert->gate, &expert->up, &expert->down}) {
      const auto decoded = DequantizeMatrix(*matrix);
      ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
      for (int64_t i = 0; i < decoded->shape().count(); ++i) {
        ASSERT_EQ(decoded->view().as<float>()[i], one.values[static_cast<size_t>(i % 4)]) << i;
      }
    }
  }
}

// Recipes that give down projections more bits.
TinyModel WithEightBitsDown(const std::string& format) {
  TinyModel mixed(format);
  nlohmann::ordered_json& config = mixed.config["quantization_config"];
  if (format == "gptq") {
    config["dynamic"] = {{"+:.*down_proj", {{"bits", 8}}}};
  } else {
    config["config_groups"]["group_1"] = config["config_groups"]["group_0"];
    config["config_groups"]["group_1"]["targets"] = {"re:.*down_proj"};
    config["config_groups"]["group_1"]["weights"]["num_bits"] = 8;
  }
  for (RawTensor& tensor : mixed.tensors) {
    if (tensor.name.ends_with("down_proj.weight_packed")) {
      tensor = Bytes(tensor.name, "I32", {kHidden, kIntermediate / 4}, 4, 0x97);
    } else if (tensor.name.ends_with("down_proj.qweight")) {
      tensor = Bytes(tensor.name, "I32", {kIntermediate / 4, kHidden}, 4, 0x97);
    } else if (tensor.name.ends_with("down_proj.qzeros")) {
      tensor = Bytes(tensor.name, "I32", {kIntermediate / 32, kHidden / 4}, 4, 0x77);
    }
  }
  return mixed;
}

TEST(MixedBits, FourBesideEight_KeepTheirValues) {
  for (const std::string format : {"ct_int4", "gptq"}) {
    SCOPED_TRACE(format);
    const WrittenModel plain((TinyModel(format))), written(WithEightBitsDown(format));
    ASSERT_TRUE(plain.source.ok() && written.source.ok()) << written.source.status().ToString();
    EXPECT_EQ(written.source->scheme.name, "int8_w8a16:g32");
    const auto before = plain.source->load(1), after = written.source->load(1);
    ASSERT_TRUE(before.ok() && after.ok()) << after.status().ToString();
    EXPECT_EQ(after->gate.codes.dtype(), DType::kU8);
    for (const auto member : {&CanonicalExpert::gate, &CanonicalExpert::up}) {
      const auto narrow = DequantizeMatrix((*before).*member), wide = DequantizeMatrix((*after).*member);
      ASSERT_TRUE(narrow.ok() && wide.ok());
      const auto bytes = static_cast<size_t>(narrow->view().total_bytes());
      EXPECT_EQ(std::memcmp(narrow->view().data(), wide->view().data(), bytes), 0);
    }
    const auto down = DequantizeMatrix(after->down);
    ASSERT_TRUE(down.ok());
    const int zero = format == "gptq" ? 0x77 + 1 : 128;
    EXPECT_EQ(down->view().as<float>()[0], static_cast<float>(0x97 - zero) * 0.5F);
  }
}

}  // namespace
}  // namespace fusedmoe
