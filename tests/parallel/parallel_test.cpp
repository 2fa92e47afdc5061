#include <fusedmoe/parallel.hpp>

#include <limits>
#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace fusedmoe {
namespace {

TEST(ParallelConfig_, EveryRankOfSmallDeploymentsIsFlattenedOnce) {
  for (const bool expert_parallel : {false, true}) {
    for (int64_t tp = 1; tp <= 4; ++tp) {
      for (int64_t pcp = 1; pcp <= 3; ++pcp) {
        for (int64_t dp = 1; dp <= 3; ++dp) {
          ParallelSizes sizes;
          sizes.tp = tp;
          sizes.pcp = pcp;
          sizes.dp = dp;
          sizes.enable_expert_parallel = expert_parallel;
          const int64_t world = tp * pcp * dp;
          for (int64_t rank = 0; rank < world; ++rank) {
            const auto ranks = RanksOf(sizes, rank);
            ASSERT_TRUE(ranks.ok());
            const auto config = MakeParallelConfig(sizes, *ranks);
            ASSERT_TRUE(config.ok());
            const bool split_experts = expert_parallel && world > 1;
            EXPECT_EQ(config->use_ep, split_experts);
            EXPECT_EQ(split_experts ? config->ep_size : config->tp_size, world);
            EXPECT_EQ(split_experts ? config->ep_rank : config->tp_rank, rank);
            EXPECT_EQ(split_experts ? config->tp_size : config->ep_size, 1);
            EXPECT_EQ(config->dp_rank, ranks->dp);
            EXPECT_EQ(config->pcp_rank, ranks->pcp);
            EXPECT_EQ(UseAllToAll(*config), split_experts && dp > 1);
          }
        }
      }
    }
  }
  EXPECT_EQ(*MakeParallelConfig({}), NoParallel());
}

TEST(ParallelConfig_, WrongSizesAndRanksAreRefusedByName) {
  const auto message = [](const ParallelSizes& sizes, const ParallelRanks& ranks = {}) {
    const auto config = MakeParallelConfig(sizes, ranks);
    EXPECT_FALSE(config.ok());
    EXPECT_EQ(config.status().code(), StatusCode::kUsage);
    return config.status().message();
  };
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  for (const int64_t bad : {int64_t{0}, int64_t{-3}, kHuge}) {
    EXPECT_NE(message({.tp = bad}).find("size tp is " + std::to_string(bad)), std::string::npos);
    EXPECT_NE(message({.pcp = bad}).find("pcp"), std::string::npos);
    EXPECT_NE(message({.dp = bad}).find("dp"), std::string::npos);
    EXPECT_NE(message({.sp = bad}).find("sp"), std::string::npos);
  }
  message({.tp = 1 << 20, .pcp = 1 << 20, .dp = 1 << 20});
  EXPECT_NE(message({.tp = 2}, {.tp = 2}).find("between 0 and 1"), std::string::npos);
  message({.dp = 2}, {.dp = -1});
  EXPECT_NE(message({.all2all = "pigeon"}).find("deepep_low_latency"), std::string::npos);
  message({.enable_expert_parallel = true, .num_redundant_experts = 2});
  message({.enable_eplb = true});
  message({.num_redundant_experts = -1});
  EXPECT_FALSE(RanksOf({.tp = 4}, 4).ok());
}

TEST(ParallelConfig_, SequenceParallelNeedsAllItsConditions) {
  ParallelSizes sizes;
  sizes.tp = 4;
  sizes.dp = 2;
  sizes.enable_expert_parallel = true;
  const std::set<std::string> able = {"allgather_reducescatter", "deepep_high_throughput",
                                      "deepep_low_latency", "mori", "nixl_ep"};
  int64_t backends = 0;
#define FMOE_CHECK(id, name, runs_as, wire, batched, sequence)                 \
  sizes.all2all = name;                                                        \
  EXPECT_EQ(SequenceParallelSize(sizes), able.contains(name) ? 4 : 1) << name; \
  EXPECT_EQ(ParseAllToAll(name), AllToAllBackend::id);                         \
  EXPECT_EQ(AllToAllName(RunsAs(AllToAllBackend::id)), runs_as);               \
  EXPECT_EQ(WireProtocolOf(AllToAllBackend::id), WireProtocol::wire);          \
  ++backends;
  FMOE_ALL_TO_ALL_TABLE(FMOE_CHECK)
#undef FMOE_CHECK
  EXPECT_EQ(backends, 10);
  sizes.all2all = "mori";
  sizes.enable_expert_parallel = false;
  EXPECT_EQ(SequenceParallelSize(sizes), 1);
  sizes.enable_expert_parallel = true;
  sizes.dp = 1;
  EXPECT_EQ(SequenceParallelSize(sizes), 1);
  sizes.dp = 2;
  sizes.tp = 1;
  EXPECT_EQ(SequenceParallelSize(sizes), 1);
}

TEST(Placement_, BothStrategiesGiveEveryExpertOneHome) {
  for (const PlacementStrategy strategy : {PlacementStrategy::kLinear, PlacementStrategy::kRoundRobin}) {
    for (int64_t experts = 1; experts <= 20; ++experts) {
      for (int64_t ranks = 1; ranks <= 24; ++ranks) {
        std::vector<int> homes(static_cast<size_t>(experts), 0);
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const auto placement = DetermineExpertPlacement(experts, ranks, rank, strategy);
          ASSERT_TRUE(placement.ok());
          EXPECT_EQ(placement->expert_map.empty(), ranks == 1);
          EXPECT_EQ(placement->num_local(), NumLocalExperts(experts, ranks, rank));
          if (strategy == PlacementStrategy::kLinear) {
            EXPECT_TRUE(placement->contiguous());
          }
          for (int64_t local = 0; local < placement->num_local(); ++local) {
            const auto global = static_cast<size_t>(placement->local_experts[static_cast<size_t>(local)]);
            ++homes[global];
            if (ranks > 1) {
              EXPECT_EQ(placement->expert_map[global], local);
            }
          }
        }
        EXPECT_EQ(homes, std::vector<int>(static_cast<size_t>(experts), 1));
      }
    }
  }
}

TEST(Placement_, EveryMissedConditionOfRoundRobinIsNamed) {
  ParallelConfig config = NoParallel();
  config.use_ep = true;
  config.dp_size = 2;
  config.enable_eplb = true;
  config.num_redundant_experts = 3;
  const PlacementChoice choice = ChoosePlacement(PlacementStrategy::kRoundRobin, 1, config);
  EXPECT_EQ(choice.strategy, PlacementStrategy::kLinear);
  for (const char* part : {"1 expert group", "3 redundant", "load balancing", "allgather_reducescatter"}) {
    EXPECT_NE(choice.fallback_reason.find(part), std::string::npos) << choice.fallback_reason;
  }
  EXPECT_TRUE(ChoosePlacement(PlacementStrategy::kLinear, 1, config).fallback_reason.empty());
}

TEST(Placement_, RoundRobinTablesAreInverse) {
  for (int64_t experts = 1; experts <= 20; ++experts) {
    for (int64_t ranks = 1; ranks <= 7; ++ranks) {
      const auto tables = MakeRoundRobinTables(experts, ranks, ranks - 1);
      ASSERT_TRUE(tables.ok());
      for (int64_t expert = 0; expert < experts; ++expert) {
        const int64_t physical = tables->global_to_physical[static_cast<size_t>(expert)];
        EXPECT_EQ(tables->physical_to_global[static_cast<size_t>(physical)], expert);
      }
    }
  }
}

TEST(Placement_, WrongSizesAreRefused) {
  EXPECT_FALSE(DetermineExpertPlacement(0, 1, 0).ok());
  EXPECT_FALSE(DetermineExpertPlacement(8, 0, 0).ok());
  EXPECT_FALSE(DetermineExpertPlacement(8, 2, 2).ok());
  EXPECT_FALSE(DetermineExpertPlacement(8, 2, -1).ok());
  EXPECT_FALSE(DetermineExpertPlacement(std::numeric_limits<int64_t>::max(), 2, 0).ok());
  EXPECT_FALSE(MakeRoundRobinTables(8, 2, 5).ok());
}

TEST(RankSizes_, BalancedRanksNeedEqualShares) {
  ParallelConfig config = NoParallel();
  config.use_ep = config.enable_eplb = true;
  config.ep_size = 6;
  config.num_redundant_experts = 1;
  const auto refused = DeriveRankSizes(config, 64, 128);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("redundant experts could be 2, 8, 14"), std::string::npos)
      << refused.status().message();
  config.num_redundant_experts = 8;
  const auto sizes = DeriveRankSizes(config, 64, 128);
  ASSERT_TRUE(sizes.ok());
  EXPECT_EQ(sizes->num_physical_experts, 72);
  EXPECT_EQ(sizes->num_local_experts, 12);
}

}  // namespace
}  // namespace fusedmoe
