#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/quant.hpp>

#include "oracle/host_table.hpp"
#include "oracle/scheme_key.hpp"
#include "oracle/select.hpp"

namespace fusedmoe {
namespace {

std::vector<Verdict> Never(const MoeProblem&, const Machine&) {
  return {{Reason::kIsa, "needs avx512", "avx2", "avx512"}, {Reason::kTopK, "top_k 9 exceeds 8", "9", "8"}};
}
std::vector<Verdict> Always(const MoeProblem&, const Machine&) {
  return {};
}
Plan EmptyPlan(const MoeProblem&, const Machine&) {
  return {};
}
void BookHundred(const MoeProblem&, const Machine&, WorkspaceBook& book) {
  book.Book("rows", 100);
}

constexpr Backend kNever{"NEVER", Never, EmptyPlan, BookHundred, nullptr, nullptr};
constexpr Backend kFast{"FAST", Always, EmptyPlan, BookHundred, nullptr, nullptr};
constexpr Backend kSlow{"SLOW", Always, EmptyPlan, BookHundred, nullptr, nullptr};
constexpr Backend kContract{"CONTRACT", Always, EmptyPlan, BookHundred, nullptr, nullptr};

const std::vector<HostBackend>& Table() {
  static const std::vector<HostBackend> table = {{"NEVER", &kNever, BackendChoice::kAutomatic, {}},
                                                 {"CONTRACT", &kContract, BackendChoice::kByName, {}},
                                                 {"FAST", &kFast, BackendChoice::kAutomatic, {}},
                                                 {"SLOW", &kSlow, BackendChoice::kAutomatic, {}},
                                                 {"ABSENT", nullptr, BackendChoice::kByName, "a layout"}};
  return table;
}

Selection Select(const SelectionRequest& request) {
  Result<Selection> selection = SelectFrom(Table(), MoeProblem{}, Machine{}, request);
  EXPECT_TRUE(selection.ok()) << selection.status().ToString();
  return selection.ok() ? *selection : Selection{};
}

TEST(HostSelection, FirstThatCan_IsChosenAndEveryOtherHasItsReasons) {
  const Selection selection = Select({});
  ASSERT_TRUE(selection.chosen);
  EXPECT_EQ(selection.chosen->backend, "FAST");
  EXPECT_EQ(selection.chosen->workspace_bytes, 128);  // 100 bytes, booked in lines of 64
  ASSERT_EQ(selection.candidates.size(), Table().size());
  EXPECT_EQ(selection.candidates[0].verdicts.size(), 2U) << "every failing check is kept";
  EXPECT_FALSE(selection.candidates[0].supported);
  EXPECT_TRUE(selection.candidates[1].supported);
  EXPECT_EQ(selection.candidates[1].verdicts.at(0).reason, Reason::kNotNamed);
  EXPECT_TRUE(selection.candidates[2].verdicts.empty());
  EXPECT_EQ(selection.candidates[3].verdicts.at(0).reason, Reason::kNotFirst);
  EXPECT_EQ(selection.candidates[3].verdicts.at(0).required, "FAST");
  EXPECT_EQ(selection.candidates[4].verdicts.at(0).reason, Reason::kNotBuilt);
}

TEST(HostSelection, NamedBackend_IsHonouredAndTheListStaysWhole) {
  SelectionRequest request;
  request.backend = "contract";
  const Selection selection = Select(request);
  ASSERT_TRUE(selection.chosen);
  EXPECT_EQ(selection.chosen->backend, "CONTRACT");
  ASSERT_EQ(selection.candidates.size(), Table().size());
  EXPECT_EQ(selection.candidates[2].verdicts.at(0).reason, Reason::kNotNamed);
}

TEST(HostSelection, NamedBackendThatCannot_IsNeverReplaced) {
  SelectionRequest request;
  request.backend = "NEVER";
  const Selection selection = Select(request);
  EXPECT_FALSE(selection.chosen);
  const Status status = ToStatus(selection);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("needs avx512"), std::string::npos);
  EXPECT_NE(status.message().find("top_k 9 exceeds 8"), std::string::npos);
}

TEST(HostSelection, UnknownName_IsAUsageErrorThatListsTheNames) {
  SelectionRequest request;
  request.backend = "FASTER";
  Result<Selection> selection = SelectFrom(Table(), MoeProblem{}, Machine{}, request);
  ASSERT_FALSE(selection.ok());
  EXPECT_EQ(selection.status().code(), StatusCode::kUsage);
  EXPECT_NE(selection.status().message().find("SLOW"), std::string::npos);
}

TEST(HostSelection, ASwitch_IsFollowedOnlyWhereThisBuildRunsWhatItNames) {
  constexpr Backend kMarlin{"MARLIN", Always, EmptyPlan, BookHundred, nullptr, nullptr};
  std::vector<HostBackend> table = {{"FAST", &kFast, BackendChoice::kAutomatic, {}},
                                    {"MARLIN", &kMarlin, BackendChoice::kByName, {}}};
  MoeProblem problem;
  problem.scheme = *ParseScheme("nvfp4_w4a4");
  SelectionRequest request;
  request.env = {"VLLM_TEST_FORCE_FP8_MARLIN=1"};
  Result<Selection> built = SelectFrom(table, problem, Machine{}, request);
  ASSERT_TRUE(built.ok());
  ASSERT_TRUE(built->chosen);
  EXPECT_EQ(built->chosen->backend, "MARLIN");
  EXPECT_EQ(built->candidates[0].verdicts.at(0).reason, Reason::kSwitch);
  table[1].backend = nullptr;
  Result<Selection> absent = SelectFrom(table, problem, Machine{}, request);
  ASSERT_TRUE(absent.ok());
  ASSERT_TRUE(absent->chosen);
  EXPECT_EQ(absent->chosen->backend, "FAST");
  EXPECT_FALSE(absent->notes.empty()) << "and it says so";
}

TEST(HostSelection, ContractNames_AreAllListed) {
  Result<Selection> selection = SelectBackend(MoeProblem{}, Machine{});
  ASSERT_TRUE(selection.ok());
  for (const char* name : {"FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS", "FLASHINFER_CUTEDSL", "VLLM_CUTLASS",
                           "MARLIN", "EMULATION"}) {
    const auto found = std::find_if(selection->candidates.begin(), selection->candidates.end(),
                                    [name](const Candidate& candidate) { return candidate.backend == name; });
    ASSERT_NE(found, selection->candidates.end()) << name;
    EXPECT_FALSE(found->verdicts.empty()) << name;
  }
}

TEST(HostSelection, ReferenceThatNobodyNamed_IsNoted) {
  MoeProblem problem;
  problem.scheme = *ParseScheme("nvfp4_w4a16");
  problem.config.num_experts = problem.config.num_local_experts = 8;
  problem.config.routing.top_k = 2;
  problem.config.hidden = problem.config.intermediate = 256;
  problem.config.routing.method = RoutingMethod::kRenormalize;
  const auto notes_of = [&problem](uint32_t isa_mask, const char* backend) {
    Machine machine;
    machine.isa_mask = isa_mask;
    SelectionRequest request;
    request.backend = backend;
    const Result<Selection> selection = SelectBackend(problem, machine, request);
    EXPECT_TRUE(selection.ok() && selection->chosen) << selection.status().ToString();
    return selection.ok() ? selection->notes : std::vector<std::string>();
  };
  const std::vector<std::string> notes = notes_of(0, "");
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_NE(notes[0].find("REFERENCE is chosen since no fast backend can run this layer"), std::string::npos);
  EXPECT_TRUE(notes_of(0, "REFERENCE").empty()) << "asked for by name";
  EXPECT_TRUE(notes_of(1U << static_cast<int>(Isa::kAvx2), "").empty());
}

// Scales that differ from column to column of a matrix fit no kernel's groups; a backend that accepts them
// without multiplying them into the weights would fail while it prepares these.
TEST(HostSelection, BlocksAlongTheOutputs_RunWhereWeightsAreDequantized) {
  Machine machine;
  machine.isa_mask = 1U << static_cast<int>(Isa::kAvx2);
  for (const char* name : {"mxfp8_w8a8_out:out32", "nvfp4_w4a8_out:out32", "mxfp4_w4a8_out:out32_static",
                           "mxfp4_w4a8_out:out16_tensor"}) {
    const Result<Scheme> scheme = ParseScheme(name);
    ASSERT_TRUE(scheme.ok()) << scheme.status().ToString();
    EXPECT_EQ(WeightKeyOf(scheme->weight), WeightKey::kOther) << name;
    MoeProblem problem;
    problem.scheme = *scheme;
    problem.config.num_experts = problem.config.num_local_experts = 8;
    problem.config.routing.top_k = 2;
    problem.config.hidden = problem.config.intermediate = 256;
    problem.config.routing.method = RoutingMethod::kRenormalize;
    for (const HostBackend& row : HostTable()) {
      const bool emulated = row.name == "EMULATION" && scheme->weight.block_scale_dtype == DType::kF8E8M0;
      if (row.backend != nullptr) {
        EXPECT_EQ(row.backend->supports(problem, machine).empty(),
                  emulated || row.name == "REFERENCE" || row.name == "CPU_FUSED")
            << row.name << " " << name;
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe
