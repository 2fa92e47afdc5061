// Checkpoints written by the tools that write the real ones, with inputs and expected outputs of one layer
// (tests/golden/checkpoints/README.md): `fusedmoe run` must come as close as each case.json says.

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/safetensors.hpp>

#include "cli/process.hpp"
#include "experts/cpu/kernels/kernels.hpp"
#include "numerics/rows.hpp"
#include "platform/cpu_features.hpp"
#include "support/relative_l2.hpp"
#include "support/tensors.hpp"
#include "support/test_name.hpp"

namespace fusedmoe::test {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = fs::path(FMOE_GOLDEN_DIR) / "checkpoints";

std::vector<std::string> Cases() {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(kRoot, ignored)) {
    if (fs::exists(entry.path() / "case.json")) {
      names.push_back(entry.path().filename());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Expert id -> weight of one token; ids are compared as sets.
std::map<int32_t, float> Routes(const Tensor& ids, const Tensor& weights, int64_t token) {
  std::map<int32_t, float> routes;
  for (int64_t slot = 0; slot < ids.dim(1); ++slot) {
    const int64_t index = token * ids.dim(1) + slot;
    routes[ids.view().as<int32_t>()[index]] = weights.view().as<float>()[index];
  }
  return routes;
}

class GoldenCheckpoint : public testing::TestWithParam<std::string> {
 protected:
  // Schemes that every build runs: a refusal of these is a failure, of others a skip.
  static bool MustRun(const std::string& name) {
    for (const char* part : {"-bf16", "-f32", "nvfp4"}) {
      if (name.find(part) != std::string::npos) {
        return true;
      }
    }
    return false;
  }

  static void Compare(const fs::path& io, const SafetensorsFile& actual, const nlohmann::json& info,
                      const nlohmann::json& plan) {
    SCOPED_TRACE(io.filename().string() + " by " + plan.at("backend").get<std::string>());
    const Result<SafetensorsFile> file = ReadSafetensors(io);
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    const Tensor& ids = *file->Find("expected_topk_ids");
    const Tensor& weights = *file->Find("expected_topk_weights");
    for (int64_t token = 0; token < ids.dim(0); ++token) {
      const auto expected = Routes(ids, weights, token);
      const auto produced = Routes(*actual.Find("topk_ids"), *actual.Find("topk_weights"), token);
      ASSERT_EQ(expected.size(), produced.size());
      for (const auto& [expert, weight] : expected) {
        ASSERT_TRUE(produced.contains(expert)) << "token " << token << " misses expert " << expert;
        EXPECT_NEAR(produced.at(expert), weight, 1e-6) << "token " << token << ", expert " << expert;
      }
    }
    const bool weight_only =
        plan.at("activation") == "weight_only" && file->Find("expected_output_weight_only");
    const Tensor& expected = *file->Find(weight_only ? "expected_output_weight_only" : "expected_output");
    const std::string mid = plan.value("intermediate_dtype", "");
    const char* rounded = "tolerance_rel_l2_if_intermediate_is_rounded_to_bf16_first";
    const bool short_mid =
        (mid == "BF16" || mid == "F16") && info.contains(rounded) && info.at(rounded).is_number();
    const double tolerance = info.at(short_mid ? rounded : "tolerance_rel_l2").get<double>();
    EXPECT_LE(RelativeL2(Floats(*actual.Find("output")), Floats(expected)), tolerance);
  }

  /// `fusedmoe run` with `more` on every input of the case.
  static void CompareAll(const std::vector<std::string>& more) {
    const fs::path directory = kRoot / GetParam();
    const nlohmann::json info = nlohmann::json::parse(ReadFile(directory / "case.json"));
    const TemporaryDirectory temporary;
    const std::string output = temporary / "out.safetensors";
    int compared = 0;
    for (const fs::directory_entry& io : fs::directory_iterator(directory / "io")) {
      std::vector<std::string> arguments = {
          "run",      directory, "--layer", std::to_string(info.at("layer").get<int>()), "--input", io.path(),
          "--output", output,    "--json"};
      arguments.insert(arguments.end(), more.begin(), more.end());
      const ProcessResult result = RunCommand(arguments);
      if (result.exit_code == 4 && !MustRun(GetParam())) {
        GTEST_SKIP() << result.err;
      }
      ASSERT_EQ(result.exit_code, 0) << result.err;
      const Result<SafetensorsFile> actual = ReadSafetensors(output);
      ASSERT_TRUE(actual.ok()) << actual.status().ToString();
      Compare(io.path(), *actual, info, result.Json().at("plan"));
      ++compared;
    }
    EXPECT_GT(compared, 0);
  }
};

TEST_P(GoldenCheckpoint, Run_ComesAsCloseAsItsCaseAsks) {
  CompareAll({"--check"});
}

/// Whatever level a machine has: tolerances are those of the cases.
TEST_P(GoldenCheckpoint, RunOnEveryLevel_ComesAsCloseAsItsCaseAsks) {
  for (const Isa isa : cpu::BuiltIsas()) {
    if (HostMachine().Has(isa) && !IsSkipped()) {
      SCOPED_TRACE(IsaName(isa));
      CompareAll({"--isa", std::string(IsaName(isa))});
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GoldenCheckpoint);
INSTANTIATE_TEST_SUITE_P(Tools, GoldenCheckpoint, testing::ValuesIn(Cases()), NamedAfterText);

}  // namespace
}  // namespace fusedmoe::test
