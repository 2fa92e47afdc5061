#include <string>

#include <gtest/gtest.h>

#include "cli/process.hpp"

namespace fusedmoe::test {
namespace {

constexpr const char* kTinyProblem = R"({
  "name": "tiny", "source": "a test", "scheme": "nvfp4_w4a16", "layers": 1, "num_experts": 6, "top_k": 2,
  "hidden": 128, "intermediate": 64, "activation": "silu", "routing": "Renormalize"
})";

class Bench : public ::testing::Test {
 protected:
  void SetUp() override { WriteFile(problem_, kTinyProblem); }

  ProcessResult Run(std::vector<std::string> more) {
    std::vector<std::string> arguments = {"bench", problem_,   "--seconds", "0",     "--threads",
                                          "1",     "--layers", "2",         "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return RunCommand(arguments);
  }

  TemporaryDirectory directory_;
  std::string problem_ = directory_ / "tiny.json";
};

TEST_F(Bench, Json_HoldsTheContract) {
  const std::string plot = directory_ / "roof.svg";
  const ProcessResult result =
      Run({"--scheme", "nvfp4_w4a16,unquantized", "--tokens", "1,5", "--plot", plot});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const nlohmann::json json = result.Json();
  EXPECT_EQ(json.at("schema_version"), 1);
  EXPECT_EQ(json.at("threads"), 1);
  EXPECT_TRUE(json.at("machine").is_object());
  for (const char* ceiling : {"read_gbps", "int8_gops", "f16_gflops", "f32_gflops"}) {
    EXPECT_TRUE(json.at("ceilings").at(ceiling).is_number()) << ceiling;
  }
  EXPECT_GT(json.at("ceilings").at("read_gbps").get<double>(), 0.0);
  ASSERT_EQ(json.at("results").size(), 4U);
  for (const nlohmann::json& row : json.at("results")) {
    EXPECT_EQ(row.at("problem"), "tiny");
    EXPECT_TRUE(row.at("checked").get<bool>());
    EXPECT_EQ(row.at("check").at("tokens"), row.at("tokens"));  // at most 16: all of so few
    const nlohmann::json& seconds = row.at("seconds");
    const double median = seconds.at("median");
    EXPECT_LE(seconds.at("min").get<double>(), median);
    EXPECT_LE(median, seconds.at("max").get<double>());
    EXPECT_NEAR(row.at("tokens_per_second").get<double>() * median, row.at("tokens").get<double>(), 1e-6);
    // The share is what it says: the rate of the row over the ceiling that is named.
    const bool reads = row.at("bound") == "read";
    const double rate = row.at(reads ? "gbps" : "gflops");
    EXPECT_NEAR(row.at("share_of_bound").get<double>(), rate / row.at("ceiling").get<double>(), 1e-9);
    EXPECT_FALSE(row.at("backend").get<std::string>().empty());
    EXPECT_FALSE(row.at("mode").get<std::string>().empty());
  }
  // gbps counts codes and scales of two experts: 4.5 bits a weight and a few bytes for NVFP4, 16 for BF16.
  const double nvfp4 = json.at("results")[0].at("bytes");
  EXPECT_NEAR(nvfp4, 2 * 3 * 128 * 64 * 4.5 / 8, 1.0);
  EXPECT_NEAR(json.at("results")[2].at("bytes").get<double>(), 2 * 3 * 128 * 64 * 2.0, 1.0);
  EXPECT_EQ(json.at("results")[0].at("flops").get<double>(), 2.0 * 3 * 128 * 64 * 2);
  const std::string svg = ReadFile(plot);
  EXPECT_EQ(svg.rfind("<svg", 0), 0U);
  EXPECT_NE(svg.find("tiny nvfp4_w4a16"), std::string::npos);
  EXPECT_NE(svg.find("</svg>"), std::string::npos);
}

TEST_F(Bench, IsaAndMode_AreForced) {
  const ProcessResult result = Run({"--tokens", "2", "--isa", kFirstIsa, "--mode", "throughput"});
  if (result.exit_code == 4) {
    GTEST_SKIP() << "no " << kFirstIsa << " here";
  }
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const nlohmann::json row = result.Json().at("results").at(0);
  EXPECT_EQ(row.at("isa"), kFirstIsa);
  EXPECT_EQ(row.at("mode"), "throughput");
}

TEST_F(Bench, SkewedRouting_VisitsFewerExperts) {
  const nlohmann::json uniform = Run({"--tokens", "1,8"}).Json();
  const nlohmann::json skewed = Run({"--tokens", "1,8", "--routing", "skewed"}).Json();
  EXPECT_GT(uniform.at("results")[1].at("bytes").get<double>(),
            skewed.at("results")[1].at("bytes").get<double>());
  EXPECT_EQ(uniform.at("results")[1].at("flops"), skewed.at("results")[1].at("flops"));
}

TEST_F(Bench, Unsupported_ExitsFourWithTheRowsThatRan) {
  const ProcessResult result =
      Run({"--scheme", "nvfp4_w4a16,int8_w8a8", "--tokens", "1", "--activation", "a8"});
  EXPECT_EQ(result.exit_code, 4) << result.err;
  const nlohmann::json json = result.Json();
  EXPECT_EQ(json.at("results").size() + json.at("refused").size(), 2U);
  ASSERT_GE(json.at("refused").size(), 1U);
  EXPECT_EQ(json.at("refused").back().at("scheme"), "int8_w8a8");
  EXPECT_FALSE(json.at("refused").back().at("reason").get<std::string>().empty());
}

TEST_F(Bench, UnknownNames_ExitTwo) {
  EXPECT_EQ(Run({"--scheme", "nvfp5"}).exit_code, 2);
  EXPECT_EQ(Run({"--tokens", "1,x"}).exit_code, 2);
  EXPECT_EQ(Run({"--tokens", "0"}).exit_code, 2);
  EXPECT_EQ(Run({"--tokens", ","}).exit_code, 2);
  EXPECT_EQ(Run({"--isa", "sse9"}).exit_code, 2);
  EXPECT_EQ(Run({"--mode", "fast"}).exit_code, 2);
  EXPECT_EQ(Run({"--backend", "NOBODY"}).exit_code, 2);
  EXPECT_EQ(Run({"--experts", "1"}).exit_code, 2);  // of two that each token chooses
  EXPECT_EQ(RunCommand({"bench", "no-such-problem"}).exit_code, 2);
}

TEST_F(Bench, Plot_NeverReplacesTheProblem) {
  EXPECT_EQ(Run({"--plot", problem_}).exit_code, 2);
  EXPECT_EQ(ReadFile(problem_), kTinyProblem);
}

TEST_F(Bench, RoutingFile_ThatIsNone_ExitsThree) {
  EXPECT_EQ(Run({"--routing", problem_}).exit_code, 3);
}

}  // namespace
}  // namespace fusedmoe::test
