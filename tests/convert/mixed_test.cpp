// Checkpoints that mix schemes, and inputs that are smoothed (AWQ).
#include <functional>

#include "convert/convert_files.hpp"

namespace fusedmoe::convert_test {
namespace {

class ConvertMixed : public ConvertTest {
 protected:
  void Rewrite(const std::string& directory,
               const std::function<void(std::vector<NamedTensor>&)>& change) const {
    const std::string path = directory + "/model.safetensors";
    auto file = ReadSafetensors(path);
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    change(file->tensors);
    const Status status = WriteSafetensors(path, file->tensors, file->metadata);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  // Layer 0 of the first and layer 1 of the second, both of compressed-tensors and of two layers: a group
  // each. An empty scheme leaves the layer unquantized.
  std::string Mix(const std::string& name, const std::vector<std::string>& schemes) const {
    const std::string target = At(name);
    Json config, groups = Json::object();
    std::vector<NamedTensor> tensors;
    for (size_t layer = 0; layer < schemes.size(); ++layer) {
      const bool plain = schemes[layer] == "unquantized";
      const std::string sample = Sample(name + std::to_string(layer), schemes[layer], "qwen3_moe",
                                        static_cast<int64_t>(schemes.size()));
      const std::string own =
          plain ? sample : Lossless(sample, "compressed-tensors", name + std::to_string(layer) + "ct");
      Json own_config = ReadJson(own + "/config.json");
      if (!plain) {
        Json group = own_config["quantization_config"]["config_groups"]["group_0"];
        group["targets"] = {"re:.*layers\\." + std::to_string(layer) + "\\.mlp\\.experts\\..*"};
        groups["group_" + std::to_string(layer)] = group;
        config = own_config;
      }
      const auto file = ReadSafetensors(own + "/model.safetensors");
      EXPECT_TRUE(file.ok());
      for (const NamedTensor& tensor : file->tensors) {
        if (tensor.name.find("layers." + std::to_string(layer) + ".") != std::string::npos) {
          tensors.push_back(tensor);
        }
      }
    }
    config["quantization_config"]["config_groups"] = groups;
    config["quantization_config"]["format"] = "mixed-precision";
    fs::create_directories(target);
    WriteJson(target + "/config.json", config);
    EXPECT_TRUE(WriteSafetensors(target + "/model.safetensors", tensors).ok());
    return target;
  }

  static std::vector<std::string> Schemes(const std::string& path) {
    const auto checkpoint = Checkpoint::Open(path);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
    std::vector<std::string> schemes;
    for (const int64_t layer : (*checkpoint)->moe_layers()) {
      schemes.push_back((*checkpoint)->Describe(layer)->scheme.name);
    }
    return schemes;
  }
};

TEST_F(ConvertMixed, EachLayer_KeepsItsOwnScheme) {
  const std::string mixed = Mix("mixed", {"nvfp4_w4a16", "fp8_w8a8:channel"});
  const std::vector<std::string> schemes = {"nvfp4_w4a16", "fp8_w8a8"};
  ASSERT_EQ(Schemes(mixed), schemes);
  const std::vector<float> values = Values(mixed);
  const std::string modelopt = Lossless(mixed, "modelopt", "modelopt");
  EXPECT_EQ(Schemes(modelopt), schemes);
  const Json config = ReadJson(modelopt + "/config.json")["quantization_config"];
  EXPECT_EQ(config["quant_algo"], "MIXED_PRECISION");
  EXPECT_EQ(config["quantized_layers"]["model.layers.0.mlp.experts.3.down_proj"]["quant_algo"],
            "W4A16_NVFP4");
  EXPECT_EQ(config["quantized_layers"]["model.layers.1.mlp.experts.3.down_proj"]["quant_algo"],
            "FP8_PER_CHANNEL_PER_TOKEN");
  EXPECT_EQ(config["quantized_layers"].size(), 2U * 4 * 3);
  EXPECT_EQ(ReadJson(modelopt + "/hf_quant_config.json")["quantization"]["quantized_layers"],
            config["quantized_layers"]);
  const std::string back = Lossless(modelopt, "compressed-tensors", "back");
  EXPECT_EQ(Schemes(back), schemes);
  const Json groups = ReadJson(back + "/config.json")["quantization_config"]["config_groups"];
  EXPECT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups["group_0"]["targets"], Json({"re:model\\.layers\\.0\\.mlp\\.experts\\..*"}));
  EXPECT_EQ(groups["group_1"]["format"], "float-quantized");
  for (const std::string& written : {modelopt, back}) {
    const std::vector<float> found = Values(written);
    ASSERT_EQ(found.size(), values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      // The reciprocal of a tensor scale rounds once.
      ASSERT_LE(std::fabs(found[i] - values[i]), std::fabs(values[i]) * 0x1p-22F) << i;
    }
  }
}

TEST_F(ConvertMixed, Integers_KeepTypesOfScalesAndZeroPointsByGroup) {
  const std::string mixed = Mix("mixed", {"int4_w4a16:g32", "int8_w8a16:channel"});
  const std::string again = Lossless(mixed, "compressed-tensors", "again");
  EXPECT_EQ(Schemes(again), (std::vector<std::string>{"int4_w4a16:g32", "int8_w8a16"}));
  EXPECT_EQ(Values(again), Values(mixed));
  const std::string gguf = Lossless(mixed, "gguf", "both.gguf");
  EXPECT_EQ(Schemes(gguf), (std::vector<std::string>{"int4_w4a16:g32", "int8_w8a16:g32"}));
  EXPECT_EQ(Values(gguf), Values(mixed));
}

TEST_F(ConvertMixed, UnquantizedLayers_StayAsTheyAre) {
  const std::string mixed = Mix("mixed", {"unquantized", "mxfp4_w4a16"});
  ASSERT_EQ(Schemes(mixed), (std::vector<std::string>{"unquantized", "mxfp4_w4a16"}));
  const std::string again = Lossless(mixed, "compressed-tensors", "again");
  EXPECT_EQ(Schemes(again), Schemes(mixed));
  EXPECT_EQ(Values(again), Values(mixed));
  const auto modelopt = To(mixed, "modelopt", "modelopt", "nvfp4_w4a16");
  ASSERT_TRUE(modelopt.ok()) << modelopt.status().ToString();
  EXPECT_EQ(Schemes(At("modelopt")), (std::vector<std::string>{"unquantized", "nvfp4_w4a16"}));
  EXPECT_EQ(Values(At("modelopt")), Values(mixed));
}

TEST_F(ConvertMixed, FormatsOfOneScheme_RefuseSeveral) {
  const std::string mixed = Mix("mixed", {"fp8_w8a8:block128", "fp8_w8a8:channel"});
  const auto report = To(mixed, "deepseek", "out");
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(report.status().ToString().find("model.layers.1"), std::string::npos)
      << report.status().ToString();
  EXPECT_FALSE(fs::exists(At("out")));
}

class ConvertSmoothed : public ConvertMixed {
 protected:
  // NVFP4 with a factor for each input: `factor(column)`.
  std::string Smoothed(const std::string& name, const std::string& scheme,
                       const std::function<float(int64_t)>& factor) const {
    const std::string directory = Sample(name, scheme);
    if (scheme == "nvfp4_w4a4") {
      for (const char* file : {"/config.json", "/hf_quant_config.json"}) {
        Json json = ReadJson(directory + file);
        Json& spec = json.contains("quantization") ? json["quantization"] : json["quantization_config"];
        spec["quant_algo"] = "NVFP4_AWQ";
        WriteJson(directory + file, json);
      }
    }
    Rewrite(directory, [&](std::vector<NamedTensor>& tensors) {
      std::vector<NamedTensor> more;
      for (const NamedTensor& tensor : tensors) {
        if (!tensor.name.ends_with("weight_scale_2")) {
          continue;
        }
        auto made = Tensor::Allocate(DType::kF32, {128});
        ASSERT_TRUE(made.ok());
        for (int64_t col = 0; col < 128; ++col) {
          made->mutable_view().as<float>()[col] = factor(col);
        }
        more.push_back({tensor.name.substr(0, tensor.name.rfind('.')) + ".pre_quant_scale", *made});
      }
      tensors.insert(tensors.end(), more.begin(), more.end());
    });
    return directory;
  }
};

TEST_F(ConvertSmoothed, Factors_StayWithModelOpt) {
  const std::string source = Smoothed("source", "nvfp4_w4a4", [](int64_t col) { return 0.5F + 0.01F * col; });
  const std::string again = Lossless(source, "modelopt", "again");
  EXPECT_EQ(ReadJson(again + "/hf_quant_config.json")["quantization"]["quant_algo"], "NVFP4_AWQ");
  EXPECT_EQ(test::ReadFile(again + "/model.safetensors"), test::ReadFile(source + "/model.safetensors"));
}

TEST_F(ConvertSmoothed, Factors_ArePartOfPlainWeights) {
  const auto factor = [](int64_t col) { return 0.5F + 0.01F * static_cast<float>(col); };
  const std::vector<float> smoothed = Values(Smoothed("source", "nvfp4_w4a4", factor));
  const std::vector<float> own = Values(Sample("bare", "nvfp4_w4a4"));
  ASSERT_EQ(smoothed.size(), own.size());
  for (size_t i = 0; i < own.size(); ++i) {
    ASSERT_EQ(smoothed[i], own[i] * factor(static_cast<int64_t>(i % 128))) << i;
  }
}

TEST_F(ConvertSmoothed, OnePowerOfTwo_GoesIntoTheTensorScales) {
  const std::string source = Smoothed("source", "nvfp4_w4a4", [](int64_t) { return 0.25F; });
  const std::string target = Lossless(source, "compressed-tensors", "ct");
  const auto before = ReadSafetensors(source + "/model.safetensors");
  const auto after = ReadSafetensors(target + "/model.safetensors");
  ASSERT_TRUE(before.ok() && after.ok());
  const std::string module = "model.layers.0.mlp.experts.1.up_proj.";
  EXPECT_EQ(after->Find(module + "pre_quant_scale"), nullptr);
  const auto number = [](const SafetensorsFile& file, const std::string& name) {
    return *file.Find(name)->view().as<float>();
  };
  EXPECT_NEAR(1.0F / number(*after, module + "input_global_scale") / number(*before, module + "input_scale"),
              4.0, 1e-6);
  EXPECT_NEAR(
      1.0F / number(*after, module + "weight_global_scale") / number(*before, module + "weight_scale_2"),
      0.25, 1e-7);
}

TEST_F(ConvertSmoothed, OtherFactors_AreRefusedOrRoundedWithLeave) {
  const auto factor = [](int64_t col) { return 0.5F + 0.01F * static_cast<float>(col); };
  const std::string both = Smoothed("both", "nvfp4_w4a4", factor);
  for (const bool lossy : {false, true}) {
    const auto report = To(both, "compressed-tensors", "out", "", lossy);
    ASSERT_FALSE(report.ok()) << "its input scale is of the smoothed input";
    EXPECT_NE(report.status().ToString().find("model.layers.0.mlp.experts.0.up_proj"), std::string::npos)
        << report.status().ToString();
  }
  const std::string weights = Smoothed("weights", "nvfp4_w4a16", factor);
  EXPECT_FALSE(To(weights, "compressed-tensors", "out").ok());
  const auto report = To(weights, "compressed-tensors", "out", "", true);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_FALSE(report->lossless);
  EXPECT_GT(report->rel_l2, 0.01);
  EXPECT_LT(report->rel_l2, 0.12);
}

}  // namespace
}  // namespace fusedmoe::convert_test
