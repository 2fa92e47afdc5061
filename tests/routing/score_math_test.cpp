#include "routing/score_math.hpp"

#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

namespace fusedmoe {
namespace {

/// Distance from the exact value in units of the last place of a float.
double Ulps(float actual, double exact) {
  const int exponent = exact == 0 ? -126 : std::max(std::ilogb(static_cast<float>(exact)), -126);
  return std::fabs(actual - exact) / std::ldexp(1.0, exponent - 23);
}

TEST(ScoreMath, ExpAndSoftplus_RoundedOnce) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> draw(-103.0F, 88.0F);
  for (int round = 0; round < 200000; ++round) {
    const float x = draw(random);
    EXPECT_LE(Ulps(ScoreExp(x), std::exp(static_cast<double>(x))), 0.501) << x;
    const float y = std::min(x / 4, 20.0F);
    EXPECT_LE(Ulps(ScoreSoftplus(y), std::log1p(std::exp(static_cast<double>(y)))), 0.501) << y;
  }
}

TEST(ScoreMath, Softcap_TwoRoundingsBesideTheQuotients) {
  for (float x = -200.0F; x < 200.0F; x += 0.173F) {
    EXPECT_LE(Ulps(ScoreSoftcap(x, 30.0F), 30.0 * std::tanh(static_cast<double>(x / 30.0F))), 1.6) << x;
  }
  EXPECT_EQ(ScoreSoftcap(1e-20F, 1.0F), 1e-20F) << "small values must not cancel";
}

TEST(ScoreMath, Extremes_LimitsAndNan) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(ScoreExp(-kInfinity), 0.0F);
  EXPECT_EQ(ScoreExp(kInfinity), kInfinity);
  EXPECT_TRUE(std::isnan(ScoreExp(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_EQ(ScoreExp(0.0F), 1.0F);
  EXPECT_EQ(ScoreSigmoid(-1e30F), 0.0F);
  EXPECT_EQ(ScoreSigmoid(1e30F), 1.0F);
  EXPECT_EQ(ScoreSoftplus(-kInfinity), 0.0F);
  EXPECT_EQ(ScoreSoftplus(50.0F), 50.0F);
  EXPECT_EQ(ScoreSoftcap(kInfinity, 5.0F), 5.0F);
}

}  // namespace
}  // namespace fusedmoe
