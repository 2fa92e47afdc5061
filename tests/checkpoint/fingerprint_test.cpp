// What ranks compare of a checkpoint, and how little of it they read for that.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <string>

#include "checkpoint/raw_checkpoint.hpp"
#include "layer/rank_plan.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

constexpr int64_t kWide = 8192;  // rows of an expert: 1 MiB a matrix

/// Two layers of two large experts.
TinyModel LargeModel() {
  TinyModel model("bf16");
  model.config["moe_intermediate_size"] = kWide;
  model.config["num_hidden_layers"] = 2;
  std::vector<RawTensor> second;
  for (RawTensor& tensor : model.tensors) {
    if (tensor.name.find("down_proj") != std::string::npos) {
      tensor = Bf16(tensor.name, {kHidden, kWide}, 0.25F);
    } else if (tensor.name.find("_proj") != std::string::npos) {
      tensor = Bf16(tensor.name, {kWide, kHidden}, 0.25F);
    }
    second.push_back(tensor);
    second.back().name = Replaced(tensor.name, "layers.0.", "layers.1.");
  }
  model.tensors.insert(model.tensors.end(), second.begin(), second.end());
  return model;
}

/// Bytes that this process has read with calls; -1 where the system does not say.
int64_t BytesRead() {
  std::ifstream file("/proc/self/io");
  std::string name;
  int64_t value = -1;
  return file >> name >> value && name == "rchar:" ? value : -1;
}

uint64_t FingerprintOf(const TinyModel& model, IoMode io = IoMode::kAuto) {
  const TemporaryDirectory folder;
  model.WriteTo(folder);
  CheckpointOptions options;
  options.io = io;
  const auto checkpoint = Checkpoint::Open(folder.path().string(), options);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  return CheckpointFingerprint(**checkpoint, 0, {});
}

TEST(CheckpointFingerprint, ReadsWhatItSamples) {
  const TemporaryDirectory folder;
  LargeModel().WriteTo(folder);
  for (const IoMode io : {IoMode::kPread, IoMode::kMmap}) {
    CheckpointOptions options;
    options.io = io;
    const auto checkpoint = Checkpoint::Open(folder.path().string(), options);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
    const int64_t before = BytesRead();
    if (before < 0) {
      GTEST_SKIP() << "the system does not count what is read";
    }
    const uint64_t fingerprint = CheckpointFingerprint(**checkpoint, 0, {});
    EXPECT_LT(BytesRead() - before, 128 << 10) << "of a layer of 6 MiB";
    EXPECT_NE(fingerprint, 0U);
  }
}

TEST(CheckpointFingerprint, IsThatOfTheLayersOwnBytes) {
  TinyModel model = LargeModel();
  const uint64_t expected = FingerprintOf(model);
  EXPECT_EQ(FingerprintOf(model, IoMode::kMmap), expected);
  const auto changed = [&](const std::string& name, size_t byte) {
    TinyModel other = model;
    other.Find(name).bytes.at(byte) ^= 1;
    return FingerprintOf(other);
  };
  const std::string up = "mlp.experts.1.up_proj.weight";
  const size_t last = model.Find("model.layers.0." + up).bytes.size() - 1;
  for (const size_t byte : {size_t{0}, last / 2, last}) {
    EXPECT_NE(changed("model.layers.0." + up, byte), expected) << byte;
  }
  EXPECT_NE(changed("model.layers.0.mlp.gate.weight", 100), expected) << "small tensors count with all bytes";
  // Expert 0 of another layer is none of layer 0.
  EXPECT_EQ(changed("model.layers.1.mlp.experts.0.up_proj.weight", 0), expected);
}

}  // namespace
}  // namespace fusedmoe
