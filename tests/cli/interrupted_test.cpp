// Commands that write, killed in the middle: nothing half-written stands under the final name, and the next
// run is not in the way of what the killed one left.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <thread>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>

#include "cli/checkpoint_fixture.hpp"
#include "cli/process.hpp"

extern char** environ;

namespace fusedmoe::test {
namespace {

namespace fs = std::filesystem;

// Starts the command and kills it after that time, unless it has ended before. True: it was killed.
bool RunAndKill(std::vector<std::string> arguments, std::chrono::microseconds after) {
  const std::vector<std::string> command = CommandWords();
  arguments.insert(arguments.begin(), command.begin(), command.end());
  std::vector<char*> words;
  for (std::string& argument : arguments) {
    words.push_back(argument.data());
  }
  words.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t child = 0;
  EXPECT_EQ(posix_spawnp(&child, words.front(), &actions, nullptr, words.data(), environ), 0);
  posix_spawn_file_actions_destroy(&actions);
  std::this_thread::sleep_for(after);
  kill(child, SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status);
}

std::map<std::string, std::string> FilesOf(const std::string& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(directory)) {
    // A hidden mark may be left of a run killed in its last moment.
    if (entry.is_regular_file() && !entry.path().filename().string().starts_with('.')) {
      files[entry.path().filename()] = ReadFile(entry.path());
    }
  }
  return files;
}

// `command` writes `target`, a directory or a file: kills it at a dozen points between its start and its end.
void KillEverywhere(const std::vector<std::string>& command, const std::string& target) {
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_EQ(RunCommand(command).exit_code, 0);
  const auto whole =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin);
  const bool is_directory = fs::is_directory(target);
  const auto read = [&] {
    return is_directory ? FilesOf(target) : std::map<std::string, std::string>{{"", ReadFile(target)}};
  };
  const auto wanted = read();
  constexpr int kPoints = 12;
  int killed = 0;
  for (int point = 0; point < kPoints; ++point) {
    fs::remove_all(target);
    killed += RunAndKill(command, whole * point / kPoints) ? 1 : 0;
    if (fs::exists(target)) {
      EXPECT_EQ(read(), wanted) << "killed at point " << point << ": what stands there is not complete";
    }
  }
  EXPECT_GE(killed, 2) << "the command was hardly ever caught at work";
  fs::remove_all(target);
  const ProcessResult again = RunCommand(command);
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(read(), wanted) << "the run after has other bytes";
}

TEST(Interrupted, Quantize_LeavesNothingHalfWritten) {
  const SampleCheckpoint source("qwen3_moe", "unquantized", {"--layers", "2"});
  const TemporaryDirectory directory;
  KillEverywhere({"quantize", source.path(), "--scheme", "nvfp4_w4a16", "--output", directory / "out",
                  "--max-shard-bytes", "200000"},
                 directory / "out");
}

TEST(Interrupted, Convert_LeavesNothingHalfWritten) {
  const SampleCheckpoint source("qwen3_moe", "nvfp4_w4a16", {"--layers", "2"});
  const TemporaryDirectory directory;
  KillEverywhere({"convert", source.path(), "--to", "compressed-tensors", "--output", directory / "out"},
                 directory / "out");
}

TEST(Interrupted, ConvertToGguf_LeavesNothingHalfWritten) {
  const SampleCheckpoint source("qwen3_moe", "nvfp4_w4a16", {"--layers", "2"});
  const TemporaryDirectory directory;
  KillEverywhere({"convert", source.path(), "--to", "gguf", "--output", directory / "out.gguf"},
                 directory / "out.gguf");
}

// Killed while the checkpoint that it replaces was moved away, or was being removed: every later run failed,
// after all its work.
TEST(Interrupted, Replacing_LeavesNothingInTheWayOfTheNextRun) {
  const SampleCheckpoint source("qwen3_moe", "unquantized");
  const TemporaryDirectory directory;
  const std::string out = directory / "out", old = directory / ".out.incomplete.old";
  std::vector<std::string> command = {"quantize", source.path(), "--scheme", "nvfp4_w4a16", "--output", out};
  ASSERT_EQ(RunCommand(command).exit_code, 0);
  const auto wanted = FilesOf(out);
  fs::rename(out, old);
  const ProcessResult refused = RunCommand(command);
  EXPECT_EQ(refused.exit_code, 2) << refused.err;
  EXPECT_EQ(FilesOf(out), wanted) << "the only checkpoint is back";
  command.emplace_back("--force");
  for (const char* left : {"config.json", "model.safetensors"}) {
    fs::create_directories(old);
    fs::rename(fs::path(out) / left, fs::path(old) / left);
    fs::copy(fs::path(old) / left, out);
    const ProcessResult again = RunCommand(command);
    EXPECT_EQ(again.exit_code, 0) << again.err;
    EXPECT_EQ(FilesOf(out), wanted);
    EXPECT_FALSE(fs::exists(old));
  }
  fs::rename(out, old);
  EXPECT_EQ(RunCommand(command).exit_code, 0);
  EXPECT_EQ(std::distance(fs::directory_iterator(directory.path()), {}), 1) << "out alone is left";
}

TEST(Interrupted, CalibrateAndPrepare_LeaveNothingHalfWritten) {
  const SampleCheckpoint source("qwen3_moe", "nvfp4_w4a16");
  const TemporaryDirectory directory;
  KillEverywhere({"calibrate", source.path(), "--layer", "0", "--input", source.input(), "--output",
                  directory / "stats.safetensors"},
                 directory / "stats.safetensors");
  KillEverywhere({"prepare", source.path(), "--layer", "0", "--backend", "MARLIN", "--output",
                  directory / "layer.safetensors"},
                 directory / "layer.safetensors");
}

}  // namespace
}  // namespace fusedmoe::test
