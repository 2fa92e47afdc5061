// Layers of MLX checkpoints through the commands: their affine experts run from their codes.
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "cli/process.hpp"
#include "support/mlx_checkpoint.hpp"

namespace fusedmoe::test {
namespace {

using testing_support::MlxBits;
using testing_support::MlxCheckpoint;
using testing_support::MlxLayer;

MlxLayer AffineLayer(MlxBits gate_up, MlxBits down) {
  return {.experts = 4, .gate = gate_up, .up = gate_up, .down = down};
}

ProcessResult RunMlx(const MlxCheckpoint& checkpoint, std::vector<std::string> more) {
  const TemporaryDirectory directory;
  std::vector<std::string> words = {"run",      checkpoint.path(),
                                    "--layer",  "0",
                                    "--input",  checkpoint.input(),
                                    "--output", directory / "out.safetensors",
                                    "--check",  "--json"};
  words.insert(words.end(), more.begin(), more.end());
  return RunCommand(words);
}

TEST(MlxCommands, Run_TakesPanelsOfCodes) {
  const struct {
    MlxBits gate_up, down;
    std::string scheme;
    const char* panel;      // of gate and up
    int64_t bits_of_panel;  // in hundredths: codes, and an F32 scale and zero point for each group
    int64_t bits_of_down;
  } cases[] = {
      {{4, 64}, {4, 64}, "int4_w4a16:g64", "U4, F32 and F32 zero per 64", 500, 500},
      {{4, 32}, {4, 32}, "int4_w4a16:g32", "U4, F32 and F32 zero per 32", 600, 600},
      {{2, 128}, {2, 128}, "int4_w4a16", "U4, F32 and F32 zero per 128", 450, 450},
      {{8, 64}, {8, 64}, "int8_w8a16:g64", "U8, F32 and F32 zero per 64", 900, 900},
      {{6, 128}, {6, 128}, "int8_w8a16:g128", "U8, F32 and F32 zero per 128", 850, 850},
      {{5, 64}, {5, 64}, "int8_w8a16:g32", "5 bits, F32 and F32 zero per 32", 700, 700},
      {{3, 64}, {6, 32}, "int8_w8a16:g32", "U4, F32 and F32 zero per 64", 500, 1000},
  };
  for (const auto& of : cases) {
    SCOPED_TRACE(of.panel);
    const MlxCheckpoint checkpoint(AffineLayer(of.gate_up, of.down));
    const ProcessResult result = RunMlx(checkpoint, {"--backend", "CPU_FUSED"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const nlohmann::json json = result.Json();
    EXPECT_EQ(json.at("check").at("ok"), true);
    EXPECT_EQ(json.at("scheme"), of.scheme);
    EXPECT_NE(json.at("plan").at("recipe").dump().find(of.panel), std::string::npos)
        << json.at("plan").at("recipe");
    // Four experts of two matrices 128 x 256 and one 256 x 128, with an F32 factor for each of their rows,
    // and three for activations.
    const int64_t weights = 4 * 128 * 256, factors = 4 * (2 * 128 + 256 + 3);
    EXPECT_EQ(json.at("plan").at("weight_bytes"),
              weights * (2 * of.bits_of_panel + of.bits_of_down) / 800 + factors * 4);
  }
}

TEST(MlxCommands, InspectExplainAndLint_SayWhatRuns) {
  const MlxCheckpoint checkpoint(AffineLayer({4, 64}, {4, 64}));
  const ProcessResult inspected = RunCommand({"inspect", checkpoint.path(), "--json"});
  ASSERT_EQ(inspected.exit_code, 0) << inspected.err;
  const nlohmann::json layer = inspected.Json().at("layers").at(0);
  EXPECT_EQ(layer.at("scheme"), "int4_w4a16:g64");
  // The bytes of the file: codes, and a scale and a bias of 16 bits for each 64.
  EXPECT_EQ(layer.at("expert_bytes"), 4 * 3 * 128 * 256 * (64 * 4 + 32) / 64 / 8);
  const ProcessResult explained =
      RunCommand({"explain", checkpoint.path(), "--layer", "0", "--backend", "CPU_FUSED", "--json"});
  ASSERT_EQ(explained.exit_code, 0) << explained.err;
  EXPECT_NE(explained.Json().at("chosen").at("recipe").dump().find("F32 zero per 64"), std::string::npos);
  const ProcessResult linted = RunCommand({"lint", checkpoint.path(), "--json"});
  EXPECT_EQ(linted.exit_code, 0) << linted.out;
}

// Writers take what the codes decode to.
TEST(MlxCommands, QuantizeAndConvert_DecodeFirst) {
  const MlxCheckpoint checkpoint(AffineLayer({4, 64}, {6, 32}));
  const TemporaryDirectory directory;
  const std::string quantized = directory / "quantized", converted = directory / "converted";
  const ProcessResult quantize = RunCommand(
      {"quantize", checkpoint.path(), "--scheme", "int8_w8a16:g64", "--output", quantized, "--json"});
  ASSERT_EQ(quantize.exit_code, 0) << quantize.err;
  const ProcessResult convert =
      RunCommand({"convert", checkpoint.path(), "--to", "bf16", "--output", converted, "--json"});
  ASSERT_EQ(convert.exit_code, 0) << convert.err;
  for (const auto& [path, scheme] :
       {std::pair(quantized, "int8_w8a16:g64"), std::pair(converted, "unquantized")}) {
    const ProcessResult inspected = RunCommand({"inspect", path, "--json"});
    ASSERT_EQ(inspected.exit_code, 0) << inspected.err;
    EXPECT_EQ(inspected.Json().at("layers").at(0).at("scheme"), scheme);
  }
}

}  // namespace
}  // namespace fusedmoe::test
