#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ranks/mpirun.hpp"
#include "support/test_name.hpp"

namespace fusedmoe {
namespace {

using test::Job;

#ifdef FMOE_ALL_RANK_TESTS
constexpr bool kAll = true;
#else
constexpr bool kAll = false;
#endif

class MpiRanks : public test::MpiTest {
 protected:
  static Job RunDriver(int64_t ranks, const std::vector<std::string>& arguments) {
    std::vector<std::string> command = {FMOE_RANKS_DRIVER, FMOE_MPI_PLUGIN};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return Run(ranks, command);
  }

  /// Runs a fault and checks how the job ends.
  void ExpectCleanEnd(const std::string& fault, const std::vector<std::string>& words) {
    constexpr double kDeadline = 2, kStart = 3;
    const std::string mark = Mark();
    const Job job = RunDriver(3, {"fault", fault, std::to_string(kDeadline), mark});
    EXPECT_NE(job.exit_code, 0) << job.text;
    EXPECT_LT(job.seconds, kStart + kDeadline + 5) << job.text;
    EXPECT_TRUE(job.Says(words)) << fault << ": no line says what happened:\n" << job.text;
    EXPECT_EQ(ProcessesWith(mark), 0) << fault;
  }
};

class MpiCells : public MpiRanks, public testing::WithParamInterface<int64_t> {};

TEST_P(MpiCells, EqualOneRank) {
  const int64_t ranks = GetParam();
  // One launch runs all its cells. The sample steps through the matrix by a number that shares no factor with
  // its inner loops.
  const Job job = RunDriver(ranks, {"cells", kAll ? "0" : std::to_string(ranks), kAll ? "1" : "53"});
  EXPECT_EQ(job.exit_code, 0) << job.text;
  EXPECT_NE(job.text.find(" cells, 0 wrong"), std::string::npos) << job.text;
}

INSTANTIATE_TEST_SUITE_P(Ranks, MpiCells, testing::Values(1, 2, 4, 8));

TEST_F(MpiRanks, ManyStepsOfRandomSizes_NoMismatchAndFlatMemory) {
  const Job job = RunDriver(2, {"steps", kAll ? "10000" : "200", "-"});
  EXPECT_EQ(job.exit_code, 0) << job.text;
}

// Open MPI ended the process at the second.
TEST_F(MpiRanks, ASecondCommunicator_WorksBesideTheFirst_AndIsRefusedAfterTheLast) {
  const Job job = RunDriver(2, {"again", "-"});
  EXPECT_EQ(job.exit_code, 0) << job.text;
  EXPECT_TRUE(job.Says({"MPI has ended in this process"})) << job.text;
}

TEST_F(MpiRanks, ExpertsMoveInTheMiddleOfARun_OutputsStay) {
  for (const int64_t ranks : kAll ? std::vector<int64_t>{2, 4, 8} : std::vector<int64_t>{2}) {
    const Job job = RunDriver(ranks, {"eplb", kAll ? "12" : "4"});
    EXPECT_EQ(job.exit_code, 0) << ranks << " ranks: " << job.text;
    EXPECT_TRUE(job.Says({"switches", ", 0 wrong"})) << job.text;
  }
}

TEST_F(MpiRanks, KilledRank_EndsJob) {
  ExpectCleanEnd("kill", {"rank 1", "signal 9"});
}

TEST_F(MpiRanks, StoppedRank_EndsJobAtDeadline) {
  ExpectCleanEnd("stop", {"dispatch header", "has waited", "for rank 1", "deadline"});
}

TEST_F(MpiRanks, CorruptHeader_EndsJobBeforeRowsMove) {
  ExpectCleanEnd("header", {"dispatch agreement", "the header of rank 1 is corrupt"});
}

class MpiFaults : public MpiRanks, public testing::WithParamInterface<std::vector<std::string>> {};

TEST_P(MpiFaults, EndTheJob) {
  const std::vector<std::string> words(GetParam().begin() + 1, GetParam().end());
  ExpectCleanEnd(GetParam().front(), words);
}

#ifdef FMOE_ALL_RANK_TESTS
INSTANTIATE_TEST_SUITE_P(
    All, MpiFaults,
    testing::Values(std::vector<std::string>{"exit0", "dispatch header", "rank 1"},
                    std::vector<std::string>{"exit3", "dispatch header", "rank 1"},
                    std::vector<std::string>{"throw", "dispatch header", "rank 1"},
                    std::vector<std::string>{"kill", "dispatch header", "rank 1"},
                    std::vector<std::string>{"late", "dispatch header", "for rank 1"},
                    std::vector<std::string>{"absent", "load", "for rank 1"},
                    std::vector<std::string>{"epoch", "dispatch agreement", "header of rank 1", "epoch"},
                    std::vector<std::string>{"count", "dispatch agreement",
                                             "rank 1 announces 1073741824 rows"},
                    std::vector<std::string>{"negative", "dispatch agreement", "rank 1 announces -1 rows"},
                    std::vector<std::string>{"kill@eplb loads", "eplb loads", "rank 1"},
                    std::vector<std::string>{"kill@eplb plan", "eplb plan", "rank 1"},
                    std::vector<std::string>{"kill@eplb experts", "eplb experts", "rank 1"},
                    std::vector<std::string>{"kill@eplb vote", "eplb vote", "rank 1"},
                    std::vector<std::string>{"stop@eplb experts", "eplb experts", "has waited", "rank 1"},
                    std::vector<std::string>{"stop@eplb vote", "eplb vote", "has waited", "rank 1"},
                    std::vector<std::string>{"options", "load", "rank 1 runs with another"},
                    std::vector<std::string>{"layer", "load", "rank 1 runs with another"}),
    [](const auto& instance) { return test::TestName(instance.param.front()); });
#else
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MpiFaults);
#endif

}  // namespace
}  // namespace fusedmoe
