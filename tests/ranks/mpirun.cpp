#include "ranks/mpirun.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "support/temporary_directory.hpp"

extern char** environ;

namespace fusedmoe::test {
namespace {

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

bool Job::Says(const std::vector<std::string>& words) const {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    bool all = true;
    for (const std::string& word : words) {
      all = all && line.find(word) != std::string::npos;
    }
    if (all) {
      return true;
    }
  }
  return false;
}

void MpiTest::SetUp() {
  if (std::string(FMOE_MPI_PLUGIN).empty() || std::system("mpirun --version >/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "needs Open MPI: apt-get install openmpi-bin libopenmpi-dev";
  }
  // Tests run as root in containers, which mpirun refuses unless it is told.
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
}

std::string MpiTest::Mark() {
  static int64_t count = 0;
  return "mark-" + std::to_string(getpid()) + "-" + std::to_string(++count);
}

int64_t MpiTest::ProcessesWith(const std::string& word) {
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

Job MpiTest::Run(int64_t ranks, const std::vector<std::string>& command) {
  std::vector<std::string> arguments = {"-n", std::to_string(ranks)};
  arguments.insert(arguments.end(), command.begin(), command.end());
  return Launch(arguments);
}

Job MpiTest::Launch(const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {"mpirun", "--oversubscribe", "--bind-to", "none"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) {
    argv.push_back(word.data());
  }
  argv.push_back(nullptr);
  // Through a file rather than a pipe: nothing to drain, nothing that can block.
  const TemporaryDirectory directory;
  const std::string out = directory / "out";
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  const auto start = std::chrono::steady_clock::now();
  pid_t pid = 0;
  Job job;
  const int failure = posix_spawnp(&pid, "mpirun", &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  int wait_status = 0;
  if (failure == 0 && waitpid(pid, &wait_status, 0) == pid) {
    job.exit_code = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -1;
  }
  job.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  job.text = Read(out);
  return job;
}

}  // namespace fusedmoe::test
