#include <map>
#include <set>

#include "oracle/explain.hpp"
#include "oracle/support.hpp"

// The order of the NVFP4 oracle, written a second time from its description and in another way (by sets of
// platforms and plain conditions), and compared with the table over the product of everything it depends on.

namespace fusedmoe {
namespace {

using testing::Answer;
using testing::Chosen;
using testing::ExpertParallel;
using testing::Find;
using testing::Request;

const std::set<std::string> kBlackwellServer = {"sm100", "sm103"};
const std::set<std::string> kBlackwellDesktop = {"sm120", "sm121"};

struct Case {
  std::string platform;
  std::string scheme;
  ActivationKind activation;
  RoutingMethod routing;
  std::string deployment;
  std::vector<std::string> env;
};

bool IsNvidia(const std::string& platform) {
  return platform.rfind("sm", 0) == 0;
}

/// Whether a backend can run the case, told from prose.
bool Can(const std::string& backend, const Case& asked) {
  const bool batched = asked.deployment == "deepep_low_latency" || asked.deployment == "nixl_ep";
  const bool four_bit_input = asked.scheme == "nvfp4_w4a4";
  const bool server = kBlackwellServer.count(asked.platform) != 0;
  const bool blackwell = server || kBlackwellDesktop.count(asked.platform) != 0;
  const bool silu = asked.activation == ActivationKind::kSilu;
  if (backend == "FLASHINFER_TRTLLM") {
    const bool routing =
        asked.routing == RoutingMethod::kDeepSeekV3 || asked.routing == RoutingMethod::kRenormalize ||
        asked.routing == RoutingMethod::kRenormalizeNaive || asked.routing == RoutingMethod::kLlama4;
    return server && four_bit_input && silu && routing && !batched;
  }
  if (backend == "FLASHINFER_CUTEDSL") {
    return server && four_bit_input && silu && batched;
  }
  if (backend == "FLASHINFER_CUTLASS") {
    const bool activation = silu || asked.activation == ActivationKind::kRelu2NoMul ||
                            asked.activation == ActivationKind::kSwigluOai;
    return blackwell && four_bit_input && activation && !batched;
  }
  if (backend == "MARLIN") {
    return IsNvidia(asked.platform) && !batched && asked.deployment.find("flashinfer") == std::string::npos;
  }
  return false;
}

/// The choice, told from prose: the switches first, then the order.
std::string Expected(const Case& asked) {
  std::vector<std::string> order = {"FLASHINFER_TRTLLM", "FLASHINFER_CUTEDSL", "FLASHINFER_CUTLASS",
                                    "MARLIN"};
  const auto value = [&asked](const std::string& name) {
    std::string found = "unset";
    for (const std::string& text : asked.env) {
      if (text.rfind(name + "=", 0) == 0) {
        found = text.substr(name.size() + 1);
      }
    }
    return found;
  };
  const std::string flashinfer = value("VLLM_USE_FLASHINFER_MOE_FP4");
  const std::string wish = value("VLLM_FLASHINFER_MOE_BACKEND");
  if (flashinfer == "1" && wish == "unset") {
    order = {"FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM", "FLASHINFER_CUTEDSL"};
  } else if (flashinfer == "1") {
    const std::map<std::string, std::string> wishes = {
        {"throughput", "FLASHINFER_CUTLASS"},
        {"latency", kBlackwellServer.count(asked.platform) != 0 ? "FLASHINFER_TRTLLM" : "FLASHINFER_CUTLASS"},
        {"masked_gemm", "FLASHINFER_CUTEDSL"}};
    order = {wishes.at(wish)};
  } else {
    if (flashinfer == "0") {
      order = {"MARLIN"};
    }
    if (value("VLLM_TEST_FORCE_FP8_MARLIN") == "1") {
      order = {"MARLIN"};
    }
  }
  for (const std::string& backend : order) {
    if (Can(backend, asked)) {
      return backend;
    }
  }
  return "none";
}

ExplainRequest ToRequest(const Case& asked) {
  ExplainRequest request = Request(asked.scheme, asked.platform);
  request.config.activation.kind = asked.activation;
  if (asked.activation == ActivationKind::kSwigluOai) {
    request.config.activation = {ActivationKind::kSwigluOai, 1.702F, 1.0F, 7.0F};
  } else if (asked.activation == ActivationKind::kSwigluStep) {
    request.config.activation.limit = 7.0F;
  }
  request.config.routing.method = asked.routing;
  if (asked.deployment == "tp8") {
    request.config.parallel.tp_size = 8;
  } else if (asked.deployment != "single") {
    request.config.parallel = ExpertParallel(8, asked.deployment);
  }
  request.selection.env = asked.env;
  return request;
}

/// The selection alone: the product below is too large for the search for alternatives.
Selection Select(const ExplainRequest& request) {
  Result<Question> question = MakeQuestion(request);
  EXPECT_TRUE(question.ok()) << question.status().ToString();
  Result<Selection> selection = SelectFor(*question, request);
  EXPECT_TRUE(selection.ok()) << selection.status().ToString();
  return selection.ok() ? *std::move(selection) : Selection{};
}

/// What must hold of every answer, whatever was chosen.
void CheckInvariants(const Selection& selection, const std::string& what) {
  int chosen = 0;
  for (const Candidate& candidate : selection.candidates) {
    const bool is_chosen = selection.chosen && candidate.backend == selection.chosen->backend;
    chosen += is_chosen ? 1 : 0;
    ASSERT_EQ(candidate.verdicts.empty(), is_chosen) << what << ": " << candidate.backend;
    for (const Verdict& verdict : candidate.verdicts) {
      ASSERT_NE(verdict.reason, Reason::kNone) << what << ": " << candidate.backend;
      ASSERT_FALSE(verdict.sentence.empty()) << what << ": " << candidate.backend;
      ASSERT_FALSE(verdict.actual.empty()) << what << ": " << candidate.backend << ": " << verdict.sentence;
      ASSERT_FALSE(verdict.required.empty()) << what << ": " << candidate.backend << ": " << verdict.sentence;
    }
  }
  ASSERT_EQ(chosen, selection.chosen ? 1 : 0) << what;
}

std::vector<Case> CasesOn(const std::string& platform) {
  const std::vector<std::vector<std::string>> switches = {
      {},
      {"VLLM_USE_FLASHINFER_MOE_FP4=1"},
      {"VLLM_USE_FLASHINFER_MOE_FP4=0"},
      {"VLLM_TEST_FORCE_FP8_MARLIN=1"},
      {"VLLM_USE_FLASHINFER_MOE_FP4=1", "VLLM_FLASHINFER_MOE_BACKEND=throughput"},
      {"VLLM_USE_FLASHINFER_MOE_FP4=1", "VLLM_FLASHINFER_MOE_BACKEND=latency"},
      {"VLLM_USE_FLASHINFER_MOE_FP4=1", "VLLM_FLASHINFER_MOE_BACKEND=masked_gemm"},
      {"VLLM_FLASHINFER_MOE_BACKEND=masked_gemm"},
      {"VLLM_USE_FLASHINFER_MOE_FP4=1", "VLLM_TEST_FORCE_FP8_MARLIN=1"},
      {"VLLM_USE_FLASHINFER_MOE_FP4=0", "VLLM_TEST_FORCE_FP8_MARLIN=0"},
  };
  std::vector<Case> cases;
  for (const std::string scheme : {"nvfp4_w4a4", "nvfp4_w4a16"}) {
    for (const ActivationKind activation :
         {ActivationKind::kSilu, ActivationKind::kGelu, ActivationKind::kSwigluOai,
          ActivationKind::kSwigluStep, ActivationKind::kRelu2NoMul}) {
      for (const RoutingMethod routing : {RoutingMethod::kDefault, RoutingMethod::kRenormalize,
                                          RoutingMethod::kDeepSeekV3, RoutingMethod::kCustom}) {
        for (const std::string deployment :
             {"single", "tp8", "naive", "pplx", "allgather_reducescatter", "deepep_high_throughput",
              "deepep_low_latency", "nixl_ep", "flashinfer_all2allv", "flashinfer_nvlink_one_sided"}) {
          for (const std::vector<std::string>& env : switches) {
            cases.push_back({platform, scheme, activation, routing, deployment, env});
          }
        }
      }
    }
  }
  return cases;
}

class Nvfp4OrderOn : public ::testing::TestWithParam<std::string> {};

TEST_P(Nvfp4OrderOn, WholeProduct_ChoosesAsTheIndependentOracle) {
  const std::vector<Case> cases = CasesOn(GetParam());
  ASSERT_EQ(cases.size(), 4000U);
  for (const Case& asked : cases) {
    std::string what = asked.platform + " " + asked.scheme + " " +
                       std::string(ActivationName(asked.activation)) + " " +
                       std::string(RoutingMethodName(asked.routing)) + " " + asked.deployment;
    for (const std::string& text : asked.env) {
      what += " " + text;
    }
    const Selection selection = Select(ToRequest(asked));
    ASSERT_EQ(Chosen(selection), Expected(asked)) << what << "\n" << ToString(selection);
    CheckInvariants(selection, what);
  }
}

INSTANTIATE_TEST_SUITE_P(Platforms, Nvfp4OrderOn,
                         ::testing::Values("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm110",
                                           "sm120", "sm121", "gfx942", "gfx950", "xpu", "cpu"),
                         [](const ::testing::TestParamInfo<std::string>& platform) {
                           return platform.param;
                         });

TEST(Nvfp4Order, TheProduct_ReachesEveryAnswer) {
  std::map<std::string, int> chosen;
  for (const char* platform : {"sm90", "sm100", "sm120"}) {
    for (const Case& asked : CasesOn(platform)) {
      ++chosen[Expected(asked)];
    }
  }
  for (const char* backend :
       {"FLASHINFER_TRTLLM", "FLASHINFER_CUTEDSL", "FLASHINFER_CUTLASS", "MARLIN", "none"}) {
    EXPECT_GT(chosen[backend], 0) << backend << " is never the answer";
  }
}

TEST(Nvfp4Order, VllmCutlassAndEmulation_OnlyWhenNamed) {
  ExplainRequest request = Request("nvfp4_w4a4", "sm120");
  request.config.activation.kind = ActivationKind::kGelu;  // leaves MARLIN and the two
  EXPECT_EQ(Chosen(Answer(request).selection), "MARLIN");
  for (const char* name : {"VLLM_CUTLASS", "EMULATION"}) {
    request.selection.backend.clear();
    const Explanation unnamed = Answer(request);
    ASSERT_NE(testing::FindVerdict(unnamed.selection, name, Reason::kNotNamed), nullptr) << name;
    EXPECT_TRUE(Find(unnamed.selection, name)->supported) << name;
    request.selection.backend = name;
    EXPECT_EQ(Chosen(Answer(request).selection), name);
  }
}

TEST(Nvfp4Order, OtherFamilies_KeepTheSameInvariants) {
  size_t asked = 0;
  for (const Platform& platform : DescribedPlatforms()) {
    for (const SchemeInfo& info : SchemeTable()) {
      for (const char* deployment : {"single", "allgather_reducescatter", "deepep_high_throughput",
                                     "deepep_low_latency", "flashinfer_nvlink_two_sided"}) {
        for (const ActivationKind activation : {ActivationKind::kSilu, ActivationKind::kRelu2NoMul}) {
          ExplainRequest request = Request(info.name, platform.name);
          request.config.activation.kind = activation;
          if (std::string_view(deployment) != "single") {
            request.config.parallel = ExpertParallel(8, deployment);
          }
          const std::string what = platform.name + " " + std::string(info.name) + " " + deployment;
          const Selection selection = Select(request);
          ASSERT_FALSE(selection.candidates.empty()) << what;
          CheckInvariants(selection, what);
          ++asked;
        }
      }
    }
  }
  EXPECT_GT(asked, 4000U);
}

TEST(Nvfp4Order, NamingABackend_RestrictsTheChoiceNotTheList) {
  for (const Platform& platform : DescribedPlatforms()) {
    const ExplainRequest request = Request("nvfp4_w4a4", platform.name);
    const Explanation free = Answer(request);
    for (const Candidate& candidate : free.selection.candidates) {
      ExplainRequest named = request;
      named.selection.backend = candidate.backend;
      const Explanation answer = Answer(named);
      ASSERT_EQ(answer.selection.candidates.size(), free.selection.candidates.size());
      EXPECT_EQ(Chosen(answer.selection), candidate.supported ? candidate.backend : "none")
          << platform.name << ": a named backend is used or refused, never replaced";
      EXPECT_EQ(Find(answer.selection, candidate.backend)->supported, candidate.supported);
    }
  }
}

}  // namespace
}  // namespace fusedmoe
