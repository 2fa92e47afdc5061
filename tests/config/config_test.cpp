#include <fusedmoe/config.hpp>
#include <fusedmoe/problems.hpp>

#include <cmath>
#include <functional>
#include <limits>

#include <gtest/gtest.h>

namespace fusedmoe {
namespace {

MoeConfig Sound() {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 128;
  config.hidden = 2048;
  config.intermediate = 768;
  config.routing.top_k = 8;
  return config;
}

std::string Refusal(const std::function<void(MoeConfig&)>& change) {
  MoeConfig config = Sound();
  change(config);
  const Status status = Validate(config);
  EXPECT_EQ(status.code(), StatusCode::kBadInput) << status.ToString();
  return status.message();
}

TEST(MoeConfig_, SoundOnePasses) {
  EXPECT_TRUE(Validate(Sound()).ok()) << Validate(Sound()).ToString();
  MoeConfig custom = Sound();
  custom.routing.method = RoutingMethod::kCustom;
  EXPECT_TRUE(Validate(custom).ok());
}

TEST(MoeConfig_, EveryFieldOutOfRangeIsNamedWithItsValue) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const auto names = [](const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  for (const int64_t bad : {int64_t{0}, int64_t{-1}, kHuge}) {
    const std::string value = std::to_string(bad);
    names(Refusal([&](auto& c) { c.num_experts = bad; }), "num_experts is " + value);
    names(Refusal([&](auto& c) { c.hidden = bad; }), "hidden is " + value);
    names(Refusal([&](auto& c) { c.intermediate = bad; }), "intermediate is " + value);
    names(Refusal([&](auto& c) { c.routing.top_k = bad; }), "top_k is " + value);
    names(Refusal([&](auto& c) { c.max_tokens = bad; }), "max_tokens is " + value);
    names(Refusal([&](auto& c) { c.parallel.dp_size = bad == kHuge ? -7 : bad; }), "dp rank is 0 of");
  }
  names(Refusal([](auto& c) { c.routing.top_k = 129; }), "between 1 and 128");
  names(Refusal([](auto& c) { c.num_local_experts = 64; }), "num_local_experts is 64; rank 0 of 1 has 128");
  names(Refusal([](auto& c) { c.dtype = DType::kF64; }), "F64");
  names(Refusal([](auto& c) { c.shared.has_gate = true; }), "gate");
  names(Refusal([](auto& c) { c.shared.intermediate = -1; }), "shared.intermediate is -1");
  names(Refusal([](auto& c) { c.apply_router_weight_on_input = true; }), "top_k 8");
  names(Refusal([](auto& c) { c.has_correction_bias = true; }), "Renormalize");
  names(Refusal([](auto& c) { c.activation.kind = ActivationKind::kGelu, c.activation.limit = 7.0F; }),
        "gelu");
  names(Refusal([](auto& c) { c.activation.limit = NAN; }), "limit");
  names(Refusal([](auto& c) { c.parallel.all2all = "carrier_pigeon"; }), "carrier_pigeon");
  names(Refusal([](auto& c) { c.parallel.tp_size = 2, c.parallel.use_ep = true; }), "one way");
  names(Refusal([](auto& c) { c.routing.num_groups = 3; }), "3 groups");
}

// Without parameters swigluoai and swiglustep would be silu(g) * u, in silence.
TEST(MoeConfig_, ActivationsWhoseParametersWereLeftUnset_AreRefused) {
  for (const ActivationKind kind : {ActivationKind::kSwigluOai, ActivationKind::kSwigluStep}) {
    MoeConfig config = Sound();
    config.activation.kind = kind;
    const Status status = Validate(config);
    EXPECT_EQ(status.code(), StatusCode::kBadInput);
    EXPECT_NE(status.message().find("alpha 1, beta 0, limit 0, which make it silu"), std::string::npos)
        << status.ToString();
    EXPECT_NE(status.hint().find("limit 7"), std::string::npos) << status.hint();
    config.activation = CanonicalActivation(kind);
    EXPECT_TRUE(Validate(config).ok()) << Validate(config).ToString();
    config.shared.intermediate = 8;
    config.shared.activation = ActivationSpec{.kind = kind};
    EXPECT_EQ(Validate(config).message().rfind("shared experts", 0), 0U) << Validate(config).ToString();
  }
  // What models say of themselves: no clamp, a clamp alone, another alpha.
  for (const ActivationSpec& own : {ActivationSpec{ActivationKind::kSwigluOai, 1.702F, 1.0F, 0.0F},
                                    ActivationSpec{ActivationKind::kSwigluOai, 1.0F, 0.0F, 10.0F},
                                    ActivationSpec{ActivationKind::kSwigluOai, 1.5F, 0.0F, 0.0F},
                                    ActivationSpec{ActivationKind::kSwigluStep, 1.0F, 0.0F, 16.0F},
                                    ActivationSpec{ActivationKind::kSilu, 1.0F, 0.0F, 0.0F}}) {
    MoeConfig config = Sound();
    config.activation = own;
    EXPECT_TRUE(Validate(config).ok()) << Validate(config).ToString();
  }
}

TEST(MoeConfig_, EveryRankOfEverySplitIsSoundAndThePartsAddUp) {
  for (const bool expert_parallel : {false, true}) {
    for (const int64_t tp : {1, 2, 4}) {
      for (const int64_t dp : {1, 3}) {
        ParallelSizes sizes;
        sizes.tp = tp;
        sizes.dp = dp;
        sizes.enable_expert_parallel = expert_parallel;
        int64_t experts = 0;
        int64_t columns = 0;
        for (int64_t rank = 0; rank < tp * dp; ++rank) {
          const auto parallel = MakeParallelConfig(sizes, *RanksOf(sizes, rank));
          ASSERT_TRUE(parallel.ok());
          const auto part = PerRank(Sound(), *parallel);
          ASSERT_TRUE(part.ok()) << part.status().ToString();
          EXPECT_TRUE(Validate(*part).ok()) << Validate(*part).ToString();
          experts += part->num_local_experts;
          columns += part->intermediate;
        }
        const bool split_experts = expert_parallel && tp * dp > 1;
        EXPECT_EQ(experts, split_experts ? 128 : 128 * tp * dp);
        EXPECT_EQ(columns, split_experts ? 768 * tp * dp : 768);
      }
    }
  }
}

TEST(MoeConfig_, SharesOfThisLibrary_GoRoundWhateverTheSize) {
  const Scheme scheme = *ParseScheme("fp8_w8a8:block128");
  for (const int64_t ranks : {2, 4, 5, 7}) {
    int64_t columns = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      ParallelConfig parallel;
      parallel.tp_size = ranks;
      parallel.tp_rank = rank;
      const auto part = PerRank(Sound(), parallel, scheme);
      ASSERT_TRUE(part.ok()) << part.status().ToString();
      const auto share = IntermediateShare(768, parallel, scheme);
      EXPECT_EQ(part->intermediate, share->end - share->begin);
      EXPECT_EQ(share->begin, columns);
      columns += part->intermediate;
    }
    EXPECT_EQ(columns, 768) << ranks;
  }
}

TEST(MoeConfig_, SizesThatCannotBeSplitAreRefusedWithThoseThatCould) {
  ParallelSizes sizes;
  sizes.tp = 5;
  const auto refused = PerRank(Sound(), *MakeParallelConfig(sizes));
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("768 cannot be split over 5"), std::string::npos);
  EXPECT_NE(refused.status().message().find("1, 2, 3, 4, 6, 8"), std::string::npos);
}

TEST(Names, OfActivationsFormatsAndDeterminismAreReadBack) {
#define FMOE_CHECK(id, name, gated, formula)            \
  EXPECT_EQ(ParseActivation(name), ActivationKind::id); \
  EXPECT_EQ(ActivationName(ActivationKind::id), name);  \
  EXPECT_EQ(IsGated(ActivationKind::id), gated);
  FMOE_ACTIVATION_TABLE(FMOE_CHECK)
#undef FMOE_CHECK
  EXPECT_EQ(ParseActivation("gelu_pytorch_tanh"), ActivationKind::kGeluTanh);
  EXPECT_EQ(ParseActivation("swigluoai_uninterleave"), ActivationKind::kSwigluOai);
  EXPECT_EQ(ActivationNames().rfind("silu, gelu, ", 0), 0U) << ActivationNames();
  EXPECT_FALSE(ParseActivation("SILU"));
  EXPECT_FALSE(ParseActivation(""));
#define FMOE_CHECK(id, name, upstream, rows)                        \
  EXPECT_EQ(ParseActivationFormat(name), ActivationFormatKind::id); \
  EXPECT_EQ(ActivationFormatName(ActivationFormatKind::id), name);
  FMOE_ACTIVATION_FORMAT_TABLE(FMOE_CHECK)
#undef FMOE_CHECK
  EXPECT_FALSE(ParseActivationFormat("Standard")) << "vLLM's name";
  EXPECT_EQ(ActivationFormatNames(), "standard, batched");
#define FMOE_CHECK(id, name, what)                    \
  EXPECT_EQ(ParseDeterminism(name), Determinism::id); \
  EXPECT_EQ(DeterminismName(Determinism::id), name);
  FMOE_DETERMINISM_TABLE(FMOE_CHECK)
#undef FMOE_CHECK
  EXPECT_FALSE(ParseDeterminism("sometimes"));
  EXPECT_EQ(DeterminismNames(), "run_to_run, thread_invariant, batch_invariant, rank_invariant");
}

}  // namespace
}  // namespace fusedmoe
