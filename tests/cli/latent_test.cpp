// Layers with latent experts through the commands: what is run, told, prepared, calibrated, quantized,
// converted.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/safetensors.hpp>

#include "cli/process.hpp"
#include "support/relative_l2.hpp"
#include "support/tensors.hpp"

namespace fusedmoe::test {
namespace {

namespace fs = std::filesystem;

const std::string kBlock = "backbone.layers.1.mixer.";

std::string Golden(const std::string& name) {
  return std::string(FMOE_GOLDEN_DIR) + "/families/nemotron_h_" + name;
}
std::string InputOf(const std::string& checkpoint) {
  return checkpoint + "/io/m5.safetensors";
}

std::vector<float> Floats(const SafetensorsFile& file, const std::string& name) {
  const Tensor* tensor = file.Find(name);
  EXPECT_NE(tensor, nullptr) << name;
  EXPECT_EQ(tensor->dtype(), DType::kF32) << name;
  const auto* values = tensor->view().as<float>();
  return {values, values + tensor->view().count()};
}

/// The output of `run` with these words, and that it exits with 0.
std::vector<float> Output(const std::string& what, const std::string& input,
                          const TemporaryDirectory& directory, const std::vector<std::string>& more) {
  std::vector<std::string> words = {"run", what, "--input", input, "--output", directory / "out.safetensors"};
  words.insert(words.end(), more.begin(), more.end());
  const ProcessResult result = RunCommand(words);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return Floats(*ReadSafetensors(directory / "out.safetensors"), "output");
}

// The bound is that of the families' tests on the reference; CPU_FUSED multiplies these BF16 weights in BF16.
TEST(LatentCommands, Run_ChecksAgainstTheReference) {
  const TemporaryDirectory directory;
  for (const char* name : {"latent-orig", "latent_bias-orig", "latent_mixed-orig"}) {
    const std::string source = Golden(name);
    const std::vector<float> expected = Floats(*ReadSafetensors(InputOf(source)), "expected_output");
    EXPECT_LT(RelativeL2(Output(source, InputOf(source), directory,
                                {"--layer", "1", "--backend", "REFERENCE", "--threads", "2"}),
                         expected),
              5e-6)
        << name;
    const ProcessResult checked =
        RunCommand({"run", source, "--layer", "1", "--input", InputOf(source), "--output",
                    directory / "out.safetensors", "--check", "--json"});
    EXPECT_EQ(checked.exit_code, 0) << checked.err;
    EXPECT_EQ(checked.Json().at("check").at("ok"), true);
    EXPECT_GT(checked.Json().at("plan").at("latent"), 0);
  }
}

TEST(LatentCommands, InspectAndExplain_TellBothWidths) {
  const std::string source = Golden("latent_mixed-orig");
  const nlohmann::json inspected = RunCommand({"inspect", source, "--json"}).Json();
  EXPECT_EQ(inspected.at("layers").at(0).at("config").at("latent"), 64);
  const std::string text = RunCommand({"inspect", Golden("latent-orig")}).out;
  EXPECT_NE(text.find("32, latent 16"), std::string::npos) << text;
  const ProcessResult explained = RunCommand({"explain", Golden("latent-orig"), "--layer", "1"});
  EXPECT_EQ(explained.exit_code, 0) << explained.err;
  EXPECT_NE(explained.out.find("hidden 32, latent 16"), std::string::npos) << explained.out;
  // What is weighed are the experts on their own rows: 8 of 2 x 16 x 16 values in F32, here in panels of 64
  // columns, beside them a factor for each row and three for activations.
  for (const auto& [platform, bytes] :
       {std::pair("host", 2 * 16 * 64 * 4 + (16 + 16 + 3) * 4), std::pair("sm90", 2 * 16 * 16 * 4)}) {
    const nlohmann::json costs =
        RunCommand({"explain", Golden("latent-orig"), "--layer", "1", "--platform", platform, "--json"})
            .Json()
            .at("costs");
    EXPECT_EQ(costs.at("weight_bytes"), 8 * bytes) << platform;
  }
  const nlohmann::json chosen =
      RunCommand({"explain", Golden("latent-orig"), "--layer", "1", "--json"}).Json().at("chosen");
  EXPECT_EQ(chosen.at("latent"), 16);
  EXPECT_EQ(chosen.at("latent_bytes"), 2 * 32 * 16 * 4) << "in F32, as the file has them";
}

TEST(LatentCommands, Problems_AreDescribedMeasuredAndSimulated) {
  const nlohmann::json chosen =
      RunCommand({"explain", "--problem", "nemotron-3-super", "--json"}).Json().at("chosen");
  EXPECT_EQ(chosen.at("latent"), 1024);
  EXPECT_EQ(chosen.at("latent_bytes"), 2 * 4096 * 1024 * 2);
  const TemporaryDirectory directory;
  const std::string problem = directory.Write(
      "problem.json",
      R"({"name": "tiny", "scheme": "nvfp4_w4a16", "num_experts": 8, "top_k": 2, "hidden": 128,
                          "latent": 64, "intermediate": 96, "activation": "relu2_no_mul"})");
  const ProcessResult measured = RunCommand(
      {"bench", problem, "--tokens", "1,4", "--seconds", "0.01", "--max-bytes", "1000000", "--json"});
  ASSERT_EQ(measured.exit_code, 0) << measured.err;
  EXPECT_EQ(measured.Json().at("results").size(), 2);
  const ProcessResult simulated =
      RunCommand({"simulate", problem, "--ranks", "4", "--all2all", "deepep_low_latency", "--json"});
  ASSERT_EQ(simulated.exit_code, 0) << simulated.err;
  EXPECT_EQ(simulated.Json().at("combine").at("row_bytes"), 2 * 64);
}

// A checkpoint with one other byte in each projection is not what the file was made from.
void ExpectProjectionsCompared(const std::string& file, const std::string& source,
                               const TemporaryDirectory& directory) {
  const std::string other = directory / "other";
  fs::copy(source, other, fs::copy_options::recursive);
  SafetensorsFile changed = *ReadSafetensors(source + "/model.safetensors");
  for (NamedTensor& tensor : changed.tensors) {
    if (tensor.name.ends_with("_latent_proj.weight")) {
      Tensor copy = *Tensor::Allocate(tensor.tensor.dtype(), tensor.tensor.shape());
      std::memcpy(copy.mutable_view().data(), tensor.tensor.view().data(),
                  static_cast<size_t>(copy.view().total_bytes()));
      copy.mutable_view().data()[5] ^= std::byte{0x80};  // a sign
      tensor.tensor = std::move(copy);
    }
  }
  ASSERT_TRUE(WriteSafetensors(other + "/model.safetensors", changed.tensors, changed.metadata).ok());
  const ProcessResult differs = RunCommand({"verify", file, "--against", other, "--layer", "1", "--json"});
  EXPECT_EQ(differs.exit_code, 1) << differs.err;
  const nlohmann::json damaged = differs.Json().at("damaged");
  ASSERT_EQ(damaged.size(), 2) << damaged;
  EXPECT_EQ(damaged.at(0).at("tensor"), "latent.to");
  EXPECT_EQ(damaged.at(1).at("tensor"), "latent.from");
}

TEST(LatentCommands, PreparedFile_CarriesTheProjections) {
  const TemporaryDirectory directory;
  const std::string source = Golden("latent_mixed-orig"), file = directory / "prepared.safetensors";
  const ProcessResult prepared =
      RunCommand({"prepare", source, "--layer", "1", "--backend", "MARLIN", "--output", file});
  ASSERT_EQ(prepared.exit_code, 0) << prepared.err;
  EXPECT_EQ(Output(file, InputOf(source), directory, {}),
            Output(source, InputOf(source), directory, {"--layer", "1", "--backend", "MARLIN"}));
  EXPECT_EQ(RunCommand({"verify", file, "--against", source, "--layer", "1"}).exit_code, 0);
  ExpectProjectionsCompared(file, source, directory);
  for (const char* name : {"latent.to", "latent.from"}) {
    SafetensorsFile damaged = *ReadSafetensors(file);
    std::erase_if(damaged.tensors, [&](const NamedTensor& tensor) { return tensor.name == name; });
    const std::string without = directory / "without.safetensors";
    ASSERT_TRUE(WriteSafetensors(without, damaged.tensors, damaged.metadata).ok());
    const ProcessResult refused =
        RunCommand({"run", without, "--input", InputOf(source), "--output", directory / "no.safetensors"});
    EXPECT_EQ(refused.exit_code, 3) << refused.err;
    EXPECT_NE(refused.err.find(name), std::string::npos) << refused.err;
  }
}

// Experts read projected rows: of all tokens the largest value that a projection gives is the largest that
// any expert read. Quantized with it, the layer has the projections' bytes as they were.
TEST(LatentCommands, CalibrateAndQuantize_SeeProjectedRows) {
  const TemporaryDirectory directory;
  const std::string source = Golden("latent-orig"), statistics = directory / "stats.safetensors";
  ASSERT_EQ(
      RunCommand({"calibrate", source, "--layer", "1", "--input", InputOf(source), "--output", statistics})
          .exit_code,
      0);
  const SafetensorsFile weights = *ReadSafetensors(source + "/model.safetensors");
  const std::vector<float> hidden = Floats(*ReadSafetensors(InputOf(source)), "hidden_states");
  const std::vector<float> matrix = Floats(weights, kBlock + "fc1_latent_proj.weight");
  double largest = 0;
  for (size_t row = 0; row < 5 * 16; ++row) {
    double sum = 0;
    for (size_t col = 0; col < 32; ++col) {
      sum +=
          static_cast<double>(hidden[row / 16 * 32 + col]) * static_cast<double>(matrix[row % 16 * 32 + col]);
    }
    largest = std::max(largest, std::fabs(sum));
  }
  const std::vector<float> amax = Floats(*ReadSafetensors(statistics), "layers.1.gate_up_amax");
  EXPECT_NEAR(*std::max_element(amax.begin(), amax.end()), largest, 1e-5 * largest);

  const std::string made = directory / "quantized";
  const ProcessResult quantized =
      RunCommand({"quantize", source, "--scheme", "nvfp4_w4a4", "--act-stats", statistics, "--output", made});
  ASSERT_EQ(quantized.exit_code, 0) << quantized.err;
  const SafetensorsFile written = *ReadSafetensors(made + "/model.safetensors");
  for (const char* name : {"fc1_latent_proj.weight", "fc2_latent_proj.weight"}) {
    ASSERT_NE(written.Find(kBlock + name), nullptr) << name;
    EXPECT_TRUE(SameBytes(*written.Find(kBlock + name), *weights.Find(kBlock + name))) << name;
  }
  EXPECT_EQ(RunCommand({"verify", made, "--layer", "1"}).exit_code, 0);
}

// The projections are FP8 in the source: matrices like others for the tools' forms, decoded in GGUF.
TEST(LatentCommands, Convert_KeepsWhatTheLayerComputes) {
  const TemporaryDirectory directory;
  const std::string source = Golden("latent_mixed-orig");
  const std::vector<float> expected = Floats(*ReadSafetensors(InputOf(source)), "expected_output");
  for (const auto& [form, target] : {std::pair("modelopt", "modelopt"), std::pair("compressed-tensors", "ct"),
                                     std::pair("gguf", "a.gguf")}) {
    const std::string made = directory / target;
    const ProcessResult converted = RunCommand({"convert", source, "--to", form, "--output", made});
    ASSERT_EQ(converted.exit_code, 0) << converted.err;
    EXPECT_EQ(converted.out.find("left out"), std::string::npos) << converted.out;
    EXPECT_LT(RelativeL2(Output(made, InputOf(source), directory, {"--layer", "1", "--backend", "REFERENCE"}),
                         expected),
              5e-6)
        << form;
  }
}

TEST(LatentCommands, LintFindsWhatRunRefuses) {
  const TemporaryDirectory directory;
  const std::string copy = directory / "copy";
  fs::copy(Golden("latent-orig"), copy, fs::copy_options::recursive);
  EXPECT_EQ(RunCommand({"lint", copy}).exit_code, 0);
  const std::string name = kBlock + "fc2_latent_proj.weight";
  SafetensorsFile file = *ReadSafetensors(copy + "/model.safetensors");
  for (NamedTensor& named : file.tensors) {
    if (named.name == name) {
      Tensor changed = *Tensor::Allocate(DType::kF32, named.tensor.shape());
      std::memcpy(changed.mutable_view().data(), named.tensor.view().data(),
                  static_cast<size_t>(changed.view().total_bytes()));
      changed.mutable_view().as<float>()[3] = std::numeric_limits<float>::quiet_NaN();
      named.tensor = std::move(changed);
    }
  }
  ASSERT_TRUE(WriteSafetensors(copy + "/model.safetensors", file.tensors, file.metadata).ok());
  const ProcessResult linted = RunCommand({"lint", copy, "--json"});
  EXPECT_EQ(linted.exit_code, 1);
  EXPECT_EQ(linted.Json().at("findings").at(0).at("code"), "tensor_refused");
  EXPECT_EQ(linted.Json().at("findings").at(0).at("tensor"), name);
  const ProcessResult run = RunCommand(
      {"run", copy, "--layer", "1", "--input", InputOf(copy), "--output", directory / "out.safetensors"});
  EXPECT_EQ(run.exit_code, 3);
  EXPECT_NE(run.err.find(name), std::string::npos) << run.err;
}

// A norm behind the experts, SiTU in them: sampled, run, prepared, damaged.
TEST(LatentCommands, KimiK3_RunsFromItsFilesAndFromPreparedOnes) {
  const TemporaryDirectory directory;
  const std::string source = directory / "k3", file = directory / "prepared.safetensors";
  ASSERT_EQ(RunCommand({"sample", "--family", "kimi_k3", "--hidden", "256", "--latent", "128",
                        "--intermediate", "96", "--experts", "8", "--top-k", "3", "--scheme", "mxfp4_w4a16",
                        "--dtype", "F32", "--output", source})
                .exit_code,
            0);
  const std::string input = source + "/io/input.safetensors";
  for (const char* isa : {"avx2", "avx512_vnni"}) {
    const ProcessResult checked =
        RunCommand({"run", source, "--layer", "0", "--input", input, "--output",
                    directory / "out.safetensors", "--isa", isa, "--check", "--json"});
    if (checked.exit_code == 4) {
      continue;  // this machine has no such instructions
    }
    ASSERT_EQ(checked.exit_code, 0) << checked.err;
    EXPECT_EQ(checked.Json().at("check").at("ok"), true) << isa;
    EXPECT_EQ(checked.Json().at("plan").at("latent"), 128);
  }
  ASSERT_EQ(
      RunCommand({"prepare", source, "--layer", "0", "--backend", "MARLIN", "--output", file}).exit_code, 0);
  EXPECT_EQ(Output(file, input, directory, {"--backend", "MARLIN"}),
            Output(source, input, directory, {"--layer", "0", "--backend", "MARLIN"}));
  EXPECT_EQ(RunCommand({"verify", file, "--against", source}).exit_code, 0);
  SafetensorsFile prepared = *ReadSafetensors(file);
  for (NamedTensor& named : prepared.tensors) {
    if (named.name == "latent.norm") {
      Tensor changed = *Tensor::Allocate(DType::kF32, named.tensor.shape());
      std::memcpy(changed.mutable_view().data(), named.tensor.view().data(),
                  static_cast<size_t>(changed.view().total_bytes()));
      changed.mutable_view().as<float>()[0] += 1.0F;
      named.tensor = std::move(changed);
    }
  }
  ASSERT_TRUE(WriteSafetensors(file, prepared.tensors, prepared.metadata).ok());
  const ProcessResult damaged = RunCommand({"verify", file, "--against", source, "--json"});
  EXPECT_EQ(damaged.exit_code, 1);
  EXPECT_EQ(damaged.Json().at("damaged").at(0).at("tensor"), "latent.norm");
}

}  // namespace
}  // namespace fusedmoe::test
