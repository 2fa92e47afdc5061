#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "layer/expert_mover.hpp"
#include "support/forwarding_communicator.hpp"
#include "support/random_layer.hpp"
#include "support/rank_cells.hpp"

namespace fusedmoe {
namespace {

using testing_support::IdPattern;
using testing_support::RankCell;
using testing_support::RankCellReport;
using testing_support::RunRankCell;
using testing_support::SourceHook;

RankCell BalancedCell(int64_t ranks) {
  RankCell cell;
  cell.sizes.dp = ranks;
  cell.sizes.enable_expert_parallel = true;
  cell.sizes.all2all = "deepep_high_throughput";
  cell.sizes.enable_eplb = true;
  cell.sizes.num_redundant_experts = ranks + (ranks - cell.num_experts % ranks) % ranks;
  cell.eplb_interval = 3;
  return cell;
}

/// Passes everything on, and changes a byte of what one rank sends under a name.
class Damaging final : public test::ForwardingCommunicator {
 public:
  Damaging(std::shared_ptr<Communicator> inner, std::string operation)
      : ForwardingCommunicator(std::move(inner)), operation_(std::move(operation)) {}
  Status Start(const RowExchange& exchange) override {
    if (exchange.operation != operation_) {
      return ForwardingCommunicator::Start(exchange);
    }
    int64_t rows = 0;
    for (size_t rank = 0; rank < exchange.send_rows.size(); ++rank) {
      rows = std::max(rows, exchange.send_offsets[rank] + exchange.send_rows[rank]);
    }
    spoiled_.assign(exchange.send, exchange.send + rows * exchange.row_bytes);
    for (int64_t row = 0; row < rows; ++row) {
      spoiled_[static_cast<size_t>(row * exchange.row_bytes) + 20] ^= std::byte{1};
    }
    RowExchange changed = exchange;
    changed.send = spoiled_.data();
    return ForwardingCommunicator::Start(changed);
  }

 private:
  std::string operation_;
  std::vector<std::byte> spoiled_;
};

struct Outcome {
  std::string wrong;
  RankCellReport report;
};

/// Runs the cell on ranks that are threads; `change` may replace what rank `changed` (-1: each) has.
std::vector<Outcome> RunOnThreads(
    int64_t ranks, const RankCell& cell, int64_t steps,
    const std::function<void(std::shared_ptr<Communicator>&, SourceHook&)>& change = {},
    int64_t changed = 1) {
  CommunicatorOptions options;
  options.deadline_seconds = 20;
  auto communicators = *InProcessCommunicators(ranks, options);
  std::vector<Outcome> outcomes(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    threads.emplace_back([&, rank] {
      SourceHook hook;
      if (change && (changed < 0 || static_cast<int64_t>(rank) == changed)) {
        change(communicators[rank], hook);
      }
      outcomes[rank].wrong = RunRankCell(communicators[rank], cell, steps, outcomes[rank].report, hook);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return outcomes;
}

TEST(Rebalance, MovedExperts_LeaveOutputsAsTheyWere) {
  for (const int64_t ranks : {2, 4}) {
    for (const char* name : {"allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"}) {
      for (const char* scheme : {"nvfp4_w4a4", "int4_w4a16"}) {
        RankCell cell = BalancedCell(ranks);
        cell.sizes.all2all = name;
        cell.scheme = scheme;
        const std::vector<Outcome> outcomes = RunOnThreads(ranks, cell, 9);
        int64_t received = 0;
        for (const Outcome& outcome : outcomes) {
          EXPECT_EQ(outcome.wrong, "") << cell.Name();
          EXPECT_GE(outcome.report.switches, 1) << cell.Name();
          EXPECT_EQ(outcome.report.epoch, outcomes[0].report.epoch);
          received += outcome.report.received;
        }
        EXPECT_GT(received, 0) << cell.Name();
      }
    }
  }
}

// Rows of experts are shorter than hidden states; the projections stay where they are.
TEST(Rebalance, MovedLatentExperts_LeaveOutputsAsTheyWere) {
  RankCell cell = BalancedCell(2);
  cell.scheme = "nvfp4_w4a16";
  cell.latent = 64;
  cell.shared = true;
  for (const Outcome& outcome : RunOnThreads(2, cell, 9)) {
    EXPECT_EQ(outcome.wrong, "") << cell.Name();
    EXPECT_GE(outcome.report.switches, 1) << cell.Name();
  }
}

TEST(Rebalance, BusyExpert_GetsReplicasOnOtherRanks) {
  RankCell cell = BalancedCell(2);
  cell.ids = IdPattern::kOneExpert;  // the last expert has all the load
  const std::vector<Outcome> outcomes = RunOnThreads(2, cell, 4);
  EXPECT_EQ(outcomes[0].wrong + outcomes[1].wrong, "");
  EXPECT_GE(outcomes[0].report.received, 1) << "rank 0 has had no copy of the last expert";
}

TEST(Rebalance, DamagedExpert_KeepsTheOldPlacement) {
  const std::vector<Outcome> outcomes = RunOnThreads(
      2, BalancedCell(2), 3,
      [](std::shared_ptr<Communicator>& communicator, SourceHook&) {
        communicator = std::make_shared<Damaging>(communicator, "eplb experts");
      },
      -1);
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.wrong, "");
    EXPECT_EQ(outcome.report.epoch, 0);
    EXPECT_EQ(outcome.report.kept_count, 1);
    EXPECT_NE(outcome.report.kept.find("eplb vote: rank "), std::string::npos) << outcome.report.kept;
    EXPECT_NE(outcome.report.kept.find("digest"), std::string::npos) << outcome.report.kept;
  }
}

TEST(Rebalance, RankThatCannotLoadAnExpert_VotesNo) {
  std::atomic<bool> gone{false};
  const std::vector<Outcome> outcomes =
      RunOnThreads(2, BalancedCell(2), 9, [&](std::shared_ptr<Communicator>& communicator, SourceHook& hook) {
        hook = [&gone, &communicator](ExpertSource& source) {
          source.load = [load = source.load, &gone, communicator](int64_t expert) -> Result<CanonicalExpert> {
            // The layer is loaded before the first exchange of rows.
            gone = gone || communicator->sequence() > 4;
            return gone ? Result<CanonicalExpert>(Status::BadInput("the disk is gone")) : load(expert);
          };
        };
      });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.wrong, "");
    EXPECT_EQ(outcome.report.epoch, 0);
    EXPECT_NE(outcome.report.kept.find("the disk is gone"), std::string::npos) << outcome.report.kept;
  }
}

TEST(Rebalance, OtherPlanOnOneRank_KeepsTheOldPlacement) {
  const std::vector<Outcome> outcomes =
      RunOnThreads(2, BalancedCell(2), 6, [](std::shared_ptr<Communicator>& communicator, SourceHook&) {
        communicator = std::make_shared<Damaging>(communicator, "eplb plan");
      });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.wrong, "");
    EXPECT_EQ(outcome.report.epoch, 0);
    EXPECT_EQ(outcome.report.kept_count, 2) << "the next interval tries again";
    EXPECT_NE(outcome.report.kept.find("another load window or plan"), std::string::npos)
        << outcome.report.kept;
  }
}

// An expert that goes from rank to rank, switch by switch: each held those before it, and what had left
// stayed in memory.
TEST(ExpertMover, ExpertsThatLeave_AreKeptNoLonger) {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 2;
  config.hidden = config.intermediate = 64;
  config.routing.top_k = 1;
  const ExpertSource all = testing_support::MakeRandomLayer(config, "unquantized", 3).source;
  const auto communicators = *InProcessCommunicators(2);
  const auto run = [&](int64_t rank) {
    int loads = 0;
    const auto first = [&, rank](int64_t) {
      ++loads;
      return all.load(rank);
    };
    ExpertSource source = all;
    source.num_local_experts = 1;
    source.load = first;
    std::vector<int64_t> own = {rank};
    std::weak_ptr<const void> last;  // what had arrived
    for (int step = 0; step < 4; ++step) {
      const std::vector<int32_t> before =
          step % 2 == 0 ? std::vector<int32_t>{0, 1} : std::vector<int32_t>{1, 0};
      const std::vector<int32_t> after = {before[1], before[0]};
      ExpertMover mover;
      EXPECT_TRUE(
          mover.Open(source, own, PlanMoves(before, after, 2), *communicators[static_cast<size_t>(rank)])
              .ok());
      EXPECT_TRUE(mover.Run(*communicators[static_cast<size_t>(rank)]).ok());
      EXPECT_TRUE(mover.fault().ok()) << mover.fault().ToString();
      own = {after[static_cast<size_t>(rank)]};
      auto next = mover.Source(own);
      ASSERT_TRUE(next.ok()) << next.status().ToString();
      source = *std::move(next);
      mover = ExpertMover();
      const auto expert = source.load(0);
      ASSERT_TRUE(expert.ok()) << expert.status().ToString();
      EXPECT_TRUE(last.expired()) << "switch " << step;
      last = expert->up.codes.owner();
      const auto expected = all.load(own[0]);
      EXPECT_EQ(0, std::memcmp(expert->up.codes.view().data(), expected->up.codes.view().data(),
                               static_cast<size_t>(expected->up.codes.view().total_bytes())));
    }
    EXPECT_LE(loads, 2) << "an expert that left long ago was loaded again";
  };
  std::thread other([&] { run(1); });
  run(0);
  other.join();
}

TEST(PlanMoves, SharesReceiversAmongTheRanksThatHaveAnExpert) {
  // Expert 0 on ranks 0 and 1 before; on all six after: 2 and 3 are served by rank 0, 4 and 5 by rank 1.
  const std::vector<int32_t> before = {0, 0, 1, 1, 1, 1}, after = {0, 0, 0, 0, 0, 0};
  const std::vector<ExpertMove> moves = PlanMoves(before, after, 6);
  ASSERT_EQ(moves.size(), 4U);
  EXPECT_EQ(moves[0].from, 0);
  EXPECT_EQ(moves[0].to, 2);
  EXPECT_EQ(moves[1].from, 0);
  EXPECT_EQ(moves[3].from, 1);
  EXPECT_EQ(moves[3].to, 5);
}

TEST(PlanMoves, RemainderGoesToTheFirstSources) {
  const std::vector<int32_t> before = {0, 0, 1, 1, 1}, after = {0, 0, 0, 0, 0};
  const std::vector<ExpertMove> moves = PlanMoves(before, after, 5);
  ASSERT_EQ(moves.size(), 3U);
  EXPECT_EQ(moves[2].from, 0);
  EXPECT_EQ(moves[2].to, 4);
}

TEST(PlanMoves, ExpertsOfOnePairOfRanksGoOneAfterTheOther) {
  const std::vector<int32_t> before = {0, 1, 2, 3}, after = {2, 3, 0, 1};
  const std::vector<ExpertMove> moves = PlanMoves(before, after, 2);
  ASSERT_EQ(moves.size(), 4U);
  EXPECT_EQ(moves[0].round, 0);
  EXPECT_EQ(moves[1].round, 0);
  EXPECT_EQ(moves[2].round, 1);
  EXPECT_EQ(moves[3].round, 1);
  EXPECT_TRUE(PlanMoves(before, before, 2).empty());
}

}  // namespace
}  // namespace fusedmoe
