#include <fusedmoe/routing.hpp>

#include <gtest/gtest.h>

namespace fusedmoe {
namespace {

TEST(RoutingNames, AreReadBackAndNumbersAreOfTheirEra) {
  for (const RoutingMethod method : {
#define FMOE_METHOD(id, name, what) RoutingMethod::id,
           FMOE_ROUTING_METHOD_TABLE(FMOE_METHOD)
#undef FMOE_METHOD
       }) {
    EXPECT_EQ(ParseRoutingMethod(RoutingMethodName(method)), method);
    for (const RoutingEra era : {RoutingEra::kVllm202604, RoutingEra::kVllm202605, RoutingEra::kVllmNewest,
                                 RoutingEra::kFlashInfer}) {
      if (const auto value = RoutingMethodValue(method, era)) {
        EXPECT_EQ(RoutingMethodOfValue(*value, era), method);
      }
    }
  }
  EXPECT_FALSE(ParseRoutingMethod("default"));
  EXPECT_EQ(RoutingMethodOfValue(8, RoutingEra::kVllm202604), RoutingMethod::kUnspecified);
  EXPECT_EQ(RoutingMethodOfValue(8, RoutingEra::kVllmNewest), RoutingMethod::kSigmoid);
  EXPECT_EQ(RoutingMethodOfValue(6, RoutingEra::kVllm202604), RoutingMethod::kCustom);
  EXPECT_FALSE(RoutingMethodOfValue(-1, RoutingEra::kVllm202604));
}

TEST(RoutingNames, DerivedLabelsChangeWithTheEra) {
  const RouterDescription biased{.score = ScoreFunction::kSigmoid,
                                 .top_k = 8,
                                 .renormalize = true,
                                 .has_correction_bias = true,
                                 .scaling_factor = 2.0F};
  EXPECT_EQ(DeriveRoutingMethod(biased, RoutingEra::kVllm202604), RoutingMethod::kUnspecified);
  EXPECT_EQ(DeriveRoutingMethod(biased, RoutingEra::kVllm202605), RoutingMethod::kMiniMax2);
  EXPECT_EQ(DeriveRoutingMethod(biased, RoutingEra::kVllmNewest), RoutingMethod::kUnspecified);
  const RouterDescription plain{.score = ScoreFunction::kSigmoid, .top_k = 8};
  EXPECT_EQ(DeriveRoutingMethod(plain, RoutingEra::kVllm202605), RoutingMethod::kUnspecified);
  EXPECT_EQ(DeriveRoutingMethod(plain, RoutingEra::kVllmNewest), RoutingMethod::kSigmoid);
}

}  // namespace
}  // namespace fusedmoe
