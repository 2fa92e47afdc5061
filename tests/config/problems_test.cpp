#include <fusedmoe/problems.hpp>

#include <set>

#include <gtest/gtest.h>

#include <fusedmoe/quant.hpp>

#include "support/temporary_directory.hpp"

namespace fusedmoe {
namespace {

TEST(Problems, AllThatTheCommandLinePromises_AreThere) {
  const std::set<std::string> promised = {
      "qwen3-30b-a3b", "qwen3-235b-a22b",  "mixtral-8x7b",     "deepseek-v3",  "kimi-k2",
      "llama-4-scout", "llama-4-maverick", "gpt-oss-20b",      "gpt-oss-120b", "glm-4.5",
      "minimax-m2",    "olmoe-1b-7b",      "nemotron-3-super", "kimi-k3"};
  std::set<std::string> found;
  for (const Problem& problem : Problems()) {
    found.insert(problem.name);
    EXPECT_FALSE(problem.source.empty()) << problem.name;
    EXPECT_GT(problem.num_layers, 0) << problem.name;
    EXPECT_TRUE(ParseScheme(problem.scheme).ok()) << problem.name << ": " << problem.scheme;
    EXPECT_TRUE(Validate(problem.config).ok()) << problem.name << ": " << Validate(problem.config).ToString();
  }
  EXPECT_EQ(found, promised);
}

TEST(Problems, ExpertParameters_AddUpToTheModelsNames) {
  // Billions of parameters in routed experts: the larger part of what the model is called.
  const auto billions = [](const char* name) {
    Result<Problem> problem = ParseProblem(name);
    EXPECT_TRUE(problem.ok()) << name;
    const MoeConfig& config = problem->config;
    const int64_t matrices = config.activation.gated() ? 3 : 2;
    return 1e-9 * static_cast<double>(matrices * problem->num_layers * config.num_experts *
                                      config.expert_hidden() * config.intermediate);
  };
  EXPECT_NEAR(billions("qwen3-30b-a3b"), 29.0, 0.1);
  EXPECT_NEAR(billions("qwen3-235b-a22b"), 227.1, 0.1);
  EXPECT_NEAR(billions("mixtral-8x7b"), 45.1, 0.1);
  EXPECT_NEAR(billions("deepseek-v3"), 653.9, 0.1);
  EXPECT_NEAR(billions("kimi-k2"), 1014.7, 0.1);
  EXPECT_NEAR(billions("kimi-k3"), 2722.7, 0.1);
  EXPECT_NEAR(billions("llama-4-scout"), 96.6, 0.1);
  EXPECT_NEAR(billions("llama-4-maverick"), 386.5, 0.1);
  EXPECT_NEAR(billions("gpt-oss-120b"), 114.7, 0.1);
  EXPECT_NEAR(billions("gpt-oss-20b"), 19.1, 0.1);
  EXPECT_NEAR(billions("glm-4.5"), 336.0, 0.1);
  EXPECT_NEAR(billions("minimax-m2"), 224.7, 0.1);
  EXPECT_NEAR(billions("olmoe-1b-7b"), 6.4, 0.1);
  EXPECT_NEAR(billions("nemotron-3-super"), 112.7, 0.1);
}

TEST(Problems, JsonText_IsReadWithItsDefaults) {
  Result<Problem> problem =
      ParseProblem(R"({"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 96})");
  ASSERT_TRUE(problem.ok()) << problem.status().ToString();
  EXPECT_EQ(problem->config.num_experts, 8);
  EXPECT_EQ(problem->config.num_local_experts, 8);
  EXPECT_EQ(problem->config.top_k(), 2);
  EXPECT_EQ(problem->config.activation.kind, ActivationKind::kSilu);
  EXPECT_EQ(problem->config.routing.method, RoutingMethod::kRenormalize);
}

TEST(Problems, ParametersOfActivations_AreTheirOwnUnlessTheyAreGiven) {
  const std::string sizes = R"({"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 96, )";
  EXPECT_EQ(ParseProblem(sizes + R"("activation": "swigluoai"})")->config.activation,
            CanonicalActivation(ActivationKind::kSwigluOai));
  EXPECT_EQ(ParseProblem(sizes + R"("activation": "swigluoai", "beta": 0.5})")->config.activation,
            (ActivationSpec{ActivationKind::kSwigluOai, 1.702F, 0.5F, 7.0F}));
  EXPECT_EQ(ParseProblem(sizes + R"("activation": "swiglustep"})")->config.activation.limit, 7.0F);
}

TEST(Problems, LatentExperts_ReadShorterRows) {
  const std::string sizes = R"("num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 96)";
  Result<Problem> problem = ParseProblem("{" + sizes + R"(, "latent": 32})");
  ASSERT_TRUE(problem.ok()) << problem.status().ToString();
  EXPECT_EQ(problem->config.latent, 32);
  EXPECT_EQ(problem->config.expert_hidden(), 32);
  EXPECT_FALSE(ParseProblem("{" + sizes + R"(, "latent": -1})").ok());
}

TEST(Problems, MalformedText_IsRefusedWithTheField) {
  const std::pair<const char*, const char*> cases[] = {
      {"{", "not a JSON object"},
      {"[{}]", "not a JSON object"},
      {R"({"num_experts": 8, "top_k": 2, "hidden": 64})", "intermediate"},
      {R"({"num_experts": "8", "top_k": 2, "hidden": 64, "intermediate": 96})", "num_experts"},
      {R"({"num_experts": 8, "top_k": 9, "hidden": 64, "intermediate": 96})", "top_k"},
      {R"({"num_experts": 8, "top_k": 2, "hidden": -64, "intermediate": 96})", "hidden"},
      {R"({"num_experts": 8, "top_k": 2, "hidden": 99999999999999999999, "intermediate": 96})", "hidden"},
      {R"({"num_experts": 8, "top_k": 2, "hidden": 18446744073709551615, "intermediate": 96})", "hidden"},
      {R"({"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 96, "routing": "Magic"})", "routing"},
      {R"({"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 96, "limit": 1e300})", "limit"},
      {R"({"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 96, "topk": 2})", "topk"},
      // Each field is possible, the layer is not.
      {R"({"num_experts": 8, "top_k": 2, "hidden": 24, "intermediate": 96, "scheme": "nvfp4_w4a4"})",
       "'hidden' is 24"},
      {R"({"num_experts": 8, "top_k": 2, "hidden": 64, "latent": 24, "intermediate": 96, "scheme": "nvfp4_w4a4"})",
       "'latent' is 24"},
      {R"({"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 100, "scheme": "mxfp4_w4a16"})",
       "'intermediate' is 100"},
      {R"({"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 96, "scheme": "fp3"})", "'scheme'"},
      {R"({"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 96, "dtype": "I32"})", "dtype"},
      {R"({"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 96, "norm_epsilon": -1})",
       "norm_epsilon -1"},
      {R"({"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 96, "limit": -1})", "limit -1"},
      {R"({"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 96, "num_groups": 3})", "num_groups"},
      {R"({"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 96, "shared_gate": true})",
       "shared.intermediate"},
  };
  for (const auto& [text, part] : cases) {
    Result<Problem> problem = ParseProblem(text);
    ASSERT_FALSE(problem.ok()) << text;
    EXPECT_EQ(problem.status().code(), StatusCode::kBadInput) << text;
    EXPECT_NE(problem.status().message().find(part), std::string::npos) << problem.status().message();
  }
}

TEST(Problems, UnknownName_ListsThoseThatExist) {
  Result<Problem> problem = ParseProblem("gpt-5");
  ASSERT_FALSE(problem.ok());
  EXPECT_EQ(problem.status().code(), StatusCode::kUsage);
  EXPECT_NE(problem.status().message().find("deepseek-v3"), std::string::npos);
}

TEST(Problems, FilesAreRead_AndNamedWhereTheyAreWrong) {
  const test::TemporaryDirectory directory;
  const std::string sound = R"({"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 96})";
  EXPECT_EQ(ReadProblem(directory.Write("a.json", sound))->config.hidden, 64);
  EXPECT_EQ(ReadProblem("mixtral-8x7b")->name, "mixtral-8x7b");
  for (const std::string& odd :
       {directory.Write("empty.json", ""), directory.Write("words.json", "mixtral-8x7b"), directory / "",
        std::string("/dev/zero")}) {
    const Status status = ReadProblem(odd).status();
    EXPECT_EQ(status.code(), StatusCode::kBadInput) << odd;
    EXPECT_EQ(status.file(), odd);
  }
  EXPECT_EQ(ReadProblem(directory / "absent.json").status().code(), StatusCode::kUsage);
}

TEST(Problems, PerRank_DividesWhatIsSplit) {
  const MoeConfig whole = ParseProblem("deepseek-v3")->config;
  ParallelSizes sizes;
  sizes.tp = 4;
  Result<MoeConfig> tensor = PerRank(whole, *MakeParallelConfig(sizes));
  ASSERT_TRUE(tensor.ok());
  EXPECT_EQ(tensor->intermediate, 512);
  EXPECT_EQ(tensor->num_local_experts, 256);
  sizes.enable_expert_parallel = true;
  Result<MoeConfig> experts = PerRank(whole, *MakeParallelConfig(sizes));
  ASSERT_TRUE(experts.ok());
  EXPECT_EQ(experts->intermediate, 2048);
  EXPECT_EQ(experts->num_local_experts, 64);
}

}  // namespace
}  // namespace fusedmoe
