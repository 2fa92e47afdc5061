#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "support/rank_cells.hpp"

namespace fusedmoe {
namespace {

using testing_support::IdPattern;
using testing_support::RankCell;
using testing_support::RankCells;
using testing_support::RunRankCell;
using testing_support::TokenPattern;

// The ranks are threads: what is tested here are the protocols, not the transport.
std::vector<std::string> RunOnThreads(int64_t ranks, const RankCell& cell) {
  CommunicatorOptions options;
  options.deadline_seconds = 20;
  const auto communicators = *InProcessCommunicators(ranks, options);
  std::vector<std::string> wrong(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < wrong.size(); ++rank) {
    threads.emplace_back([&, rank] { wrong[rank] = RunRankCell(communicators[rank], cell); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return wrong;
}

class CellsOnThreads : public testing::TestWithParam<int64_t> {};

TEST_P(CellsOnThreads, EqualOneRank) {
  const int64_t ranks = GetParam();
  const std::vector<RankCell> cells = RankCells(ranks);
  // A sample that changes with the number of ranks: a step that shares no factor with the inner loops.
  for (size_t index = static_cast<size_t>(ranks); index < cells.size(); index += 37) {
    const std::vector<std::string> wrong = RunOnThreads(ranks, cells[index]);
    for (size_t rank = 0; rank < wrong.size(); ++rank) {
      EXPECT_EQ(wrong[rank], "") << cells[index].Name() << ", rank " << rank << " of " << ranks;
    }
  }
}

// Latent experts: each rank projects its tokens, rows of the latent width travel, and what is projected back
// is the finished sum, so that experts spread over ranks give the bits of one rank.
std::vector<RankCell> LatentCells() {
  std::vector<RankCell> cells;
  for (const char* scheme : {"unquantized", "nvfp4_w4a16"}) {
    for (const char* backend : {"REFERENCE", "CPU_FUSED"}) {
      RankCell cell;
      cell.latent = 64;
      cell.scheme = scheme;
      cell.backend = backend;
      cell.shared = true;
      cell.seed = cells.size() + 1;
      RankCell tensor_parallel = cell;
      tensor_parallel.sizes.tp = 2;
      tensor_parallel.determinism = Determinism::kThreadInvariant;
      cells.push_back(tensor_parallel);
      for (const char* name : {"allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"}) {
        cell.sizes = {};
        cell.sizes.dp = 2;
        cell.sizes.enable_expert_parallel = true;
        cell.sizes.all2all = name;
        cell.tokens = TokenPattern::kDescending;
        cell.ids = IdPattern::kHoles;
        cell.determinism = Determinism::kRankInvariant;
        cells.push_back(cell);
        cell.tokens = TokenPattern::kZeroOnOne;
        cell.determinism = Determinism::kThreadInvariant;
        cells.push_back(cell);
      }
      cell.sizes = {};
      cell.sizes.tp = cell.sizes.sp = 2;
      cell.sizes.enable_expert_parallel = true;
      cell.tokens = TokenPattern::kEqual;
      cell.determinism = Determinism::kRankInvariant;
      cells.push_back(cell);
      cell.sizes.sp = 1;  // experts apart, tokens of both ranks the same
      cell.shared = false;
      cells.push_back(cell);
    }
  }
  return cells;
}

TEST(LatentExperts, OnTwoRanks_EqualOneRank) {
  for (const RankCell& cell : LatentCells()) {
    const std::vector<std::string> wrong = RunOnThreads(2, cell);
    EXPECT_EQ(wrong[0], "") << cell.Name();
    EXPECT_EQ(wrong[1], "") << cell.Name();
  }
}

// A token that names one expert in all its slots, of which its rank has fewer experts: more rows came back
// than there was room for.
TEST(RepeatedExperts, OnFourRanks_EqualOneRank) {
  for (const char* name : {"naive", "allgather_reducescatter", "deepep_high_throughput", "mori"}) {
    for (const Determinism determinism : {Determinism::kRankInvariant, Determinism::kThreadInvariant}) {
      for (const char* backend : {"REFERENCE", "CPU_FUSED"}) {
        RankCell cell;
        cell.sizes.dp = 4;
        cell.sizes.enable_expert_parallel = true;
        cell.sizes.all2all = name;
        cell.ids = IdPattern::kRepeated;
        cell.num_experts = 4;
        cell.determinism = determinism;
        cell.backend = backend;
        const std::vector<std::string> wrong = RunOnThreads(4, cell);
        EXPECT_EQ(wrong, std::vector<std::string>(4)) << cell.Name();
      }
    }
  }
}

// Each tensor-parallel rank brings its slices, of which the bias of the down projection is whole: it counts
// once.
TEST(DownBias, OfTensorParallelRanks_IsAddedOnce) {
  for (const int64_t ranks : {2, 4}) {
    for (const char* backend : {"REFERENCE", "CPU_FUSED"}) {
      RankCell cell;
      cell.sizes.tp = ranks;
      cell.bias = true;
      cell.backend = backend;
      cell.determinism = Determinism::kThreadInvariant;
      const std::vector<std::string> wrong = RunOnThreads(ranks, cell);
      EXPECT_EQ(wrong, std::vector<std::string>(static_cast<size_t>(ranks))) << cell.Name();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CellsOnThreads, testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace fusedmoe
