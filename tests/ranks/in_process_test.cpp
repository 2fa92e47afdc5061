#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "support/rank_cells.hpp"

namespace fusedmoe {
namespace {

using testing_support::RankCell;
using testing_support::RankCells;
using testing_support::RunRankCell;

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

INSTANTIATE_TEST_SUITE_P(Ranks, CellsOnThreads, testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace fusedmoe
