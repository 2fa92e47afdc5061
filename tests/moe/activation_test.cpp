#include "moe/activation.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace fusedmoe {
namespace {

std::vector<ActivationKind> AllKinds() {
  std::vector<ActivationKind> kinds;
  for (int kind = 0; kind < kActivationKinds; ++kind) {
    kinds.push_back(static_cast<ActivationKind>(kind));
  }
  return kinds;
}

TEST(Activation, SingleStaysWithinTheBoundOfTheDefinition) {
  for (const ActivationKind kind : AllKinds()) {
    for (const float limit : {0.0F, 7.0F}) {
      const ActivationSpec spec{.kind = kind, .alpha = 1.702F, .beta = 1.0F, .limit = limit};
      for (int step = -300; step <= 300; ++step) {
        const float gate = static_cast<float>(step) * 0.05F;
        for (const float up : {-9.0F, -1.0F, 0.25F, 30.0F}) {
          const double exact = Activate<double>(spec, gate, up);
          // The argument z of the exponential carries a few roundings, which the result sees times |z|: for
          // gelu_tanh z grows with the cube. The definition itself cancels below 1e-16 * |gate * up|.
          const double x = std::fabs(gate);
          const double z = std::max({1.702 * x, x * x, 1.6 * (x + 0.045 * x * x * x)});
          const double bound =
              (8.0 + 4.0 * z) * 0x1p-24 * std::fabs(exact) + 1e-15 * (x + 1) * (x + 1) * 31.0;
          EXPECT_NEAR(Activate<float>(spec, gate, up), exact, bound)
              << ActivationName(kind) << " gate " << gate << " up " << up << " limit " << limit;
        }
      }
    }
  }
}

TEST(Activation, LimitsClampGateAboveAndUpOnBothSides) {
  const ActivationSpec oai{.kind = ActivationKind::kSwigluOai, .alpha = 1.702F, .beta = 1.0F, .limit = 7.0F};
  EXPECT_EQ(Activate(oai, 100.0F, 0.5F), Activate(oai, 7.0F, 0.5F));
  EXPECT_NE(Activate(oai, -8.0F, 0.5F), Activate(oai, -7.0F, 0.5F));
  EXPECT_EQ(Activate(oai, 1.0F, 50.0F), Activate(oai, 1.0F, 7.0F));
  EXPECT_EQ(Activate(oai, 1.0F, -50.0F), Activate(oai, 1.0F, -7.0F));
  const ActivationSpec step{.kind = ActivationKind::kSwigluStep, .limit = 7.0F};
  EXPECT_EQ(Activate(step, 100.0F, 1.0F), 7.0F);  // the gate is clamped behind the silu
  const ActivationSpec silu{.kind = ActivationKind::kSilu, .limit = 7.0F};
  EXPECT_EQ(Activate(silu, 100.0F, 1.0F), Activate(silu, 7.0F, 1.0F));
}

// Kimi-K3 has bounds of 4 and 25. Small values pass as silu(g) * u.
TEST(Activation, SituBoundsGateAndUpByTanh) {
  const ActivationSpec situ{.kind = ActivationKind::kSitu, .alpha = 4.0F, .limit = 25.0F};
  EXPECT_NEAR(Activate<double>(situ, 2.0, 3.0),
              4 * std::tanh(0.5) / (1 + std::exp(-2.0)) * 25 * std::tanh(0.12), 1e-12);
  EXPECT_NEAR(Activate<double>(situ, 200.0, 1000.0), 100.0, 1e-9);
  EXPECT_NEAR(Activate<double>(situ, -200.0, -1000.0), 0.0, 1e-9);
  EXPECT_NEAR(Activate<double>(situ, 1e-4, 1e-3), 5e-8, 5e-12);
  const ActivationSpec gate_alone{.kind = ActivationKind::kSitu, .alpha = 4.0F};
  EXPECT_NEAR(Activate<double>(gate_alone, 200.0, 1000.0), 4000.0, 1e-6);
}

// ReGLU, of SmallThinker; what stands behind a gate of zero or less is not let through.
TEST(Activation, ReluIsItsGateAboveZeroTimesUp) {
  const ActivationSpec reglu{.kind = ActivationKind::kRelu};
  EXPECT_EQ(Activate(reglu, 3.0F, -2.0F), -6.0F);
  EXPECT_EQ(Activate(reglu, -3.0F, 2.0F), 0.0F);
  const ActivationSpec single{.kind = ActivationKind::kReluNoMul};
  EXPECT_EQ(Activate(single, 3.0F, 7.0F), 3.0F);
  EXPECT_EQ(Activate(single, -3.0F, 7.0F), 0.0F);
  EXPECT_EQ(ParseActivation("relu"), ActivationKind::kRelu);
  EXPECT_EQ(ParseActivation("reglu"), ActivationKind::kRelu);
  EXPECT_EQ(WithoutMul(ActivationKind::kRelu), ActivationKind::kReluNoMul);
}

TEST(Activation, NanStaysNanInEveryKind) {
  for (const ActivationKind kind : AllKinds()) {
    const ActivationSpec spec{.kind = kind, .limit = 7.0F};
    EXPECT_TRUE(std::isnan(Activate(spec, std::numeric_limits<float>::quiet_NaN(), 1.0F)))
        << ActivationName(kind);
    if (spec.gated()) {
      EXPECT_TRUE(std::isnan(Activate(spec, 1.0F, std::numeric_limits<float>::quiet_NaN())))
          << ActivationName(kind);
    }
  }
}

TEST(Activation, InterleavedRowsEqualHalves) {
  const ActivationSpec spec{.kind = ActivationKind::kSwigluOai, .alpha = 1.5F, .beta = 0.5F, .limit = 4.0F};
  const std::vector<float> halves = {1, 2, 3, -1, -2, 5};
  const std::vector<float> pairs = {1, -1, 2, -2, 3, 5};
  std::vector<float> a(3), b(3);
  ActivateRow(spec, halves.data(), 3, GateUpLayout::kHalves, a.data());
  ActivateRow(spec, pairs.data(), 3, GateUpLayout::kInterleaved, b.data());
  EXPECT_EQ(a, b);
  const ActivationSpec single{.kind = ActivationKind::kRelu2NoMul};
  ActivateRow(single, halves.data(), 3, GateUpLayout::kHalves, a.data());
  EXPECT_EQ(a, (std::vector<float>{1, 4, 9}));
}

}  // namespace
}  // namespace fusedmoe
