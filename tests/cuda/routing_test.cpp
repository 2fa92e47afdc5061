// Routing on the card gives the ids and weights of the CPU, bit for bit.

#include <limits>
#include <random>
#include <string>

#include <fusedmoe/routing.hpp>

#include "cuda/card.hpp"
#include "cuda/on_card.hpp"
#include "numerics/rows.hpp"
#include "routing/cuda/device_router.hpp"
#include "routing/router_gemm.hpp"
#include "support/tensors.hpp"

namespace fusedmoe {
namespace {

struct Case {
  RoutingConfig config;
  int64_t num_tokens = 0, num_experts = 0;
  bool with_bias = false;
};

/// Logits with ties, infinities and NaN among ordinary ones.
std::vector<float> DrawLogits(int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0F, 2.0F);
  std::vector<float> logits(static_cast<size_t>(count));
  for (float& logit : logits) {
    logit = normal(random);
    switch (random() % 64) {
      case 0:
        logit = 1.0F;
        break;
      case 1:
        logit = -std::numeric_limits<float>::infinity();
        break;
      case 2:
        logit = -0.0F;
        break;
      case 3:
        logit = random() % 16 == 0 ? std::numeric_limits<float>::quiet_NaN() : 0.5F;
        break;
      default:
        break;
    }
  }
  return logits;
}

void ExpectSame(const Case& one, unsigned seed) {
  std::mt19937 random(seed);
  const int64_t tokens = one.num_tokens, experts = one.num_experts, top_k = one.config.top_k;
  const std::vector<float> logits = DrawLogits(tokens * experts, random);
  std::vector<float> bias(static_cast<size_t>(experts));
  for (float& value : bias) {
    value = static_cast<float>(random() % 100) * 0.003F;
  }
  RoutingInputs inputs;
  inputs.router_logits =
      TensorView(reinterpret_cast<const std::byte*>(logits.data()), DType::kF32, {tokens, experts});
  cuda::RouterTables tables;
  if (one.with_bias) {
    inputs.correction_bias =
        TensorView(reinterpret_cast<const std::byte*>(bias.data()), DType::kF32, {experts});
    tables.correction_bias = inputs.correction_bias;
  }
  std::vector<int32_t> ids(static_cast<size_t>(tokens * top_k), -7);
  std::vector<float> weights(ids.size(), -7.0F);
  const Status expected = Route(one.config, inputs, ids.data(), weights.data());
  ASSERT_TRUE(expected.ok()) << expected.message();
  auto router = cuda::DeviceRouter::Create(one.config, experts, tokens, tables);
  ASSERT_TRUE(router.ok()) << router.status().message();
  const OnCard<float> card_logits(logits);
  const OnCard<int32_t> card_ids(std::vector<int32_t>(ids.size(), -9));
  const OnCard<float> card_weights(std::vector<float>(ids.size(), -9.0F));
  const Status status = (*router)->Choose(tokens, card_logits.View(DType::kF32, {tokens, experts}), {},
                                          card_ids.data(), card_weights.data(), nullptr);
  ASSERT_TRUE(status.ok()) << status.message();
  const std::string name =
      std::string(RoutingMethodName(one.config.method)) + " over " + std::to_string(experts);
  EXPECT_TRUE(test::SameBits(card_ids.Read(), ids)) << name << ": ids differ";
  EXPECT_TRUE(test::SameBits(card_weights.Read(), weights)) << name << ": weights differ";
}

TEST(DeviceRouting, EveryMethod_IdsAndWeightsOfTheCpu) {
  FMOE_SKIP_WITHOUT_CARD();
  unsigned seed = 1;
  for (const auto& [experts, top_k] :
       {std::pair<int64_t, int64_t>{8, 2}, {60, 4}, {128, 8}, {256, 8}, {512, 10}, {2048, 32}}) {
    for (int method = 0; method <= static_cast<int>(RoutingMethod::kUnspecified); ++method) {
      Case one;
      one.config.method = static_cast<RoutingMethod>(method);
      if (one.config.method == RoutingMethod::kCustom) {
        continue;
      }
      one.num_experts = experts;
      one.num_tokens = 257;
      one.config.top_k = one.config.method == RoutingMethod::kSparseMixer ? 2 : top_k;
      one.config.simulation = "normal_routing";
      one.config.scaling_factor = 2.5F;
      ExpectSame(one, ++seed);
      one.config.renormalize = false;
      one.config.logit_softcap = 30.0F;
      one.with_bias =
          one.config.method == RoutingMethod::kDeepSeekV3 || one.config.method == RoutingMethod::kMiniMax2 ||
          one.config.method == RoutingMethod::kDeepseekV4 || one.config.method == RoutingMethod::kSoftmaxBias;
      ExpectSame(one, ++seed);
    }
  }
}

TEST(DeviceRouting, Groups_IdsAndWeightsOfTheCpu) {
  FMOE_SKIP_WITHOUT_CARD();
  unsigned seed = 100;
  for (const RoutingMethod method :
       {RoutingMethod::kDeepSeekV3, RoutingMethod::kGroupedTopK, RoutingMethod::kDefault}) {
    for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
      for (const int64_t kept : {int64_t{4}, kEveryGroup}) {
        Case one;
        one.config.method = method;
        one.config.score = score;
        one.config.top_k = 16;
        one.config.num_groups = 8;
        one.config.topk_groups = kept;
        one.num_experts = 256;
        one.num_tokens = 100;
        one.with_bias = method == RoutingMethod::kDeepSeekV3;
        ExpectSame(one, ++seed);
      }
    }
  }
}

TEST(DeviceRouting, HashTable_IdsOfTheTable) {
  FMOE_SKIP_WITHOUT_CARD();
  RoutingConfig config;
  config.method = RoutingMethod::kDeepseekV4;
  config.top_k = 2;
  const std::vector<int32_t> table = {0, 3, 2, 1, 3, 2};
  const std::vector<int64_t> tokens = {2, 0, 1, 9};
  const std::vector<float> logits(16, 0.25F);
  cuda::RouterTables tables;
  tables.token_id_to_experts =
      TensorView(reinterpret_cast<const std::byte*>(table.data()), DType::kI32, {3, 2});
  auto router = cuda::DeviceRouter::Create(config, 4, 4, tables);
  ASSERT_TRUE(router.ok()) << router.status().message();
  const OnCard<float> card_logits(logits);
  const OnCard<int64_t> card_tokens(tokens);
  const OnCard<int32_t> ids(std::vector<int32_t>(8));
  const OnCard<float> weights(std::vector<float>(8));
  ASSERT_TRUE((*router)
                  ->Choose(4, card_logits.View(DType::kF32, {4, 4}), card_tokens.View(DType::kI64, {4}),
                           ids.data(), weights.data(), nullptr)
                  .ok());
  for (const DType other : {DType::kU64, DType::kF32, DType::kI16}) {
    const Status refused =
        (*router)->Choose(4, card_logits.View(DType::kF32, {4, 4}), card_tokens.View(other, {4}), ids.data(),
                          weights.data(), nullptr);
    EXPECT_EQ(refused.code(), StatusCode::kUsage) << DTypeName(other);
  }
  EXPECT_EQ(ids.Read(), (std::vector<int32_t>{3, 2, 0, 3, 2, 1, -1, -1}));
  EXPECT_EQ(weights.Read(), (std::vector<float>{0.5F, 0.5F, 0.5F, 0.5F, 0.5F, 0.5F, 0.0F, 0.0F}));
}

/// Values in the bytes of a dtype.
std::vector<std::byte> Encode(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * static_cast<size_t>(DTypeBits(dtype) / 8));
  EncodeRow(dtype, values.data(), static_cast<int64_t>(values.size()), bytes.data());
  return bytes;
}

TEST(DeviceRouting, RouterProduct_LogitsOfTheCpu) {
  FMOE_SKIP_WITHOUT_CARD();
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto draw = [&](int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
      value = normal(random);
    }
    return values;
  };
  for (const DType hidden_type : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const DType weight_type : {DType::kBF16, DType::kF32, DType::kF16}) {
      for (const auto& [tokens, experts, width] :
           {std::tuple<int64_t, int64_t, int64_t>{1, 128, 2048}, {7, 33, 100}, {50, 65, 264}, {130, 8, 24}}) {
        const std::vector<std::byte> hidden = Encode(hidden_type, draw(tokens * width));
        const std::vector<std::byte> weight = Encode(weight_type, draw(experts * width));
        const std::vector<float> bias = draw(experts);
        const TensorView hidden_view(hidden.data(), hidden_type, {tokens, width});
        const TensorView weight_view(weight.data(), weight_type, {experts, width});
        const TensorView bias_view(reinterpret_cast<const std::byte*>(bias.data()), DType::kF32, {experts});
        std::vector<float> expected(static_cast<size_t>(tokens * experts));
        ASSERT_TRUE(RouterGemm(hidden_view, weight_view, bias_view, expected.data()).ok());
        cuda::RouterTables tables;
        tables.weight = weight_view;
        tables.bias = bias_view;
        RoutingConfig config;
        auto router = cuda::DeviceRouter::Create(config, experts, tokens, tables);
        ASSERT_TRUE(router.ok()) << router.status().message();
        const OnCard<std::byte> card_hidden(hidden);
        const OnCard<float> logits(std::vector<float>(expected.size()));
        const Status status =
            (*router)->Logits(card_hidden.View(hidden_type, {tokens, width}), logits.data(), nullptr);
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_TRUE(test::SameBits(logits.Read(), expected))
            << DTypeName(hidden_type) << " x " << DTypeName(weight_type) << " [" << tokens << ", " << experts
            << ", " << width << "]";
      }
    }
  }
}

TEST(DeviceRouting, TakeChoiceAndSplitIdentity_AsTheCpu) {
  FMOE_SKIP_WITHOUT_CARD();
  const OnCard<int64_t> ids(std::vector<int64_t>{0, 5, -1, 3, 99, 4});
  const OnCard<float> weights(std::vector<float>{1, 2, 3, 4, 5, 6});
  const OnCard<int32_t> out_ids(std::vector<int32_t>(6));
  const OnCard<float> out_weights(std::vector<float>(6)), identity(std::vector<float>(3));
  ASSERT_TRUE(cuda::TakeChoice(ids.View(DType::kI64, {3, 2}), weights.View(DType::kF32, {3, 2}), 6,
                               out_ids.data(), out_weights.data(), nullptr)
                  .ok());
  EXPECT_EQ(out_ids.Read(), (std::vector<int32_t>{0, 5, -1, 3, -1, 4}));
  EXPECT_EQ(out_weights.Read(), (std::vector<float>{1, 2, 3, 4, 5, 6}));
  ASSERT_TRUE(cuda::SplitIdentity(3, 2, 4, out_ids.data(), out_weights.data(), out_ids.data(),
                                  identity.data(), nullptr)
                  .ok());
  EXPECT_EQ(out_ids.Read(), (std::vector<int32_t>{0, -1, -1, 3, -1, -1}));
  EXPECT_EQ(identity.Read(), (std::vector<float>{2, 0, 6}));
}

}  // namespace
}  // namespace fusedmoe
