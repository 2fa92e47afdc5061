#include <functional>
#include <set>

#include "oracle/explain.hpp"
#include "oracle/select.hpp"
#include "oracle/support.hpp"

// Each reason of the table, produced by a question that differs from one with an answer in exactly what the
// reason names.

namespace fusedmoe {
namespace {

using testing::Answer;
using testing::ExpertParallel;
using testing::FindVerdict;
using testing::Request;

struct Row {
  Reason reason;
  const char* scheme;
  const char* platform;
  const char* backend;
  std::function<void(ExplainRequest&)> change;
};

const std::vector<Row>& Rows() {
  static const std::vector<Row> rows = {
      {Reason::kDevice, "nvfp4_w4a4", "sm100", "FLASHINFER_TRTLLM",
       [](ExplainRequest& r) { r.platform = "sm90"; }},
      {Reason::kIsa, "unquantized", "cpu-avx2", "REFERENCE", [](ExplainRequest& r) { r.isa = "amx"; }},
      {Reason::kScheme, "nvfp4_w4a4", "sm100", "FLASHINFER_TRTLLM",
       [](ExplainRequest& r) { r.scheme = *ParseScheme("nvfp4_w4a16"); }},
      {Reason::kActivation, "nvfp4_w4a4", "sm100", "FLASHINFER_TRTLLM",
       [](ExplainRequest& r) { r.config.activation.kind = ActivationKind::kGelu; }},
      {Reason::kActivationParameters, "nvfp4_w4a4", "sm100", "FLASHINFER_TRTLLM",
       [](ExplainRequest& r) { r.config.activation.limit = 10.0F; }},
      {Reason::kNotGated, "nvfp4_w4a4", "sm100", "FLASHINFER_TRTLLM",
       [](ExplainRequest& r) { r.config.activation.kind = ActivationKind::kRelu2NoMul; }},
      {Reason::kBias, "nvfp4_w4a4", "sm100", "FLASHINFER_TRTLLM",
       [](ExplainRequest& r) { r.config.has_bias = true; }},
      {Reason::kZeroPoint, "fp8_w8a16", "sm90", "MARLIN",
       [](ExplainRequest& r) { r.weights.has_zero_points = true; }},
      {Reason::kZeroPoint, "int4_w4a16:g32", "sm90", "MARLIN",
       [](ExplainRequest& r) {
         r.weights.has_zero_points = true;
         r.scheme.weight.zero_point_dtype = DType::kF32;
       }},
      {Reason::kScheme, "int4_w4a16:g32", "sm90", "MARLIN",
       [](ExplainRequest& r) { r.scheme = *ParseScheme("int4_w4a16:g16"); }},
      {Reason::kScheme, "nvfp4_w4a4", "sm90", "MARLIN",
       [](ExplainRequest& r) { r.weights.has_pre_quant_scale = true; }},
      {Reason::kScheme, "nvfp4_w4a4", "host", "MARLIN",
       [](ExplainRequest& r) { r.weights.has_pre_quant_scale = true; }},
      {Reason::kParallel, "nvfp4_w4a4", "sm100", "VLLM_CUTLASS",
       [](ExplainRequest& r) { r.config.parallel = ExpertParallel(8, "allgather_reducescatter"); }},
      {Reason::kAllToAll, "nvfp4_w4a4", "sm90", "MARLIN",
       [](ExplainRequest& r) { r.config.parallel = ExpertParallel(8, "flashinfer_nvlink_one_sided"); }},
      {Reason::kRouting, "nvfp4_w4a4", "sm100", "FLASHINFER_TRTLLM",
       [](ExplainRequest& r) { r.config.routing.method = RoutingMethod::kCustom; }},
      {Reason::kRouterLogitsDtype, "nvfp4_w4a4", "sm100", "FLASHINFER_TRTLLM",
       [](ExplainRequest& r) { r.selection.router_logits_dtype = DType::kF16; }},
      {Reason::kHiddenSize, "nvfp4_w4a4", "sm90", "MARLIN",
       [](ExplainRequest& r) { r.config.hidden = 2049; }},
      {Reason::kIntermediateSize, "fp8_w8a8:block128", "sm90", "TRITON",
       [](ExplainRequest& r) { r.config.intermediate = 448; }},
      {Reason::kTopK, "fp8_w8a8:block128", "sm100", "FLASHINFER_TRTLLM",
       [](ExplainRequest& r) { r.config.routing.top_k = 11; }},
      {Reason::kNumExperts, "fp8_w8a8:block128", "sm100", "FLASHINFER_TRTLLM",
       [](ExplainRequest& r) { r.config.num_experts = 126; }},
      {Reason::kExpertMap, "nvfp4_w4a4", "sm100", "FLASHINFER_TRTLLM",
       [](ExplainRequest& r) { r.config.parallel = ExpertParallel(6, "allgather_reducescatter"); }},
      {Reason::kActivationFormat, "nvfp4_w4a4", "sm90", "MARLIN",
       [](ExplainRequest& r) { r.config.parallel = ExpertParallel(8, "deepep_low_latency"); }},
      {Reason::kRouterWeightOnInput, "nvfp4_w4a4", "sm90", "MARLIN",
       [](ExplainRequest& r) { r.config.apply_router_weight_on_input = true; }},
      {Reason::kDtype, "nvfp4_w4a4", "sm90", "MARLIN",
       [](ExplainRequest& r) { r.config.dtype = DType::kF32; }},
      {Reason::kDeterminism, "nvfp4_w4a4", "sm90", "MARLIN",
       [](ExplainRequest& r) { r.determinism = Determinism::kBatchInvariant; }},
      {Reason::kLora, "nvfp4_w4a4", "sm90", "MARLIN", [](ExplainRequest& r) { r.selection.lora = true; }},
      {Reason::kEplb, "fp8_w8a8:block128", "sm100", "FLASHINFER_TRTLLM",
       [](ExplainRequest& r) {
         r.config.parallel = ExpertParallel(8, "allgather_reducescatter");
         r.config.parallel.enable_eplb = true;
         r.config.routing.method = RoutingMethod::kRenormalize;
       }},
      {Reason::kSwitch, "nvfp4_w4a4", "sm100", "FLASHINFER_TRTLLM",
       [](ExplainRequest& r) { r.selection.env = {"VLLM_USE_FLASHINFER_MOE_FP4=0"}; }},
      {Reason::kNotNamed, "nvfp4_w4a4", "sm90", "MARLIN",
       [](ExplainRequest& r) { r.selection.backend = "EMULATION"; }},
      {Reason::kNotFirst, "nvfp4_w4a4", "sm90", "MARLIN", [](ExplainRequest& r) { r.platform = "sm100"; }},
      {Reason::kMemory, "unquantized", "sm75", "TRITON",
       [](ExplainRequest& r) {
         r.config.num_experts = 4096;
         r.config.hidden = 8192;
       }},
  };
  return rows;
}

TEST(Reasons, EveryReason_IsProducedByWhatItNames) {
  for (const Row& row : Rows()) {
    ExplainRequest request = Request(row.scheme, row.platform);
    const std::string what = std::string(ReasonCode(row.reason)) + " of " + row.backend;
    EXPECT_EQ(FindVerdict(Answer(request).selection, row.backend, row.reason), nullptr)
        << what << " before the change";
    row.change(request);
    const Explanation answer = Answer(request);
    const Verdict* verdict = FindVerdict(answer.selection, row.backend, row.reason);
    ASSERT_NE(verdict, nullptr) << what << "\n" << ToString(answer);
    EXPECT_FALSE(verdict->sentence.empty()) << what;
    EXPECT_FALSE(verdict->actual.empty()) << what;
    EXPECT_FALSE(verdict->required.empty()) << what;
    EXPECT_NE(testing::Chosen(answer.selection), row.backend) << what;
  }
}

TEST(Reasons, TheRowsAbove_CoverTheWholeTable) {
  // The chosen backend's, and that of names without code: this build has all, host_test.cpp a table with one.
  std::set<Reason> produced = {Reason::kNone, Reason::kNotBuilt};
  for (const Row& row : Rows()) {
    produced.insert(row.reason);
  }
#define FMOE_REASON_COVERED(id, code, what) EXPECT_EQ(produced.count(Reason::id), 1U) << code;
  FMOE_REASON_TABLE(FMOE_REASON_COVERED)
#undef FMOE_REASON_COVERED
}

TEST(Reasons, Codes_AreDistinctWords) {
  std::set<std::string_view> codes;
  size_t count = 0;
#define FMOE_REASON_DISTINCT(id, code, what) \
  codes.insert(ReasonCode(Reason::id));      \
  ++count;
  FMOE_REASON_TABLE(FMOE_REASON_DISTINCT)
#undef FMOE_REASON_DISTINCT
  EXPECT_EQ(codes.size(), count);
}

TEST(Reasons, AllFailingChecks_AreListedTogether) {
  ExplainRequest request = Request("nvfp4_w4a4", "sm90");
  request.config.activation = {ActivationKind::kSwigluOai, 1.5F, 1.0F, 7.0F};
  request.config.routing.method = RoutingMethod::kCustom;
  request.config.has_bias = true;
  request.config.dtype = DType::kF32;
  request.config.hidden = 2056;
  request.determinism = Determinism::kRankInvariant;
  request.selection.lora = true;
  request.selection.router_logits_dtype = DType::kF16;
  request.config.parallel = ExpertParallel(6, "deepep_low_latency");
  const Selection selection = Answer(request).selection;
  for (const Reason reason :
       {Reason::kDevice, Reason::kActivation, Reason::kActivationParameters, Reason::kRouting,
        Reason::kRouterLogitsDtype, Reason::kHiddenSize, Reason::kActivationFormat, Reason::kBias,
        Reason::kDtype, Reason::kDeterminism, Reason::kLora}) {
    EXPECT_NE(FindVerdict(selection, "FLASHINFER_TRTLLM", reason), nullptr) << ReasonCode(reason);
  }
}

TEST(Reasons, ClampBehindBatchedRows_HasNoNvfp4Backend) {
  ExplainRequest request = Request("nvfp4_w4a4", "sm100");
  request.config.parallel = ExpertParallel(8, "deepep_low_latency");
  EXPECT_EQ(testing::Chosen(Answer(request).selection), "FLASHINFER_CUTEDSL");
  request.config.activation.limit = 10.0F;
  const Explanation answer = Answer(request);
  EXPECT_FALSE(answer.selection.chosen) << "a clamp must not be ignored";
  EXPECT_FALSE(answer.alternatives.empty());
}

TEST(Reasons, HostWithoutRoom_SaysSo) {
  MoeProblem problem;
  problem.config.num_experts = 8;
  problem.config.num_local_experts = 8;
  problem.config.hidden = 4096;
  problem.config.intermediate = 14336;
  problem.config.routing.top_k = 2;
  Machine machine;
  machine.memory_bytes = int64_t{1} << 30;
  Result<Selection> selection = SelectBackend(problem, machine);
  ASSERT_TRUE(selection.ok());
  EXPECT_FALSE(selection->chosen);
  EXPECT_NE(FindVerdict(*selection, "REFERENCE", Reason::kMemory), nullptr);
}

}  // namespace
}  // namespace fusedmoe
