#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cli/checkpoint_fixture.hpp"
#include "cli/process.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe::test {
namespace {

ProcessResult Verify(const SampleCheckpoint& checkpoint, std::vector<std::string> more) {
  std::vector<std::string> arguments = {"verify", checkpoint.path(), "--json"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return RunCommand(arguments);
}

TEST(Verify, OwnBackend_IsWithinItsBoundAndEveryTokenIsCounted) {
  for (const char* family : {"qwen3_moe", "qwen2_moe", "gpt_oss"}) {
    for (const char* scheme : {"unquantized", "nvfp4_w4a4"}) {
      const SampleCheckpoint checkpoint(family, scheme);
      const ProcessResult result = Verify(checkpoint, {"--input", checkpoint.input(), "--layer", "0"});
      ASSERT_EQ(result.exit_code, 0) << family << scheme << result.err;
      const nlohmann::json json = result.Json();
      EXPECT_TRUE(json.at("ok").get<bool>());
      EXPECT_EQ(json.at("rows"), 5);
      EXPECT_LE(json.at("rel_l2").get<double>(), json.at("bound").get<double>());
      EXPECT_GE(json.at("max_row_error").get<double>(), json.at("rel_l2").get<double>() * 0.999);
      int64_t tokens = 0;
      for (const auto& expert : json.at("experts")) {
        tokens += expert.at("tokens").get<int64_t>();
        EXPECT_LE(expert.at("rel_l2").get<double>(), 4 * json.at("bound").get<double>());
      }
      EXPECT_EQ(tokens, 5 * 2);
      EXPECT_EQ(json.at("worst_rows").size(), 5U);
    }
  }
}

TEST(Verify, A8_IsComparedWithTheSchemeWithinWhatItCosts) {
  for (const char* family : {"qwen3_moe", "qwen2_moe"}) {  // the second has a shared expert
    const SampleCheckpoint checkpoint(family, "int4_w4a16:g32");
    const auto error = [&](const char* backend) {
      const ProcessResult result = Verify(checkpoint, {"--activation", "a8", "--backend", backend});
      EXPECT_EQ(result.exit_code, 0) << family << backend << result.err;
      return result.Json().at("rel_l2").get<double>();
    };
    EXPECT_GT(error("CPU_FUSED"), 4e-3) << "rounding to 127 steps of two and more root mean squares";
    EXPECT_GT(error("REFERENCE"), 4e-3);
  }
}

TEST(Verify, BoundZero_ExitsOne) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
  const ProcessResult result = Verify(checkpoint, {"--bound", "0"});
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_FALSE(result.Json().at("ok").get<bool>());
}

TEST(Verify, OptionsWithoutEffect_AreNamedInNotes) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a16");
  const std::string cache = checkpoint.path() + "/cache", figures = checkpoint.path() + "/tune.json";
  EXPECT_FALSE(Verify(checkpoint, {}).Json().contains("notes"));
  const nlohmann::json packed = Verify(checkpoint, {"--pack-cache", cache}).Json();
  EXPECT_NE(packed.at("notes").dump().find("pack cache: wrote"), std::string::npos);
  const nlohmann::json canonical =
      Verify(checkpoint, {"--pack-cache", cache, "--backend", "reference"}).Json();
  EXPECT_NE(canonical.at("notes").dump().find("nothing is kept"), std::string::npos);
  const ProcessResult tuned = RunCommand({"tune", "--scheme", "int8_w8a8", "--isa", kFirstIsa, "--seconds",
                                          "0", "--threads", "1", "--out", figures});
  ASSERT_EQ(tuned.exit_code, 0) << tuned.err;
  EXPECT_NE(Verify(checkpoint, {"--tune", figures}).Json().at("notes").dump().find("--tune has no effect"),
            std::string::npos);
}

TEST(Verify, OutputsThatAreNoNumbers_AreCounted) {
  const SampleCheckpoint checkpoint("qwen3_moe", "fp8_w8a16:channel");
  EXPECT_EQ(Verify(checkpoint, {}).Json().at("not_finite"), 0);
  checkpoint.Rewrite("model.safetensors", [](std::vector<NamedTensor>& tensors) {
    for (NamedTensor& tensor : tensors) {
      if (tensor.name.ends_with("down_proj.weight")) {  // one row of each expert: an output of each token
        Tensor spoilt = *Tensor::Allocate(tensor.tensor.dtype(), tensor.tensor.shape());
        std::copy_n(tensor.tensor.view().data(), spoilt.view().total_bytes(), spoilt.mutable_view().data());
        spoilt.mutable_view().data()[3] = std::byte{0x7f};
        tensor.tensor = spoilt;
      }
    }
  });
  const ProcessResult result = Verify(checkpoint, {});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.Json().at("not_finite"), result.Json().at("rows"));
}

// Hidden states of the sample, times `factor`.
void ScaleInput(const SampleCheckpoint& checkpoint, float factor) {
  checkpoint.Rewrite("io/input.safetensors", [&](std::vector<NamedTensor>& tensors) {
    for (NamedTensor& tensor : tensors) {
      if (tensor.name != "hidden_states") {
        continue;
      }
      const TensorView old = tensor.tensor.view();
      Tensor scaled = *Tensor::Allocate(old.dtype(), old.shape());
      std::vector<float> values(static_cast<size_t>(old.count()));
      DecodeRow(old.dtype(), old.data(), 0, old.count(), values.data());
      std::transform(values.begin(), values.end(), values.begin(),
                     [factor](float value) { return value * factor; });
      EncodeRow(old.dtype(), values.data(), old.count(), scaled.mutable_view().data());
      tensor.tensor = scaled;
    }
  });
}

TEST(Verify, OutputsOutsideTheRangeOfF16_AreNoError) {
  for (const char* scheme : {"mxfp8_w8a16", "fp8_w8a8:block128"}) {
    const SampleCheckpoint large("qwen3_moe", scheme, {"--dtype", "F16"});
    ScaleInput(large, 4096);  // silu(gate) x up grows by the square
    const SampleCheckpoint small("qwen3_moe", scheme, {"--dtype", "F16"});
    ScaleInput(small, 0x1p-12F);
    for (const SampleCheckpoint* checkpoint : {&large, &small}) {
      const ProcessResult verified = Verify(*checkpoint, {"--input", checkpoint->input(), "--layer", "0"});
      EXPECT_EQ(verified.exit_code, 0) << scheme << verified.err;
      const ProcessResult run = checkpoint->Run({"--check", "--json"});
      ASSERT_EQ(run.exit_code, 0) << scheme << run.err;
      const int64_t overflowed = run.Json().at("check").at("overflowed").get<int64_t>();
      EXPECT_EQ(overflowed > 0, checkpoint == &large) << scheme;
      EXPECT_EQ(verified.Json().at("overflowed"), overflowed);
    }
  }
}

TEST(Verify, AgainstTheOriginal_BlamesTheExpertThatWasChanged) {
  const SampleCheckpoint original("qwen3_moe", "unquantized");
  const SampleCheckpoint damaged("qwen3_moe", "unquantized");
  ASSERT_EQ(Verify(original, {"--against", damaged.path()}).exit_code, 0);
  damaged.Rewrite("model.safetensors", [](std::vector<NamedTensor>& tensors) {
    for (NamedTensor& tensor : tensors) {
      if (tensor.name == "model.layers.0.mlp.experts.3.down_proj.weight") {
        Tensor copy = *Tensor::Allocate(tensor.tensor.dtype(), tensor.tensor.shape());  // zeros
        tensor.tensor = copy;
      }
    }
  });
  const ProcessResult result = Verify(damaged, {"--against", original.path(), "--tokens", "64"});
  EXPECT_EQ(result.exit_code, 1) << result.err;
  const nlohmann::json json = result.Json();
  bool seen = false;
  for (const auto& expert : json.at("experts")) {
    const bool changed = expert.at("expert") == 3;
    seen |= changed;
    EXPECT_EQ(expert.at("rel_l2").get<double>() > 0.5, changed) << expert;
  }
  EXPECT_TRUE(seen) << "64 tokens left an expert of eight without any";
  for (const auto& row : json.at("worst_rows")) {
    EXPECT_TRUE(row.at("experts").at(0) == 3 || row.at("experts").at(1) == 3) << row;
  }
}

TEST(Verify, OtherSizes_AreRefused) {
  const SampleCheckpoint one("qwen3_moe", "unquantized"), other("qwen3_moe", "unquantized", {"--top-k", "3"});
  EXPECT_EQ(Verify(one, {"--against", other.path()}).exit_code, 2);
}

TEST(Verify, Plot_IsAPicture) {
  const SampleCheckpoint checkpoint("mixtral", "nvfp4_w4a16");
  const TemporaryDirectory directory;
  const ProcessResult result = Verify(checkpoint, {"--plot", directory / "map.svg"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const std::string svg = ReadFile(directory / "map.svg");
  EXPECT_TRUE(svg.starts_with("<svg"));
  EXPECT_NE(svg.find("</svg>"), std::string::npos);
}

TEST(Verify, Plot_NeverReplacesWhatIsRead) {
  const SampleCheckpoint checkpoint("mixtral", "nvfp4_w4a16"), other("mixtral", "unquantized");
  for (const std::string& read :
       {checkpoint.path() + "/model.safetensors", checkpoint.path() + "/config.json", checkpoint.input(),
        other.path() + "/model.safetensors"}) {
    const std::string before = ReadFile(read);
    const ProcessResult result =
        Verify(checkpoint, {"--input", checkpoint.input(), "--against", other.path(), "--plot", read});
    EXPECT_EQ(result.exit_code, 2) << read << result.err;
    EXPECT_EQ(ReadFile(read), before) << read;
  }
}

TEST(Verify, PlotThatDoesNotFit_IsRemoved) {
  const SampleCheckpoint checkpoint("mixtral", "nvfp4_w4a16");
  const TemporaryDirectory directory;
  const std::string plot = directory / "map.svg";
  // A file size limit of some kilobytes stands for a full disk.
  const std::string command = "trap '' XFSZ; ulimit -f 4; " + CommandText() + " verify " + checkpoint.path() +
                              " --plot " + plot + " >/dev/null 2>&1";
  EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 5);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  // And one that stood there is what it was.
  const std::string old = directory.Write("map.svg", "old");
  EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 5);
  EXPECT_EQ(ReadFile(old), "old");
}

}  // namespace
}  // namespace fusedmoe::test
