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

// GPTQModel 7 and auto-round 0.16 list what they left alone there: routers, as a rule.
TEST(GptqModel, DynamicOfGptq_NamesWhatIsLeftAlone) {
  TinyModel model("gptq");
  auto& dynamic = model.config["quantization_config"]["dynamic"];
  dynamic = {{"-:.*model\\.layers\\.0\\.mlp\\.gate.*", nlohmann::ordered_json::object()}};
  EXPECT_EQ(LoadEverything(model).message(), "");

  // Settings of their own: the first pattern that matches decides, and says what tensors must hold.
  dynamic = {{"+:.*experts\\..*", {{"bits", 4}, {"group_size", 32}}}, {".*", {{"bits", 8}}}};
  EXPECT_EQ(LoadEverything(model).message(), "");
  dynamic = {{".*experts\\..*", {{"bits", 8}}}};
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput);
  dynamic = {{".*experts\\..*", {{"bits", 9}}}};
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported);
  dynamic = {{"-:.*experts\\.[", nlohmann::ordered_json::object()}};
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput);
  dynamic = {"-:.*gate.*"};
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput);

  TinyModel plain("bf16");
  plain.config["quantization_config"] = TinyModel("gptq").config["quantization_config"];
  EXPECT_EQ(LoadEverything(plain).code(), StatusCode::kBadInput);
  plain.config["quantization_config"]["dynamic"] = {{"-:.*experts.*", nlohmann::ordered_json::object()}};
  EXPECT_EQ(LoadEverything(plain).message(), "");
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
    if (expert.ok()) {
      DequantizeRow(expert->gate, 0, row.data());
    }
    return std::pair(described.ok() ? described->scheme.name : "", row);
  };
  TinyModel deepseek("fp8_block"), gptq = deepseek;
  for (TinyModel* model : {&deepseek, &gptq}) {
    for (RawTensor& tensor : model->tensors) {
      if (tensor.name.ends_with(".weight_scale_inv")) {
        tensor = Floats(tensor.name, tensor.shape, model == &gptq ? 4.0F : 0.25F);
      }
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
      if (tensor.name.ends_with(".weight_scale_inv")) {
        tensor = Floats(tensor.name,
                        by_row ? std::vector{down ? kHidden : kIntermediate} : std::vector<int64_t>{}, 4.0F);
      }
    }
    const auto found = first(model);
    EXPECT_EQ(found.second, expected.second);
    EXPECT_EQ(found.first, by_row ? "fp8_w8a16" : "fp8_w8a16:tensor");
    for (const float bad : {0.0F, std::numeric_limits<float>::infinity(), -1.0F}) {
      RawTensor& scale = model.Find("model.layers.0.mlp.experts.1.up_proj.weight_scale_inv");
      scale = Floats(scale.name, scale.shape, bad);
      EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput) << bad;
    }
  }
  quantization["format"] = "float8_e5m2";
  EXPECT_EQ(LoadEverything(gptq).code(), StatusCode::kUnsupported);
  quantization["format"] = "float8_e4m3fn";
  quantization["weight_scale_semantics"] = "direct";
  EXPECT_EQ(LoadEverything(gptq).code(), StatusCode::kUnsupported);
}

// The rule of GPTQModel 7 for 5, 6 and 7 bits (gptq_p), with zero points as they are: the layout of each 32
// codes.
std::vector<int32_t> InPlanes(const std::vector<uint32_t>& codes, int bits) {
  std::vector<int32_t> words;
  int offset = 0;
  for (const int width : {8, 4, 2, 1}) {
    if ((bits & width) == 0) {
      continue;
    }
    const int per_word = 32 / width;
    for (int first = 0; first < 32; first += per_word) {
      uint32_t word = 0;
      for (int i = 0; i < per_word; ++i) {
        word |= (codes[static_cast<size_t>(first + i)] >> offset & ((1U << width) - 1)) << (i * width);
      }
      words.push_back(static_cast<int32_t>(word));
    }
    offset += width;
  }
  return words;
}

TEST(GptqModel, Planes_HoldTheBitsOfEachCode) {
  for (int bits = 2; bits <= 8; ++bits) {
    SCOPED_TRACE(bits);
    const auto code = [&](int64_t i) { return static_cast<uint32_t>(i * 37 + 11) & ((1U << bits) - 1); };
    const auto zero = [&](int64_t i) { return static_cast<uint32_t>(i * 5 + 1) & ((1U << bits) - 1); };
    const auto planes = [&](const auto& value) {
      std::vector<uint32_t> fields(32);
      for (size_t i = 0; i < 32; ++i) {
        fields[i] = value(static_cast<int64_t>(i));
      }
      return InPlanes(fields, bits);
    };
    TinyModel model("gptq");
    model.config["quantization_config"]["bits"] = bits;
    model.config["quantization_config"]["checkpoint_format"] = "gptq_p";
    for (RawTensor& tensor : model.tensors) {
      const bool down = tensor.name.find("down_proj") != std::string::npos;
      const int64_t rows = down ? kHidden : kIntermediate, cols = down ? kIntermediate : kHidden;
      if (tensor.name.ends_with(".qweight")) {  // every column of words alike
        std::vector<int32_t> words;
        for (int64_t block = 0; block < cols / 32; ++block) {
          for (const int32_t word : planes(code)) {
            words.insert(words.end(), static_cast<size_t>(rows), word);
          }
        }
        tensor = Ints(tensor.name, {cols * bits / 32, rows}, words);
      } else if (tensor.name.ends_with(".qzeros")) {
        std::vector<int32_t> words;
        for (int64_t block = 0; block < cols / 32 * rows / 32; ++block) {
          for (const int32_t word : planes(zero)) {
            words.push_back(word);
          }
        }
        tensor = Ints(tensor.name, {cols / 32, rows * bits / 32}, words);
      }
    }
    const WrittenModel written(model);
    ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
    const auto expert = written.source->load(0);
    ASSERT_TRUE(expert.ok()) << expert.status().ToString();
    std::vector<float> row(static_cast<size_t>(kHidden));
    for (const int64_t r : {0, 3, 31}) {
      DequantizeRow(expert->up, r, row.data());
      for (int64_t c = 0; c < kHidden; ++c) {
        const int difference = static_cast<int>(code(c % 32)) - static_cast<int>(zero(r % 32));
        ASSERT_EQ(row[static_cast<size_t>(c)], 0.5F * static_cast<float>(difference)) << r << " " << c;
      }
    }
  }
}

// Of gpt-oss, whose rows of gate and up alternate, GPTQModel 7 calls the halves gate_proj and up_proj:
// outputs were wrong.
TEST(GptqModel, HalvesOfGptOss_AreRefused) {
  TinyModel model("gptq");
  model.config["model_type"] = "gpt_oss";
  model.config["num_local_experts"] = kExperts;
  for (RawTensor& tensor : model.tensors) {
    if (tensor.name.ends_with("mlp.gate.weight")) {
      tensor.name = "model.layers.0.mlp.router.weight";
    }
  }
  model.tensors.push_back(Floats("model.layers.0.mlp.router.bias", {kExperts}, 0.0F));
  EXPECT_EQ(LoadEverything(model).message(), "");
  model.config["quantization_config"]["meta"] = {{"quantizer", {"gptqmodel:7.7.0"}}};
  const Status status = LoadEverything(model);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(status.tensor(), "model.layers.0.mlp.experts.0.up_proj.qweight");
}

// A stream of E4M3 or NVFP4 between modules: weights alone would compute something else.
TEST(GptqModel, QuantizedInputs_AreRefused) {
  TinyModel model("gptq");
  model.config["quantization_config"]["activation"] = {{"mode", "w4afp8"}};
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported);
  model.config["quantization_config"]["activation"] = nullptr;
  EXPECT_EQ(LoadEverything(model).message(), "");
}

// GPTQModel 7 has `dynamic` in every format.
TEST(GptqModel, DynamicOfGptqModel_HoldsForAwqAndFp8) {
  for (const std::string format : {"awq", "fp8_block"}) {
    SCOPED_TRACE(format);
    TinyModel model("bf16");
    auto& quantization = model.config["quantization_config"];
    quantization = TinyModel(format).config["quantization_config"];
    if (format == "fp8_block") {
      quantization["weight_scale_method"] = "block";
    }
    EXPECT_EQ(LoadEverything(model).code(), format == "awq" ? StatusCode::kBadInput : StatusCode::kOk);
    quantization["dynamic"] = {{"-:.*experts.*", nlohmann::ordered_json::object()}};
    EXPECT_EQ(LoadEverything(model).message(), "");
    quantization["dynamic"] = {{".*experts.*", 1}};
    EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput);
  }
}

}  // namespace
}  // namespace fusedmoe
