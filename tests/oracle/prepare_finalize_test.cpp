#include <cmath>

#include <fmt/format.h>

#include "oracle/support.hpp"

namespace fusedmoe {
namespace {

using testing::Answer;
using testing::Chosen;
using testing::ExpertParallel;
using testing::FindVerdict;
using testing::Request;

std::string StepFor(const ParallelConfig& parallel, std::string_view platform) {
  ExplainRequest request = Request("nvfp4_w4a4", platform);
  request.config.parallel = parallel;
  return Chosen(Answer(request).prepare_finalize);
}

TEST(PrepareFinalize, OneRankOrTensorParallel_NeedsNoExchange) {
  EXPECT_EQ(StepFor({}, "sm90"), "no_ep");
  ParallelConfig tensor;
  tensor.tp_size = 4;
  EXPECT_EQ(StepFor(tensor, "sm90"), "no_ep");
  ParallelSizes sizes;
  sizes.tp = 4;
  sizes.enable_expert_parallel = true;
  sizes.all2all = "deepep_low_latency";
  EXPECT_EQ(StepFor(*MakeParallelConfig(sizes), "sm90"), "no_ep") << "an exchange needs data parallelism";
}

TEST(PrepareFinalize, DataParallelWithoutExperts_Gathers) {
  ParallelSizes sizes;
  sizes.dp = 2;
  sizes.all2all = "deepep_low_latency";
  ExplainRequest request = Request("nvfp4_w4a4", "sm90");
  request.config.parallel = *MakeParallelConfig(sizes);
  const Explanation answer = Answer(request);
  EXPECT_EQ(Chosen(answer.prepare_finalize), "gather_scatter");
  EXPECT_TRUE(testing::AnyNote(answer.prepare_finalize, "deepep_low_latency is not used"));
}

TEST(PrepareFinalize, EachNameOnItsPlatform) {
  EXPECT_EQ(StepFor(ExpertParallel(8, "naive"), "sm90"), "gather_scatter");
  EXPECT_EQ(StepFor(ExpertParallel(8, "pplx"), "sm90"), "gather_scatter");
  EXPECT_EQ(StepFor(ExpertParallel(8, "allgather_reducescatter"), "gfx942"), "gather_scatter");
  EXPECT_EQ(StepFor(ExpertParallel(8, "deepep_high_throughput"), "sm90"), "deepep_high_throughput");
  EXPECT_EQ(StepFor(ExpertParallel(8, "deepep_low_latency"), "sm100"), "deepep_low_latency");
  EXPECT_EQ(StepFor(ExpertParallel(8, "nixl_ep"), "sm90"), "nixl_ep");
  EXPECT_EQ(StepFor(ExpertParallel(8, "flashinfer_all2allv"), "sm100"), "flashinfer_nvlink_two_sided");
  EXPECT_EQ(StepFor(ExpertParallel(8, "flashinfer_nvlink_one_sided"), "sm100"),
            "flashinfer_nvlink_one_sided");
  EXPECT_EQ(StepFor(ExpertParallel(8, "mori"), "gfx950"), "mori");
  EXPECT_EQ(StepFor(ExpertParallel(8, "mori"), "sm90"), "none");
}

TEST(PrepareFinalize, NothingThatServes_IsExplainedAndNoted) {
  ExplainRequest request = Request("nvfp4_w4a4", "sm80");
  request.config.parallel = ExpertParallel(8, "deepep_high_throughput");
  const Explanation answer = Answer(request);
  EXPECT_FALSE(answer.prepare_finalize.chosen);
  EXPECT_NE(FindVerdict(answer.prepare_finalize, "deepep_high_throughput", Reason::kDevice), nullptr);
  EXPECT_TRUE(testing::AnyNote(answer.selection, "no prepare and finalize step"));
  for (const Candidate& candidate : answer.prepare_finalize.candidates) {
    EXPECT_FALSE(candidate.verdicts.empty()) << candidate.backend;
  }
}

TEST(PrepareFinalize, LowLatencyRows_AreRoundedUpOrRefused) {
  ExplainRequest request = Request("nvfp4_w4a4", "sm100");
  request.config.parallel = ExpertParallel(8, "deepep_low_latency");
  request.config.hidden = 2880;
  EXPECT_TRUE(testing::AnyNote(Answer(request).prepare_finalize, "rows of 2880 are sent as rows of 3072"));
  request.config.hidden = 16384;
  EXPECT_NE(FindVerdict(Answer(request).prepare_finalize, "deepep_low_latency", Reason::kHiddenSize),
            nullptr);
}

// What ranks of this build do: the same as MoeLayer decides when it loads.
TEST(PrepareFinalize, Here_EveryDeploymentHasTheStepThatRuns) {
  struct Row {
    int64_t tp, pcp, dp;
    bool ep;
    const char* all2all;
    const char* step;
    bool batched;
  };
  const Row rows[] = {
      {1, 1, 1, false, "deepep_low_latency", "no_ep", false},
      {2, 1, 1, false, "allgather_reducescatter", "gather_scatter", false},
      {4, 1, 1, true, "deepep_low_latency", "gather_scatter", false},  // an exchange needs data parallelism
      {1, 2, 1, true, "naive", "gather_scatter", false},
      {1, 1, 4, false, "deepep_high_throughput", "gather_scatter", false},
      {1, 1, 4, true, "naive", "gather_scatter", false},
      {1, 1, 4, true, "allgather_reducescatter", "gather_scatter", false},
      {1, 1, 4, true, "deepep_high_throughput", "deepep_high_throughput", false},
      {2, 1, 4, true, "mori", "mori", false},
      {1, 2, 2, true, "flashinfer_all2allv", "flashinfer_nvlink_two_sided", false},
      {1, 1, 2, true, "deepep_low_latency", "deepep_low_latency", true},
      {1, 1, 2, true, "nixl_ep", "nixl_ep", true},
      {2, 1, 2, true, "pplx", "deepep_low_latency", true},  // by the same protocol
  };
  for (const Row& row : rows) {
    ParallelSizes sizes;
    sizes.tp = row.tp;
    sizes.pcp = row.pcp;
    sizes.dp = row.dp;
    sizes.enable_expert_parallel = row.ep;
    sizes.all2all = row.all2all;
    ExplainRequest request = Request("fp8_w8a8:block128", "host");
    request.config.parallel = *MakeParallelConfig(sizes);
    const Explanation answer = Answer(request);
    const std::string what =
        fmt::format("tp {} pcp {} dp {} ep {} {}", row.tp, row.pcp, row.dp, row.ep, row.all2all);
    EXPECT_EQ(Chosen(answer.prepare_finalize), row.step) << what;
    ASSERT_TRUE(answer.selection.chosen) << what;
    EXPECT_EQ(answer.selection.chosen->activation_format == ActivationFormatKind::kBatchedExperts,
              row.batched)
        << what;
    EXPECT_EQ(answer.costs.exchange_bytes > 0, row.tp * row.pcp * row.dp > 1) << what;
  }
}

TEST(PrepareFinalize, Here_ExchangedBytesAreThoseOfRowsAsTheyTravel) {
  ParallelSizes sizes;
  sizes.dp = 2;
  sizes.enable_expert_parallel = true;
  ExplainRequest request = Request("fp8_w8a8:block128", "host");
  request.tokens = 16;
  request.config.parallel = *MakeParallelConfig(sizes);
  const auto hidden = request.config.hidden;
  const double missed = std::pow(0.5, static_cast<double>(request.config.top_k()));
  const double expected = 16 * (static_cast<double>(hidden + hidden / 128 * 4 + 8 * request.config.top_k()) +
                                (1 - missed) * 4 * static_cast<double>(hidden));
  EXPECT_NEAR(static_cast<double>(Answer(request).costs.exchange_bytes), expected, 1);
}

// What `bench --ranks --device cuda` counted on two cards.
TEST(PrepareFinalize, OnCards_ExchangedBytesAreThoseThatWereCounted) {
  struct Row {
    int64_t tp, dp, tokens, bytes;
  };
  for (const Row& row :
       {Row{1, 2, 8, 98816}, {1, 2, 4096, 50593792}, {2, 1, 8, 65536}, {2, 1, 4096, 25165824}}) {
    ParallelSizes sizes;
    sizes.tp = row.tp;
    sizes.dp = row.dp;
    sizes.enable_expert_parallel = true;
    ExplainRequest request = Request("nvfp4_w4a4", "host");
    request.device = "cuda";
    request.config.hidden = 2048;
    request.config.routing.top_k = 8;
    request.tokens = row.tokens;
    request.config.parallel = *MakeParallelConfig(sizes);
    EXPECT_EQ(Answer(request).costs.exchange_bytes, row.bytes)
        << row.tp << " x " << row.dp << ", " << row.tokens;
  }
}

}  // namespace
}  // namespace fusedmoe
