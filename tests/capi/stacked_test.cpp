// Stacked experts and their FusedMoEQuantConfig through the C interface.
#include <fusedmoe/fusedmoe.h>

#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <string>

#include <gtest/gtest.h>

#include "capi/held_layer.hpp"
#include "support/stacked_experts.hpp"
#include "support/tensors.hpp"

namespace fusedmoe {
namespace {

using testing_support::ExpertStacker;
using testing_support::MakeRandomLayer;
using testing_support::RandomLayer;
using testing_support::RandomRows;

/// A layer in NVFP4, up first, as an engine in C hands it over.
struct StackedLayer {
  StackedLayer()
      : random(MakeRandomLayer(SmallConfig(), "nvfp4_w4a16", 5)),
        stacker(HeldExperts(random).experts, GateUpOrder::kUpFirst) {
    const auto one = [](const CanonicalMatrix&) { return 1.0F; };
    fmoe_stacked_experts_init(&experts);
    experts.w1 = ToC(stacker.Codes(1, DType::kU8));
    experts.w2 = ToC(stacker.Codes(2, DType::kU8));
    experts.order = "w31";
    experts.weight_quant_dtype = "nvfp4";
    experts.w1_scale = ToC(stacker.BlockScales(1, DType::kF8E4M3));
    experts.w2_scale = ToC(stacker.BlockScales(2, DType::kF8E4M3));
    experts.g1_alphas = ToC(stacker.TensorScales(1, one));
    experts.g2_alphas = ToC(stacker.TensorScales(2, one));
    fmoe_layer_config_init(&config);
    config.top_k = random.config.top_k();
  }
  RandomLayer random;
  ExpertStacker stacker;
  fmoe_stacked_experts experts;
  fmoe_layer_config config;
};

TEST(CApi, StackedExperts_GiveTheBitsOfTheirLayer) {
  StackedLayer stacked;
  Loaded loaded;
  ASSERT_EQ(fmoe_layer_create_stacked(&stacked.config, &stacked.experts, nullptr, &loaded.layer), FMOE_OK)
      << LastText();
  fmoe_layer_info info;
  fmoe_layer_info_init(&info);
  ASSERT_EQ(fmoe_layer_get_info(loaded.layer, &info), FMOE_OK);
  EXPECT_EQ(info.num_experts, 6);
  EXPECT_EQ(info.hidden, 128);
  EXPECT_EQ(info.intermediate, 64);
  EXPECT_STREQ(info.scheme, "nvfp4_w4a16");
  const Tensor hidden = RandomRows(5, 128, DType::kBF16, 3), logits = RandomRows(5, 6, DType::kF32, 4);
  const auto layer = MoeLayer::Create(stacked.random.config, stacked.random.source, RouterWeights{});
  ASSERT_TRUE(layer.ok()) << layer.status().ToString();
  EXPECT_TRUE(test::SameBits(loaded.Run(hidden, logits), RunCpp(**layer, hidden, logits)));
}

TEST(CApi, ParametersOfStackedExperts_ReachTheActivation) {
  StackedLayer stacked;
  stacked.experts.gemm1_clamp_limit = 0.5F;
  MoeConfig clamped = stacked.random.config;
  clamped.activation.limit = 0.5F;
  Loaded loaded;
  ASSERT_EQ(fmoe_layer_create_stacked(&stacked.config, &stacked.experts, nullptr, &loaded.layer), FMOE_OK)
      << LastText();
  const Tensor hidden = RandomRows(5, 128, DType::kBF16, 3), logits = RandomRows(5, 6, DType::kF32, 4);
  const auto layer = MoeLayer::Create(clamped, stacked.random.source, RouterWeights{});
  ASSERT_TRUE(layer.ok()) << layer.status().ToString();
  EXPECT_TRUE(test::SameBits(loaded.Run(hidden, logits), RunCpp(**layer, hidden, logits)));
}

TEST(CApi, StackedExpertsThatDoNotFit_AreRefused) {
  const struct {
    std::function<void(StackedLayer&)> bend;
    fmoe_code code;
    const char* words;
  } refusals[] = {
      {[](StackedLayer& s) { s.config.scheme = "nvfp4_w4a16"; }, FMOE_USAGE,
       "scheme is 'nvfp4_w4a16'; stacked experts say theirs, null is required"},
      {[](StackedLayer& s) { s.config.num_experts = 8; }, FMOE_USAGE,
       "num_experts is 8 in the config and 6 in the tensors"},
      {[](StackedLayer& s) { s.config.intermediate = 128; }, FMOE_USAGE, "intermediate is 128 in the config"},
      {[](StackedLayer& s) { s.experts.order = "w12"; }, FMOE_USAGE,
       "unknown order 'w12'; known: w13, w31, interleaved"},
      {[](StackedLayer& s) { s.experts.weight_quant_dtype = "fp3"; }, FMOE_USAGE,
       "unknown weight_quant_dtype 'fp3'; known: float8_e4m3fn, int8, "},
      {[](StackedLayer& s) { s.experts.quant_dtype = "mxfp8"; }, FMOE_UNSUPPORTED,
       "w1 is 'nvfp4' and a1 is 'mxfp8'"},
      {[](StackedLayer& s) { s.experts.g2_alphas.data = nullptr; }, FMOE_USAGE, "g1_alphas is given without"},
      {[](StackedLayer& s) { s.experts.w1.shape[1] = 100; }, FMOE_BAD_INPUT, "w1 has 100 rows"},
      {[](StackedLayer& s) { s.config.limit = 1.0F, s.experts.gemm1_clamp_limit = 7.0F; }, FMOE_USAGE,
       "limit of the activation is 1 in the config and 7 as gemm1_clamp_limit"},
      {[](StackedLayer& s) { s.experts.gemm1_alpha = 1.702F; }, FMOE_USAGE,
       "gemm1_alpha is 1.702; the activation silu has no such parameter"},
      {[](StackedLayer& s) { s.experts.struct_size += 8; }, FMOE_USAGE, "fmoe_stacked_experts.struct_size"},
  };
  for (const auto& refusal : refusals) {
    StackedLayer stacked;
    refusal.bend(stacked);
    fmoe_layer* layer = nullptr;
    EXPECT_EQ(fmoe_layer_create_stacked(&stacked.config, &stacked.experts, nullptr, &layer), refusal.code)
        << refusal.words;
    EXPECT_NE(LastText().find(refusal.words), std::string::npos) << LastText();
    EXPECT_EQ(layer, nullptr);
  }
  StackedLayer stacked;
  fmoe_layer* layer = nullptr;
  EXPECT_EQ(fmoe_layer_create_stacked(&stacked.config, nullptr, nullptr, &layer), FMOE_USAGE);
  EXPECT_EQ(fmoe_layer_create_stacked(nullptr, &stacked.experts, nullptr, &layer), FMOE_USAGE);
}

/// One thing wrong with one tensor: whatever it is, nothing beyond the memory of the others is read.
TEST(CApi, DrawnStacks_NeverCrash) {
  std::mt19937_64 random(20261);
  const StackedLayer stacked;
  int made = 0;
  for (int round = 0; round < 400; ++round) {
    fmoe_stacked_experts experts = stacked.experts;
    fmoe_tensor* const tensors[] = {
        &experts.w1,        &experts.w2,    &experts.w1_scale, &experts.w2_scale, &experts.g1_alphas,
        &experts.g2_alphas, &experts.w1_zp, &experts.w2_bias,  &experts.a1_scale, &experts.a2_gscale};
    fmoe_tensor& spoiled = *tensors[random() % std::size(tensors)];
    const int64_t extents[] = {0,
                               1,
                               -1,
                               2,
                               3,
                               1 << 20,
                               int64_t{1} << 40,
                               std::numeric_limits<int64_t>::max(),
                               std::numeric_limits<int64_t>::min()};
    switch (random() % 5) {
      case 0:
        spoiled.data = nullptr;
        break;
      case 1:
        spoiled.dtype = static_cast<fmoe_dtype>(static_cast<int>(random() % 40) - 8);
        break;
      case 2:
        spoiled.rank = static_cast<int32_t>(random() % 10) - 2;
        break;
      case 3:
        spoiled.shape[random() % 3] = extents[random() % std::size(extents)];
        break;
      default:
        experts.block_shape[0] = extents[random() % std::size(extents)];
        experts.block_shape[1] = extents[random() % std::size(extents)];
        break;
    }
    fmoe_layer* layer = nullptr;
    const fmoe_code code = fmoe_layer_create_stacked(&stacked.config, &experts, nullptr, &layer);
    EXPECT_EQ(code == FMOE_OK, layer != nullptr);
    made += code == FMOE_OK ? 1 : 0;
    fmoe_layer_release(layer);
  }
  EXPECT_GT(made, 0) << "all were refused: nothing was tried";
}

}  // namespace
}  // namespace fusedmoe
