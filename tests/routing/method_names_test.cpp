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
    for (const RoutingEra era :
         {RoutingEra::kSeed, RoutingEra::kHead, RoutingEra::kNewest, RoutingEra::kFlashInfer}) {
      if (const auto value = RoutingMethodValue(method, era)) {
        EXPECT_EQ(RoutingMethodOfValue(*value, era), method);
      }
    }
  }
  EXPECT_FALSE(ParseRoutingMethod("default"));
  EXPECT_EQ(RoutingMethodOfValue(8, RoutingEra::kSeed), RoutingMethod::kUnspecified);
  EXPECT_EQ(RoutingMethodOfValue(8, RoutingEra::kNewest), RoutingMethod::kSigmoid);
  EXPECT_EQ(RoutingMethodOfValue(6, RoutingEra::kSeed), RoutingMethod::kCustom);
  EXPECT_FALSE(RoutingMethodOfValue(-1, RoutingEra::kSeed));
}

TEST(RoutingNames, DerivedLabelsChangeWithTheEra) {
  const RouterDescription biased{.score = ScoreFunction::kSigmoid,
                                 .top_k = 8,
                                 .renormalize = true,
                                 .has_correction_bias = true,
                                 .scaling_factor = 2.0F};
  EXPECT_EQ(DeriveRoutingMethod(biased, RoutingEra::kSeed), RoutingMethod::kUnspecified);
  EXPECT_EQ(DeriveRoutingMethod(biased, RoutingEra::kHead), RoutingMethod::kMiniMax2);
  EXPECT_EQ(DeriveRoutingMethod(biased, RoutingEra::kNewest), RoutingMethod::kUnspecified);
  const RouterDescription plain{.score = ScoreFunction::kSigmoid, .top_k = 8};
  EXPECT_EQ(DeriveRoutingMethod(plain, RoutingEra::kHead), RoutingMethod::kUnspecified);
  EXPECT_EQ(DeriveRoutingMethod(plain, RoutingEra::kNewest), RoutingMethod::kSigmoid);
}

}  // namespace
}  // namespace fusedmoe
