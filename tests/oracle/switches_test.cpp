#include "oracle/switches.hpp"
#include "oracle/support.hpp"

namespace fusedmoe {
namespace {

using testing::Answer;
using testing::AnyNote;
using testing::Chosen;
using testing::ExpertParallel;
using testing::FindVerdict;
using testing::Request;

Selection With(std::string_view scheme, std::string_view platform, std::vector<std::string> env) {
  ExplainRequest request = Request(scheme, platform);
  request.selection.env = std::move(env);
  return Answer(request).selection;
}

// What upstream's oracle got wrong and ours must not (docs/oracle.md, "Not reproduced").

TEST(Slips, FlashInferSwitchAlone_ChecksEachBackendInsteadOfTakingTheFirst) {
  // Upstream tested a (supported, reason) pair for truth, so that FLASHINFER_CUTLASS was taken wherever it
  // could not run.
  const Selection hopper = With("nvfp4_w4a4", "sm90", {"VLLM_USE_FLASHINFER_MOE_FP4=1"});
  EXPECT_FALSE(hopper.chosen);
  EXPECT_NE(FindVerdict(hopper, "FLASHINFER_CUTLASS", Reason::kScheme), nullptr);
  EXPECT_NE(FindVerdict(hopper, "MARLIN", Reason::kSwitch), nullptr);
  ExplainRequest batched = Request("nvfp4_w4a4", "sm100");
  batched.config.parallel = ExpertParallel(8, "deepep_low_latency");
  batched.selection.env = {"VLLM_USE_FLASHINFER_MOE_FP4=1"};
  EXPECT_EQ(Chosen(Answer(batched).selection), "FLASHINFER_CUTEDSL")
      << "the first two of the list cannot, the third can";
  EXPECT_EQ(Chosen(With("nvfp4_w4a4", "sm100", {"VLLM_USE_FLASHINFER_MOE_FP4=1"})), "FLASHINFER_CUTLASS")
      << "where it can run, it is the first of the switch's own list";
}

TEST(FlashInferBackendOf, Words_MeanWhatUpstreamMakesOfThem) {
  EXPECT_EQ(FlashInferBackendOf("throughput", 120), "FLASHINFER_CUTLASS");
  EXPECT_EQ(FlashInferBackendOf("latency", 103), "FLASHINFER_TRTLLM");
  EXPECT_EQ(FlashInferBackendOf("latency", 110), "FLASHINFER_CUTLASS");
  EXPECT_EQ(FlashInferBackendOf("masked_gemm", 80), "FLASHINFER_CUTEDSL");
  EXPECT_EQ(FlashInferBackendOf("swift", 90), "FLASHINFER_CUTLASS");
  EXPECT_EQ(FlashInferBackendOf("swift", 100), "");
}

TEST(Slips, TrtllmReachedByTheGenericBranch_IsChosenNotRaised) {
  // Upstream raised NotImplementedError when one of the generic branches came to TRTLLM.
  ExplainRequest request = Request("nvfp4_w4a4", "sm100");
  EXPECT_EQ(Chosen(Answer(request).selection), "FLASHINFER_TRTLLM");
  request.selection.backend = "flashinfer_trtllm";
  EXPECT_EQ(Chosen(Answer(request).selection), "FLASHINFER_TRTLLM");
  request.selection.backend.clear();
  // A size that the CUTLASS kernel of the switch's list cannot take, so that the list goes on to TRTLLM.
  request.selection.env = {"VLLM_USE_FLASHINFER_MOE_FP4=1", "VLLM_FLASHINFER_MOE_BACKEND=latency"};
  EXPECT_EQ(Chosen(Answer(request).selection), "FLASHINFER_TRTLLM");
}

TEST(Slips, NothingLeft_CarriesTheWholeRejectionTable) {
  const Selection selection = With("nvfp4_w4a4", "gfx942", {});
  const Status status = ToStatus(selection);
  for (const Candidate& candidate : selection.candidates) {
    EXPECT_NE(status.message().find(candidate.backend + ": "), std::string::npos) << candidate.backend;
  }
}

TEST(Switches, SetAndTrue_AreTwoQuestions) {
  EXPECT_EQ(Chosen(With("nvfp4_w4a4", "sm100", {})), "FLASHINFER_TRTLLM");
  EXPECT_EQ(Chosen(With("nvfp4_w4a4", "sm100", {"VLLM_USE_FLASHINFER_MOE_FP4=0"})), "MARLIN")
      << "set, and false";
  EXPECT_EQ(Chosen(With("fp8_w8a8:block128", "sm90", {})), "TRITON");
  EXPECT_EQ(Chosen(With("fp8_w8a8:block128", "sm90", {"VLLM_USE_DEEP_GEMM=1"})), "DEEPGEMM")
      << "true is the default, and setting it to that still decides";
  EXPECT_EQ(Chosen(With("fp8_w8a8:block128", "sm90", {"VLLM_USE_DEEP_GEMM=1", "VLLM_MOE_USE_DEEP_GEMM=0"})),
            "TRITON");
}

// Of gpt-oss alone, in a list that all of MXFP4 has.
TEST(Switches, ThoseOfGptOss_LeaveOtherMxfp4LayersAlone) {
  for (const char* scheme : {"mxfp4_w4a16", "mxfp4_mxfp8"}) {
    for (const char* platform : {"sm90", "sm100"}) {
      const std::string usual(Chosen(With(scheme, platform, {})));
      ASSERT_NE(usual, "");
      for (const char* env :
           {"VLLM_USE_FLASHINFER_MOE_MXFP4_BF16=1", "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS=1"}) {
        const Selection selection = With(scheme, platform, {env});
        EXPECT_EQ(Chosen(selection), usual) << scheme << " on " << platform << " with " << env;
        EXPECT_TRUE(AnyNote(selection, "no effect")) << env;
      }
    }
  }
}

TEST(Switches, LatencyOffTheSm100Family_FallsBackToCutlass) {
  const std::vector<std::string> env = {"VLLM_USE_FLASHINFER_MOE_FP4=1",
                                        "VLLM_FLASHINFER_MOE_BACKEND=latency"};
  EXPECT_EQ(Chosen(With("nvfp4_w4a4", "sm100", env)), "FLASHINFER_TRTLLM");
  const Selection desktop = With("nvfp4_w4a4", "sm120", env);
  EXPECT_EQ(Chosen(desktop), "FLASHINFER_CUTLASS");
  EXPECT_TRUE(AnyNote(desktop, "falls back to FLASHINFER_CUTLASS"));
}

TEST(Switches, UnknownWish_TakesCutlassOnSm90AndNothingElsewhere) {
  const auto env = [](const char* flag) {
    return std::vector<std::string>{std::string(flag) + "=1", "VLLM_FLASHINFER_MOE_BACKEND=fastest"};
  };
  EXPECT_EQ(Chosen(With("fp8_w8a8:tensor_static", "sm90", env("VLLM_USE_FLASHINFER_MOE_FP8"))),
            "FLASHINFER_CUTLASS");
  const Selection elsewhere = With("nvfp4_w4a4", "sm100", env("VLLM_USE_FLASHINFER_MOE_FP4"));
  EXPECT_FALSE(elsewhere.chosen);
  EXPECT_TRUE(AnyNote(elsewhere, "none of throughput, latency, masked_gemm"));
}

TEST(Switches, MaskedGemmForFp8_HasNoKernelAndSaysSo) {
  const Selection selection =
      With("fp8_w8a8:block128", "sm100",
           {"VLLM_USE_FLASHINFER_MOE_FP8=1", "VLLM_FLASHINFER_MOE_BACKEND=masked_gemm"});
  EXPECT_FALSE(selection.chosen);
  EXPECT_TRUE(AnyNote(selection, "no kernel for these weights"));
}

TEST(Switches, TheFirstThatNamesBackends_Decides) {
  const Selection selection =
      With("fp8_w8a8:block128", "sm100", {"VLLM_TEST_FORCE_FP8_MARLIN=1", "VLLM_USE_FLASHINFER_MOE_FP8=1"});
  EXPECT_EQ(Chosen(selection), "FLASHINFER_TRTLLM");
  EXPECT_TRUE(AnyNote(selection, "VLLM_TEST_FORCE_FP8_MARLIN=1: no effect"));
  EXPECT_EQ(Chosen(With("fp8_w8a8:block128", "sm100", {"VLLM_TEST_FORCE_FP8_MARLIN=1"})), "MARLIN");
}

TEST(Switches, ANamedBackend_OverridesThem) {
  ExplainRequest request = Request("nvfp4_w4a4", "sm100");
  request.selection.backend = "MARLIN";
  request.selection.env = {"VLLM_USE_FLASHINFER_MOE_FP4=1"};
  const Selection selection = Answer(request).selection;
  EXPECT_EQ(Chosen(selection), "MARLIN");
  EXPECT_TRUE(AnyNote(selection, "VLLM_USE_FLASHINFER_MOE_FP4=1: no effect, a backend was named"));
}

TEST(Switches, WithoutEffect_AreReportedWithTheReason) {
  const Selection selection =
      With("nvfp4_w4a4", "sm90",
           {"VLLM_USE_FLASHINFER_MOE_FP8=1", "VLLM_USE_DEEP_GEMM_E8M0=1", "VLLM_FUSED_MOE_CHUNK_SIZE=64",
            "VLLM_FLASHINFER_MOE_BACKEND=latency", "VLLM_USE_FLASHINFER_MOE_FP4=0"});
  EXPECT_TRUE(AnyNote(selection, "VLLM_USE_FLASHINFER_MOE_FP8=1: no effect, it concerns FP8"));
  EXPECT_TRUE(AnyNote(selection, "VLLM_USE_DEEP_GEMM_E8M0=1: no effect on the choice"));
  EXPECT_TRUE(AnyNote(selection, "VLLM_FUSED_MOE_CHUNK_SIZE=64: no effect on the choice"));
  EXPECT_TRUE(AnyNote(selection, "VLLM_FLASHINFER_MOE_BACKEND=latency: no effect"));
  EXPECT_TRUE(AnyNote(selection, "VLLM_USE_FLASHINFER_MOE_FP4=0: changed verdicts, not the choice"));
  EXPECT_FALSE(
      AnyNote(With("nvfp4_w4a4", "sm100", {"VLLM_USE_FLASHINFER_MOE_FP4=0"}), "VLLM_USE_FLASHINFER_MOE_FP4"))
      << "a switch that changed the choice needs no note";
}

TEST(Switches, BatchInvariant_AsksForTheLevel) {
  EXPECT_EQ(Chosen(With("unquantized", "sm90", {})), "FLASHINFER_CUTLASS");
  EXPECT_EQ(Chosen(With("unquantized", "sm90", {"VLLM_BATCH_INVARIANT=1"})), "TRITON");
  const Selection fp4 = With("nvfp4_w4a4", "sm90", {"VLLM_BATCH_INVARIANT=1"});
  EXPECT_FALSE(fp4.chosen);
  EXPECT_NE(FindVerdict(fp4, "MARLIN", Reason::kDeterminism), nullptr);
  EXPECT_EQ(Chosen(With("nvfp4_w4a4", "sm90", {"VLLM_BATCH_INVARIANT=0"})), "MARLIN");
}

TEST(Switches, Aiter_IsOffUntilAskedFor) {
  EXPECT_EQ(Chosen(With("fp8_w8a8:block128", "gfx942", {})), "TRITON");
  EXPECT_EQ(Chosen(With("fp8_w8a8:block128", "gfx942", {"VLLM_ROCM_USE_AITER=1"})), "AITER");
  EXPECT_EQ(
      Chosen(With("fp8_w8a8:block128", "gfx942", {"VLLM_ROCM_USE_AITER=1", "VLLM_ROCM_USE_AITER_MOE=0"})),
      "TRITON");
  EXPECT_EQ(Chosen(With("fp8_w8a8:block128", "sm90", {"VLLM_ROCM_USE_AITER=1"})), "TRITON")
      << "it concerns ROCm only";
}

TEST(Switches, Mxfp4Flags_NameTheirBackends) {
  ExplainRequest request = Request("mxfp4_w4a16", "sm100");
  request.config.activation = {ActivationKind::kSwigluOai, 1.702F, 1.0F, 7.0F};
  request.config.has_bias = true;
  EXPECT_EQ(Chosen(Answer(request).selection), "FLASHINFER_TRTLLM_BF16");
  request.selection.env = {"VLLM_MXFP4_USE_MARLIN=1"};
  EXPECT_EQ(Chosen(Answer(request).selection), "MARLIN");
  request.selection.env = {"VLLM_USE_FLASHINFER_MOE_MXFP4_BF16=0"};
  EXPECT_EQ(Chosen(Answer(request).selection), "TRITON");
  request.platform = "sm90";
  request.selection.env = {"VLLM_USE_FLASHINFER_MOE_MXFP4_BF16=1"};
  EXPECT_EQ(Chosen(Answer(request).selection), "FLASHINFER_CUTLASS_BF16");
  request.scheme = *ParseScheme("mxfp4_mxfp8");
  request.platform = "sm100";
  request.selection.env = {"VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS=1"};
  EXPECT_EQ(Chosen(Answer(request).selection), "FLASHINFER_CUTLASS_MXFP8");
  request.selection.env = {"VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=0"};
  EXPECT_EQ(Chosen(Answer(request).selection), "FLASHINFER_CUTLASS_MXFP8");
}

// kMxfp4Static with kFp8Dynamic128Sym alone is what upstream's DeepGEMM experts support.
TEST(Selection, DeepGemmMxfp4_TakesGroupsOf128AndNothingElse) {
  for (const char* platform : {"sm100", "sm103"}) {
    EXPECT_EQ(Chosen(Answer(Request("mxfp4_w4a8:group128", platform)).selection), "DEEPGEMM_MXFP4")
        << platform;
  }
  EXPECT_EQ(Chosen(Answer(Request("mxfp4_w4a8:group128", "sm90")).selection), "MARLIN") << "weights alone";
  for (const char* other : {"mxfp4_mxfp8", "mxfp4_w4a8:static", "mxfp4_w4a8:group64", "mxfp4_w4a16"}) {
    EXPECT_NE(FindVerdict(Answer(Request(other, "sm100")).selection, "DEEPGEMM_MXFP4", Reason::kScheme),
              nullptr)
        << other;
  }
}

TEST(Switches, VllmCutlassForFp8_OnlyWhereUpstreamAllowsIt) {
  ExplainRequest request = Request("fp8_w8a8:channel", "sm90");
  EXPECT_EQ(Chosen(Answer(request).selection), "VLLM_CUTLASS");
  request.selection.allow_vllm_cutlass = false;
  EXPECT_EQ(Chosen(Answer(request).selection), "TRITON");
  request.selection.backend = "cutlass";
  EXPECT_FALSE(Answer(request).selection.chosen) << "refused even by name";
}

TEST(Switches, OrderOnHopperForBlockFp8_DependsOnExpertParallelism) {
  ExplainRequest request = Request("fp8_w8a8:block128", "sm90");
  EXPECT_EQ(Chosen(Answer(request).selection), "TRITON");
  request.config.parallel = ExpertParallel(8, "allgather_reducescatter");
  EXPECT_EQ(Chosen(Answer(request).selection), "FLASHINFER_CUTLASS");
}

// Answered with what runs without it, a misspelt switch would look as if it had no effect.
TEST(Switches, UnknownName_IsRefusedWithTheNearest) {
  const Status status = Switches::Parse(std::vector<std::string>{"VLLM_USE_FLASHINFER_MOE_FP44=1"}).status();
  EXPECT_EQ(status.code(), StatusCode::kUsage);
  EXPECT_NE(status.message().find("'VLLM_USE_FLASHINFER_MOE_FP44' is no switch that is known; nearest are "
                                  "VLLM_USE_FLASHINFER_MOE_FP4, VLLM_USE_FLASHINFER_MOE_"),
            std::string::npos)
      << status.ToString();
  EXPECT_EQ(Switches::Parse(std::vector<std::string>{"NAME=1"}).status().code(), StatusCode::kUsage);
}

TEST(Switches, ValuesAreIntegersOrTruthWords) {
  for (const char* value : {"1", "0", "2", "-1", "true", "False"}) {
    EXPECT_TRUE(Switches::Parse(std::vector<std::string>{std::string("VLLM_USE_DEEP_GEMM=") + value}).ok())
        << value;
  }
  for (const char* value : {"", "yes", "1.5", "99999999999999999999", "0x1"}) {
    EXPECT_FALSE(Switches::Parse(std::vector<std::string>{std::string("VLLM_USE_DEEP_GEMM=") + value}).ok())
        << value;
  }
  Result<Switches> last =
      Switches::Parse(std::vector<std::string>{"VLLM_USE_DEEP_GEMM=0", "VLLM_USE_DEEP_GEMM=1"});
  ASSERT_TRUE(last.ok());
  EXPECT_TRUE(last->IsTrue("VLLM_USE_DEEP_GEMM")) << "the later value counts";
  EXPECT_TRUE(Switches().IsTrue("VLLM_MOE_USE_DEEP_GEMM")) << "upstream's default";
  EXPECT_FALSE(Switches().IsSet("VLLM_MOE_USE_DEEP_GEMM"));
}

TEST(Switches, OnTheHost_ThoseThatNameNothingHereAreNotFollowed) {
  const Selection deep = With("fp8_w8a8:block128", "host", {"VLLM_USE_DEEP_GEMM=1"});
  EXPECT_TRUE(deep.chosen);
  EXPECT_TRUE(AnyNote(deep, "not followed"));
}

}  // namespace
}  // namespace fusedmoe
