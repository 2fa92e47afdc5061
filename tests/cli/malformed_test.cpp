#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/checkpoint_fixture.hpp"
#include "cli/process.hpp"

namespace fusedmoe::test {
namespace {

constexpr const char* kScale = "model.layers.0.mlp.experts.3.up_proj.weight_scale";
constexpr const char* kTensorScale = "model.layers.0.mlp.experts.3.up_proj.weight_scale_2";
constexpr const char* kWeight = "model.layers.0.mlp.experts.3.up_proj.weight";

NamedTensor& Find(std::vector<NamedTensor>& tensors, const std::string& name) {
  const auto found = std::find_if(tensors.begin(), tensors.end(),
                                  [&name](const NamedTensor& tensor) { return tensor.name == name; });
  EXPECT_NE(found, tensors.end()) << name;
  return *found;
}

// A copy of the tensor with its first bytes replaced.
void Patch(std::vector<NamedTensor>& tensors, const std::string& name, const void* bytes, size_t count) {
  NamedTensor& entry = Find(tensors, name);
  Tensor copy = *Tensor::Allocate(entry.tensor.dtype(), entry.tensor.shape());
  std::byte* data = copy.mutable_view().data();
  std::memcpy(data, entry.tensor.view().data(), static_cast<size_t>(entry.tensor.view().total_bytes()));
  std::memcpy(data, bytes, count);
  entry.tensor = copy;
}

void ExpectRefused(const SampleCheckpoint& checkpoint, const std::string& file, const std::string& tensor) {
  const ProcessResult result = checkpoint.Run({"--json"});
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_NE(result.err.find(file), std::string::npos)
      << "the line does not name " << file << ": " << result.err;
  EXPECT_NE(result.err.find(tensor), std::string::npos)
      << "the line does not name " << tensor << ": " << result.err;
  EXPECT_EQ(result.Json().at("error").at("code"), "bad_input");
  EXPECT_FALSE(std::filesystem::exists(checkpoint.output()));
}

void RefusedAfter(const std::function<void(std::vector<NamedTensor>&)>& change, const std::string& tensor) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
  checkpoint.Rewrite("model.safetensors", change);
  ExpectRefused(checkpoint, "model.safetensors", tensor);
}

// A file of the folder in place of the folder: the message says what is wanted.
TEST(Malformed, ConfigurationInPlaceOfTheFolder_IsAnswered) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
  for (const char* command : {"run", "verify"}) {
    std::vector<std::string> words = {command, checkpoint.path() + "/config.json", "--layer", "0"};
    if (words[0] == "run") {
      words.insert(words.end(), {"--input", checkpoint.input(), "--output", checkpoint.output()});
    }
    const ProcessResult result = RunCommand(words);
    EXPECT_EQ(result.exit_code, 3) << result.err;
    EXPECT_NE(result.err.find("give the folder that holds config.json"), std::string::npos) << result.err;
  }
}

TEST(Malformed, TruncatedFile_IsRefused) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
  const std::string path = checkpoint.path() + "/model.safetensors";
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 2);
  ExpectRefused(checkpoint, "model.safetensors", "");
}

TEST(Malformed, MissingBlockScale_IsRefused) {
  RefusedAfter(
      [](auto& tensors) { tensors.erase(tensors.begin() + (&Find(tensors, kScale) - tensors.data())); },
      kScale);
}

TEST(Malformed, MissingTensorScale_IsRefused) {
  RefusedAfter(
      [](auto& tensors) { tensors.erase(tensors.begin() + (&Find(tensors, kTensorScale) - tensors.data())); },
      kTensorScale);
}

TEST(Malformed, NanBlockScale_IsRefused) {
  RefusedAfter([](auto& tensors) { Patch(tensors, kScale, "\x7f", 1); }, kScale);
}

TEST(Malformed, NegativeBlockScale_IsRefused) {
  RefusedAfter([](auto& tensors) { Patch(tensors, kScale, "\xb0", 1); }, kScale);
}

// Of this command's own integers: auto-round's alone may be negative, which are known by what they lack.
TEST(Malformed, NegativeScaleOfIntegers_IsRefused) {
  const SampleCheckpoint checkpoint("qwen3_moe", "int4_w4a16:g32");
  checkpoint.Rewrite("model.safetensors", [](auto& tensors) { Patch(tensors, kScale, "\x80\xbf", 2); });
  ExpectRefused(checkpoint, "model.safetensors", kScale);
}

TEST(Malformed, ZeroNegativeOrNanTensorScale_IsRefused) {
  for (const float value : {0.0F, -1.0F, std::numeric_limits<float>::quiet_NaN()}) {
    RefusedAfter([value](auto& tensors) { Patch(tensors, kTensorScale, &value, sizeof value); },
                 kTensorScale);
  }
}

TEST(Malformed, WrongDtypeForRole_IsRefused) {
  RefusedAfter(
      [](auto& tensors) {
        Find(tensors, kScale).tensor = *Tensor::Allocate(DType::kI32, {128, 8});
      },
      kScale);
  RefusedAfter(
      [](auto& tensors) {
        Find(tensors, kWeight).tensor = *Tensor::Allocate(DType::kF32, {128, 64});
      },
      kWeight);
}

TEST(Malformed, WrongShape_IsRefused) {
  RefusedAfter(
      [](auto& tensors) {
        Find(tensors, kScale).tensor = *Tensor::Allocate(DType::kF8E4M3, {128, 4});
      },
      kScale);
}

// Replaces text in the header of a safetensors file by text of the same length.
void EditHeader(const std::string& path, const std::function<void(std::string&)>& edit) {
  std::string contents = ReadFile(path);
  int64_t size = 0;
  std::memcpy(&size, contents.data(), sizeof size);
  std::string header = contents.substr(8, static_cast<size_t>(size));
  const size_t before = header.size();
  edit(header);
  ASSERT_LE(header.size(), before);
  header.resize(before, ' ');
  contents.replace(8, before, header);
  WriteFile(path, contents);
}

TEST(Malformed, OverlappingOffsets_AreRefused) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
  EditHeader(checkpoint.path() + "/model.safetensors", [](std::string& header) {
    nlohmann::ordered_json json = nlohmann::ordered_json::parse(header);
    json[kScale]["data_offsets"] = json["model.layers.0.mlp.experts.2.up_proj.weight_scale"]["data_offsets"];
    header = json.dump();
  });
  ExpectRefused(checkpoint, "model.safetensors", "weight_scale");
}

TEST(Malformed, DuplicateKey_IsRefused) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
  const std::string twin = "model.layers.0.mlp.experts.2.up_proj.weight_scale";
  EditHeader(checkpoint.path() + "/model.safetensors", [&twin](std::string& header) {
    const size_t at = header.find("\"" + std::string(kScale) + "\"");
    ASSERT_NE(at, std::string::npos);
    header.replace(at + 1, twin.size(), twin);
  });
  ExpectRefused(checkpoint, "model.safetensors", twin);
}

TEST(Malformed, IndexThatLeavesTheDirectory_IsRefused) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4", {"--max-shard-bytes", "200000"});
  const std::string path = checkpoint.path() + "/model.safetensors.index.json";
  nlohmann::json index = nlohmann::json::parse(ReadFile(path));
  index["weight_map"][kScale] = "../model-00001-of-00002.safetensors";
  WriteFile(path, index.dump());
  ExpectRefused(checkpoint, "model.safetensors.index.json", "../");
}

TEST(Malformed, IndexWithoutTensors_IsRefused) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4", {"--max-shard-bytes", "200000"});
  WriteFile(checkpoint.path() + "/model.safetensors.index.json", R"({"weight_map": {}})");
  ExpectRefused(checkpoint, checkpoint.path(), "no layer of the checkpoint has experts");
}

TEST(Malformed, SizesInConfig_AreRefused) {
  const std::vector<std::string> sizes = {"-128", "0", "1e999", "1e30", "NaN", "\"128\"", "128.5", "[128]"};
  for (const std::string& size : sizes) {
    const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
    const std::string path = checkpoint.path() + "/config.json";
    std::string config = ReadFile(path);
    const std::string key = "\"hidden_size\": ";
    const size_t at = config.find(key);
    ASSERT_NE(at, std::string::npos);
    config.replace(at + key.size(), 3, size);
    WriteFile(path, config);
    SCOPED_TRACE("hidden_size = " + size);
    ExpectRefused(checkpoint, "config.json", "");
  }
}

TEST(Malformed, InputFile_IsRefusedByNameAndTensor) {
  const auto refused = [](const std::function<void(std::vector<NamedTensor>&)>& change,
                          const std::string& tensor) {
    const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
    checkpoint.Rewrite("io/input.safetensors", change);
    ExpectRefused(checkpoint, "input.safetensors", tensor);
  };
  refused([](auto& tensors) { tensors[0].name = "hidden"; }, "hidden_states");
  refused([](auto& tensors) { tensors[0].name = "expected_output"; }, "hidden_states");
  for (const std::string name : {"router_logit", "Topk_ids", "hidden_states "}) {  // each meant to decide
    refused(
        [&name](auto& tensors) {
          tensors.push_back({name, *Tensor::Allocate(DType::kF32, {5, 8})});
        },
        "tensor '" + name + "'");
  }
  refused(
      [](auto& tensors) {
        tensors[0].tensor = *Tensor::Allocate(DType::kBF16, {5, 127});
      },
      "hidden_states");
  refused(
      [](auto& tensors) {
        tensors[0].tensor = *Tensor::Allocate(DType::kI32, {5, 128});
      },
      "hidden_states");
  refused(
      [](auto& tensors) {
        tensors[0].tensor = *Tensor::Allocate(DType::kBF16, {0, 128});
      },
      "hidden_states");
  refused(
      [](auto& tensors) {
        tensors.push_back({"topk_ids", *Tensor::Allocate(DType::kI32, {5, 2})});
      },
      "topk_weights");
  refused(
      [](auto& tensors) {
        tensors.push_back({"router_logits", *Tensor::Allocate(DType::kF32, {4, 8})});
      },
      "router_logits");
  refused(
      [](auto& tensors) {
        Tensor ids = *Tensor::Allocate(DType::kI64, {5, 2});
        ids.mutable_view().as<int64_t>()[3] = 8;  // experts are 0..7
        tensors.push_back({"topk_ids", ids});
        tensors.push_back({"topk_weights", *Tensor::Allocate(DType::kF32, {5, 2})});
      },
      "tensor 'topk_ids'");
}

TEST(Malformed, UnknownModelType_ExitsFour) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
  const std::string path = checkpoint.path() + "/config.json";
  nlohmann::json config = nlohmann::json::parse(ReadFile(path));
  config["model_type"] = "gpt2";
  WriteFile(path, config.dump());
  EXPECT_EQ(checkpoint.Run().exit_code, 4);
}

}  // namespace
}  // namespace fusedmoe::test
