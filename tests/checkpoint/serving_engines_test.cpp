// Checkpoints made for SGLang and TensorRT-LLM, and what ModelOpt leaves to such engines: made here from what
// their loaders read, since no tool that writes them runs without a card.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "checkpoint/raw_checkpoint.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;
using Json = nlohmann::ordered_json;

/// A model with other tensors in the place of each routed projection's.
template <typename Make>
TinyModel Experts(const Json& quantization, const Make& make) {
  TinyModel model("bf16");
  if (!quantization.is_null()) {
    model.config["quantization_config"] = quantization;
  }
  std::vector<RawTensor> tensors;
  for (const RawTensor& tensor : model.tensors) {
    if (tensor.name.find(".experts.") == std::string::npos) {
      tensors.push_back(tensor);
      continue;
    }
    const std::string base = Replaced(tensor.name, ".weight", "");
    for (RawTensor& made : make(base, tensor.shape[0], tensor.shape[1])) {
      tensors.push_back(std::move(made));
    }
  }
  model.tensors = std::move(tensors);
  return model;
}

void ExpectScheme(const WrittenModel& written, const std::string& scheme) {
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  const auto described = written.checkpoint->Describe(0);
  ASSERT_TRUE(described.ok()) << described.status().ToString();
  EXPECT_EQ(described->scheme.name, scheme);
  for (int64_t expert = 0; expert < kExperts; ++expert) {
    const auto loaded = written.source->load(expert);
    EXPECT_TRUE(loaded.ok()) << loaded.status().ToString();
  }
}

/// The first numbers of a row of the first expert's gate.
std::vector<float> Decoded(const WrittenModel& written, size_t count) {
  const auto expert = written.source->load(0);
  if (!expert.ok()) {
    ADD_FAILURE() << expert.status().ToString();
    return {};
  }
  std::vector<float> values(static_cast<size_t>(expert->gate.cols));
  DequantizeRow(expert->gate, 0, values.data());
  values.resize(count);
  return values;
}

std::vector<RawTensor> Int4WithInputScale(const std::string& base, int64_t rows, int64_t cols) {
  return {Bytes(base + ".weight", "I8", {rows, cols / 2}, 1, 0x97),
          Floats(base + ".weight_scale_inv", {rows, 1}, 0.5F), Floats(base + ".input_scale", {1}, 0.25F)};
}

// Two's complement, the first of two codes in the low half: 7 and -7.
TEST(ServingEngines, W4AFp8_IsInt4WithStoredScalesOfInputs) {
  const WrittenModel written(Experts({{"quant_method", "w4afp8"}}, Int4WithInputScale));
  ExpectScheme(written, "int4_w4afp8:g128_static");
  EXPECT_EQ(Decoded(written, 2), (std::vector<float>{3.5F, -3.5F}));
  EXPECT_EQ(written.source->load(1)->down.input_tensor_scale, 0.25F);
}

// As the script of TensorRT-LLM writes it: nothing in config.json, MIXED_PRECISION beside it, and scales of
// inputs by DeepSeek's own names.
TEST(ServingEngines, W4AFp8_IsMixedPrecisionWithoutLayers) {
  TinyModel model = Experts(nullptr, Int4WithInputScale);
  for (RawTensor& tensor : model.tensors) {
    for (const auto& [name, number] :
         {std::pair{"gate_proj", "w1"}, {"down_proj", "w2"}, {"up_proj", "w3"}}) {
      tensor.name =
          Replaced(tensor.name, std::string(name) + ".input_scale", std::string(number) + ".input_scale");
    }
  }
  const TemporaryDirectory folder;
  model.WriteTo(folder);
  const Json settings = {{"quant_algo", "MIXED_PRECISION"}, {"kv_cache_quant_algo", nullptr}};
  folder.Write("hf_quant_config.json", Json{{"quantization", settings}}.dump());
  EXPECT_EQ(LoadEverything(folder.path()).message(), "");
  const auto checkpoint = Checkpoint::Open(folder.path().string());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  EXPECT_EQ((*checkpoint)->Describe(0)->scheme.name, "int4_w4afp8:g128_static");
}

TEST(ServingEngines, W4AFp8_NeedsItsScales) {
  TinyModel model = Experts({{"quant_method", "w4afp8"}}, Int4WithInputScale);
  model.Drop("model.layers.0.mlp.experts.1.up_proj.input_scale");
  ExpectRefused("no scale of inputs", model,
                {StatusCode::kBadInput, "model.layers.0.mlp.experts.1.up_proj.input_scale"});
}

TEST(ServingEngines, BlockwiseInt8_IsDeepSeeksBlocksInIntegers) {
  const auto make = [](const std::string& base, int64_t rows, int64_t cols) {
    return std::vector<RawTensor>{Bytes(base + ".weight", "I8", {rows, cols}, 1, 0xFD),
                                  Floats(base + ".weight_scale_inv", {1, 1}, 0.5F)};
  };
  TinyModel model = Experts({{"quant_method", "blockwise_int8"},
                             {"activation_scheme", "dynamic"},
                             {"weight_block_size", {128, 128}}},
                            make);
  const WrittenModel written(model);
  ExpectScheme(written, "int8_w8a8:block128");
  EXPECT_EQ(Decoded(written, 1), std::vector<float>{-1.5F});
  auto& quantization = model.config["quantization_config"];
  quantization["activation_scheme"] = "static";
  ExpectRefused("stored scales of inputs", model);
  quantization = {{"quant_method", "blockwise_int8"}};
  ExpectRefused("no size of blocks", model);
}

// What stays in BF16 is named by parts of SGLang's modules: the tensors say it too.
TEST(ServingEngines, RowsOfW8A8_HaveInputsByToken) {
  for (const auto& [method, type, scheme] :
       {std::tuple{"w8a8_int8", "I8", "int8_w8a8"}, {"w8a8_fp8", "F8_E4M3", "fp8_w8a8"}}) {
    SCOPED_TRACE(method);
    const auto make = [type = type](const std::string& base, int64_t rows, int64_t cols) {
      return std::vector<RawTensor>{Bytes(base + ".weight", type, {rows, cols}, 1, 0x38),
                                    Floats(base + ".weight_scale", {rows, 1}, 0.5F)};
    };
    const WrittenModel written(
        Experts({{"quant_method", method}, {"is_dynamic", true}, {"ignore", {"lm_head"}}}, make));
    ExpectScheme(written, scheme);
    EXPECT_EQ(Decoded(written, 1), std::vector<float>{std::string(type) == "I8" ? 28.0F : 0.5F});
    EXPECT_EQ(LoadEverything(written.folder.path()).message(), "");
  }
}

// MiMo-V2.6 and Ling: FP8 with experts in MXFP4, their scales under either name.
TEST(ServingEngines, Fp8_MayHaveExpertsOfMxfp4) {
  const Json fp8 = {{"quant_method", "fp8"},
                    {"fmt", "e4m3"},
                    {"activation_scheme", "dynamic"},
                    {"weight_block_size", {128, 128}}};
  for (const auto& [key, size, suffix, type] :
       {std::tuple{"store_dtype", "mxfp4_block_size", ".weight_scale", "U8"},
        {"routed_experts_quant_method", "routed_experts_group_size", ".weight_scale_inv", "F8_E8M0"}}) {
    SCOPED_TRACE(key);
    const auto make = [suffix = suffix, type = type](const std::string& base, int64_t rows, int64_t cols) {
      return std::vector<RawTensor>{Bytes(base + ".weight", "U8", {rows, cols / 2}, 1, 0x21),
                                    Bytes(base + suffix, type, {rows, cols / 32}, 1, 128)};
    };
    TinyModel model = Experts(fp8, make);
    auto& quantization = model.config["quantization_config"];
    quantization[key] = "mxfp4";
    quantization[size] = 32;
    const WrittenModel written(model);
    ExpectScheme(written, "mxfp4_w4a8:group128");
    EXPECT_EQ(Decoded(written, 2), (std::vector<float>{1.0F, 2.0F}));
    quantization[size] = 16;
    ExpectRefused("another size", model);
    quantization[size] = 32;
    quantization[key] = "nvfp4";
    ExpectRefused("another method", model, {StatusCode::kUnsupported});
  }
}

// Without quant_method, as a hf_quant_config.json that was copied into config.json, and under SGLang's names.
TEST(ServingEngines, ModelOptIsKnownByItsOwnWords) {
  TinyModel model("modelopt_fp8");
  auto& quantization = model.config["quantization_config"];
  quantization["quant_method"] = "modelopt_fp8";
  EXPECT_EQ(LoadEverything(model).message(), "");
  quantization.erase("quant_method");
  EXPECT_EQ(LoadEverything(model).message(), "");
  quantization = {{"producer", {{"name", "modelopt"}}}, {"quantization", {{"quant_algo", "FP8"}}}};
  EXPECT_EQ(LoadEverything(model).message(), "");
  quantization = {{"bits", 4}};
  ExpectRefused("nothing says whose it is", model);
}

// The list of modules may stand in ModelOpt's own file alone.
TEST(ServingEngines, LayersOfMixedPrecision_MayStandBesideConfigJson) {
  TinyModel model("modelopt_fp8");
  model.config["quantization_config"] = {{"quant_method", "modelopt"}, {"quant_algo", "MIXED_PRECISION"}};
  const TemporaryDirectory folder;
  model.WriteTo(folder);
  EXPECT_NE(LoadEverything(folder.path()).message().find("'quantized_layers'"), std::string::npos);
  const Json settings = {{"quant_algo", "MIXED_PRECISION"},
                         {"quantized_layers", {{"model.layers.0.mlp.experts", {{"quant_algo", "FP8"}}}}}};
  folder.Write("hf_quant_config.json", Json{{"quantization", settings}}.dump());
  EXPECT_EQ(LoadEverything(folder.path()).message(), "");
}

TEST(ServingEngines, Fp8BlockScales_AreDeepSeeks) {
  const auto make = [](const std::string& base, int64_t rows, int64_t cols) {
    return std::vector<RawTensor>{Bytes(base + ".weight", "F8_E4M3", {rows, cols}, 1, 0x38),
                                  Floats(base + ".weight_scale_inv", {1, 1}, 0.5F)};
  };
  const WrittenModel written(
      Experts({{"quant_method", "modelopt"},
               {"quant_algo", "MIXED_PRECISION"},
               {"quantized_layers", {{"model.layers.0.mlp.experts", {{"quant_algo", "FP8_BLOCK_SCALES"}}}}}},
              make));
  ExpectScheme(written, "fp8_w8a8:block128");
  EXPECT_EQ(Decoded(written, 1), std::vector<float>{0.5F});
}

// Of NVFP4 whose groups have no inputs, a file without their scales has weights alone; other files promise
// both.
TEST(ServingEngines, Nvfp4OfWeightsAlone_ShowsInItsGroups) {
  TinyModel model("modelopt_nvfp4");
  std::erase_if(model.tensors, [](const RawTensor& tensor) { return tensor.name.ends_with(".input_scale"); });
  ExpectRefused("no scales of inputs", model);
  const Json weights = {{"dynamic", false}, {"num_bits", 4}, {"type", "float"}, {"group_size", 16}};
  model.config["quantization_config"]["config_groups"] = {
      {"group_0", {{"weights", weights}, {"input_activations", nullptr}, {"targets", {"Linear"}}}}};
  ExpectScheme(WrittenModel(model), "nvfp4_w4a16");
}

// Weights are codes times weight_scale; weight_scale_2 is what engines divide by before FP8 and multiply by
// afterwards.
TEST(ServingEngines, W4A8Awq_HasItsWholeScaleInTheGroups) {
  const auto make = [](const std::string& base, int64_t rows, int64_t cols) {
    return std::vector<RawTensor>{
        Bytes(base + ".weight", "U8", {rows / 2, cols}, 1, 0x97),
        Floats(base + ".weight_scale", {rows, 1}, 0.5F), Floats(base + ".weight_scale_2", {}, 0.125F),
        Floats(base + ".input_scale", {}, 0.25F), Floats(base + ".pre_quant_scale", {cols}, 2.0F)};
  };
  const WrittenModel written(
      Experts({{"quant_method", "modelopt"}, {"quant_algo", "W4A8_AWQ"}, {"group_size", 128}}, make));
  ExpectScheme(written, "int4_w4afp8:g128_static");
  EXPECT_EQ(Decoded(written, 1), std::vector<float>{3.5F});
}

}  // namespace
}  // namespace fusedmoe
