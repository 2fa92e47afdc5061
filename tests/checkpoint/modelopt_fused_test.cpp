// Llama-4 and gpt-oss as ModelOpt writes them: fused experts [E, in, out] with scales of many shapes. What
// every element decodes to is computed here a second time, from the stored bytes.
#include <gtest/gtest.h>

#include <random>

#include "checkpoint/raw_checkpoint.hpp"
#include "numerics/rows.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

constexpr int64_t kIn = 288, kMid = 96;  // neither is a multiple of 128

struct Stored {
  std::string algorithm;
  std::string scheme;
  DType code, scale;
  int64_t block;  ///< outputs that share a scale; 0: the expert, -1: blocks of 128 x 128
  bool second = false, input = false;
};

const std::vector<Stored> kStored = {
    {"MXFP8", "mxfp8_w8a8_out", DType::kF8E4M3, DType::kF8E8M0, 32},
    {"W4A8_MXFP4_FP8", "mxfp4_w4a8_out", DType::kF4E2M1, DType::kF8E8M0, 32, false, true},
    {"W4A8_NVFP4_FP8", "nvfp4_w4a8_out", DType::kF4E2M1, DType::kF8E4M3, 32, true, true},
    {"FP8_PER_CHANNEL_PER_TOKEN", "fp8_w8a8", DType::kF8E4M3, DType::kF32, 0},
    {"FP8_PB_WO", "fp8_w8a16:block128", DType::kF8E4M3, DType::kF32, -1},
};

int64_t Ceil(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit;
}

/// A fused tensor [E, in, out] with its scales, and what its elements are.
class Fused {
 public:
  Fused(const Stored& stored, int64_t in, int64_t out, std::mt19937& random)
      : stored_(stored), in_(in), out_(out) {
    const bool nibbles = stored.code == DType::kF4E2M1;
    codes_.resize(static_cast<size_t>(kExperts * in * out / (nibbles ? 2 : 1)));
    for (char& byte : codes_) {
      byte = static_cast<char>(random() & (nibbles ? 0xff : 0x77));  // no NaN
    }
    const int64_t scales = stored.block == 0  ? kExperts
                           : stored.block < 0 ? kExperts * Ceil(in, 128) * Ceil(out, 128)
                                              : kExperts * in * (out / stored.block);
    for (int64_t i = 0; i < scales; ++i) {
      const float wide = 0.25F + static_cast<float>(random() % 1000) / 500.0F;
      const auto narrow =
          static_cast<char>(stored.scale == DType::kF8E8M0 ? 120 + random() % 12 : 48 + random() % 40);
      stored.scale == DType::kF32 ? scales_.append(reinterpret_cast<const char*>(&wide), 4)
                                  : scales_.append(1, narrow);
    }
  }

  void AddTo(TinyModel& model, const std::string& name) const {
    const bool nibbles = stored_.code == DType::kF4E2M1;
    model.tensors.push_back(
        {name, nibbles ? "U8" : "F8_E4M3", {kExperts, in_, nibbles ? out_ / 2 : out_}, codes_});
    std::vector<int64_t> shape = {kExperts};
    if (stored_.block < 0) {
      shape = {kExperts, Ceil(out_, 128), 1, Ceil(in_, 128), 1};  // shape of [out, in], order of [in, out]
    }
    if (stored_.block > 0) {
      shape = {kExperts, in_, out_ / stored_.block};
    }
    const std::string type = stored_.scale == DType::kF32      ? "F32"
                             : stored_.scale == DType::kF8E8M0 ? "U8"
                                                               : "F8_E4M3";
    model.tensors.push_back({name + "_weight_scale", type, shape, scales_});
    if (stored_.second) {
      model.tensors.push_back(Floats(name + "_weight_scale_2", {}, 0.5F));
    }
    if (stored_.input) {
      model.tensors.push_back(Floats(name + "_input_scale", {}, 0.125F));
    }
  }

  float At(int64_t expert, int64_t in, int64_t out) const {
    const int64_t index = (expert * in_ + in) * out_ + out;
    const int64_t scale = stored_.block == 0 ? expert
                          : stored_.block < 0
                              ? (expert * Ceil(in_, 128) + in / 128) * Ceil(out_, 128) + out / 128
                              : (expert * in_ + in) * (out_ / stored_.block) + out / stored_.block;
    float code = 0.0F, factor = 0.0F;
    DecodeRow(stored_.code, reinterpret_cast<const std::byte*>(codes_.data()), index, 1, &code);
    DecodeRow(stored_.scale, reinterpret_cast<const std::byte*>(scales_.data()), scale, 1, &factor);
    return code * factor * (stored_.second ? 0.5F : 1.0F);
  }

 private:
  Stored stored_;
  int64_t in_, out_;
  std::string codes_, scales_;
};

class ModelOptFused : public testing::TestWithParam<std::tuple<std::string, size_t>> {};

TEST_P(ModelOptFused, EveryElement_IsWhatTheBytesSay) {
  const auto& [family, which] = GetParam();
  const Stored& stored = kStored[which];
  const bool gpt_oss = family == "gpt_oss";
  std::mt19937 random(which * 2 + (gpt_oss ? 1 : 0));
  const std::string block = gpt_oss ? "model.layers.0.mlp." : "model.layers.0.feed_forward.";
  TinyModel model("bf16");
  model.tensors.clear();
  model.config = {{"model_type", family},          {"hidden_size", kIn},       {"intermediate_size", kMid},
                  {"num_local_experts", kExperts}, {"num_experts_per_tok", 1}, {"num_hidden_layers", 1},
                  {"torch_dtype", "bfloat16"}};
  model.config["quantization_config"] = {{"quant_method", "modelopt"}, {"quant_algo", stored.algorithm}};
  model.config["quantization_config"]["ignore"] = {"lm_head", block + "router"};
  model.tensors.push_back(Bf16(block + "router.weight", {kExperts, kIn}, 0.1F));
  model.tensors.push_back(Bf16(block + "router.bias", {kExperts}, 0.1F));
  const Fused gate_up(stored, kIn, 2 * kMid, random), down(stored, kMid, kIn, random);
  gate_up.AddTo(model, block + "experts.gate_up_proj");
  down.AddTo(model, block + "experts.down_proj");
  const TemporaryDirectory folder;
  model.WriteTo(folder);

  const auto checkpoint = Checkpoint::Open(folder.path().string());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  const auto whole = (*checkpoint)->Experts(0);
  ASSERT_TRUE(whole.ok()) << whole.status().ToString();
  EXPECT_EQ(whole->scheme.name.substr(0, whole->scheme.name.find(':')),
            stored.scheme.substr(0, stored.scheme.find(':')));
  for (const int64_t ranks : {1, 2}) {
    int64_t first = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto source = (*checkpoint)->Experts(0, {.tp_size = ranks, .tp_rank = rank});
      ASSERT_TRUE(source.ok()) << source.status().ToString();
      const auto expert = source->load(1);
      ASSERT_TRUE(expert.ok()) << expert.status().ToString();
      const Tensor gate = *DequantizeMatrix(expert->gate), up = *DequantizeMatrix(expert->up);
      const Tensor out = *DequantizeMatrix(expert->down);
      const int64_t share = expert->gate.rows;
      for (int64_t i = 0; i < share; ++i) {
        for (int64_t h = 0; h < kIn; ++h) {
          const int64_t mid = first + i;
          ASSERT_EQ(gate.view().as<float>()[i * kIn + h], gate_up.At(1, h, gpt_oss ? 2 * mid : mid))
              << mid << " " << h;
          ASSERT_EQ(up.view().as<float>()[i * kIn + h], gate_up.At(1, h, gpt_oss ? 2 * mid + 1 : kMid + mid))
              << mid << " " << h;
          ASSERT_EQ(out.view().as<float>()[h * share + i], down.At(1, mid, h)) << h << " " << mid;
        }
      }
      first += share;
    }
    EXPECT_EQ(first, kMid);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ModelOptFused,
                         testing::Combine(testing::Values("llama4_text", "gpt_oss"),
                                          testing::Range<size_t>(0, kStored.size())),
                         [](const auto& parameter) {
                           return std::get<0>(parameter.param) + "_" +
                                  kStored[std::get<1>(parameter.param)].algorithm;
                         });

}  // namespace
}  // namespace fusedmoe
