#include <gtest/gtest.h>

#include "support/golden.hpp"

namespace fusedmoe::golden {
namespace {

class GoldenVectors : public testing::TestWithParam<GoldenCase> {};

TEST_P(GoldenVectors, AreReproduced) {
  const Outcome outcome = RunCase(GetParam());
  EXPECT_FALSE(outcome.has_value()) << outcome.value_or("");
}

std::vector<GoldenCase> AllCases() {
  std::vector<GoldenCase> all;
  for (const std::string topic : {
#define FMOE_GOLDEN_TOPIC(topic, function) #topic,
#include "vectors/topics.inc"
#undef FMOE_GOLDEN_TOPIC
           ""}) {
    if (topic.empty()) {
      continue;
    }
    auto cases = LoadTopic(FMOE_GOLDEN_DIR "/vectors", topic);
    EXPECT_TRUE(cases.ok()) << cases.status().ToString();
    if (cases.ok()) {
      all.insert(all.end(), cases->begin(), cases->end());
    }
  }
  return all;
}

std::string CaseName(const testing::TestParamInfo<GoldenCase>& info) {
  std::string name = info.param.topic() + "_" + info.param.name();
  for (char& letter : name) {
    letter = std::isalnum(static_cast<unsigned char>(letter)) != 0 ? letter : '_';
  }
  return name + (info.param.is_table() ? "_table" : "");
}

INSTANTIATE_TEST_SUITE_P(All, GoldenVectors, testing::ValuesIn(AllCases()), CaseName);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GoldenVectors);

}  // namespace
}  // namespace fusedmoe::golden
