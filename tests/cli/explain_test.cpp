#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/oracle.hpp>
#include <fusedmoe/problems.hpp>

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

nlohmann::json Explained(const std::vector<std::string>& question) {
  std::vector<std::string> words = {"explain"};
  words.insert(words.end(), question.begin(), question.end());
  words.emplace_back("--json");
  const ProcessResult result = RunCommand(words);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return result.Json();
}

// Panels are not the codes and scales of the checkpoint: rows are padded, scales of rows stand beside them.
TEST(Explain, Weights_TakeTheBytesThatTheLayerThenHas) {
  for (const auto& [family, scheme] :
       {std::pair("qwen3_moe", "nvfp4_w4a4"), std::pair("qwen3_moe", "int4_w4a16:g32"),
        std::pair("qwen3_moe", "fp8_w8a8:block128"), std::pair("gpt_oss", "mxfp4_w4a16"),
        std::pair("qwen3_moe", "unquantized")}) {
    const SampleCheckpoint checkpoint(family, scheme);
    const ProcessResult run = checkpoint.Run({"--backend", "CPU_FUSED", "--json"});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    const nlohmann::json answer = Explained({checkpoint.path(), "--tokens", "5", "--backend", "CPU_FUSED"});
    const int64_t bytes = run.Json().at("plan").at("weight_bytes");
    EXPECT_EQ(answer.at("costs").at("weight_bytes"), bytes) << family << " " << scheme;
    EXPECT_EQ(answer.at("chosen").at("weight_bytes"), bytes) << family << " " << scheme;
  }
}

// Blocks of 128 rows: of 13 ranks the eighth has rows 120 to 135 of 200, in one stripe of its panels.
TEST(Explain, BlocksThatEndInsideAStripe_KeepScalesOfRows) {
  const SampleCheckpoint checkpoint("qwen3_moe", "fp8_w8a8:block128", {"--intermediate", "200"});
  const auto recipe = [&](const std::vector<std::string>& deployment) {
    std::vector<std::string> question = {checkpoint.path(), "--backend", "CPU_FUSED"};
    question.insert(question.end(), deployment.begin(), deployment.end());
    return Explained(question).at("chosen").at("recipe").dump();
  };
  EXPECT_NE(recipe({}).find("F32 per 16x64"), std::string::npos) << recipe({});
  EXPECT_NE(recipe({"--tp", "13", "--rank", "7"}).find("F32 per 16x64"), std::string::npos);
  const std::string cut = recipe({"--tp", "13", "--rank", "8"});
  EXPECT_NE(cut.find("F32 per 64"), std::string::npos) << cut;
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

TEST(Explain, OptionsWithoutEffect_AreRefused) {
  const auto refused = [](std::vector<std::string> more, const std::string& text) {
    more.insert(more.begin(), {"explain", "--problem", "qwen3-30b-a3b"});
    const ProcessResult result = RunCommand(more);
    EXPECT_EQ(result.exit_code, 2) << text;
    EXPECT_NE(result.err.find(text + " has no effect"), std::string::npos) << result.err;
  };
  refused({"--platform", "sm90", "--isa", "avx2"}, "--isa");
  refused({"--platform", "sm90", "--mode", "latency"}, "--mode");
  refused({"--platform", "sm90", "--threads", "2"}, "--threads");
  refused({"--io", "mmap"}, "--io");
  refused({"--expert-layout", "in_out"}, "--expert-layout");
  refused({"--allow-partial"}, "--allow-partial");
  EXPECT_EQ(RunCommand({"explain", "--problem", "qwen3-30b-a3b", "--platform", "cpu-avx512", "--isa", "avx2"})
                .exit_code,
            0);
  EXPECT_EQ(
      RunCommand({"explain", "--problem", "qwen3-30b-a3b", "--isa", "avx2", "--diff", "sm90"}).exit_code, 0);
}

// Plans reserve memory for all cores; only more threads change them, where kernels need memory for each.
TEST(Explain, ThreadsWithoutEffect_AreNamedInNotes) {
  const auto explained = [](const char* threads) {
    const ProcessResult result = RunCommand({"explain", "--problem", "qwen3-30b-a3b", "--tokens", "512",
                                             "--platform", "cpu-amx", "--threads", threads, "--json"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.Json();
  };
  const nlohmann::json one = explained("1"), many = explained("1024");
  EXPECT_NE(one.at("notes").dump().find("--threads 1 has no effect"), std::string::npos) << one.at("notes");
  EXPECT_EQ(many.at("notes").dump().find("--threads"), std::string::npos);
  EXPECT_LT(one.at("chosen").at("workspace_bytes"), many.at("chosen").at("workspace_bytes"));
}

TEST(Explain, Problem_OnADescribedPlatform) {
  const ProcessResult result = RunCommand({"explain", "--problem", "deepseek-v3", "--scheme", "nvfp4_w4a4",
                                           "--platform", "sm100", "--tokens", "64", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_FALSE(result.Json().at("chosen").is_null());
}

TEST(Explain, ProblemWhoseSizesTheSchemeDoesNotDivide_IsRefused) {
  const ProcessResult result =
      RunCommand({"explain", "--problem", "gpt-oss-20b", "--scheme", "int4_w4a16:g128"});
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_NE(result.err.find("'hidden' is 2880; scheme int4_w4a16:g128 needs a multiple of its groups of 128"),
            std::string::npos)
      << result.err;
}

TEST(Explain, Diff_TakesPlatformsAndDeployments) {
  const std::vector<std::string> question = {"explain",    "--problem",  "deepseek-v3", "--scheme",
                                             "nvfp4_w4a4", "--platform", "sm100",       "--json"};
  const auto chosen = [&](const std::vector<std::string>& sides) {
    std::vector<std::string> words = question;
    words.emplace_back("--diff");
    words.insert(words.end(), sides.begin(), sides.end());
    const ProcessResult result = RunCommand(words);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    const nlohmann::json differences = result.Json().at("diff").at("differences");
    for (const nlohmann::json& difference : differences) {
      if (difference.at("field") == "chosen") {
        return difference.at("first").get<std::string>() + " " + difference.at("second").get<std::string>();
      }
    }
    return std::string("the same");
  };
  EXPECT_EQ(chosen({"sm90"}), "FLASHINFER_TRTLLM MARLIN");
  EXPECT_EQ(chosen({"sm90", "sm80"}), "the same");
  EXPECT_EQ(chosen({"dp=8,ep", "dp=8,ep,all2all=deepep_low_latency"}),
            "FLASHINFER_TRTLLM FLASHINFER_CUTEDSL");
  EXPECT_EQ(chosen({"sm90,tp=2", "sm100,tp=2"}), "MARLIN FLASHINFER_TRTLLM");
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
  EXPECT_EQ(RunCommand({"explain", "--diff", "sm90", checkpoint.path()}).exit_code, 0);
  std::vector<std::string> wrong = question;
  wrong.insert(wrong.end(), {"--diff", "sm90,dp=x"});
  EXPECT_EQ(RunCommand(wrong).exit_code, 2);
  wrong.back() = "sm999";
  EXPECT_EQ(RunCommand(wrong).exit_code, 2);
}

TEST(Explain, UnknownSwitch_ExitsTwoWithTheNearest) {
  const auto ask = [](const std::string& env) {
    return RunCommand({"explain", "--problem", "qwen3-30b-a3b", "--platform", "sm90", "--env", env});
  };
  const ProcessResult misspelt = ask("VLLM_USE_DEEPGEMM=1");
  EXPECT_EQ(misspelt.exit_code, 2) << misspelt.out;
  EXPECT_NE(misspelt.err.find("nearest are VLLM_USE_DEEP_GEMM, "), std::string::npos) << misspelt.err;
  EXPECT_EQ(ask("VLLM_FUSED_MOE_CHUNK_SIZE=32768").exit_code, 0);
}

TEST(Explain, WhatALayerDoesNotSay_IsAskedByOptions) {
  const auto ask = [](std::vector<std::string> more) {
    std::vector<std::string> words = {"explain", "--problem", "qwen3-30b-a3b", "--json"};
    words.insert(words.end(), more.begin(), more.end());
    return RunCommand(words);
  };
  const auto speaks = [&](const std::vector<std::string>& more, const std::string& backend,
                          const std::string& code) {
    const nlohmann::json answer = ask(more).Json();
    for (const nlohmann::json& candidate : answer.at("candidates")) {
      for (const nlohmann::json& verdict : candidate.value("verdicts", nlohmann::json::array())) {
        if (candidate.at("backend") == backend && verdict.at("code") == code) {
          return true;
        }
      }
    }
    return false;
  };
  const std::vector<std::string> nvfp4 = {"--scheme", "nvfp4_w4a4", "--platform", "sm90"};
  std::vector<std::string> lora = nvfp4;
  lora.emplace_back("--lora");
  EXPECT_TRUE(speaks(lora, "MARLIN", "lora"));
  EXPECT_FALSE(speaks(nvfp4, "MARLIN", "lora"));
  const std::vector<std::string> fp8 = {"--scheme", "fp8_w8a8:channel", "--platform", "sm90"};
  std::vector<std::string> off = fp8;
  off.insert(off.end(), {"--allow-vllm-cutlass", "off"});
  EXPECT_TRUE(speaks(off, "VLLM_CUTLASS", "switch"));
  EXPECT_FALSE(speaks(fp8, "VLLM_CUTLASS", "switch"));
  for (const char* option : {"--logits-dtype", "--allow-vllm-cutlass"}) {
    const ProcessResult refused = ask({option, "I8"});
    EXPECT_EQ(refused.exit_code, 2) << option;
    EXPECT_NE(refused.err.find("I8"), std::string::npos) << refused.err;
  }
  EXPECT_EQ(ask({"--logits-dtype", "BF16"}).exit_code, 0);
}

TEST(Explain, Help_NamesEverySwitchAndThePagesWithTheWords) {
  const std::string help = RunCommand({"explain", "--help"}).out;
  for (const SwitchInfo& info : SwitchTable()) {
    EXPECT_NE(help.find(info.name), std::string::npos) << info.name;
  }
  for (const Problem& problem : Problems()) {
    EXPECT_NE(help.find(problem.name), std::string::npos) << problem.name;
  }
  for (const std::string page : {"docs/oracle.md", "docs/scales.md", "docs/cli.md"}) {
    EXPECT_NE(help.find(page), std::string::npos) << page;
    EXPECT_NE(RunCommand({"--help"}).out.find(page), std::string::npos) << page;
    EXPECT_TRUE(std::filesystem::exists(std::string(FMOE_GOLDEN_DIR) + "/../../" + page)) << page;
  }
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
