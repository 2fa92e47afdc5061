#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ranks/mpirun.hpp"
#include "support/temporary_directory.hpp"

#ifdef FMOE_CLI
namespace fusedmoe {
namespace {

using test::Job;

std::string Bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// `fusedmoe run` as users start it.
class RunOnRanks : public test::MpiTest {
 protected:
  void Sample(const std::string& scheme, const std::string& name = "checkpoint",
              const std::string& hidden = "128", const std::string& experts = "10") {
    const Job job = Run(1, {FMOE_CLI, "sample", "--family", "qwen3_moe", "--scheme", scheme, "--output",
                            directory_ / name, "--hidden", hidden, "--intermediate", "128", "--experts",
                            experts, "--top-k", "3", "--tokens", "7"});
    ASSERT_EQ(job.exit_code, 0) << job.text;
  }
  std::vector<std::string> Command(const std::string& name, const std::vector<std::string>& more) const {
    std::vector<std::string> command = {FMOE_CLI,
                                        "run",
                                        directory_ / name,
                                        "--layer",
                                        "0",
                                        "--input",
                                        directory_ / "checkpoint/io/input.safetensors",
                                        "--output",
                                        Output()};
    command.insert(command.end(), more.begin(), more.end());
    return command;
  }
  std::string Output() const { return directory_ / "out.safetensors"; }
  /// Two ranks of one job, each with a command of its own.
  Job LaunchBoth(const std::vector<std::string>& first, const std::vector<std::string>& second) {
    std::vector<std::string> arguments = {"-n", "1"};
    arguments.insert(arguments.end(), first.begin(), first.end());
    arguments.insert(arguments.end(), {":", "-n", "1"});
    arguments.insert(arguments.end(), second.begin(), second.end());
    return Launch(arguments);
  }

  const test::TemporaryDirectory directory_;
};

TEST_F(RunOnRanks, RankInvariant_WritesTheFileOfOneRank) {
  Sample("nvfp4_w4a4");
  const std::vector<std::string> invariant = {"--determinism", "rank_invariant"};
  const Job alone = Run(1, Command("checkpoint", invariant));
  ASSERT_EQ(alone.exit_code, 0) << alone.text;
  const std::string expected = Bytes(Output());
  ASSERT_FALSE(expected.empty());
  for (const std::vector<std::string>& deployment : std::vector<std::vector<std::string>>{
           {"--dp", "2", "--ep"},
           {"--tp", "2", "--ep"},
           {"--dp", "2", "--ep", "--all2all", "deepep_high_throughput"},
           {"--dp", "2", "--ep", "--all2all", "deepep_low_latency", "--eplb", "--redundant-experts", "2"}}) {
    std::filesystem::remove(Output());
    std::vector<std::string> more = invariant;
    more.insert(more.end(), deployment.begin(), deployment.end());
    const Job job = Run(2, Command("checkpoint", more));
    EXPECT_EQ(job.exit_code, 0) << job.text;
    EXPECT_EQ(Bytes(Output()), expected) << deployment.front();
  }
}

TEST_F(RunOnRanks, Eplb_MovesExpertsWhileItRuns) {
  Sample("nvfp4_w4a4");
  const Job alone = Run(1, Command("checkpoint", {"--determinism", "rank_invariant"}));
  ASSERT_EQ(alone.exit_code, 0) << alone.text;
  const std::string expected = Bytes(Output());
  std::filesystem::remove(Output());
  const Job job = Run(2, Command("checkpoint", {"--determinism", "rank_invariant", "--dp", "2", "--ep",
                                                "--eplb", "--redundant-experts", "2", "--eplb-interval", "4",
                                                "--repeat", "6", "--all2all", "deepep_high_throughput"}));
  EXPECT_EQ(job.exit_code, 0) << job.text;
  EXPECT_TRUE(job.Says({"placement ", "of 2 plans carried out"})) << job.text;
  EXPECT_FALSE(job.Says({"placement 0"})) << job.text;
  EXPECT_EQ(Bytes(Output()), expected);
}

TEST_F(RunOnRanks, Check_PassesOnTensorAndDataParallelRanks) {
  Sample("fp8_w8a8");
  const Job job = Run(4, Command("checkpoint", {"--tp", "2", "--dp", "2", "--check"}));
  EXPECT_EQ(job.exit_code, 0) << job.text;
  EXPECT_TRUE(job.Says({"check:", ": ok"})) << job.text;
}

// 128 columns go round three ranks in smaller units than the groups of 128 that activations are quantized in:
// codes differ from those of one rank, by as much as the bound then says.
TEST_F(RunOnRanks, Check_PassesWhereSharesCutGroupsOfActivations) {
  for (const char* scheme : {"fp8_w8a8:block128", "nvfp4_w4a4"}) {
    Sample(scheme, "checkpoint");
    for (const char* ranks : {"2", "3"}) {
      const Job job = Run(std::stoi(ranks), Command("checkpoint", {"--tp", ranks, "--check"}));
      EXPECT_EQ(job.exit_code, 0) << scheme << ": " << job.text;
      EXPECT_TRUE(job.Says({"check:", ": ok"})) << job.text;
    }
    std::filesystem::remove_all(directory_ / "checkpoint");
  }
}

// The scale over the batch between the GEMMs is that of a rank's own experts.
TEST_F(RunOnRanks, Check_PassesWhereRanksHaveOneScaleEachOverTheBatch) {
  Sample("fp8_w8a8:tensor");
  const Job job = Run(2, Command("checkpoint", {"--dp", "2", "--ep", "--check"}));
  EXPECT_EQ(job.exit_code, 0) << job.text;
  EXPECT_TRUE(job.Says({"check:", ": ok"})) << job.text;
}

TEST_F(RunOnRanks, MoreRanksThanExperts_WriteTheFileOfOneRank) {
  Sample("nvfp4_w4a4", "checkpoint", "128", "3");
  const Job alone = Run(1, Command("checkpoint", {"--determinism", "rank_invariant"}));
  ASSERT_EQ(alone.exit_code, 0) << alone.text;
  const std::string expected = Bytes(Output());
  for (const char* all2all : {"allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"}) {
    std::filesystem::remove(Output());
    const Job job = Run(4, Command("checkpoint", {"--determinism", "rank_invariant", "--dp", "4", "--ep",
                                                  "--all2all", all2all}));
    EXPECT_EQ(job.exit_code, 0) << all2all << ": " << job.text;
    EXPECT_EQ(Bytes(Output()), expected) << all2all;
  }
}

TEST_F(RunOnRanks, WrongNumberOfRanks_IsAUsageError) {
  Sample("unquantized");
  const Job job = Run(2, Command("checkpoint", {"--dp", "4", "--ep"}));
  EXPECT_EQ(job.exit_code, 2) << job.text;
  EXPECT_TRUE(job.Says({"are 4 ranks, this job has 2", "mpirun -n 4"})) << job.text;
}

TEST_F(RunOnRanks, OtherCheckpointOnOneRank_EndsTheJobBeforeItRuns) {
  Sample("unquantized");
  Sample("int4_w4a16", "other");
  const std::vector<std::string> more = {"--dp", "2", "--ep", "--deadline", "10"};
  const Job job = LaunchBoth(Command("checkpoint", more), Command("other", more));
  EXPECT_EQ(job.exit_code, 5) << job.text;
  EXPECT_TRUE(job.Says({"load", "rank 1 runs with another layer, checkpoint or options"})) << job.text;
  EXPECT_FALSE(std::filesystem::exists(Output()));
}

TEST_F(RunOnRanks, RankThatNeverStarts_EndsJobAtDeadline) {
  Sample("unquantized");
  const Job job =
      LaunchBoth(Command("checkpoint", {"--dp", "2", "--ep", "--deadline", "2"}), {"sleep", "86.5"});
  EXPECT_EQ(job.exit_code, 5) << job.text;
  EXPECT_LT(job.seconds, 3 + 2 + 5) << job.text;
  EXPECT_TRUE(job.Says({"start: rank 0 has waited", "within 2 s"})) << job.text;
  EXPECT_EQ(ProcessesWith("86.5"), 0);
}

TEST_F(RunOnRanks, Bench_SendsLittleMoreThanTheProtocolMust) {
  for (const char* all2all : {"allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"}) {
    const Job job = Run(
        2, {FMOE_CLI, "bench", "--ranks", "olmoe-1b-7b", "--experts", "16", "--scheme", "fp8_w8a8:block128",
            "--tokens", "16", "--seconds", "0", "--dp", "2", "--ep", "--all2all", all2all, "--json"});
    EXPECT_EQ(job.exit_code, 0) << job.text;
    const size_t begin = job.text.find("{\n");
    ASSERT_NE(begin, std::string::npos) << job.text;
    const auto document = nlohmann::json::parse(job.text.substr(begin), nullptr, false);
    ASSERT_TRUE(document.is_object()) << job.text;
    const auto& row = document["results"][0];
    EXPECT_EQ(row["wire"], "codes");
    ASSERT_EQ(row["ranks"].size(), 2U);
    for (const auto& rank : row["ranks"]) {
      EXPECT_GT(rank["minimum_bytes"].get<double>(), 16 * 2048.0) << all2all;
      EXPECT_GE(rank["overhead"].get<double>(), 0) << all2all;
      EXPECT_LT(rank["overhead"].get<double>(), 0.02) << all2all;
      EXPECT_EQ(rank["remote_bytes"].get<double>(), 0) << "one machine";
    }
  }
}

// One scale over the batch: a few tokens of all ranks are compared as a batch of their own.
TEST_F(RunOnRanks, Bench_ComparesLayersWithOneScaleOverTheBatch) {
  const Job job =
      Run(2, {FMOE_CLI, "bench", "--ranks", "olmoe-1b-7b", "--experts", "8", "--scheme", "fp8_w8a8:tensor",
              "--tokens", "6", "--seconds", "0", "--dp", "2", "--ep", "--json"});
  EXPECT_EQ(job.exit_code, 0) << job.text;
  const size_t begin = job.text.find("{\n");
  ASSERT_NE(begin, std::string::npos) << job.text;
  const auto document = nlohmann::json::parse(job.text.substr(begin), nullptr, false);
  ASSERT_TRUE(document.is_object()) << job.text;
  EXPECT_GT(document["results"][0]["check"]["rel_l2"].get<double>(), 1e-4) << "outputs are rounded to BF16";
}

TEST_F(RunOnRanks, Doctor_RefusesRecoveryAndPrintsTheCommand) {
  const Job alone = Run(1, {FMOE_CLI, "doctor", "--ranks"});
  EXPECT_EQ(alone.exit_code, 0) << alone.text;
  EXPECT_TRUE(alone.Says({"mpirun -n N", "--mca oob_tcp_keepalive_time 2", "--bind-to none"})) << alone.text;
  // What mpirun itself returns cannot be relied on: that is the fault of the setting.
  const Job job = Launch({"--mca", "orte_enable_recovery", "1", "-n", "2", FMOE_CLI, "doctor", "--ranks"});
  EXPECT_TRUE(job.Says({"error: --enable-recovery"})) << job.text;
}

TEST_F(RunOnRanks, OtherWeightsOnOneRank_EndTheJobBeforeItRuns) {
  Sample("unquantized");
  // The same names, shapes and router; one expert's weights differ.
  std::filesystem::copy(directory_ / "checkpoint", directory_ / "other",
                        std::filesystem::copy_options::recursive);
  for (const auto& entry : std::filesystem::directory_iterator(directory_ / "other")) {
    if (entry.path().extension() == ".safetensors") {
      std::string bytes = Bytes(entry.path());
      const size_t name = bytes.find("experts.4.down_proj.weight");
      if (name == std::string::npos) {
        continue;
      }
      const size_t offsets =
          bytes.find("\"data_offsets\":[", name) + std::string("\"data_offsets\":[").size();
      uint64_t header = 0;
      std::memcpy(&header, bytes.data(), sizeof(header));
      bytes[8 + header + static_cast<size_t>(std::stoll(bytes.substr(offsets)))] ^= 4;
      std::ofstream(entry.path(), std::ios::binary) << bytes;
    }
  }
  const std::vector<std::string> more = {"--dp", "2", "--ep", "--deadline", "10"};
  const Job job = LaunchBoth(Command("checkpoint", more), Command("other", more));
  EXPECT_EQ(job.exit_code, 5) << job.text;
  EXPECT_TRUE(job.Says({"load", "rank 1 runs with another layer, checkpoint or options"})) << job.text;
  EXPECT_FALSE(std::filesystem::exists(Output()));
}

// Each rank takes its tokens from the file: rows of two files in one result would be nobody's layer.
TEST_F(RunOnRanks, OtherInputOnOneRank_EndsTheJobBeforeItRuns) {
  Sample("unquantized");
  const std::vector<std::string> good = Command("checkpoint", {"--dp", "2", "--ep", "--deadline", "10"});
  std::string input = Bytes(good[6]);
  input.back() = static_cast<char>(input.back() ^ 1);
  std::vector<std::string> other = good;
  other[6] = directory_ / "other.safetensors";
  std::ofstream(other[6], std::ios::binary) << input;
  const Job job = LaunchBoth(good, other);
  EXPECT_EQ(job.exit_code, 5) << job.text;
  EXPECT_TRUE(job.Says({"load", "rank 1 runs with another layer, checkpoint or options"})) << job.text;
  EXPECT_FALSE(std::filesystem::exists(Output()));
}

TEST_F(RunOnRanks, MissingInputOnOneRank_EndsTheJobWithItsExitCode) {
  Sample("unquantized");
  const std::vector<std::string> good = Command("checkpoint", {"--dp", "2", "--ep", "--deadline", "10"});
  std::vector<std::string> bad = good;
  bad[6] = directory_ / "absent.safetensors";
  const Job job = LaunchBoth(good, bad);
  EXPECT_EQ(job.exit_code, 3) << job.text;
  EXPECT_TRUE(job.Says({"absent.safetensors"})) << job.text;
}

}  // namespace
}  // namespace fusedmoe
#endif
