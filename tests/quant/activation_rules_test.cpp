#include "quant/activation_rules.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <set>
#include <string>

#include "quant/activation_formulas.hpp"

namespace fusedmoe {
namespace {

TEST(ActivationRules, Names_AreUniqueAndFound) {
  std::set<std::string_view> names;
  for (const NamedActivationRule& entry : ActivationRuleTable()) {
    EXPECT_TRUE(names.insert(entry.name).second) << entry.name;
    EXPECT_FALSE(entry.what.empty());
    const auto found = ActivationRuleByName(entry.name);
    ASSERT_TRUE(found.ok());
    EXPECT_EQ(*found, entry.rule);
  }
  EXPECT_EQ(*ActivationRuleByName("exact"), ActivationRule{});
  const auto unknown = ActivationRuleByName("exakt");
  EXPECT_EQ(unknown.status().code(), StatusCode::kUsage);
  EXPECT_NE(unknown.status().message().find("compressed_tensors_int8"), std::string::npos);
}

TEST(ActivationRules, Documentation_ListsThemInThisOrder) {
  std::ifstream stream(FMOE_GOLDEN_DIR "/../../docs/numerics.md");
  const std::string page{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  size_t at = page.find("### Named rules");
  ASSERT_NE(at, std::string::npos);
  for (const NamedActivationRule& entry : ActivationRuleTable()) {
    std::string quoted = "`";
    quoted.append(entry.name).append("`");
    const size_t found = page.find(quoted, at);
    ASSERT_NE(found, std::string::npos)
        << entry.name << " is not in docs/numerics.md, or not in the order of the table";
    at = found;
  }
}

TEST(ActivationRules, Scales_FollowTheirProducers) {
  const auto rule = [](const char* name) { return *ActivationRuleByName(name); };
  EXPECT_EQ(RealScale(rule("exact"), 127.0F, 2.0F), 2.0F / 127.0F);
  EXPECT_EQ(RealScale(rule("vllm_fp8_token"), 448.0F, 0.0F), 1.0F / (448.0F * 512.0F));
  EXPECT_EQ(RealScale(rule("vllm_fp8_group"), 448.0F, 0.0F), 1e-10F / 448.0F);
  EXPECT_EQ(RealScale(rule("vllm_fp8_group_ue8m0"), 448.0F, 448.0F * 1.01F), 2.0F);
  EXPECT_EQ(RealScale(rule("vllm_fp8_group_ue8m0"), 448.0F, 448.0F), 1.0F);
  EXPECT_EQ(RealScale(rule("vllm_int8_tensor"), 127.0F, 1e-20F), 1e-10F);
  EXPECT_EQ(TwoLevelScaleCode(rule("compressed_tensors_nvfp4"), 6.0F, 1.0F, 0.0F),
            EncodeE4m3RneSaturating(0.125F));
  EXPECT_EQ(TwoLevelScaleCode(rule("modelopt_nvfp4"), 6.0F, 1.0F, 0.0F), 1);
  ActivationRule bounded;
  bounded.amax_upper_bound = 1.5F;
  EXPECT_EQ(RealScale(bounded, 448.0F, 100.0F), 1.5F / 448.0F);
  EXPECT_EQ(RealScale(bounded, 448.0F, 1.0F), 1.0F / 448.0F);
}

TEST(ActivationRules, Step_MultipliesOnlyWhereThatIsExactOrAskedFor) {
  ActivationRule rule;
  EXPECT_TRUE(StepFor(rule, 0.25F).multiply);
  EXPECT_FALSE(StepFor(rule, 0.3F).multiply);
  EXPECT_EQ(StepFor(rule, 0.0F).Apply(5.0F), 0.0F);
  rule.multiply_by_reciprocal = true;
  EXPECT_TRUE(StepFor(rule, 0.3F).multiply);
  EXPECT_FALSE(StepFor(rule, 1e-40F).multiply) << "its reciprocal is not an fp32 number";
  for (int exponent = -127; exponent <= 127; ++exponent) {
    const EncodeStep step = StepFor({}, PowerOfTwo(exponent));
    ASSERT_TRUE(step.multiply) << exponent;
    ASSERT_EQ(step.Apply(1.3F), 1.3F / PowerOfTwo(exponent)) << exponent;
  }
}

}  // namespace
}  // namespace fusedmoe
