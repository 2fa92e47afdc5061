#include <gtest/gtest.h>

#include "cli/checkpoint_fixture.hpp"

namespace fusedmoe::test {
namespace {

// Every layout leads back to the same canonical bytes, those of the checkpoint: the file is the witness.
TEST(Prepare, Inverted_GivesTheSameFileFromEveryLayout) {
  const SampleCheckpoint sample("qwen3_moe", "nvfp4_w4a4");
  TemporaryDirectory directory;
  std::string first;
  for (const std::string backend :
       {"MARLIN", "VLLM_CUTLASS", "FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM", "EMULATION"}) {
    const std::string prepared = directory / (backend + ".safetensors");
    const std::string canonical = directory / (backend + ".canonical.safetensors");
    const ProcessResult there = RunCommand(
        {"prepare", sample.path(), "--layer", "0", "--backend", backend, "--output", prepared, "--json"});
    ASSERT_EQ(there.exit_code, 0) << there.err;
    EXPECT_EQ(there.Json()["backend"], backend);
    EXPECT_GT(there.Json()["prepared_bytes"].get<int64_t>(), 0);
    EXPECT_GE(there.Json()["peak_bytes"].get<int64_t>(), 0);
    const ProcessResult back = RunCommand({"prepare", prepared, "--invert", "--output", canonical});
    ASSERT_EQ(back.exit_code, 0) << back.err;
    const std::string bytes = ReadFile(canonical);
    EXPECT_FALSE(bytes.empty());
    first = first.empty() ? bytes : first;
    EXPECT_TRUE(bytes == first) << backend;
  }
}

TEST(Prepare, WithoutALayoutOrABackend_SaysSo) {
  const SampleCheckpoint sample("qwen3_moe", "nvfp4_w4a4");
  TemporaryDirectory directory;
  const std::string file = directory / "out.safetensors";
  EXPECT_EQ(RunCommand({"prepare", sample.path(), "--output", file}).exit_code, 2);
  EXPECT_EQ(RunCommand({"prepare", sample.path(), "--backend", "NO_SUCH", "--output", file}).exit_code, 2);
  EXPECT_EQ(RunCommand({"prepare", sample.path(), "--backend", "REFERENCE", "--output", file}).exit_code, 4);
  EXPECT_EQ(RunCommand({"prepare", sample.input(), "--invert", "--output", file}).exit_code, 3);
  EXPECT_TRUE(ReadFile(file).empty()) << "a failing command leaves no file";
}

}  // namespace
}  // namespace fusedmoe::test
