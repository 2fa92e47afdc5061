#include <fusedmoe/routing.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "numerics/codecs.hpp"
#include "routing/route.hpp"
#include "support/tensors.hpp"

namespace fusedmoe {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Routed {
  Status status;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed RouteLogits(const RoutingConfig& config, const std::vector<float>& logits, int64_t num_experts,
                   const std::vector<float>& bias = {}, const Executor& executor = {}) {
  RoutingInputs inputs;
  const auto num_tokens = static_cast<int64_t>(logits.size()) / num_experts;
  inputs.router_logits = test::ViewOf(logits, {num_tokens, num_experts});
  if (!bias.empty()) {
    inputs.correction_bias = test::ViewOf(bias, {static_cast<int64_t>(bias.size())});
  }
  Routed routed;
  routed.ids.resize(static_cast<size_t>(num_tokens * std::max<int64_t>(config.top_k, 0)));
  routed.weights.resize(routed.ids.size());
  routed.status = Route(config, inputs, routed.ids.data(), routed.weights.data(), executor);
  return routed;
}

std::vector<float> RandomLogits(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, 2.0F);
  std::vector<float> logits(static_cast<size_t>(count));
  std::generate(logits.begin(), logits.end(), [&] { return normal(generator); });
  return logits;
}

RoutingConfig Config(RoutingMethod method, int64_t top_k) {
  RoutingConfig config;
  config.method = method;
  config.top_k = top_k;
  if (method == RoutingMethod::kSimulated) {
    config.simulation = "uniform_random";
  }
  if (method == RoutingMethod::kCustom) {
    config.custom = [](TensorView, TensorView logits, int64_t k, bool, int32_t* ids, float* weights) {
      for (int64_t slot = 0; slot < logits.dim(0) * k; ++slot) {
        ids[slot] = static_cast<int32_t>(slot % k);
        weights[slot] = static_cast<float>(slot % k + 1);
      }
    };
  }
  return config;
}

constexpr RoutingMethod kAllMethods[] = {
#define FMOE_METHOD(id, name, what) RoutingMethod::id,
    FMOE_ROUTING_METHOD_TABLE(FMOE_METHOD)
#undef FMOE_METHOD
};

TEST(Routing, EveryMethodGivesDistinctExpertsInTheTotalOrder) {
  const std::vector<float> logits = RandomLogits(23 * 40, 1);
  for (const RoutingMethod method : kAllMethods) {
    SCOPED_TRACE(RoutingMethodName(method));
    for (const int64_t top_k : {1, 2, 7, 40}) {
      const Routed routed = RouteLogits(Config(method, top_k), logits, 40);
      ASSERT_TRUE(routed.status.ok()) << routed.status.ToString();
      for (size_t first = 0; first < routed.ids.size(); first += static_cast<size_t>(top_k)) {
        std::set<int32_t> seen;
        for (size_t slot = first; slot < first + static_cast<size_t>(top_k); ++slot) {
          ASSERT_TRUE(routed.ids[slot] >= 0 && routed.ids[slot] < 40);
          EXPECT_TRUE(seen.insert(routed.ids[slot]).second) << "expert chosen twice";
          EXPECT_TRUE(std::isfinite(routed.weights[slot]));
          if (slot > first) {
            EXPECT_TRUE(routed.weights[slot - 1] > routed.weights[slot] ||
                        (routed.weights[slot - 1] == routed.weights[slot] &&
                         routed.ids[slot - 1] < routed.ids[slot]));
          }
        }
      }
    }
  }
}

TEST(Routing, EveryMethodIsIndependentOfThreadsAndOfNeighbours) {
  const std::vector<float> logits = RandomLogits(100 * 24, 2);
  for (const int threads : {2, 3, 7}) {
    auto pool = ThreadPool::Create(threads);
    ASSERT_TRUE(pool.ok());
    for (const RoutingMethod method : kAllMethods) {
      const Routed serial = RouteLogits(Config(method, 4), logits, 24);
      const Routed parallel = RouteLogits(Config(method, 4), logits, 24, {}, (*pool)->executor());
      EXPECT_EQ(serial.ids, parallel.ids) << RoutingMethodName(method);
      EXPECT_EQ(serial.weights, parallel.weights) << RoutingMethodName(method);
      const Routed alone = RouteLogits(Config(method, 4), {logits.begin(), logits.begin() + 24}, 24);
      EXPECT_TRUE(std::equal(alone.ids.begin(), alone.ids.end(), serial.ids.begin()));
    }
  }
}

TEST(Routing, ScalingFactorMultipliesEveryMethodOnce) {
  const std::vector<float> logits = RandomLogits(9 * 16, 3);
  for (const RoutingMethod method : kAllMethods) {
    RoutingConfig config = Config(method, 3);
    const Routed plain = RouteLogits(config, logits, 16);
    config.scaling_factor = 2.0F;
    const Routed scaled = RouteLogits(config, logits, 16);
    EXPECT_EQ(plain.ids, scaled.ids);
    for (size_t slot = 0; slot < plain.weights.size(); ++slot) {
      EXPECT_EQ(scaled.weights[slot], 2.0F * plain.weights[slot]) << RoutingMethodName(method);
    }
  }
}

TEST(Routing, NanAndInfinityNeverEscapeTheirRow) {
  for (const RoutingMethod method : kAllMethods) {
    SCOPED_TRACE(RoutingMethodName(method));
    std::vector<float> logits = RandomLogits(5 * 12, 4);
    const Routed clean = RouteLogits(Config(method, 3), logits, 12);
    logits[12 + 3] = kNan;
    logits[24 + 4] = kInfinity;
    std::fill(logits.begin() + 36, logits.begin() + 48, -kInfinity);
    const Routed routed = RouteLogits(Config(method, 3), logits, 12);
    ASSERT_TRUE(routed.status.ok());
    for (const size_t token : {0, 4}) {
      for (size_t slot = token * 3; slot < token * 3 + 3; ++slot) {
        EXPECT_EQ(routed.ids[slot], clean.ids[slot]);
        EXPECT_EQ(routed.weights[slot], clean.weights[slot]);
      }
    }
    for (size_t slot = 0; slot < routed.ids.size(); ++slot) {
      EXPECT_TRUE(std::isfinite(routed.weights[slot])) << "token " << slot / 3;
      EXPECT_TRUE(routed.ids[slot] >= 0 && routed.ids[slot] < 12);
    }
  }
}

TEST(Routing, RowWithoutSoftmaxGetsWeightZero) {
  for (const RoutingMethod method :
       {RoutingMethod::kDefault, RoutingMethod::kRenormalize, RoutingMethod::kRenormalizeNaive}) {
    const Routed routed = RouteLogits(Config(method, 2), {1.0F, kNan, 3.0F, 2.0F}, 4);
    EXPECT_EQ(routed.weights, (std::vector<float>{0.0F, 0.0F}));
  }
}

TEST(Routing, LogitOfMinusInfinityIsNeverPreferred) {
  for (const RoutingMethod method :
       {RoutingMethod::kTopK, RoutingMethod::kRenormalize, RoutingMethod::kLlama4, RoutingMethod::kDefault,
        RoutingMethod::kSparseMixer}) {
    const Routed routed = RouteLogits(Config(method, 2), {-kInfinity, -3.0F, -2.0F, -kInfinity}, 4);
    EXPECT_EQ(std::set<int32_t>(routed.ids.begin(), routed.ids.end()), (std::set<int32_t>{1, 2}))
        << RoutingMethodName(method);
  }
}

TEST(Routing, SparseMixerMatchesTheFormulaDoneByHand) {
  // First: max 2.0; near are 2.0 and 1.97 ((2 - 1.97)/2 = 0.015 <= 0.02), not 1.9. Second, without expert 1:
  // max 1.97; 1.9 is 0.0355 away, so it stands alone and weighs 1.
  const Routed routed = RouteLogits(Config(RoutingMethod::kSparseMixer, 2), {1.9F, 2.0F, 1.97F, -5.0F}, 4);
  ASSERT_TRUE(routed.status.ok());
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{2, 1}));
  EXPECT_FLOAT_EQ(routed.weights[0], 1.0F);
  EXPECT_FLOAT_EQ(routed.weights[1], 1.0F / (1.0F + std::exp(1.97F - 2.0F)));
}

TEST(Routing, SoftcapBoundsLogitsBeforeTheSoftmax) {
  RoutingConfig config = Config(RoutingMethod::kTopK, 2);
  config.logit_softcap = 30.0F;
  const Routed routed = RouteLogits(config, {60.0F, -1.0F, 15.0F}, 3);
  EXPECT_FLOAT_EQ(routed.weights[0], 30.0F * std::tanh(2.0F));
  EXPECT_FLOAT_EQ(routed.weights[1], 30.0F * std::tanh(0.5F));
}

TEST(Routing, EpsilonEntersTheSumOnly) {
  RoutingConfig config = Config(RoutingMethod::kMiniMax2, 2);
  config.norm_epsilon = 1.0F;
  const Routed routed = RouteLogits(config, {0.0F, 0.0F, -50.0F}, 3);
  EXPECT_FLOAT_EQ(routed.weights[0], 0.5F / (0.5F + 0.5F + 1.0F));
}

TEST(Routing, HalfPrecisionLogitsAreReadExactly) {
  std::vector<float> logits = RandomLogits(6 * 8, 5);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<uint16_t> codes;
    for (float& logit : logits) {
      codes.push_back(dtype == DType::kBF16 ? EncodeBf16Rne(logit) : EncodeFp16Rne(logit));
      logit = dtype == DType::kBF16 ? DecodeBf16(codes.back()) : DecodeFp16(codes.back());
    }
    RoutingInputs inputs;
    inputs.router_logits = {reinterpret_cast<const std::byte*>(codes.data()), dtype, {6, 8}};
    std::vector<int32_t> ids(12);
    std::vector<float> weights(12);
    const RoutingConfig config = Config(RoutingMethod::kDefault, 2);
    ASSERT_TRUE(Route(config, inputs, ids.data(), weights.data()).ok());
    const Routed expected = RouteLogits(config, logits, 8);
    EXPECT_EQ(ids, expected.ids);
    EXPECT_EQ(weights, expected.weights);
  }
}

TEST(Routing, RowsMayHaveGapsBetweenThem) {
  const std::vector<float> wide = RandomLogits(4 * 10, 6);
  RoutingInputs inputs;
  inputs.router_logits = test::ViewOf(wide, {4, 8});
  inputs.router_logits.set_stride_bytes(0, 10 * 4);
  std::vector<float> narrow;
  for (size_t token = 0; token < 4; ++token) {
    narrow.insert(narrow.end(), wide.begin() + static_cast<int64_t>(token) * 10,
                  wide.begin() + static_cast<int64_t>(token) * 10 + 8);
  }
  std::vector<int32_t> ids(8);
  std::vector<float> weights(8);
  ASSERT_TRUE(Route(Config(RoutingMethod::kTopK, 2), inputs, ids.data(), weights.data()).ok());
  EXPECT_EQ(ids, RouteLogits(Config(RoutingMethod::kTopK, 2), narrow, 8).ids);
}

TEST(Routing, CustomAnswersAreSortedScaledAndChecked) {
  RoutingConfig config = Config(RoutingMethod::kCustom, 2);
  const Routed routed = RouteLogits(config, RandomLogits(3 * 4, 7), 4);
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{1, 0, 1, 0, 1, 0}));
  EXPECT_EQ(routed.weights, (std::vector<float>{2, 1, 2, 1, 2, 1}));
  config.custom = [](TensorView, TensorView, int64_t, bool, int32_t* ids, float* weights) {
    ids[0] = 0;
    ids[1] = 4;
    weights[0] = weights[1] = 1.0F;
  };
  const Routed outside = RouteLogits(config, RandomLogits(4, 8), 4);
  EXPECT_EQ(outside.status.code(), StatusCode::kBadInput);
  EXPECT_NE(outside.status.message().find("expert 4 of 4"), std::string::npos) << outside.status.message();
}

TEST(Routing, HashTablesOutOfRangeAreRefused) {
  const std::vector<float> logits = RandomLogits(2 * 4, 9);
  RoutingInputs inputs;
  inputs.router_logits = test::ViewOf(logits, {2, 4});
  std::vector<int32_t> tokens = {0, 2};
  std::vector<int64_t> table = {0, 1, 2, 3, 3, 1};
  inputs.token_ids = {reinterpret_cast<const std::byte*>(tokens.data()), DType::kI32, {2}};
  inputs.token_id_to_experts = {reinterpret_cast<const std::byte*>(table.data()), DType::kI64, {3, 2}};
  std::vector<int32_t> ids(4);
  std::vector<float> weights(4);
  const RoutingConfig config = Config(RoutingMethod::kDeepseekV4, 2);
  ASSERT_TRUE(Route(config, inputs, ids.data(), weights.data()).ok());
  EXPECT_EQ(ids, (std::vector<int32_t>{0, 1, 3, 1}));
  EXPECT_FLOAT_EQ(weights[0] + weights[1], 1.0F);
  EXPECT_EQ(Route(Config(RoutingMethod::kDefault, 2), inputs, ids.data(), weights.data()).code(),
            StatusCode::kUsage);
  table[5] = 4;
  EXPECT_EQ(Route(config, inputs, ids.data(), weights.data()).code(), StatusCode::kBadInput);
  table[5] = 1;
  tokens[1] = 3;
  EXPECT_EQ(Route(config, inputs, ids.data(), weights.data()).code(), StatusCode::kBadInput);
  tokens[1] = -1;
  EXPECT_EQ(Route(config, inputs, ids.data(), weights.data()).code(), StatusCode::kBadInput);
}

// An expert at -inf in a group that stays comes before all experts of those that do not.
TEST(Routing, GroupsThatAreDropped_GiveNoExpert) {
  RoutingConfig config = Config(RoutingMethod::kRenormalize, 2);
  config.num_groups = 2;
  const Routed routed = RouteLogits(config, {0.0F, 0.5F, 5.0F, -std::numeric_limits<float>::infinity()}, 4);
  ASSERT_TRUE(routed.status.ok()) << routed.status.ToString();
  EXPECT_EQ(routed.ids, (std::vector<int32_t>{2, 3}));
  EXPECT_EQ(routed.weights, (std::vector<float>{1.0F, 0.0F}));
}

TEST(Routing, ImpossibleConfigurationsNameBothValues) {
  const std::vector<float> logits = RandomLogits(2 * 12, 10);
  const auto refusal = [&](const std::function<void(RoutingConfig&)>& change, std::vector<float> bias = {}) {
    RoutingConfig config = Config(RoutingMethod::kDefault, 2);
    change(config);
    const Routed routed = RouteLogits(config, logits, 12, bias);
    EXPECT_EQ(routed.status.code(), StatusCode::kUsage);
    return routed.status.message();
  };
  EXPECT_NE(refusal([](auto& c) { c.top_k = 13; }).find("top_k is 13; it must be between 1 and the 12"),
            std::string::npos);
  refusal([](auto& c) { c.top_k = 0; });
  EXPECT_NE(refusal([](auto& c) { c.num_groups = 5; }).find("1, 2, 3, 4, 6, 12"), std::string::npos);
  refusal([](auto& c) { c.num_groups = 4, c.topk_groups = 5; });
  EXPECT_NE(refusal([](auto& c) { c.num_groups = 12, c.topk_groups = 1; }).find("only 1 experts"),
            std::string::npos);
  EXPECT_NE(
      refusal([](auto& c) { c.num_groups = 4, c.topk_groups = kEveryGroup; }).find("top_k is 2 of 4 groups"),
      std::string::npos);
  refusal([](auto& c) { c.topk_groups = kEveryGroup; });
  refusal([](auto& c) { c.num_groups = 2, c.topk_groups = 0; });
  refusal([](auto&) {}, std::vector<float>(12, 0.0F));
  refusal([](auto& c) { c.num_zero_experts = 12; });
  refusal([](auto& c) { c.scaling_factor = kNan; });
  refusal([](auto& c) { c.norm_epsilon = -1.0F; });
  refusal([](auto& c) { c.jitter = std::numeric_limits<float>::infinity(); });
  refusal([](auto& c) { c.method = RoutingMethod::kCustom; });
  EXPECT_NE(refusal([](auto& c) {
              c.method = RoutingMethod::kSimulated, c.simulation.assign("gaussian");
            }).find("'gaussian'"),
            std::string::npos);
  refusal([](auto& c) { c.method = RoutingMethod::kSparseMixer, c.num_groups = 4, c.topk_groups = 2; });
  refusal([](auto& c) { c.method = RoutingMethod::kMiniMax2; }, std::vector<float>(11, 0.0F));
}

TEST(Routing, EveryGroup_GivesItsBest) {
  constexpr int64_t kExperts = 24, kGroups = 3, kEach = 2, kTokens = 40;
  const std::vector<float> logits = RandomLogits(kTokens * kExperts, 12);
  const std::vector<float> bias = RandomLogits(kExperts, 13);
  for (const bool biased : {false, true}) {
    RoutingConfig config =
        Config(biased ? RoutingMethod::kDeepSeekV3 : RoutingMethod::kGroupedTopK, kGroups * kEach);
    config.num_groups = kGroups;
    config.topk_groups = kEveryGroup;
    const Routed routed = RouteLogits(config, logits, kExperts, biased ? bias : std::vector<float>());
    ASSERT_TRUE(routed.status.ok()) << routed.status.ToString();
    for (int64_t token = 0; token < kTokens; ++token) {
      std::set<int32_t> wanted;
      for (int64_t group = 0; group < kGroups; ++group) {
        std::vector<int32_t> ids(kExperts / kGroups);
        std::iota(ids.begin(), ids.end(), static_cast<int32_t>(group * kExperts / kGroups));
        const auto value = [&](int32_t id) {
          const float x = logits[static_cast<size_t>(token * kExperts + id)];
          return biased ? 1.0F / (1.0F + std::exp(-x)) + bias[static_cast<size_t>(id)] : x;
        };
        std::sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return value(a) > value(b); });
        wanted.insert(ids.begin(), ids.begin() + kEach);
      }
      const auto* first = routed.ids.data() + token * kGroups * kEach;
      EXPECT_EQ(std::set<int32_t>(first, first + kGroups * kEach), wanted) << "token " << token;
      for (int64_t slot = 1; slot < kGroups * kEach; ++slot) {
        const float* weights = routed.weights.data() + token * kGroups * kEach;
        EXPECT_GE(weights[slot - 1], weights[slot]);
      }
    }
  }
}

TEST(Routing, GroupsConfineTheSelection) {
  const std::vector<float> logits = RandomLogits(64 * 32, 11);
  for (const RoutingMethod method : {RoutingMethod::kDeepSeekV3, RoutingMethod::kGroupedTopK}) {
    RoutingConfig config = Config(method, 4);
    config.num_groups = 8;
    config.topk_groups = 2;
    const Routed routed = RouteLogits(config, logits, 32);
    ASSERT_TRUE(routed.status.ok());
    for (size_t token = 0; token < 64; ++token) {
      std::set<int32_t> groups;
      for (size_t slot = token * 4; slot < token * 4 + 4; ++slot) {
        groups.insert(routed.ids[slot] / 4);
      }
      EXPECT_LE(groups.size(), 2U);
    }
  }
}

TEST(SimulatedRouting, IsSeededAndUniform) {
  RoutingConfig config = Config(RoutingMethod::kSimulated, 4);
  const std::vector<float> logits(4096 * 32, 0.0F);
  const Routed first = RouteLogits(config, logits, 32);
  EXPECT_EQ(first.ids, RouteLogits(config, logits, 32).ids);
  config.simulation_seed = 1;
  EXPECT_NE(first.ids, RouteLogits(config, logits, 32).ids);
  std::vector<int64_t> counts(32, 0);
  for (const int32_t id : first.ids) {
    ++counts[static_cast<size_t>(id)];
  }
  // Each count is binomial with mean 512 and deviation sqrt(4096 / 8 * 7 / 8) = 21.2; six deviations.
  for (const int64_t count : counts) {
    EXPECT_NEAR(static_cast<double>(count), 512.0, 6 * 21.2);
  }
  config.simulation = "normal_routing";
  const Routed normal = RouteLogits(config, logits, 32);
  for (size_t slot = 0; slot < normal.weights.size(); slot += 4) {
    EXPECT_NEAR(
        normal.weights[slot] + normal.weights[slot + 1] + normal.weights[slot + 2] + normal.weights[slot + 3],
        1.0, 1e-6);
  }
}

}  // namespace
}  // namespace fusedmoe
