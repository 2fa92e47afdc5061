#include "parallel/eplb.hpp"

#include <algorithm>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

namespace fusedmoe {
namespace {

std::vector<double> RandomLoad(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<double> load(static_cast<size_t>(count));
  std::generate(load.begin(), load.end(), [&] { return static_cast<double>(generator() % 1000); });
  return load;
}

/// The worked example of DeepSeek's published balancer (its README), and the same load with one node.
TEST(Eplb, PublishedExampleIsReproduced) {
  const std::vector<double> load[] = {{90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86},
                                      {20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27}};
  const EplbShape shape{
      .num_experts = 12, .num_physical = 16, .num_groups = 4, .num_nodes = 2, .num_ranks = 8};
  EXPECT_EQ(RebalanceExperts(shape, load[0]),
            (std::vector<int32_t>{5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1}));
  EXPECT_EQ(RebalanceExperts(shape, load[1]),
            (std::vector<int32_t>{7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1}));
  EplbShape odd = shape;
  odd.num_groups = 3;
  EXPECT_EQ(RebalanceExperts(odd, load[0]),
            (std::vector<int32_t>{10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1}));
}

TEST(Eplb, NodesThatDoNotDivideTheRanksCountAsOne) {
  const std::vector<double> load = RandomLoad(12, 1);
  EplbShape shape{.num_experts = 12, .num_physical = 18, .num_groups = 4, .num_nodes = 4, .num_ranks = 6};
  const std::vector<int32_t> plan = RebalanceExperts(shape, load);
  shape.num_nodes = 1;
  EXPECT_EQ(plan, RebalanceExperts(shape, load));
}

TEST(Eplb, EveryPlanHasEveryExpertAndIsNoWorseThanTheInitialOne) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    for (const int64_t redundant : {0, 8, 24}) {
      const EplbShape shape{
          .num_experts = 64, .num_physical = 64 + redundant, .num_groups = 8, .num_nodes = 2, .num_ranks = 8};
      const std::vector<double> load = RandomLoad(64, seed);
      const auto plan = MakeEplbMaps(RebalanceExperts(shape, load), 64);
      ASSERT_TRUE(plan.ok()) << plan.status().ToString();
      const auto initial = MakeEplbMaps(InitialPhysicalToLogical(64, redundant), 64);
      EXPECT_GE(Balancedness(PhysicalLoad(*plan, load), 8), Balancedness(PhysicalLoad(*initial, load), 8));
      EXPECT_EQ(std::accumulate(plan->replica_count.begin(), plan->replica_count.end(), 0), 64 + redundant);
      for (int64_t expert = 0; expert < 64; ++expert) {
        for (int64_t replica = 0; replica < plan->max_replicas; ++replica) {
          const int32_t slot =
              plan->logical_to_physical[static_cast<size_t>(expert * plan->max_replicas + replica)];
          EXPECT_EQ(slot >= 0, replica < plan->replica_count[static_cast<size_t>(expert)]);
          if (slot >= 0) {
            EXPECT_EQ(plan->physical_to_logical[static_cast<size_t>(slot)], expert);
          }
        }
      }
    }
  }
}

TEST(Eplb, PreservedSlotsKeepEachRanksExperts) {
  const EplbShape shape{
      .num_experts = 16, .num_physical = 24, .num_groups = 1, .num_nodes = 1, .num_ranks = 4};
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const std::vector<int32_t> old = RebalanceExperts(shape, RandomLoad(16, seed));
    const std::vector<int32_t> plan = RebalanceExperts(shape, RandomLoad(16, seed + 100));
    const std::vector<int32_t> kept = PreserveSlots(plan, old, 4);
    for (int64_t rank = 0; rank < 4; ++rank) {
      EXPECT_TRUE(
          std::is_permutation(kept.begin() + rank * 6, kept.begin() + rank * 6 + 6, plan.begin() + rank * 6));
    }
    EXPECT_EQ(PreserveSlots(old, old, 4), old);
  }
  EXPECT_EQ(PreserveSlots({1, 0}, std::vector<int32_t>{0, 1, 0}, 1), (std::vector<int32_t>{1, 0}));
}

TEST(Eplb, ShapesThatCannotBeBalancedNameThoseThatCan) {
  const Status ranks = CheckEplbShape({.num_experts = 64, .num_physical = 66, .num_ranks = 8});
  EXPECT_NE(ranks.message().find("they can by 1, 2, 3, 6, 11"), std::string::npos) << ranks.message();
  EXPECT_FALSE(CheckEplbShape({.num_experts = 64, .num_physical = 60, .num_ranks = 4}).ok());
  EXPECT_FALSE(CheckEplbShape({.num_experts = 64, .num_physical = 64, .num_groups = 5}).ok());
  EXPECT_FALSE(CheckEplbShape({.num_experts = 4, .num_physical = 4, .num_nodes = 0}).ok());
  EXPECT_FALSE(MakeEplbMaps({0, 1, 1}, 3).ok());
  EXPECT_FALSE(MakeEplbMaps({0, 3}, 2).ok());
  EXPECT_EQ(MakeEplbMaps({}, 0).status().code(), StatusCode::kUsage);
  EXPECT_FALSE(MakeEplbMaps({0, 1, 1, 1}, 2, 2).ok());
}

TEST(Eplb, BalancednessIsMeanOverLargest) {
  const std::vector<double> load = {3, 1, 2, 0};
  EXPECT_DOUBLE_EQ(Balancedness(load, 2), 3.0 / 4.0);
  EXPECT_DOUBLE_EQ(Balancedness(load, 4), 1.5 / 3.0);
  EXPECT_DOUBLE_EQ(Balancedness(std::vector<double>(4, 0.0), 2), 1.0);
}

TEST(EplbState_, WindowForgetsAndIntervalsStartAtThreeQuarters) {
  const EplbShape shape{.num_experts = 4, .num_physical = 6, .num_ranks = 2};
  auto state = EplbState::Create(shape, 2, {.window_steps = 3, .interval_steps = 8});
  ASSERT_TRUE(state.ok()) << state.status().ToString();
  EXPECT_EQ(state->maps(0).physical_to_logical, (std::vector<int32_t>{0, 1, 2, 3, 0, 1}));
  const std::vector<int64_t> busy = {100, 0, 0, 0, 20, 0, 0, 0, 0, 7, 0, 0};
  EXPECT_FALSE(*state->RecordStep(busy));
  EXPECT_TRUE(*state->RecordStep(busy));
  // Slots 0 and 4 hold expert 0; the second layer's slot 3 is expert 3.
  EXPECT_EQ(state->LogicalLoad(), (std::vector<double>{240, 0, 0, 0, 0, 0, 0, 14}));
  const auto changed = state->Rearrange(state->LogicalLoad());
  ASSERT_TRUE(changed.ok());
  EXPECT_GT(*changed, 0);
  EXPECT_EQ(state->maps(0).replica_count[0], 3);
  // The window counts logical experts, so a new map does not disturb it; three idle steps empty it.
  const std::vector<int64_t> idle(12, 0);
  for (int step = 0; step < 3; ++step) {
    EXPECT_FALSE(*state->RecordStep(idle));
  }
  EXPECT_EQ(state->LogicalLoad(), std::vector<double>(8, 0.0));
  for (int step = 3; step < 7; ++step) {
    EXPECT_FALSE(*state->RecordStep(idle));
  }
  EXPECT_TRUE(*state->RecordStep(idle)) << "the eighth after the plan";
}

TEST(EplbState_, WrongSizesAndLoadsAreRefused) {
  const EplbShape shape{.num_experts = 4, .num_physical = 6, .num_ranks = 2};
  EXPECT_FALSE(EplbState::Create(shape, 0).ok());
  EXPECT_FALSE(EplbState::Create(shape, 1, {.window_steps = 0}).ok());
  EXPECT_FALSE(EplbState::Create(shape, int64_t{1} << 60).ok());
  auto state = EplbState::Create(shape, 1);
  ASSERT_TRUE(state.ok());
  EXPECT_FALSE(state->RecordStep(std::vector<int64_t>(5, 0)).ok());
  EXPECT_FALSE(state->RecordStep(std::vector<int64_t>(6, -1)).ok());
  EXPECT_FALSE(state->Rearrange(std::vector<double>(4, -1.0)).ok());
  EXPECT_FALSE(state->Rearrange(std::vector<double>(3, 1.0)).ok());
}

}  // namespace
}  // namespace fusedmoe
