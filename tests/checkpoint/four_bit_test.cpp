// The 4-bit matrices of bitsandbytes: what they decode to, and files that lie about them. The values of whole
// layers stand in golden/formats.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "checkpoint/raw_checkpoint.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

constexpr const char* kUp = "model.layers.0.mlp.experts.1.up_proj.weight";

std::string FloatBytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

// The plain model with one matrix [32, 64] of 4 bits in blocks of 64: codes 0x12 everywhere, a table in which
// code c is c / 2, scales that count rows, or two levels of them.
struct FourBitModel : TinyModel {
  nlohmann::ordered_json state = {
      {"quant_type", "nf4"}, {"blocksize", 64}, {"dtype", "bfloat16"}, {"shape", {kIntermediate, kHidden}}};

  explicit FourBitModel(bool nested) : TinyModel("bf16") {
    config["quantization_config"] = {{"quant_method", "bitsandbytes"}, {"load_in_4bit", true}};
    Drop(kUp);
    tensors.push_back(Bytes(kUp, "U8", {kIntermediate * kHidden / 2, 1}, 1, 0x12));
    std::vector<float> table(16), scales(kIntermediate), outer(256);
    for (size_t i = 0; i < 16; ++i) {
      table[i] = static_cast<float>(i) / 2;
    }
    for (size_t i = 0; i < outer.size(); ++i) {
      outer[i] = static_cast<float>(i) / 4;
    }
    for (size_t i = 0; i < scales.size(); ++i) {
      scales[i] = static_cast<float>(i);
    }
    Add(".quant_map", "F32", 16, FloatBytes(table));
    if (nested) {
      std::string codes;
      for (int64_t row = 0; row < kIntermediate; ++row) {
        codes.push_back(static_cast<char>(row));
      }
      Add(".absmax", "U8", kIntermediate, codes);
      Add(".nested_absmax", "F32", 2, FloatBytes({4.0F, 8.0F}));
      Add(".nested_quant_map", "F32", 256, FloatBytes(outer));
      state["nested_blocksize"] = 16;
      state["nested_dtype"] = "float32";
      state["nested_offset"] = 0.5;
    } else {
      Add(".absmax", "F32", kIntermediate, FloatBytes(scales));
    }
  }

  void Add(const std::string& suffix, const std::string& dtype, int64_t count, const std::string& bytes) {
    tensors.push_back({kUp + suffix, dtype, {count}, bytes});
  }
  /// With the tensor that describes the matrix.
  TinyModel Whole() const {
    TinyModel model = *this;
    const std::string text = state.dump();
    model.tensors.push_back({std::string(kUp) + ".quant_state.bitsandbytes__nf4",
                             "U8",
                             {static_cast<int64_t>(text.size())},
                             text});
    return model;
  }
};

TEST(FourBit, Matrices_AreListedAndReadAsWhatTheyDecodeTo) {
  for (const bool nested : {false, true}) {
    SCOPED_TRACE(nested);
    const WrittenModel written(FourBitModel(nested).Whole());
    ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
    EXPECT_EQ(written.source->scheme.name, "unquantized");
    EXPECT_EQ(written.checkpoint->producer(), "bitsandbytes");
    for (const TensorInfo& info : written.checkpoint->tensors()) {
      EXPECT_FALSE(info.name.starts_with(std::string(kUp) + ".")) << info.name;
      if (info.name == kUp) {
        EXPECT_EQ(info.shape, (Shape{kIntermediate, kHidden}));
        ExpectBytesAlone(*written.checkpoint, info.name);
      }
    }
    const auto expert = written.source->load(1);
    ASSERT_TRUE(expert.ok()) << expert.status().ToString();
    const Tensor& codes = expert->up.codes;
    ASSERT_EQ(codes.dtype(), DType::kBF16);
    for (int64_t row = 0; row < kIntermediate; ++row) {
      // The high nibble comes first: codes 1, 2, 1, 2 are 0.5, 1, 0.5, 1.
      const float scale =
          nested ? static_cast<float>(row) / 4 * (row < 16 ? 4.0F : 8.0F) + 0.5F : static_cast<float>(row);
      for (int64_t col = 0; col < kHidden; ++col) {
        const auto bits = static_cast<uint32_t>(codes.view().as<uint16_t>()[row * kHidden + col]) << 16;
        float value = 0.0F;
        std::memcpy(&value, &bits, sizeof(value));
        ASSERT_EQ(value, col % 2 == 0 ? 0.5F * scale : scale) << row << " " << col;
      }
    }
  }
}

TEST(FourBit, FilesThatContradictThemselves_AreNamed) {
  const auto expect = [](const TinyModel& model, const std::string& word) {
    const Status status = LoadEverything(model);
    EXPECT_EQ(status.code(), StatusCode::kBadInput) << word;
    EXPECT_EQ(status.tensor(), kUp) << status.ToString();
    EXPECT_NE(status.message().find(word), std::string::npos) << status.ToString();
  };
  for (const bool nested : {false, true}) {
    const FourBitModel sound(nested);
    EXPECT_EQ(LoadEverything(sound.Whole()).message(), "");
    expect(sound, "U8 [1024, 1]; BF16, F16 or F32 is needed");  // nothing says how to read it
    for (const auto& [key, value] : std::vector<std::pair<std::string, nlohmann::ordered_json>>{
             {"dtype", "float8"},
             {"dtype", nullptr},
             {"shape", {32}},
             {"shape", {0, 64}},
             {"shape", {int64_t{1} << 40, int64_t{1} << 40}},
             {"blocksize", 0},
             {"blocksize", "64"},
             {"nested_blocksize", nested ? -1 : 256},
             {"nested_offset", "x"}}) {
      FourBitModel model(nested);
      model.state[key] = value;
      expect(model.Whole(), key == "nested_blocksize" && !nested ? "nested_dtype"
                            : key == "nested_offset" && !nested  ? "nested_blocksize"
                                                                 : key);
    }
    for (const std::string part : {".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"}) {
      if (!nested && part.starts_with(".nested")) {
        continue;
      }
      TinyModel lost = sound.Whole();
      lost.Drop(kUp + part);
      expect(lost, part + "' is missing");
      TinyModel short_one = sound.Whole();
      RawTensor& tensor = short_one.Find(kUp + part);
      tensor.bytes.resize(tensor.bytes.size() / 2);
      tensor.shape[0] /= 2;
      expect(short_one, part + "' is ");
    }
    TinyModel larger = sound.Whole();
    larger.Find(kUp) = Bytes(kUp, "U8", {4096, 1}, 1, 0x12);
    expect(larger, "codes of 4096 bytes");
  }
  FourBitModel infinite(false);
  infinite.Find(kUp + std::string(".absmax")).bytes.replace(12, 4, FloatBytes({INFINITY}));
  expect(infinite.Whole(), "the scale of block 3 is inf");
  FourBitModel broken(false);
  TinyModel text = broken.Whole();
  text.Find(kUp + std::string(".quant_state.bitsandbytes__nf4")).bytes[0] = 'x';
  expect(text, "quant_state");
}

TEST(FourBit, EightBitRows_AreScaledByTheirLargest) {
  TinyModel model("ct_int8");
  model.config["quantization_config"] = {{"quant_method", "bitsandbytes"}, {"load_in_8bit", true}};
  for (RawTensor& tensor : model.tensors) {
    if (tensor.name.ends_with(".weight_scale")) {
      tensor = Floats(tensor.name.substr(0, tensor.name.size() - 13) + ".SCB", {tensor.shape[0]}, 254.0F);
    }
  }
  model.tensors.push_back(Bytes("model.layers.0.mlp.experts.1.up_proj.weight_format", "U8", {}, 1, 0));
  EXPECT_EQ(LoadEverything(model).message(), "");
  model.tensors.back().bytes[0] = 2;
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported) << "tiles of a graphics card";
  model.config["quantization_config"].erase("load_in_8bit");
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput);
}

}  // namespace
}  // namespace fusedmoe
