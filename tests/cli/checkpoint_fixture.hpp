#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/safetensors.hpp>

#include "cli/process.hpp"

namespace fusedmoe::test {

/// Sizes small enough for a process per test, large enough for every group (16, 32, 128) to divide them.
inline const std::vector<std::string> kTinySizes = {"--hidden",  "128", "--intermediate", "128",
                                                    "--experts", "8",   "--tokens",       "5"};

/// A sample checkpoint of tiny sizes in a directory of its own, to be run and to be damaged.
class SampleCheckpoint {
 public:
  SampleCheckpoint(const std::string& family, const std::string& scheme,
                   const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"sample", "--family", family, "--scheme",
                                          scheme,   "--output", path()};
    for (size_t i = 0; i < kTinySizes.size(); i += 2) {
      if (std::find(more.begin(), more.end(), kTinySizes[i]) == more.end()) {
        arguments.insert(arguments.end(), {kTinySizes[i], kTinySizes[i + 1]});
      }
    }
    arguments.insert(arguments.end(), more.begin(), more.end());
    if (std::find(more.begin(), more.end(), "--top-k") == more.end()) {
      arguments.insert(arguments.end(), {"--top-k", "2"});
    }
    const ProcessResult result = RunCommand(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }

  std::string path() const { return directory_ / "checkpoint"; }
  std::string input() const { return path() + "/io/input.safetensors"; }
  std::string output() const { return directory_ / "out.safetensors"; }

  /// `fusedmoe run` of layer 0 with more arguments.
  ProcessResult Run(std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments = {"run",     path(),  "--layer",  "0",
                                          "--input", input(), "--output", output()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return RunCommand(arguments);
  }

  /// Rewrites a safetensors file of the checkpoint after `change`.
  void Rewrite(const std::string& file, const std::function<void(std::vector<NamedTensor>&)>& change) const {
    Result<SafetensorsFile> contents = ReadSafetensors(path() + "/" + file);
    ASSERT_TRUE(contents.ok()) << contents.status().ToString();
    change(contents->tensors);
    const Status status = WriteSafetensors(path() + "/" + file, contents->tensors, contents->metadata);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

 private:
  TemporaryDirectory directory_;
};

}  // namespace fusedmoe::test
