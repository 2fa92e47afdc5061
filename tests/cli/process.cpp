#include "cli/process.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

extern char** environ;

namespace fusedmoe::test {

nlohmann::json ProcessResult::Json() const {
  nlohmann::json json = nlohmann::json::parse(out, nullptr, false);
  EXPECT_FALSE(json.is_discarded()) << "stdout is not one JSON document:\n" << out << "\nstderr:\n" << err;
  return json.is_discarded() ? nlohmann::json() : json;
}

std::vector<std::string> CommandWords() {
  const std::string emulator = FMOE_CLI_EMULATOR;
  return emulator.empty() ? std::vector<std::string>{FMOE_CLI} : std::vector<std::string>{emulator, FMOE_CLI};
}

std::string CommandText() {
  std::string text;
  for (const std::string& word : CommandWords()) {
    text += (text.empty() ? "" : " ") + word;
  }
  return text;
}

ProcessResult RunCommand(const std::vector<std::string>& arguments) {
  // Through files rather than pipes: nothing to drain, nothing that can block.
  const TemporaryDirectory directory;
  const std::string out = directory / "out";
  const std::string err = directory / "err";
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.c_str(), O_WRONLY | O_CREAT, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err.c_str(), O_WRONLY | O_CREAT, 0600);
  std::vector<std::string> words = CommandWords();
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) {
    argv.push_back(word.data());
  }
  argv.push_back(nullptr);
  ProcessResult result;
  pid_t pid = 0;
  const int failure = posix_spawnp(&pid, argv.front(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  EXPECT_EQ(failure, 0) << "cannot start " << FMOE_CLI;
  int wait_status = 0;
  rusage used = {};
  if (failure == 0 && wait4(pid, &wait_status, 0, &used) == pid) {
    result.peak_bytes = static_cast<int64_t>(used.ru_maxrss) * 1024;
    result.exit_code = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -1;
  }
  result.out = ReadFile(out);
  result.err = ReadFile(err);
  return result;
}

}  // namespace fusedmoe::test
