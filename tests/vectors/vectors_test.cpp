#include <filesystem>

#include <gtest/gtest.h>

#include "support/golden.hpp"
#include "support/temporary_directory.hpp"
#include "support/test_name.hpp"

namespace fusedmoe::golden {
namespace {

class GoldenVectors : public testing::TestWithParam<GoldenCase> {};

TEST_P(GoldenVectors, AreReproduced) {
  const Outcome outcome = RunCase(GetParam());
  EXPECT_FALSE(outcome.has_value()) << outcome.value_or("");
}

/// The topics of tests/golden/vectors, each of which must be there, and those of tests/golden/edges.
std::vector<GoldenCase> AllCases() {
  std::vector<std::pair<std::string, std::string>> manifests = {
#define FMOE_GOLDEN_TOPIC(topic, function) {FMOE_GOLDEN_DIR "/vectors", #topic},
#include "vectors/topics.inc"
#undef FMOE_GOLDEN_TOPIC
  };
  for (const std::string& topic : TopicsIn(FMOE_GOLDEN_DIR "/edges")) {
    manifests.emplace_back(FMOE_GOLDEN_DIR "/edges", topic);
  }
  EXPECT_GT(manifests.size(), size_t{12}) << "tests/golden/edges holds no topics";
  std::vector<GoldenCase> all;
  for (const auto& [folder, topic] : manifests) {
    auto cases = LoadTopic(folder, topic);
    EXPECT_TRUE(cases.ok()) << cases.status().ToString();
    if (cases.ok()) {
      all.insert(all.end(), cases->begin(), cases->end());
    }
  }
  return all;
}

std::string CaseName(const testing::TestParamInfo<GoldenCase>& info) {
  return test::TestName(info.param.topic() + "_" + info.param.name()) +
         (info.param.is_table() ? "_table" : "");
}

TEST(GoldenFolder, ThatIsDamaged_IsAFailureAndNoCrash) {
  namespace fs = std::filesystem;
  const test::TemporaryDirectory directory;
  const fs::path& folder = directory.path();
  const fs::path source = fs::path(FMOE_GOLDEN_DIR) / "vectors";
  for (const std::string topic : {"routing", "nvfp4", "layers"}) {
    fs::copy_file(source / (topic + ".json"), folder / (topic + ".json"));
    // Without data every case fails by itself.
    auto cases = LoadTopic(folder.string(), topic);
    ASSERT_TRUE(cases.ok()) << cases.status().ToString();
    for (const GoldenCase& golden_case : *cases) {
      if (!golden_case.is_table()) {
        EXPECT_TRUE(RunCase(golden_case).has_value()) << golden_case.name();
      }
    }
    fs::copy_file(source / (topic + ".safetensors"), folder / (topic + ".safetensors"));
    fs::permissions(folder / (topic + ".safetensors"), fs::perms::owner_all);
    const uintmax_t size = fs::file_size(folder / (topic + ".safetensors"));
    for (const uintmax_t left :
         {size - 1, uintmax_t{3000}, uintmax_t{7}}) {  // in the data, in the header, before it
      fs::resize_file(folder / (topic + ".safetensors"), left);
      EXPECT_FALSE(LoadTopic(folder.string(), topic).ok()) << topic << " of " << left << " bytes";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenVectors, testing::ValuesIn(AllCases()), CaseName);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GoldenVectors);

}  // namespace
}  // namespace fusedmoe::golden
