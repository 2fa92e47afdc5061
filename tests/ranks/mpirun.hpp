#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace fusedmoe::test {

/// A finished job.
struct Job {
  int exit_code = -1;
  double seconds = 0;
  std::string text;  ///< stdout and stderr
  /// Whether one line holds all these words.
  bool Says(const std::vector<std::string>& words) const;
};

/// Tests that start ranks; skipped where Open MPI is not installed.
class MpiTest : public testing::Test {
 protected:
  void SetUp() override;
  /// mpirun -n `ranks` of a command, with room for more ranks than cores.
  static Job Run(int64_t ranks, const std::vector<std::string>& command);
  /// mpirun with these arguments.
  static Job Launch(const std::vector<std::string>& arguments);
  /// Processes whose command line holds `word`, this one excepted.
  static int64_t ProcessesWith(const std::string& word);
  /// A word for a command line, used by no other process.
  static std::string Mark();
};

}  // namespace fusedmoe::test
