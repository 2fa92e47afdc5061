#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cli/checkpoint_fixture.hpp"
#include "cli/process.hpp"

namespace fusedmoe::test {
namespace {

TEST(Explain, Checkpoint_ListsEveryBackendWithItsVerdict) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
  const ProcessResult result = RunCommand({"explain", checkpoint.path(), "--layer", "0", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const nlohmann::json json = result.Json();
  EXPECT_TRUE(json.at("chosen").at("backend").is_string());
  std::vector<std::string> names;
  for (const nlohmann::json& candidate : json.at("candidates")) {
    names.push_back(candidate.at("backend"));
    EXPECT_FALSE(candidate.at("code").get<std::string>().empty());
    EXPECT_FALSE(candidate.at("reason").get<std::string>().empty());
  }
  for (const char* name : {"FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS", "FLASHINFER_CUTEDSL", "VLLM_CUTLASS",
                           "MARLIN", "EMULATION", "REFERENCE"}) {
    EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << name;
  }
}

TEST(Explain, NothingChosen_ExitsFourWithTheObject) {
  const SampleCheckpoint checkpoint("qwen3_moe", "unquantized");
  const ProcessResult result =
      RunCommand({"explain", checkpoint.path(), "--backend", "FLASHINFER_CUTEDSL", "--json"});
  EXPECT_EQ(result.exit_code, 4) << result.err;
  const nlohmann::json json = result.Json();
  EXPECT_TRUE(json.at("chosen").is_null());
  EXPECT_GT(json.at("candidates").size(), 3U);
}

TEST(Explain, UnknownBackendOrProblem_ExitsTwo) {
  const SampleCheckpoint checkpoint("qwen3_moe", "unquantized");
  EXPECT_EQ(RunCommand({"explain", checkpoint.path(), "--backend", "X"}).exit_code, 2);
  EXPECT_EQ(RunCommand({"explain", "--problem", "gpt-2"}).exit_code, 2);
  EXPECT_EQ(RunCommand({"explain"}).exit_code, 2);
}

TEST(Explain, Problem_OnADescribedPlatform) {
  const ProcessResult result = RunCommand({"explain", "--problem", "deepseek-v3", "--scheme", "nvfp4_w4a4",
                                           "--platform", "sm100", "--tokens", "64", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_FALSE(result.Json().at("chosen").is_null());
}

TEST(Backends, Matrix_NamesTheReferenceForEveryScheme) {
  const ProcessResult result = RunCommand({"backends", "--schemes", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const nlohmann::json matrix = result.Json().at("matrix");
  for (const char* scheme : {"unquantized", "nvfp4_w4a4", "nvfp4_w4a16"}) {
    bool found = false;
    for (const nlohmann::json& cell : matrix) {
      found = found || (cell.at("scheme") == scheme && cell.at("backend") == "REFERENCE" &&
                        cell.at("supported").get<bool>());
    }
    EXPECT_TRUE(found) << scheme;
  }
}

}  // namespace
}  // namespace fusedmoe::test
