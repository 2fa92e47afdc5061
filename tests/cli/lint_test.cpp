#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include <fusedmoe/jobs/lint.hpp>

#include "cli/checkpoint_fixture.hpp"
#include "cli/process.hpp"
#include "support/files.hpp"

namespace fusedmoe::test {
namespace {

const std::string kExpert = "model.layers.0.mlp.experts.3.";

ProcessResult RunLint(const SampleCheckpoint& checkpoint) {
  return RunCommand({"lint", checkpoint.path(), "--json"});
}

// The findings of one code.
std::vector<nlohmann::json> Of(const nlohmann::json& report, const std::string& code) {
  std::vector<nlohmann::json> found;
  for (const auto& finding : report.at("findings")) {
    if (finding.at("code") == code) {
      found.push_back(finding);
    }
  }
  return found;
}

void Change(const SampleCheckpoint& checkpoint, const std::string& name,
            const std::function<void(Tensor&)>& change) {
  checkpoint.Rewrite("model.safetensors", [&](std::vector<NamedTensor>& tensors) {
    bool found = false;
    for (NamedTensor& tensor : tensors) {
      if (tensor.name != name) {
        continue;
      }
      found = true;
      Tensor copy = *Tensor::Allocate(tensor.tensor.dtype(), tensor.tensor.shape());
      std::memcpy(copy.mutable_view().data(), tensor.tensor.view().data(),
                  static_cast<size_t>(copy.view().total_bytes()));
      change(copy);
      tensor.tensor = copy;
    }
    ASSERT_TRUE(found) << name;
  });
}

void SetFloat(Tensor& tensor, float value) {
  *tensor.mutable_view().as<float>() = value;
}

struct Damage {
  std::string name, code, severity;
  std::string tensor;  // ends so
  std::function<void(const SampleCheckpoint&)> make;
};

void Drop(const SampleCheckpoint& checkpoint, const std::string& ending) {
  checkpoint.Rewrite("model.safetensors", [&](std::vector<NamedTensor>& tensors) {
    std::erase_if(tensors, [&](const NamedTensor& tensor) { return tensor.name.ends_with(ending); });
  });
}

std::vector<Damage> Damages() {
  const std::string up = kExpert + "up_proj";
  const auto scale = [](const std::string& suffix, float value) {
    return [suffix, value](const SampleCheckpoint& checkpoint) {
      Change(checkpoint, kExpert + suffix, [value](Tensor& tensor) { SetFloat(tensor, value); });
    };
  };
  const auto fill = [](const std::string& suffix, int byte) {
    return [suffix, byte](const SampleCheckpoint& checkpoint) {
      Change(checkpoint, kExpert + suffix, [byte](Tensor& tensor) {
        std::memset(tensor.mutable_view().data(), byte, static_cast<size_t>(tensor.view().total_bytes()));
      });
    };
  };
  return {
      {"NanTensorScale", "invalid_scale", "error", "up_proj.weight_scale_2",
       scale("up_proj.weight_scale_2", std::numeric_limits<float>::quiet_NaN())},
      {"ZeroTensorScale", "invalid_scale", "error", "up_proj.weight_scale_2",
       scale("up_proj.weight_scale_2", 0.0F)},
      {"NegativeInputScale", "invalid_scale", "error", "down_proj.input_scale",
       scale("down_proj.input_scale", -1.0F)},
      {"NanBlockScale", "invalid_scale", "error", "up_proj.weight_scale", fill("up_proj.weight_scale", 0x7f)},
      {"NegativeBlockScale", "invalid_scale", "error", "up_proj.weight_scale",
       fill("up_proj.weight_scale", 0xb8)},
      {"MissingInputScale", "input_scale_missing", "error", "3.up_proj.input_scale",
       [](const SampleCheckpoint& checkpoint) { Drop(checkpoint, "3.up_proj.input_scale"); }},
      {"MissingWeight", "tensor_refused", "error", "3.down_proj.weight",
       [](const SampleCheckpoint& checkpoint) { Drop(checkpoint, "3.down_proj.weight"); }},
      {"MissingRouter", "layer_refused", "error", "gate.weight",
       [](const SampleCheckpoint& checkpoint) { Drop(checkpoint, "mlp.gate.weight"); }},
      {"OtherTensorScale", "gate_up_scale_mismatch", "warning", "3.gate_proj",
       scale("up_proj.weight_scale_2", 0.25F)},
      {"OtherInputScale", "gate_up_input_scale_mismatch", "warning", "3.gate_proj",
       scale("up_proj.input_scale", 0.25F)},
      {"FarInputScale", "expert_uncalibrated", "warning", "3.down_proj",
       scale("down_proj.input_scale", 1e-9F)},
      {"Saturated", "blocks_saturated", "warning", "3.up_proj", fill("up_proj.weight_scale", 0x7e)},
      {"Zeros", "weights_zero", "warning", "3.up_proj", fill("up_proj.weight", 0)},
      {"SmallCodes", "code_order", "warning", "3.up_proj", fill("up_proj.weight", 0x11)},
      {"Leftover", "unused_tensor", "warning", "3.up_proj.k_scale",
       [](const SampleCheckpoint& checkpoint) {
         checkpoint.Rewrite("model.safetensors", [](std::vector<NamedTensor>& tensors) {
           tensors.push_back({kExpert + "up_proj.k_scale", *Tensor::Allocate(DType::kF32, {})});
         });
       }},
  };
}

// Largest codes around a center are 255 as much as 1. In small groups each has one of its own.
TEST(Lint, SaturatedIntegers_AreFoundByChannel) {
  const SampleCheckpoint channel("qwen3_moe", "int8_w8a16:channel"), groups("qwen3_moe", "int8_w8a16:g32");
  EXPECT_TRUE(Of(RunLint(channel).Json(), "codes_saturated").empty());
  EXPECT_TRUE(Of(RunLint(groups).Json(), "codes_saturated").empty());
  Change(channel, kExpert + "gate_proj.weight_packed", [](Tensor& tensor) {
    const auto bytes = static_cast<size_t>(tensor.view().total_bytes());
    std::memset(tensor.mutable_view().data(), 0xff, bytes / 3);
  });
  EXPECT_EQ(Of(RunLint(channel).Json(), "codes_saturated").size(), 1U);
}

class LintDamage : public testing::TestWithParam<Damage> {};
INSTANTIATE_TEST_SUITE_P(All, LintDamage, testing::ValuesIn(Damages()),
                         [](const auto& entry) { return entry.param.name; });

TEST_P(LintDamage, IsFoundWithItsCodeAndTensor) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
  ASSERT_TRUE(Of(RunLint(checkpoint).Json(), GetParam().code).empty() ||
              GetParam().code == "gate_up_scale_mismatch");
  GetParam().make(checkpoint);
  const ProcessResult result = RunLint(checkpoint);
  EXPECT_EQ(result.exit_code, GetParam().severity == "error" ? 1 : 0) << result.out << result.err;
  bool named = false;
  for (const auto& finding : Of(result.Json(), GetParam().code)) {
    EXPECT_EQ(finding.at("severity"), GetParam().severity);
    EXPECT_FALSE(finding.at("message").get<std::string>().empty());
    named |= finding.at("tensor").get<std::string>().ends_with(GetParam().tensor);
  }
  EXPECT_TRUE(named) << result.out;
}

TEST(Lint, WhatIsAnError_IsWhatRunRefuses) {
  for (const Damage& damage : Damages()) {
    const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
    damage.make(checkpoint);
    EXPECT_EQ(checkpoint.Run().exit_code != 0, damage.severity == "error") << damage.name;
  }
}

// One finding of `code` where a NaN stands among the 16-bit numbers of `tensor`.
void ExpectNanFound(const SampleCheckpoint& checkpoint, const std::string& tensor, const std::string& code) {
  EXPECT_EQ(RunLint(checkpoint).exit_code, 0) << tensor;
  Change(checkpoint, tensor, [](Tensor& spoilt) { spoilt.mutable_view().as<uint16_t>()[7] = 0x7fc0; });
  const ProcessResult result = RunLint(checkpoint);
  EXPECT_EQ(result.exit_code, 1) << tensor;
  EXPECT_EQ(Of(result.Json(), code).size(), 1U) << tensor;
}

TEST(Lint, NanWeights_AreAnError) {
  ExpectNanFound(SampleCheckpoint("mixtral", "unquantized"),
                 "model.layers.0.block_sparse_moe.experts.1.w2.weight", "weight_not_finite");
  ExpectNanFound(SampleCheckpoint("qwen2_moe", "unquantized"),
                 "model.layers.0.mlp.shared_expert.up_proj.weight", "weight_not_finite");
}

// Tokens would get the weight 0, as any row of scores that is NaN: no output would say so.
TEST(Lint, NanInTheRouter_IsAnErrorThatRunRefuses) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a16");
  ExpectNanFound(checkpoint, "model.layers.0.mlp.gate.weight", "router_refused");
  const ProcessResult run = checkpoint.Run();
  EXPECT_EQ(run.exit_code, 3);
  EXPECT_NE(run.err.find("gate.weight"), std::string::npos) << run.err;
}

TEST(Lint, PromisedSharedExpertsThatAreMissing_AreAWarning) {
  const SampleCheckpoint checkpoint("qwen2_moe", "unquantized");
  EXPECT_TRUE(Of(RunLint(checkpoint).Json(), "shared_experts_missing").empty());
  checkpoint.Rewrite("model.safetensors", [](std::vector<NamedTensor>& tensors) {
    std::erase_if(tensors, [](const NamedTensor& tensor) {
      return tensor.name.find("shared_expert") != std::string::npos;
    });
  });
  const ProcessResult result = RunLint(checkpoint);
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  const auto found = Of(result.Json(), "shared_experts_missing");
  ASSERT_EQ(found.size(), 1U) << result.out;
  EXPECT_EQ(found.front().at("tensor"), "model.layers.0.mlp");
}

TEST(Lint, SizesThatDoNotSplit_AreAWarning) {
  const SampleCheckpoint whole("qwen3_moe", "nvfp4_w4a16");
  EXPECT_TRUE(Of(RunLint(whole).Json(), "tp_shard").empty()) << "128 columns in groups of 16 over 8 ranks";
  const TemporaryDirectory directory;
  const std::string odd = directory / "odd";
  ASSERT_EQ(RunCommand({"sample", "--family", "qwen3_moe", "--scheme", "nvfp4_w4a16", "--output", odd,
                        "--hidden", "128", "--intermediate", "96", "--experts", "2", "--top-k", "1"})
                .exit_code,
            0);
  EXPECT_EQ(Of(RunCommand({"lint", odd, "--json"}).Json(), "tp_shard").size(), 1U);
}

// Up twenty times as large as gate, which alternate in the columns of gpt-oss.
void MakeUpLarge(const SampleCheckpoint& checkpoint) {
  Change(checkpoint, "model.layers.0.mlp.experts.gate_up_proj", [](Tensor& tensor) {
    auto* values = tensor.mutable_view().as<uint16_t>();
    for (int64_t index = 1; index < tensor.view().count(); index += 2) {
      values[index] = static_cast<uint16_t>(values[index] + (4U << 7));  // times 16
    }
  });
}

// [E, in, out] of all experts as a matrix [out, in] for each, the bias [E, out] as its rows: how Quark writes
// gpt-oss.
void TakeExpertsApart(const SampleCheckpoint& checkpoint) {
  const std::string stem = "model.layers.0.mlp.experts.";
  checkpoint.Rewrite("model.safetensors", [&](std::vector<NamedTensor>& tensors) {
    std::vector<NamedTensor> apart;
    for (NamedTensor& named : tensors) {
      const TensorView all = named.tensor.view();
      if (!named.name.starts_with(stem)) {
        apart.push_back(std::move(named));
        continue;
      }
      const std::string role = named.name.substr(stem.size());
      const bool bias = role.ends_with("_bias");
      const std::string module = bias ? role.substr(0, role.size() - 5) : role;
      const int64_t in = bias ? 1 : all.dim(1), out = all.dim(all.rank() - 1);
      const int64_t width = all.total_bytes() / all.count();
      for (int64_t e = 0; e < all.dim(0); ++e) {
        Tensor one = *Tensor::Allocate(all.dtype(), bias ? Shape{out} : Shape{out, in});
        for (int64_t i = 0; i < in * out; ++i) {
          std::memcpy(one.mutable_view().data() + (i % out * in + i / out) * width,
                      all.data() + (e * in * out + i) * width, static_cast<size_t>(width));
        }
        apart.push_back({stem + std::to_string(e) + "." + module + (bias ? ".bias" : ".weight"), one});
      }
    }
    tensors = std::move(apart);
  });
}

TEST(Lint, RowsInTheWrongOrder_AreSuspected) {
  // The right reading has no pattern within either half, and reading the rows one after the other has.
  for (const bool apart : {false, true}) {
    SCOPED_TRACE(apart ? "a matrix for each expert" : "one tensor for all experts");
    const SampleCheckpoint checkpoint("gpt_oss", "unquantized");
    MakeUpLarge(checkpoint);
    if (apart) {
      TakeExpertsApart(checkpoint);
    }
    const ProcessResult right = RunLint(checkpoint);
    ASSERT_EQ(right.exit_code, 0) << right.out;
    EXPECT_TRUE(Of(right.Json(), "interleaving").empty());
    const std::string layout = apart ? "out_in,chunked" : "in_out,chunked";
    const ProcessResult wrong = RunCommand({"lint", checkpoint.path(), "--json", "--expert-layout", layout});
    const auto found = Of(wrong.Json(), "interleaving");
    ASSERT_FALSE(found.empty()) << wrong.out;
    const std::string tensor = found.front().at("tensor").get<std::string>();
    EXPECT_TRUE(tensor.ends_with(apart ? "experts.0.gate_up_proj" : "experts.gate_up_proj")) << tensor;
  }
}

// Beside the experts, where a family has no name for them.
TEST(Lint, TensorsOfTheBlockThatNothingReads_AreReported) {
  const SampleCheckpoint checkpoint("qwen3_moe", "unquantized");
  const std::string block = "model.layers.0.mlp.";
  EXPECT_TRUE(Of(RunLint(checkpoint).Json(), "unused_tensor").empty());
  const std::set<std::string> added = {block + "shared_mlp.up_proj.weight", block + "gate.per_expert_scale",
                                       block + "router.weight", block + "bias"};
  checkpoint.Rewrite("model.safetensors", [&](std::vector<NamedTensor>& tensors) {
    for (const std::string& name : added) {
      tensors.push_back({name, *Tensor::Allocate(DType::kF32, {8})});
    }
    tensors.push_back(
        {"model.layers.0.post_attention_layernorm.bias", *Tensor::Allocate(DType::kF32, {128})});
  });
  const ProcessResult result = RunLint(checkpoint);
  EXPECT_EQ(result.exit_code, 0);
  std::set<std::string> found;
  for (const auto& finding : Of(result.Json(), "unused_tensor")) {
    found.insert(finding.at("tensor").get<std::string>());
  }
  EXPECT_EQ(found, added) << result.out;
}

// ModelOpt's W4A8_AWQ and the scales of W4AFP8's inputs: known, whether a value depends on them or not.
TEST(Lint, TensorsThatAFormatHasBesideItsWeights_AreNoFindings) {
  const SampleCheckpoint checkpoint("qwen3_moe", "fp8_w8a8:tensor_static");
  checkpoint.Rewrite("model.safetensors", [](std::vector<NamedTensor>& tensors) {
    std::vector<NamedTensor> more;
    for (NamedTensor& tensor : tensors) {
      const size_t experts = tensor.name.find(".experts."), suffix = tensor.name.rfind('.');
      if (experts == std::string::npos) {
        continue;
      }
      const std::string base = tensor.name.substr(0, suffix);
      if (tensor.name.ends_with(".weight")) {
        const int64_t rows = tensor.tensor.dim(0), cols = tensor.tensor.dim(1);
        tensor.tensor = *Tensor::Allocate(DType::kU8, {rows / 2, cols});
        std::memset(tensor.tensor.mutable_view().data(), 0x21, static_cast<size_t>(rows / 2 * cols));
        more.push_back({base + ".weight_scale_2", *Tensor::Allocate(DType::kF32, {1})});
      } else if (tensor.name.ends_with(".weight_scale")) {
        tensor.tensor = *Tensor::Allocate(DType::kF32, {128, 1});
        std::fill_n(tensor.tensor.mutable_view().as<float>(), 128, 0.5F);
      }
    }
    tensors.insert(tensors.end(), more.begin(), more.end());
  });
  nlohmann::json config = nlohmann::json::parse(ReadFile(checkpoint.path() + "/config.json"));
  config["quantization_config"] = {{"quant_method", "modelopt"}, {"quant_algo", "W4A8_AWQ"}};
  WriteFile(checkpoint.path() + "/config.json", config.dump());
  const ProcessResult result = RunLint(checkpoint);
  EXPECT_EQ(result.exit_code, 0) << result.out;
  EXPECT_TRUE(Of(result.Json(), "unused_tensor").empty()) << result.out;
}

TEST(Lint, Codes_AreListedOnceEach) {
  const ProcessResult result = RunCommand({"lint", "--codes", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::set<std::string> codes;
  const nlohmann::json json = result.Json();
  for (const auto& row : json.at("codes")) {
    EXPECT_TRUE(codes.insert(row.at("code").get<std::string>()).second) << row;
  }
  EXPECT_EQ(codes.size(), LintTable().size());
}

}  // namespace
}  // namespace fusedmoe::test
