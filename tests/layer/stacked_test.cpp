// SourceOfStacked: a layer of stacked tensors gives the bits of a layer of the experts that they were made
// of.
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "layer/stacked_cases.hpp"
#include "support/tensors.hpp"

namespace fusedmoe::stacked_test {
namespace {

void ExpectSameOutput(const Case& c, ActivationKind activation, GateUpOrder order) {
  const RandomLayer layer = MakeRandomLayer(Config(c.sizes, activation, c.has_bias), c.scheme, 11);
  ExpertStacker stacker(ExpertsOf(layer, c.zero_points), order);
  Arguments arguments;
  c.fill(stacker, arguments);
  const Result<QuantConfig> quant = MakeQuantConfig(c.factory, arguments);
  ASSERT_TRUE(quant.ok()) << quant.status().ToString();
  const StackedWeights weights{stacker.Codes(1, c.codes), stacker.Codes(2, c.codes), order};
  const Result<ExpertSource> source = SourceOfStacked(weights, *quant);
  ASSERT_TRUE(source.ok()) << source.status().ToString();
  EXPECT_EQ(source->num_local_experts, kExperts);
  EXPECT_EQ(source->scheme.weight, layer.source.scheme.weight);
  EXPECT_EQ(source->scheme.activation, layer.source.scheme.activation);
  const std::vector<float> expected =
      OutputOf(layer.config, SourceOf(stacker.experts(), layer.source.scheme));
  EXPECT_TRUE(test::SameBits(OutputOf(layer.config, *source), expected));
}

TEST(Stacked, EveryFactory_GivesTheBitsOfItsExperts) {
  for (const Case& c : Cases()) {
    for (const GateUpOrder order :
         {GateUpOrder::kGateFirst, GateUpOrder::kUpFirst, GateUpOrder::kInterleaved}) {
      if (std::string_view(c.scheme).ends_with("block128") && order == GateUpOrder::kInterleaved) {
        continue;  // refused: StackedRefused.BlocksThatHoldBoth_AreRefused
      }
      SCOPED_TRACE(std::string(c.factory) + " " + c.scheme + " " + std::string(GateUpOrderName(order)));
      ExpectSameOutput(c, ActivationKind::kSilu, order);
    }
    SCOPED_TRACE(std::string(c.factory) + " " + c.scheme + " without a gate");
    ExpectSameOutput(c, ActivationKind::kRelu2NoMul, GateUpOrder::kGateFirst);
  }
}

/// Configurations that no factory makes, and that their descriptors say.
TEST(Stacked, Mxfp8AndWeightsAlone_NeedNoFactory) {
  for (const auto& [scheme, activation, weight] :
       {std::tuple("mxfp8_w8a8", QuantKind::kMxfp8, QuantKind::kMxfp8),
        std::tuple("mxfp8_w8a16", QuantKind::kNone, QuantKind::kMxfp8),
        std::tuple("w_mxfp6_e3m2", QuantKind::kNone, QuantKind::kMxfp6E3M2),
        std::tuple("w_mxfp6_e2m3_a_fp8:dynamic", QuantKind::kFp8, QuantKind::kMxfp6E2M3)}) {
    SCOPED_TRACE(scheme);
    const RandomLayer layer = MakeRandomLayer(Config({}, ActivationKind::kSilu), scheme, 11);
    ExpertStacker stacker(ExpertsOf(layer, false), GateUpOrder::kUpFirst);
    QuantConfig quant;
    quant.a1.kind = quant.a2.kind = activation;
    quant.w1.kind = quant.w2.kind = weight;
    quant.w1.scale = stacker.BlockScales(1, DType::kF8E8M0);
    quant.w2.scale = stacker.BlockScales(2, DType::kF8E8M0);
    const DType codes = weight == QuantKind::kMxfp8 ? DType::kF8E4M3 : DType::kU8;
    const auto source =
        SourceOfStacked({stacker.Codes(1, codes), stacker.Codes(2, codes), GateUpOrder::kUpFirst}, quant);
    ASSERT_TRUE(source.ok()) << source.status().ToString();
    EXPECT_TRUE(test::SameBits(OutputOf(layer.config, *source),
                               OutputOf(layer.config, SourceOf(stacker.experts(), layer.source.scheme))));
  }
}

TEST(Stacked, SignedBytesOfInt8Alone_AreThoseAround128) {
  Bent bent("int8_w8a16");
  bent.weights.w1 = bent.stacker.SignedCodes(1);
  bent.weights.w2 = bent.stacker.SignedCodes(2);
  EXPECT_TRUE(test::SameBits(OutputOf(bent.layer.config, *bent.Source()), bent.Expected()));
}

/// What vLLM's activations look like to its kernels says nothing about weights (docs/vllm.md).
TEST(Stacked, SwizzledActivations_SayNothingOfWeights) {
  Bent bent("nvfp4");
  const std::vector<float> expected = bent.Expected();
  for (const bool swizzled : {false, true}) {
    bent.quant.is_scale_swizzled = swizzled;
    bent.quant.mx_alignment = swizzled ? 256 : 0;
    EXPECT_TRUE(test::SameBits(OutputOf(bent.layer.config, *bent.Source()), expected));
  }
}

TEST(Stacked, TensorsWithGaps_AreReadWhereTheyLie) {
  Bent bent("nvfp4_w4a16", GateUpOrder::kInterleaved);
  std::vector<std::vector<std::byte>> memory;
  const auto widen = [&memory](TensorView& view) {
    const int64_t row = view.row_bytes() + 7, matrix = view.dim(1) * row + 13;
    std::vector<std::byte>& out =
        memory.emplace_back(static_cast<size_t>(view.dim(0) * matrix), std::byte{0x7f});
    TensorView wide(out.data(), view.dtype(), view.shape());
    wide.set_stride_bytes(0, matrix);
    wide.set_stride_bytes(1, row);
    for (int64_t e = 0; e < view.dim(0); ++e) {
      for (int64_t r = 0; r < view.dim(1); ++r) {
        std::memcpy(out.data() + e * matrix + r * row, view[e].data() + r * view.stride_bytes(1),
                    static_cast<size_t>(view.row_bytes()));
      }
    }
    view = wide;
  };
  for (TensorView* view : {&bent.weights.w1, &bent.weights.w2, &bent.quant.w1.scale, &bent.quant.w2.scale}) {
    widen(*view);
  }
  for (const char* backend : {"CPU_FUSED", "REFERENCE"}) {
    EXPECT_TRUE(test::SameBits(OutputOf(bent.layer.config, *bent.Source(), backend), bent.Expected(backend)))
        << backend;
  }
}

/// A scale that is no power of two: each number comes back up to one rounding.
TEST(Stacked, ProductsAndReciprocals_AreTakenApartWithOneRoundingEach) {
  Bent bent("nvfp4");
  const float input = 0.0123F, weight = 0.00321F;
  const std::vector<float> alphas(kExperts, input * weight);
  bent.quant.w1.global_scale = bent.quant.w2.global_scale = bent.stacker.Floats(alphas, {kExperts});
  bent.quant.a1.global_scale = bent.quant.a2.global_scale = bent.stacker.Floats({1.0F / input}, Shape{});
  const auto source = bent.Source();
  ASSERT_TRUE(source.ok()) << source.status().ToString();
  const CanonicalExpert expert = *source->load(2);
  for (const CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
    EXPECT_EQ(*matrix->input_tensor_scale, 1.0F / (1.0F / input));
    EXPECT_EQ(1.0F / *matrix->input_tensor_scale, 1.0F / input);
    EXPECT_NEAR(*matrix->tensor_scale, weight, weight * 0x1p-22F);
    EXPECT_NEAR(*matrix->input_tensor_scale * *matrix->tensor_scale, input * weight,
                input * weight * 0x1p-23F);
  }
}

TEST(Stacked, RuleOfActivations_IsThatOfTheDescriptor) {
  Bent bent("int8_w8a8");
  bent.quant.a1.rule.amax_divisor = bent.quant.a2.rule.amax_divisor = 127.5F;
  EXPECT_EQ(bent.Source()->scheme.activation.rule.amax_divisor, 127.5F);
  bent.quant.a2.rule = {};
  EXPECT_NE(bent.Source().status().message().find("a1 and a2 have different rules"), std::string::npos);
}

TEST(Stacked, ExpertsThatAreNotThere_AreRefused) {
  const Bent bent("mxfp4");
  ExpectRefused(bent.Source()->load(4).status(), StatusCode::kUsage, "expert 4 of 4 stacked ones");
}

TEST(Stacked, Orders_HaveNames) {
  EXPECT_EQ(GateUpOrderNames(), "w13, w31, interleaved");
  EXPECT_EQ(ParseGateUpOrder("w31"), GateUpOrder::kUpFirst);
  EXPECT_FALSE(ParseGateUpOrder("W31").has_value());
}

TEST(Stacked, ParametersOfGemm1_BelongToTheActivation) {
  QuantConfig quant;
  EXPECT_EQ(*ActivationOf(quant, ActivationKind::kSwigluOai),
            CanonicalActivation(ActivationKind::kSwigluOai));
  quant.gemm1_clamp_limit = 10.0F;
  EXPECT_EQ(ActivationOf(quant, ActivationKind::kSilu)->limit, 10.0F);
  EXPECT_EQ(ActivationOf(quant, ActivationKind::kSwigluStep)->limit, 10.0F);
  ExpectRefused(ActivationOf(quant, ActivationKind::kGelu).status(), StatusCode::kUsage,
                "gemm1_clamp_limit is 10; the activation gelu has no such parameter");
  quant.gemm1_alpha = 1.5F;
  quant.gemm1_beta = 0.5F;
  const ActivationSpec oai = *ActivationOf(quant, ActivationKind::kSwigluOai);
  EXPECT_EQ(std::tuple(oai.alpha, oai.beta, oai.limit), std::tuple(1.5F, 0.5F, 10.0F));
  ExpectRefused(ActivationOf(quant, ActivationKind::kSilu).status(), StatusCode::kUsage,
                "gemm1_alpha is 1.5; the activation silu has no such parameter");
  quant.gemm1_alpha = 1.0F;
  quant.gemm1_beta = 0.0F;
  EXPECT_EQ(ActivationOf(quant, ActivationKind::kSilu)->limit, 10.0F);
}

}  // namespace
}  // namespace fusedmoe::stacked_test
