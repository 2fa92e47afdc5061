// Latent experts on a card: both projections, with biases, beside routed experts and with shared ones.
#include <string>

#include "cuda/card.hpp"
#include "cuda/layer_batch.hpp"
#include "support/relative_l2.hpp"

namespace fusedmoe {
namespace {

using testing_support::MakeRandomLayer;
using testing_support::MakeRandomRouting;
using testing_support::RandomLatent;
using testing_support::RandomRows;

/// More outputs than a block of the product has, and widths that fill none.
struct Widths {
  int64_t hidden, latent;
};

/// Nemotron-3, and Kimi-K3 with its norm.
constexpr ActivationSpec kRelu{.kind = ActivationKind::kRelu2NoMul};
constexpr ActivationSpec kSitu{.kind = ActivationKind::kSitu, .alpha = 4.0F, .limit = 25.0F};

Result<std::unique_ptr<MoeLayer>> MakeLayer(const Widths& widths, const std::string& scheme, DType dtype,
                                            bool with_shared, const std::string& device,
                                            const ActivationSpec& activation = kRelu) {
  MoeConfig inner;
  inner.num_experts = 12;
  inner.hidden = widths.latent;
  inner.intermediate = 128;
  inner.activation = activation;
  inner.routing.top_k = 3;
  inner.dtype = dtype;
  const auto routed = MakeRandomLayer(inner, scheme, 11);
  MoeConfig config = routed.config;
  config.hidden = widths.hidden;
  config.latent = widths.latent;
  const bool with_norm = activation.kind == ActivationKind::kSitu;
  config.latent_norm_epsilon = with_norm ? 1e-5F : 0.0F;
  config.shared.intermediate = with_shared ? 96 : 0;
  inner.num_experts = inner.routing.top_k = 1;
  inner.hidden = widths.hidden;
  inner.intermediate = 96;
  const SharedExpertWeights shared{MakeRandomLayer(inner, "unquantized", 12).source, {}};
  const LatentWeights latent = RandomLatent(widths.hidden, widths.latent, 8, with_norm);
  LayerOptions options;
  options.device = device;
  options.backend = device == "cuda" ? "" : "REFERENCE";
  options.max_tokens = 96;
  return MoeLayer::Create(config, routed.source, RouterWeights{}, options, with_shared ? &shared : nullptr,
                          &latent);
}

TEST(CudaLatent, Projections_AreThoseOfTheReference) {
  FMOE_SKIP_WITHOUT_KERNELS("unquantized");  // of the shared expert
  for (const Widths& widths : {Widths{2112, 256}, Widths{160, 544}}) {
    for (const std::string& scheme : BuiltSchemes({"unquantized", "nvfp4_w4a16"})) {
      for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
        for (const bool with_shared : {false, true}) {
          SCOPED_TRACE(scheme + " " + std::string(DTypeName(dtype)) + (with_shared ? " shared" : ""));
          const auto card = MakeLayer(widths, scheme, dtype, with_shared, "cuda");
          const auto reference = MakeLayer(widths, scheme, dtype, with_shared, "cpu");
          ASSERT_TRUE(card.ok() && reference.ok())
              << card.status().ToString() << reference.status().ToString();
          EXPECT_EQ((*card)->plan().latent, widths.latent);
          EXPECT_EQ((*card)->plan().latent_bytes, (*reference)->plan().latent_bytes);
          for (const int64_t tokens : {1, 7, 96}) {
            const Batch batch{RandomRows(tokens, widths.hidden, dtype, 20 + tokens),
                              MakeRandomRouting(tokens, 3, 12, 30 + tokens)};
            const auto actual = RunLayer(**card, batch), expected = RunLayer(**reference, batch);
            EXPECT_LT(test::RelativeL2(actual, expected), AllowedError(**card, dtype, tokens)) << tokens;
          }
        }
      }
    }
  }
}

TEST(CudaLatent, SumsBehindANorm_AreThoseOfTheReference) {
  FMOE_SKIP_WITHOUT_KERNELS("unquantized");  // of the shared expert
  for (const std::string& scheme : BuiltSchemes({"unquantized", "mxfp4_w4a16", "fp8_w8a8:block128"})) {
    SCOPED_TRACE(scheme);
    const Widths widths{2112, 256};
    const auto card = MakeLayer(widths, scheme, DType::kBF16, true, "cuda", kSitu);
    const auto reference = MakeLayer(widths, scheme, DType::kBF16, true, "cpu", kSitu);
    ASSERT_TRUE(card.ok() && reference.ok()) << card.status().ToString() << reference.status().ToString();
    EXPECT_EQ((*card)->plan().latent_bytes, (*reference)->plan().latent_bytes);
    for (const int64_t tokens : {1, 7, 96}) {
      const Batch batch{RandomRows(tokens, widths.hidden, DType::kBF16, 20 + tokens),
                        MakeRandomRouting(tokens, 3, 12, 30 + tokens)};
      const auto actual = RunLayer(**card, batch), expected = RunLayer(**reference, batch);
      EXPECT_LT(test::RelativeL2(actual, expected), AllowedError(**card, DType::kBF16, tokens)) << tokens;
    }
  }
}

TEST(CudaLatent, NoTokens_WriteNothing) {
  FMOE_SKIP_WITHOUT_KERNELS("nvfp4_w4a16");
  const auto layer = MakeLayer({2112, 256}, "nvfp4_w4a16", DType::kBF16, true, "cuda");
  ASSERT_TRUE(layer.ok()) << layer.status().ToString();
  const Batch none{*Tensor::Allocate(DType::kBF16, {0, 2112}), {}};
  EXPECT_TRUE(RunLayer(**layer, none).empty());
}

}  // namespace
}  // namespace fusedmoe
