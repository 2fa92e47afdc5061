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

}  // namespace
}  // namespace fusedmoe
