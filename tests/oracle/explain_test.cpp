
#include "oracle/support.hpp"

namespace fusedmoe {
namespace {

using testing::Answer;
using testing::AnyNote;
using testing::Chosen;
using testing::ExpertParallel;
using testing::Find;
using testing::FindVerdict;
using testing::Request;

ExplainRequest Named(std::string_view problem, std::string_view scheme, std::string_view platform) {
  ExplainRequest request = Request(scheme, platform);
  Result<Problem> parsed = ParseProblem(problem);
  EXPECT_TRUE(parsed.ok()) << problem;
  if (parsed.ok()) {
    request.problem = parsed->name;
    request.config = parsed->config;
  }
  return request;
}

ExplainRequest WideDeepSeek(std::string_view platform) {
  ExplainRequest request = Named("deepseek-v3", "nvfp4_w4a4", platform);
  request.config.parallel = ExpertParallel(8, "deepep_low_latency");
  return request;
}

TEST(Explain, DeepSeekWideOnSm100_TakesTheBatchedKernel) {
  const Explanation answer = Answer(WideDeepSeek("sm100"));
  ASSERT_TRUE(answer.selection.chosen);
  EXPECT_EQ(answer.selection.chosen->backend, "FLASHINFER_CUTEDSL");
  EXPECT_EQ(answer.selection.chosen->activation_format, ActivationFormatKind::kBatchedExperts);
  EXPECT_EQ(answer.selection.chosen->mode, "masked");
  EXPECT_EQ(answer.selection.chosen->prepare_finalize, "deepep_low_latency");
  EXPECT_EQ(answer.rank_config.num_local_experts, 32);
}

TEST(Explain, DeepSeekWideOnSm90_RefusesEachAndNamesTheNearestAlternative) {
  const Explanation answer = Answer(WideDeepSeek("sm90"));
  EXPECT_FALSE(answer.selection.chosen);
  ASSERT_EQ(answer.selection.candidates.size(), 6U);
  for (const Candidate& candidate : answer.selection.candidates) {
    EXPECT_FALSE(candidate.supported) << candidate.backend;
    EXPECT_FALSE(candidate.verdicts.empty()) << candidate.backend;
  }
  EXPECT_NE(FindVerdict(answer.selection, "FLASHINFER_CUTEDSL", Reason::kDevice), nullptr);
  EXPECT_NE(FindVerdict(answer.selection, "MARLIN", Reason::kActivationFormat), nullptr);
  EXPECT_GE(Find(answer.selection, "VLLM_CUTLASS")->verdicts.size(), 4U)
      << "all failing checks, not the first";
  ASSERT_FALSE(answer.alternatives.empty());
  EXPECT_EQ(answer.alternatives.front(), "--all2all allgather_reducescatter: MARLIN");
  for (const std::string& alternative : answer.alternatives) {
    EXPECT_EQ(alternative.find("mori"), std::string::npos) << "mori does not exist there";
  }
  EXPECT_EQ(ToStatus(answer.selection).code(), StatusCode::kUnsupported);
}

TEST(Explain, Costs_MatchTheRooflineOfTheLayer) {
  // Qwen3-30B, one token: 8 experts of 3 * 2048 * 768 weights, 75.5 MB in bf16, 21.2 MB at 4.5 bits.
  const Explanation plain = Answer(Named("qwen3-30b-a3b", "unquantized", "sm90"));
  EXPECT_NEAR(plain.costs.active_experts, 8.0, 1e-9);
  constexpr int64_t kWeights = int64_t{8} * 3 * 2048 * 768;
  EXPECT_EQ(plain.costs.flops, 2 * kWeights);
  EXPECT_EQ(plain.costs.read_bytes, 2 * kWeights + 2 * 2048 * 2);
  EXPECT_EQ(plain.costs.weight_bytes, int64_t{128} * 3 * 2048 * 768 * 2);
  EXPECT_NEAR(plain.costs.seconds, static_cast<double>(plain.costs.read_bytes) / 4.8e12, 1e-12);
  EXPECT_EQ(plain.costs.rate, "4800 GB/s");
  const Explanation four = Answer(Named("qwen3-30b-a3b", "nvfp4_w4a4", "sm90"));
  // gate, up and down each have one F32 above their block scales
  EXPECT_EQ(four.costs.weight_bytes, int64_t{128} * (int64_t{3} * 2048 * 768 * 9 / 16 + 3 * 4));
}

TEST(Explain, ManyTokens_AreBoundByTheArithmeticAndKnowItsRate) {
  ExplainRequest request = Named("qwen3-30b-a3b", "fp8_w8a8:block128", "sm90");
  request.tokens = 8192;
  const Explanation answer = Answer(request);
  EXPECT_EQ(answer.costs.rate, "1979 TFLOP/s fp8");
  EXPECT_NEAR(answer.costs.active_experts, 128.0, 1e-6);
  request.selection.backend = "MARLIN";
  EXPECT_EQ(Answer(request).costs.rate, "989 TFLOP/s f16") << "weight-only kernels multiply in 16 bits";
}

TEST(Explain, ExpertParallel_DividesWeightsAndWork) {
  ExplainRequest request = Named("deepseek-v3", "nvfp4_w4a4", "sm100");
  const Explanation one = Answer(request);
  request.config.parallel = ExpertParallel(8, "allgather_reducescatter");
  const Explanation eight = Answer(request);
  EXPECT_EQ(eight.costs.weight_bytes * 8, one.costs.weight_bytes);
  EXPECT_EQ(eight.costs.flops, one.costs.flops) << "an eighth of the experts, eight times the tokens";
  EXPECT_EQ(one.costs.exchange_bytes, 0);
  EXPECT_GT(eight.costs.exchange_bytes, 0);
}

TEST(Explain, TensorParallelThatDoesNotDivide_NamesWhatWould) {
  ExplainRequest request = Named("qwen3-30b-a3b", "unquantized", "sm90");
  request.config.parallel.tp_size = 7;
  Result<Explanation> answer = Explain(request);
  ASSERT_FALSE(answer.ok());
  EXPECT_NE(answer.status().message().find("768"), std::string::npos) << answer.status().message();
  EXPECT_NE(answer.status().message().find("7"), std::string::npos) << answer.status().message();
}

TEST(Explain, UnknownNames_AreUsageErrors) {
  ExplainRequest request = Request("nvfp4_w4a4", "sm91");
  EXPECT_EQ(Explain(request).status().code(), StatusCode::kUsage);
  request.platform = "sm90";
  request.selection.backend = "FASTEST";
  EXPECT_EQ(Explain(request).status().code(), StatusCode::kUsage);
  request.selection.backend.clear();
  request.config.parallel.all2all = "pigeons";
  EXPECT_EQ(Explain(request).status().code(), StatusCode::kUsage);
  request.config.parallel = {};
  request.selection.env = {"VLLM_USE_FLASHINFER_MOE_FP4=maybe"};
  EXPECT_EQ(Explain(request).status().code(), StatusCode::kUsage);
  request.selection.env = {"VLLM_USE_FLASHINFER_MOE_FP4"};
  EXPECT_EQ(Explain(request).status().code(), StatusCode::kUsage);
}

// Upstream's word for what no table has: not the same mistake as a misspelt one.
TEST(Explain, WordsOfVllmWithoutARow_SaySoAndWhatToNameInstead) {
  for (const auto& [word, instead] :
       {std::pair("humming", "name marlin"), std::pair("deep_gemm_mega_moe", "name deep_gemm"),
        std::pair("Triton_Unfused", "name triton"), std::pair("flashinfer_b12x", "name flashinfer_cutlass"),
        std::pair("hpc", "name triton"), std::pair("FlyDSL", "name aiter"),
        std::pair("sm70_skinny", "name marlin")}) {
    for (const char* platform : {"sm100", "host"}) {
      ExplainRequest request = Request("mxfp4_w4a16", platform);
      request.selection.backend = word;
      const Status status = Explain(request).status();
      EXPECT_EQ(status.code(), StatusCode::kUsage) << word;
      EXPECT_NE(status.message().find("is known to vLLM"), std::string::npos) << status.message();
      EXPECT_NE(status.message().find("not described here"), std::string::npos) << status.message();
      EXPECT_NE(status.message().find(instead), std::string::npos) << status.message();
    }
    const Status status = WhyNot(Request("mxfp4_w4a16", "sm100"), word).status();
    EXPECT_NE(status.message().find(instead), std::string::npos) << status.message();
  }
}

// A word that a table has is no stranger where another table is asked.
TEST(Explain, WordsOfVllmThatOtherTablesHave_AreRefusals) {
  ExplainRequest request = Request("mxfp4_w4a16", "sm100");
  request.selection.backend = "batched_triton";
  const Result<Explanation> answer = Explain(request);
  ASSERT_TRUE(answer.ok()) << answer.status().ToString();
  EXPECT_FALSE(answer->selection.chosen);
}

TEST(Explain, Auto_NamesNoBackend) {
  for (const char* platform : {"sm100", "host"}) {
    const ExplainRequest unnamed = Request("mxfp4_w4a16", platform);
    for (const char* word : {"auto", "AUTO"}) {
      ExplainRequest request = unnamed;
      request.selection.backend = word;
      const Result<Explanation> answer = Explain(request), expected = Explain(unnamed);
      ASSERT_TRUE(answer.ok()) << answer.status().ToString();
      EXPECT_EQ(answer->selection.chosen->backend, expected->selection.chosen->backend);
      EXPECT_EQ(answer->selection.candidates.size(), expected->selection.candidates.size());
      EXPECT_EQ(answer->alternatives, expected->alternatives) << word;
    }
  }
  const Status why = WhyNot(Request("mxfp4_w4a16", "sm100"), "auto").status();
  EXPECT_EQ(why.code(), StatusCode::kUsage);
  EXPECT_NE(why.message().find("names no backend"), std::string::npos) << why.message();
}

TEST(Explain, SizesOutOfRange_AreRefusedBeforeAnyArithmetic) {
  for (const int64_t bad : {int64_t{0}, int64_t{-1}, int64_t{1} << 62}) {
    ExplainRequest request = Request("nvfp4_w4a4", "sm90");
    request.config.hidden = bad;
    EXPECT_EQ(Explain(request).status().code(), StatusCode::kUsage) << "hidden " << bad;
    request = Request("nvfp4_w4a4", "sm90");
    request.config.num_experts = bad;
    EXPECT_EQ(Explain(request).status().code(), StatusCode::kUsage) << "num_experts " << bad;
    request = Request("nvfp4_w4a4", "sm90");
    request.tokens = bad;
    EXPECT_EQ(Explain(request).status().code(), StatusCode::kUsage) << "tokens " << bad;
    request = Request("nvfp4_w4a4", "sm90");
    request.config.parallel.dp_size = bad;
    EXPECT_EQ(Explain(request).status().code(), StatusCode::kUsage) << "dp " << bad;
  }
}

TEST(Explain, KnownBackendOfAnotherTable_IsRefusedNotUnknown) {
  ExplainRequest request = Request("nvfp4_w4a4", "sm90");
  request.selection.backend = "TRITON";
  const Explanation answer = Answer(request);
  EXPECT_FALSE(answer.selection.chosen);
  EXPECT_NE(FindVerdict(answer.selection, "TRITON", Reason::kNotBuilt), nullptr);
}

TEST(Explain, BatchedRows_ReplaceANamedBackendByItsBatchedForm) {
  ExplainRequest request = Request("int4_w4a16", "sm90");
  request.config.parallel = ExpertParallel(8, "deepep_low_latency");
  request.selection.backend = "marlin";
  const Explanation answer = Answer(request);
  EXPECT_EQ(Chosen(answer.selection), "BATCHED_MARLIN");
  EXPECT_TRUE(AnyNote(answer.selection, "MARLIN means BATCHED_MARLIN"));
}

TEST(Explain, HostAndCpus_AnswerWithThisBuild) {
  for (const char* platform : {"host", "cpu-avx2", "cpu-amx"}) {
    const Explanation answer = Answer(Request("unquantized", platform));
    EXPECT_EQ(answer.family, "this build");
    EXPECT_NE(Find(answer.selection, "MARLIN"), nullptr);
    EXPECT_NE(Find(answer.selection, "FLASHINFER_TRTLLM"), nullptr);
  }
  EXPECT_EQ(Answer(Request("unquantized", "cpu")).family, "unquantized") << "plain cpu is upstream's view";
}

TEST(Explain, EveryProblemOnEveryPlatform_HasAnAnswerAndATable) {
  for (const Problem& problem : Problems()) {
    for (const Platform& platform : DescribedPlatforms()) {
      const Explanation answer = Answer(Named(problem.name, problem.scheme, platform.name));
      EXPECT_EQ(answer.selection.chosen.has_value(), ToStatus(answer.selection).ok());
      const std::string text = ToString(answer);
      for (const Candidate& candidate : answer.selection.candidates) {
        EXPECT_NE(text.find(candidate.backend), std::string::npos);
      }
    }
  }
}

// What is said to help is all that was changed to try it.
TEST(Explain, Alternatives_AreWholeChanges) {
  ExplainRequest int8 = Named("gpt-oss-20b", "w_mxfp6_e3m2_a_fp8:static", "sm90");
  int8.activation = ActivationMode::kA8;
  for (const std::string& alternative : Answer(int8).alternatives) {
    const std::string flag = "--scheme ";
    if (alternative.starts_with(flag)) {
      ExplainRequest other = int8;
      other.scheme = *ParseScheme(alternative.substr(flag.size(), alternative.find(": ") - flag.size()));
      EXPECT_TRUE(Answer(other).selection.chosen) << alternative;
    }
  }
  ExplainRequest balanced = Named("minimax-m2", "nvfp4_w4a8:g16", "sm75");
  balanced.config.parallel = ExpertParallel(4, "nixl_ep");
  balanced.config.parallel.enable_eplb = true;
  const std::vector<std::string> alternatives = Answer(balanced).alternatives;
  EXPECT_TRUE(std::none_of(alternatives.begin(), alternatives.end(), [](const std::string& alternative) {
    return alternative.starts_with("without --ep:");
  }));
}

// vLLM's kernels for int4 with FP8 activations have groups of 128 alone.
TEST(Explain, CutlassOfInt4AndFp8_HasGroupsOf128) {
  EXPECT_EQ(Chosen(Answer(Request("int4_w4afp8:g128", "sm90")).selection), "VLLM_CUTLASS");
  for (const char* scheme : {"int4_w4afp8:g64", "int4_w4afp8:g32"}) {
    const Selection selection = Answer(Request(scheme, "sm90")).selection;
    EXPECT_NE(Chosen(selection), "VLLM_CUTLASS") << scheme;
    EXPECT_NE(FindVerdict(selection, "VLLM_CUTLASS", Reason::kScheme), nullptr) << scheme;
  }
}

TEST(WhyNot, ItsChanges_DoMakeTheBackendTheChoice) {
  const ExplainRequest request = WideDeepSeek("sm90");
  Result<WhyNotAnswer> answer = WhyNot(request, "marlin");
  ASSERT_TRUE(answer.ok());
  EXPECT_TRUE(answer->reachable);
  ASSERT_EQ(answer->changes.size(), 1U);
  EXPECT_EQ(answer->changes[0], "--all2all allgather_reducescatter");
  Result<WhyNotAnswer> dsl = WhyNot(request, "FLASHINFER_CUTEDSL");
  ASSERT_TRUE(dsl.ok());
  ASSERT_EQ(dsl->changes.size(), 1U);
  EXPECT_EQ(dsl->changes[0], "--platform sm100");
}

TEST(WhyNot, ABackendBehindAnother_NeedsToBeNamed) {
  Result<WhyNotAnswer> answer = WhyNot(Request("nvfp4_w4a4", "sm100"), "MARLIN");
  ASSERT_TRUE(answer.ok());
  EXPECT_TRUE(answer->reachable);
  EXPECT_EQ(answer->changes, std::vector<std::string>{"--backend MARLIN"});
  Result<WhyNotAnswer> chosen = WhyNot(Request("nvfp4_w4a4", "sm100"), "FLASHINFER_TRTLLM");
  ASSERT_TRUE(chosen.ok());
  EXPECT_TRUE(chosen->chosen_already);
  EXPECT_TRUE(chosen->changes.empty());
}

TEST(WhyNot, ASwitchInTheWay_IsTakenAway) {
  ExplainRequest request = Request("nvfp4_w4a4", "sm100");
  request.selection.env = {"VLLM_USE_FLASHINFER_MOE_FP4=0"};
  ASSERT_EQ(Chosen(Answer(request).selection), "MARLIN");
  Result<WhyNotAnswer> answer = WhyNot(request, "FLASHINFER_TRTLLM");
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->changes, std::vector<std::string>{"without VLLM_USE_FLASHINFER_MOE_FP4=0"});
}

TEST(WhyNot, EveryBackendOfEveryTable_IsReachableFromAnOrdinaryQuestion) {
  // The tables hold nothing that no question could choose. Names of this build alone are left out: they are
  // not there.
  const ExplainRequest request = Request("nvfp4_w4a4", "sm90");
  for (const char* backend : {"FLASHINFER_TRTLLM",
                              "FLASHINFER_CUTEDSL",
                              "FLASHINFER_CUTLASS",
                              "VLLM_CUTLASS",
                              "EMULATION",
                              "DEEPGEMM",
                              "BATCHED_DEEPGEMM",
                              "TRITON",
                              "BATCHED_TRITON",
                              "BATCHED_VLLM_CUTLASS",
                              "XPU",
                              "CPU",
                              "AITER",
                              "BATCHED_MARLIN",
                              "FLASHINFER_TRTLLM_BF16",
                              "FLASHINFER_CUTLASS_BF16",
                              "FLASHINFER_TRTLLM_MXFP8",
                              "FLASHINFER_CUTLASS_MXFP8",
                              "DEEPGEMM_MXFP4",
                              "AITER_MXFP4_BF16",
                              "AITER_MXFP4_FP8",
                              "AITER_MXFP4_MXFP4"}) {
    Result<WhyNotAnswer> answer = WhyNot(request, backend);
    ASSERT_TRUE(answer.ok()) << backend;
    EXPECT_TRUE(answer->reachable) << ToString(*answer);
  }
  EXPECT_EQ(WhyNot(request, "FASTEST").status().code(), StatusCode::kUsage);
}

TEST(Diff, TwoPlatforms_DifferWhereTheyDo) {
  const Explanation first = Answer(Request("nvfp4_w4a4", "sm90"));
  const Explanation second = Answer(Request("nvfp4_w4a4", "sm100"));
  EXPECT_TRUE(Diff(first, first).empty());
  const std::vector<Difference> differences = Diff(first, second);
  ASSERT_FALSE(differences.empty());
  EXPECT_EQ(differences.front().field, "chosen");
  EXPECT_EQ(differences.front().first, "MARLIN");
  EXPECT_EQ(differences.front().second, "FLASHINFER_TRTLLM");
  const std::string text = ToString(differences);
  EXPECT_NE(text.find("candidate FLASHINFER_CUTLASS"), std::string::npos);
  EXPECT_EQ(text.find("candidate VLLM_CUTLASS\n  - \n"), std::string::npos);
}

}  // namespace
}  // namespace fusedmoe
