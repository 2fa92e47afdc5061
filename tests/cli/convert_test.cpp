#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cli/checkpoint_fixture.hpp"
#include "cli/process.hpp"

namespace fusedmoe::test {
namespace {

ProcessResult Convert(const std::string& source, const std::string& to, const std::string& output,
                      std::vector<std::string> more = {}) {
  std::vector<std::string> arguments = {"convert", source, "--to", to, "--output", output, "--json"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return RunCommand(arguments);
}

TEST(Convert, ThereAndBack_GivesTheSameValues) {
  const SampleCheckpoint source("qwen3_moe", "nvfp4_w4a4");
  const TemporaryDirectory directory;
  const ProcessResult there = Convert(source.path(), "compressed-tensors", directory / "ct");
  ASSERT_EQ(there.exit_code, 0) << there.err;
  const nlohmann::json json = there.Json();
  EXPECT_TRUE(json.at("lossless").get<bool>());
  EXPECT_EQ(json.at("values"), 8 * 3 * 128 * 128);
  const ProcessResult back = Convert(directory / "ct", "modelopt", directory / "mo");
  ASSERT_EQ(back.exit_code, 0) << back.err;
  EXPECT_TRUE(back.Json().at("lossless").get<bool>());
  const ProcessResult run = RunCommand({"run", directory / "mo", "--layer", "0", "--input", source.input(),
                                        "--output", directory / "out.safetensors", "--check"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
}

TEST(Convert, MxBecomesNvfp4Exactly) {
  const SampleCheckpoint source("qwen3_moe", "mxfp4_w4a16");
  const TemporaryDirectory directory;
  const ProcessResult result =
      Convert(source.path(), "modelopt", directory / "out", {"--scheme", "nvfp4_w4a16"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(result.Json().at("lossless").get<bool>());
  EXPECT_EQ(result.Json().at("different"), 0);
}

TEST(Convert, Gguf_IsReadAndRunsAndComesBack) {
  const SampleCheckpoint source("deepseek_v3", "nvfp4_w4a16");
  const TemporaryDirectory directory;
  const ProcessResult there = Convert(source.path(), "gguf", directory / "out.gguf");
  ASSERT_EQ(there.exit_code, 0) << there.err;
  EXPECT_TRUE(there.Json().at("lossless").get<bool>());
  EXPECT_EQ(there.Json().at("left_out"), 0);
  EXPECT_EQ(there.Json().at("files"), nlohmann::json({"out.gguf"}));
  const auto distance = [&](const std::string& path) {
    const ProcessResult verify =
        RunCommand({"verify", path, "--against", source.path(), "--backend", "REFERENCE", "--json"});
    EXPECT_EQ(verify.exit_code, 0) << verify.err;
    return verify.Json().at("rel_l2").get<double>();
  };
  const double own = distance(source.path());  // outputs in BF16 against outputs in F32
  EXPECT_EQ(distance(directory / "out.gguf"), own) << "the same weights and the same routing";
  const ProcessResult back = Convert(directory / "out.gguf", "modelopt", directory / "back");
  ASSERT_EQ(back.exit_code, 0) << back.err;
  EXPECT_EQ(distance(directory / "back"), own);
  const ProcessResult quantized = RunCommand(
      {"quantize", directory / "out.gguf", "--scheme", "mxfp4_w4a16", "--output", directory / "no"});
  EXPECT_EQ(quantized.exit_code, 4) << "quantized already";
}

// Whatever the reader takes of config.json is written again: words of Python for numbers that are none, the
// type of a number, and settings of quantization from all the objects where they may stand.
TEST(Convert, Configuration_KeepsItsValuesAndLosesOldSettings) {
  const SampleCheckpoint source("qwen3_moe", "int4_w4a16:g32");
  const TemporaryDirectory directory;
  nlohmann::ordered_json inner = nlohmann::ordered_json::parse(ReadFile(source.path() + "/config.json"));
  inner["rope_theta"] = 10000.0;
  inner["time_step_limit"] = "HERE";
  const nlohmann::ordered_json nested[] = {
      inner,
      {{"model_type", "qwen3_moe"}, {"llm", inner}},
      {{"model_type", "qwen3_omni_moe"}, {"thinker_config", {{"model_type", "x"}, {"text_config", inner}}}}};
  for (const nlohmann::ordered_json& config : nested) {
    std::string text = config.dump();
    const std::string mark = "\"HERE\"";
    text.replace(text.find(mark), mark.size(), "[0.0, Infinity, -Infinity, NaN, 12345678901234567]");
    WriteFile(source.path() + "/config.json", text);
    for (const char* target : {"f32", "compressed-tensors"}) {
      const std::string output = directory / target;
      const ProcessResult result = Convert(source.path(), target, output, {"--force"});
      ASSERT_EQ(result.exit_code, 0) << target << ": " << result.err;
      const std::string written = ReadFile(output + "/config.json");
      std::string flat = written;
      std::erase_if(flat, [](char letter) { return letter == ' ' || letter == '\n'; });
      EXPECT_NE(flat.find("[0.0,Infinity,-Infinity,NaN,12345678901234567]"), std::string::npos) << written;
      EXPECT_NE(flat.find("\"rope_theta\":10000.0,"), std::string::npos) << written;
      const size_t settings = flat.find("quantization_config");
      EXPECT_EQ(settings == std::string::npos, std::string(target) == "f32") << written;
      EXPECT_TRUE(settings == std::string::npos ||
                  flat.find("quantization_config", settings + 1) == std::string::npos)
          << written;
      EXPECT_EQ(
          RunCommand({"verify", output, "--against", source.path(), "--backend", "REFERENCE"}).exit_code, 0);
    }
  }
}

TEST(Convert, LossyOnes_NeedLeaveAndStateTheError) {
  const SampleCheckpoint source("qwen3_moe", "fp8_w8a8:block128");
  const TemporaryDirectory directory;
  const ProcessResult refused = Convert(source.path(), "bf16", directory / "out");
  EXPECT_EQ(refused.exit_code, 4) << refused.err;
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  const ProcessResult allowed = Convert(source.path(), "bf16", directory / "out", {"--allow-lossy"});
  ASSERT_EQ(allowed.exit_code, 0) << allowed.err;
  const nlohmann::json json = allowed.Json();
  EXPECT_FALSE(json.at("lossless").get<bool>());
  EXPECT_GT(json.at("rel_l2").get<double>(), 5e-4);
  EXPECT_LT(json.at("rel_l2").get<double>(), 4e-3);
  EXPECT_FALSE(json.at("first_difference").get<std::string>().empty());
  EXPECT_EQ(Convert(source.path(), "f32", directory / "f32").exit_code, 0) << "fp32 holds every product";
}

TEST(Convert, Refusals_HaveTheirCodes) {
  const SampleCheckpoint source("qwen3_moe", "nvfp4_w4a16"), plain("qwen3_moe", "unquantized");
  const TemporaryDirectory directory;
  const std::string output = directory / "out";
  EXPECT_EQ(Convert(source.path(), "nobody", output).exit_code, 2);
  EXPECT_EQ(Convert(source.path(), "deepseek", output).exit_code, 4);
  EXPECT_EQ(Convert(source.path(), "modelopt", output, {"--scheme", "nvfp4_w4a4"}).exit_code, 4);
  EXPECT_EQ(Convert(source.path(), "compressed-tensors", output, {"--scheme", "mxfp4_w4a16"}).exit_code, 4);
  EXPECT_EQ(Convert(plain.path(), "modelopt", output).exit_code, 2);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

}  // namespace
}  // namespace fusedmoe::test
