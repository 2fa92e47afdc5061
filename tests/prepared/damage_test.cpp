#include <algorithm>

#include "prepared/prepared_layer.hpp"

namespace fusedmoe::prepared_test {
namespace {

constexpr int64_t kVictim = 5;

class PreparedDamage : public testing::TestWithParam<PreparedCase> {};

/// One way to damage one expert. `exact`: only a comparison byte by byte can see it at once; others show in
/// what the expert computes as well.
struct Wound {
  std::string name;
  std::vector<std::string> tensors;  ///< the first that the file has
  std::function<void(std::byte*, int64_t)> change;
};

std::vector<Wound> Wounds() {
  return {
      // A row (32 bytes of one, at least) goes to the end and all behind it move up.
      {"a row moved",
       {"gate_up"},
       [](std::byte* data, int64_t bytes) {
         std::rotate(data, data + std::min<int64_t>(64, bytes / 2), data + bytes);
       }},
      // A tile of 512 scales (of 16, where the layout has fewer) read by columns instead of rows.
      {"a scale tile transposed",
       {"down_block_scale", "down_channel_scale", "down_tensor_scale"},
       [](std::byte* data, int64_t bytes) {
         const int64_t side = bytes >= 256 ? 16 : bytes >= 16 ? 4 : 0;
         for (int64_t row = 0; row < side; ++row) {
           for (int64_t column = row + 1; column < side; ++column) {
             std::swap(data[row * side + column], data[column * side + row]);
           }
         }
         if (side == 0) {
           *reinterpret_cast<float*>(data) *= 1.5F;
         }
       }},
      {"an alpha changed",
       {"gate_up_output_scale", "gate_up_tensor_scale", "gate_up_channel_scale", "gate_up_block_scale"},
       [](std::byte* data, int64_t bytes) {
         if (bytes > 8) {
           data[0] = static_cast<std::byte>(static_cast<int>(data[0]) ^ 4);
         } else {
           *reinterpret_cast<float*>(data) *= 1.25F;
         }
       }},
  };
}

std::string Damage(const std::string& path, const std::string& to, const Wound& wound) {
  std::string tensor;
  Rewrite(path, to, [&](SafetensorsFile& file) {
    for (const std::string& name : wound.tensors) {
      if (ChangeExpert(file, name, kVictim, wound.change)) {
        tensor = name;
        return;
      }
    }
  });
  return tensor;
}

void ExpectBlame(const VerifyReport& report, const std::string& tensor, const std::string& context) {
  EXPECT_FALSE(report.ok) << context;
  ASSERT_FALSE(report.damaged.empty()) << context;
  for (const DamagedTensor& damaged : report.damaged) {
    EXPECT_EQ(damaged.expert, kVictim) << context << ": " << damaged.tensor << " " << damaged.what;
  }
  const bool named = std::any_of(report.damaged.begin(), report.damaged.end(),
                                 [&](const DamagedTensor& damaged) { return damaged.tensor == tensor; });
  EXPECT_TRUE(named) << context << ": " << tensor << " is not named";
}

TEST_P(PreparedDamage, Verify_NamesExpertAndTensor) {
  const Files files;
  const auto checkpoint = files.Sample(GetParam().family, GetParam().scheme);
  const std::string path = files.Prepare(*checkpoint, GetParam());
  VerifyOptions options;
  options.layer = Files::OptionsOf(GetParam());
  options.tokens = 12;
  VerifyOptions against = options;
  against.against = checkpoint;
  {
    const auto sound = PreparedLayer::Open(path);
    ASSERT_TRUE(sound.ok()) << sound.status().ToString();
    for (const VerifyOptions& one : {options, against}) {
      const auto report = VerifyPrepared(*sound, one);
      ASSERT_TRUE(report.ok()) << report.status().ToString();
      EXPECT_TRUE(report->ok) << report->rel_l2 << " > " << report->bound;
      EXPECT_TRUE(report->damaged.empty());
    }
  }
  for (const Wound& wound : Wounds()) {
    const std::string broken = files / "broken.safetensors";
    const std::string tensor = Damage(path, broken, wound);
    ASSERT_FALSE(tensor.empty()) << wound.name;
    const auto layer = PreparedLayer::Open(broken);
    ASSERT_TRUE(layer.ok()) << wound.name << ": " << layer.status().ToString();
    for (const VerifyOptions& one : {options, against}) {
      const auto report = VerifyPrepared(*layer, one);
      ASSERT_TRUE(report.ok()) << wound.name << ": " << report.status().ToString();
      ExpectBlame(*report, tensor, wound.name);
    }
    EXPECT_FALSE(InvertPrepared(broken, files / "inverted.safetensors").ok()) << wound.name;
  }
}

// Digests that were made after the damage (a preparation that goes wrong) agree with it: the original tells.
TEST_P(PreparedDamage, DigestsMadeAfterTheDamage_AreContradictedByTheOriginal) {
  const Files files;
  const auto checkpoint = files.Sample(GetParam().family, GetParam().scheme);
  const std::string path = files.Prepare(*checkpoint, GetParam());
  VerifyOptions options;
  options.layer = Files::OptionsOf(GetParam());
  options.tokens = 12;
  options.against = checkpoint;
  for (const Wound& wound : Wounds()) {
    const std::string broken = files / "broken.safetensors", sealed = files / "sealed.safetensors";
    const std::string tensor = Damage(path, broken, wound);
    auto file = prepared::ReadPreparedFile(broken);
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    ASSERT_TRUE(prepared::WritePreparedFile(*file, sealed, {}).ok());
    const auto layer = PreparedLayer::Open(sealed);
    ASSERT_TRUE(layer.ok()) << layer.status().ToString();
    EXPECT_TRUE((*layer)->FindDamage().empty());
    const auto report = VerifyPrepared(*layer, options);
    ASSERT_TRUE(report.ok()) << wound.name << ": " << report.status().ToString();
    ExpectBlame(*report, tensor, wound.name);
    if (wound.name == "a row moved") {  // the numbers say so as well
      double victim = 0.0, others = 0.0;
      for (const ExpertError& expert : report->experts) {
        double& largest = expert.expert == kVictim ? victim : others;
        largest = std::max(largest, expert.rel_l2);
      }
      EXPECT_GT(victim, 3 * others);
      EXPECT_GT(victim, 0.3);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, PreparedDamage, testing::ValuesIn(AllCases()));

TEST(PreparedFile, RouterAndSharedExpert_AreWatchedToo) {
  const Files files;
  const auto checkpoint = files.Sample("qwen2_moe", "nvfp4_w4a4");
  const std::string path = files.Prepare(*checkpoint, {"VLLM_CUTLASS", "nvfp4_w4a4"});
  for (const std::string name : {"router.weight", "shared.up.codes", "shared.output_gate"}) {
    const std::string broken = files / "broken.safetensors";
    Rewrite(path, broken, [&](SafetensorsFile& file) {
      ASSERT_TRUE(ChangeExpert(file, name, 0, [](std::byte* data, int64_t) { data[0] ^= std::byte{1}; }));
    });
    const auto layer = PreparedLayer::Open(broken);
    ASSERT_TRUE(layer.ok()) << layer.status().ToString();
    const auto damaged = (*layer)->FindDamage();
    ASSERT_EQ(damaged.size(), 1U) << name;
    EXPECT_EQ(damaged[0].expert, -1);
    EXPECT_EQ(damaged[0].tensor, name);
  }
}

// The checkpoint has the tensors, but they cannot be used: that, and which, is what the user must learn.
TEST(PreparedFile, OriginalWithABrokenSharedExpert_IsAnErrorWithItsTensor) {
  const Files files;
  const auto checkpoint = files.Sample("qwen2_moe", "nvfp4_w4a4");
  const auto layer = PreparedLayer::Open(files.Prepare(*checkpoint, {"VLLM_CUTLASS", "nvfp4_w4a4"}));
  ASSERT_TRUE(layer.ok()) << layer.status().ToString();
  const std::string scales = "model.layers.0.mlp.shared_expert.up_proj.weight_scale";
  Rewrite(files / "checkpoint/model.safetensors", files / "checkpoint/model.safetensors",
          [&](SafetensorsFile& file) {
            ASSERT_TRUE(ChangeExpert(file, scales, 0, [](std::byte* data, int64_t) {
              data[0] = std::byte{0x7f};  // NaN
            }));
          });
  const auto broken = Checkpoint::Open(files / "checkpoint");
  ASSERT_TRUE(broken.ok()) << broken.status().ToString();
  VerifyOptions options;
  options.layer = Files::OptionsOf({"VLLM_CUTLASS", "nvfp4_w4a4"});
  options.tokens = 4;
  options.against = *broken;
  const auto report = VerifyPrepared(*layer, options);
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.status().tensor(), scales) << report.status().ToString();
}

}  // namespace
}  // namespace fusedmoe::prepared_test
