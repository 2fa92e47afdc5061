#include <algorithm>
#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/jobs/sample.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/safetensors.hpp>

#include "support/files.hpp"
#include "support/temporary_directory.hpp"

namespace fusedmoe {
namespace {

namespace fs = std::filesystem;

class SampleTest : public testing::Test {
 protected:
  SampleOptions Tiny(const std::string& directory) const {
    SampleOptions options;
    options.directory = root_ / directory;
    options.hidden = 128;
    options.intermediate = 64;
    options.num_experts = 6;
    options.top_k = 2;
    options.num_tokens = 3;
    return options;
  }
  std::string Bytes(const std::string& file) const { return test::ReadFile(root_ / file); }

  const test::TemporaryDirectory directory_;
  const fs::path& root_ = directory_.path();
};

TEST_F(SampleTest, Bytes_DependOnTheSeedAndNotOnThreads) {
  const auto pool = ThreadPool::Create(3);
  ASSERT_TRUE(pool.ok());
  SampleOptions options = Tiny("serial");
  ASSERT_TRUE(WriteSample(options).ok());
  options.directory = root_ / "threads";
  options.executor = (*pool)->executor();
  ASSERT_TRUE(WriteSample(options).ok());
  options.directory = root_ / "seed";
  options.seed = 1;
  ASSERT_TRUE(WriteSample(options).ok());
  EXPECT_EQ(Bytes("serial/model.safetensors"), Bytes("threads/model.safetensors"));
  EXPECT_EQ(Bytes("serial/io/input.safetensors"), Bytes("threads/io/input.safetensors"));
  EXPECT_NE(Bytes("serial/model.safetensors"), Bytes("seed/model.safetensors"));
}

TEST_F(SampleTest, Nvfp4_HasTheTensorsOfTheProducer) {
  SampleOptions options = Tiny("x");
  const auto report = WriteSample(options);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report->producer, "modelopt");
  const auto file = ReadSafetensors((root_ / "x/model.safetensors").string());
  ASSERT_TRUE(file.ok());
  const std::string up = "model.layers.0.mlp.experts.5.up_proj.";
  ASSERT_NE(file->Find(up + "weight"), nullptr);
  EXPECT_EQ(file->Find(up + "weight")->shape(), (Shape{64, 64}));
  EXPECT_EQ(file->Find(up + "weight")->dtype(), DType::kU8);
  EXPECT_EQ(file->Find(up + "weight_scale")->shape(), (Shape{64, 8}));
  EXPECT_EQ(file->Find(up + "weight_scale")->dtype(), DType::kF8E4M3);
  EXPECT_EQ(file->Find(up + "weight_scale_2")->shape().rank(), 0);
  EXPECT_GT(*file->Find(up + "input_scale")->view().as<float>(), 0.0F);
  EXPECT_EQ(file->tensors.size(), 6U * 3 * 4 + 1)
      << "six experts, three projections of four tensors, a router";
}

TEST_F(SampleTest, SmallShards_AreIndexed) {
  SampleOptions options = Tiny("x");
  options.max_shard_bytes = 30000;
  const auto report = WriteSample(options);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_FALSE(fs::exists(root_ / "x/model.safetensors"));
  EXPECT_TRUE(fs::exists(root_ / "x/model.safetensors.index.json"));
  EXPECT_NE(Bytes("x/model.safetensors.index.json").find("experts.5.up_proj.weight_scale_2"),
            std::string::npos);
}

TEST_F(SampleTest, Refusals_LeaveNothing) {
  const auto refused = [this](const SampleOptions& options, StatusCode code) {
    const auto report = WriteSample(options);
    ASSERT_FALSE(report.ok());
    EXPECT_EQ(report.status().code(), code) << report.status().ToString();
    EXPECT_FALSE(fs::exists(root_ / "x"));
  };
  SampleOptions options = Tiny("x");
  options.family = "gpt2";
  refused(options, StatusCode::kUsage);
  options = Tiny("x");
  options.scheme = "nvfp5";
  refused(options, StatusCode::kUsage);
  options = Tiny("x");
  options.scheme = "w_mxfp6_e3m2";  // no tool writes it
  refused(options, StatusCode::kUnsupported);
  options = Tiny("x");
  options.hidden = 120;  // 120 is no multiple of 16
  refused(options, StatusCode::kUnsupported);
  options = Tiny("x");
  options.top_k = 7;
  refused(options, StatusCode::kUsage);
  options = Tiny("x");
  options.family = "llama4_text";
  options.top_k = 2;  // which run would refuse
  refused(options, StatusCode::kUsage);
  options = Tiny("x");
  options.family = "phimoe";
  options.top_k = 3;  // which Describe would refuse
  refused(options, StatusCode::kUsage);
  options = Tiny("x");
  options.num_tokens = -1;
  refused(options, StatusCode::kUsage);
}

TEST_F(SampleTest, Families_AreWrittenPlainAndQuantized) {
  for (const SampleFamily& family : SampleFamilies()) {
    for (const char* scheme : {"unquantized", "nvfp4_w4a4"}) {
      SampleOptions options = Tiny(std::string(family.name) + scheme);
      options.family = family.name;
      options.scheme = scheme;
      options.top_k = std::min(options.top_k, family.top_k);  // Llama-4 takes one
      const auto report = WriteSample(options);
      EXPECT_TRUE(report.ok()) << family.name << " " << scheme << ": " << report.status().ToString();
    }
  }
}

TEST_F(SampleTest, LatentExperts_HaveProjectionsAndRun) {
  for (const char* scheme : {"unquantized", "nvfp4_w4a4", "fp8_w8a8:block128"}) {
    SampleOptions options = Tiny(scheme);
    options.family = "nemotron_h";
    options.scheme = scheme;
    options.latent = 64;
    const auto report = WriteSample(options);
    ASSERT_TRUE(report.ok()) << scheme << ": " << report.status().ToString();
    EXPECT_EQ(report->latent, 64);
    const auto checkpoint = Checkpoint::Open(options.directory);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
    const auto description = (*checkpoint)->Describe(0);
    ASSERT_TRUE(description.ok()) << description.status().ToString();
    EXPECT_EQ(description->config.latent, 64);
    EXPECT_EQ(description->config.hidden, 128);
    EXPECT_FALSE(description->config.activation.gated());
    const auto layer = MoeLayer::Load(*checkpoint, 0, {});
    EXPECT_TRUE(layer.ok()) << scheme << ": " << layer.status().ToString();
  }
  SampleOptions options = Tiny("no");
  options.latent = 64;  // whose experts read the hidden states
  EXPECT_EQ(WriteSample(options).status().code(), StatusCode::kUsage);
}

TEST_F(SampleTest, Schemes_AreWritten) {
  for (const char* scheme : {"nvfp4_w4a16", "mxfp4_w4a16", "mxfp4_w4a4", "fp8_w8a8:channel",
                             "fp8_w8a8:block128", "fp8_w8a8:tensor_static", "int8_w8a8:channel",
                             "int4_w4a16:g64", "int4_w4a16", "fp8_w8a8", "int8_w8a8"}) {
    SampleOptions options = Tiny(scheme);
    options.scheme = scheme;
    const auto report = WriteSample(options);
    EXPECT_TRUE(report.ok()) << scheme << ": " << report.status().ToString();
  }
}

}  // namespace
}  // namespace fusedmoe
