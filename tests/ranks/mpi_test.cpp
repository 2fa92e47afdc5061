#include <dirent.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

extern char** environ;

namespace fusedmoe {
namespace {

#ifdef FMOE_ALL_RANK_TESTS
constexpr bool kAll = true;
#else
constexpr bool kAll = false;
#endif

struct Finished {
  int exit_code = -1;
  double seconds = 0;
  std::string text;  // stdout and stderr
};

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// Processes whose command line holds `word`, this one excepted.
int64_t ProcessesWith(const std::string& word) {
  int64_t count = 0;
  DIR* directory = opendir("/proc");
  while (const dirent* entry = readdir(directory)) {
    const int64_t pid = std::atoll(entry->d_name);
    if (pid > 0 && pid != getpid() &&
        Read(std::string("/proc/") + entry->d_name + "/cmdline").find(word) != std::string::npos) {
      ++count;
    }
  }
  closedir(directory);
  return count;
}

class MpiRanks : public testing::Test {
 protected:
  void SetUp() override {
    if (std::string(FMOE_RANKS_DRIVER).empty() || std::system("mpirun --version >/dev/null 2>&1") != 0) {
      GTEST_SKIP() << "needs Open MPI: apt-get install openmpi-bin libopenmpi-dev";
    }
    // Tests run as root in containers; whoever runs mpirun otherwise is asked by mpirun itself.
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  }

  /// mpirun -n `ranks` of the driver. `mark_` names the processes of this run.
  Finished Run(int64_t ranks, std::vector<std::string> arguments) {
    mark_ = "mark-" + std::to_string(getpid()) + "-" + std::to_string(++runs_);
    std::vector<std::string> words = {"mpirun",    "-n",   std::to_string(ranks), "--oversubscribe",
                                      "--bind-to", "none", FMOE_RANKS_DRIVER,     FMOE_MPI_PLUGIN};
    words.insert(words.end(), arguments.begin(), arguments.end());
    words.push_back(mark_);
    std::vector<char*> argv;
    for (std::string& word : words) {
      argv.push_back(word.data());
    }
    argv.push_back(nullptr);
    const std::string out = testing::TempDir() + "/" + mark_;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    const auto start = std::chrono::steady_clock::now();
    pid_t pid = 0;
    Finished finished;
    const int failure = posix_spawnp(&pid, "mpirun", &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    int wait_status = 0;
    if (failure == 0 && waitpid(pid, &wait_status, 0) == pid) {
      finished.exit_code = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -1;
    }
    finished.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    finished.text = Read(out);
    unlink(out.c_str());
    return finished;
  }

  /// Runs a fault and checks how the job ends.
  void ExpectCleanEnd(const std::string& fault, const std::vector<std::string>& words) {
    constexpr double kDeadline = 2, kStart = 3;
    const Finished finished = Run(3, {"fault", fault, std::to_string(kDeadline)});
    EXPECT_NE(finished.exit_code, 0) << finished.text;
    EXPECT_LT(finished.seconds, kStart + kDeadline + 5) << finished.text;
    bool said = false;
    std::istringstream lines(finished.text);
    for (std::string line; std::getline(lines, line);) {
      bool all = true;
      for (const std::string& word : words) {
        all = all && line.find(word) != std::string::npos;
      }
      said = said || all;
    }
    EXPECT_TRUE(said) << fault << ": no line says what happened:\n" << finished.text;
    EXPECT_EQ(ProcessesWith(mark_), 0) << fault;
  }

  std::string mark_;
  int64_t runs_ = 0;
};

class MpiCells : public MpiRanks, public testing::WithParamInterface<int64_t> {};

TEST_P(MpiCells, EqualOneRank) {
  const int64_t ranks = GetParam();
  // One launch runs all its cells. The sample steps through the matrix by a number that shares no factor with
  // its inner loops.
  const Finished finished = Run(ranks, {"cells", kAll ? "0" : std::to_string(ranks), kAll ? "1" : "53"});
  EXPECT_EQ(finished.exit_code, 0) << finished.text;
  EXPECT_NE(finished.text.find(" cells, 0 wrong"), std::string::npos) << finished.text;
}

INSTANTIATE_TEST_SUITE_P(Ranks, MpiCells, testing::Values(1, 2, 4, 8));

TEST_F(MpiRanks, ManyStepsOfRandomSizes_NoMismatchAndFlatMemory) {
  const Finished finished = Run(2, {"steps", kAll ? "10000" : "200", "-"});
  EXPECT_EQ(finished.exit_code, 0) << finished.text;
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
                    std::vector<std::string>{"options", "load", "rank 1 runs with another"},
                    std::vector<std::string>{"layer", "load", "rank 1 runs with another"}),
    [](const auto& instance) { return instance.param.front(); });
#else
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MpiFaults);
#endif

}  // namespace
}  // namespace fusedmoe
