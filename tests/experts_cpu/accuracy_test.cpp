#include <gtest/gtest.h>

#include <iterator>
#include <string>
#include <tuple>

#include "bounds.hpp"
#include "experts/cpu/cpu_experts.hpp"

namespace fusedmoe::cpu_test {
namespace {

class EveryIsa : public testing::TestWithParam<std::string> {};

void ExpectClose(LayerSpec spec, const std::string& isa, std::initializer_list<int64_t> token_counts) {
  Layer layer = MakeLayer(spec);
  layer.problem.isa = isa;
  const Definition definition(layer);
  const Runner runner = MakeRunner(layer);
  for (const int64_t tokens : token_counts) {
    const Batch batch = MakeBatch(spec, tokens, static_cast<uint32_t>(17 + tokens));
    const double error = RelativeL2(RunBatch(layer, runner, batch), definition.Forward(batch));
    EXPECT_LE(error, BoundOf(spec, isa))
        << spec.scheme << " " << isa << " tokens=" << tokens << " hidden=" << spec.hidden
        << " intermediate=" << spec.intermediate;
  }
}

TEST_P(EveryIsa, UnquantizedLayersOfAnySize_AgreeWithFp64) {
  for (const DType weight : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const auto& [hidden, intermediate] : {std::pair{1, 1}, {17, 33}, {64, 16}, {130, 70}, {200, 129}}) {
      ExpectClose({.hidden = hidden, .intermediate = intermediate, .experts = 3, .weight_dtype = weight},
                  GetParam(), {1, 2, 5, 19});
    }
  }
}

TEST_P(EveryIsa, WeightOnlySchemes_AgreeWithFp64) {
  for (const char* scheme : kWeightOnlySchemes) {
    ExpectClose({.scheme = scheme, .hidden = 256, .intermediate = 128, .experts = 3}, GetParam(), {1, 4, 23});
    ExpectClose(
        {.scheme = scheme, .hidden = 384, .intermediate = 256, .experts = 4, .top_k = 4, .bias = true},
        GetParam(), {3, 16});
  }
}

TEST_P(EveryIsa, GroupsThatEndInsideABlock_AgreeWithFp64) {
  for (const char* scheme :
       {"nvfp4_w4a16", "mxfp4_w4a16", "int4_w4a16:g16", "int4_w4a16:g32", "int8_w8a16:g16", "mxfp8_w8a16"}) {
    ExpectClose({.scheme = scheme, .hidden = 96, .intermediate = 32, .experts = 3}, GetParam(), {1, 7});
  }
  ExpectClose({.scheme = "nvfp4_w4a16", .hidden = 16, .intermediate = 48, .experts = 2}, GetParam(), {1, 40});
  ExpectClose({.scheme = "fp8_w8a16:block128", .hidden = 200, .intermediate = 130, .experts = 2}, GetParam(),
              {2, 9});
}

TEST_P(EveryIsa, ZeroPoints_AreSubtracted) {
  for (const char* scheme : {"int4_w4a16:g32", "int4_w4a16:g64", "int4_w4a16:g128", "int4_w4a16:channel",
                             "int8_w8a16:g128", "int8_w8a16:channel"}) {
    ExpectClose({.scheme = scheme, .hidden = 128, .intermediate = 128, .experts = 3, .zero_points = true},
                GetParam(), {1, 11});
  }
}

TEST_P(EveryIsa, GroupScalesOfEveryType_AgreeWithFp64) {
  for (const LayerSpec& spec : GroupScaleSpecs()) {
    ExpectClose(spec, GetParam(), {1, 11});
  }
}

TEST_P(EveryIsa, EightBitActivations_StayWithinTheirBound) {
  for (const char* scheme : {"nvfp4_w4a16", "mxfp4_w4a16", "int4_w4a16:g128", "int8_w8a16:channel"}) {
    ExpectClose({.scheme = scheme, .hidden = 256, .intermediate = 128, .mode = ActivationMode::kA8},
                GetParam(), {1, 13});
  }
  for (const char* scheme : {"int4_w4a16:g32", "int8_w8a16:g16"}) {
    ExpectClose({.scheme = scheme,
                 .hidden = 256,
                 .intermediate = 128,
                 .zero_points = true,
                 .float_zeros = true,
                 .mode = ActivationMode::kA8},
                GetParam(), {1, 13});
  }
}

TEST_P(EveryIsa, EightBitActivationsOfFp8_NeedAUnitForSixteenBits) {
  const std::string isa = GetParam();
  for (const char* scheme : {"fp8_w8a16:tensor", "fp8_w8a16:channel", "fp8_w8a16:block128", "mxfp8_w8a16"}) {
    LayerSpec spec{
        .scheme = scheme, .hidden = 384, .intermediate = 256, .bias = true, .mode = ActivationMode::kA8};
    if (isa == "avx512_bf16" || isa == "avx512_fp16") {
      ExpectClose(spec, isa, {1, 2, 4, 13, 64});
    } else {
      Layer layer = MakeLayer(spec);
      layer.problem.isa = isa;
      EXPECT_FALSE(kCpuFusedBackend.supports(layer.problem, HostMachine()).empty()) << isa;
    }
  }
}

/// By default sums are good enough to keep the codes of the intermediate (ExpectClose has the bounds of
/// both).
TEST_P(EveryIsa, QuantizedFp8_HasSumsInF16OnlyForThoseWhoAsk) {
  const std::string isa = GetParam();
  for (const char* scheme :
       {"fp8_w8a8:tensor_static", "fp8_w8a8:channel", "fp8_w8a8:block128", "mxfp8_w8a8"}) {
    LayerSpec spec{.scheme = scheme, .hidden = 384, .intermediate = 256, .bias = true};
    ExpectClose(spec, isa, {1, 2, 4, 13, 64});
    spec.mode = ActivationMode::kA8;
    if (isa == "avx512_fp16" && std::string_view(scheme) != "mxfp8_w8a8") {
      ExpectClose(spec, isa, {1, 2, 4, 13, 64});
    } else {
      Layer layer = MakeLayer(spec);
      layer.problem.isa = isa;
      EXPECT_FALSE(kCpuFusedBackend.supports(layer.problem, cpu_test::MachineFor(isa)).empty()) << isa;
    }
  }
}

TEST_P(EveryIsa, HiddenStatesOfEveryType_KeepTheirBits) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const char* scheme : {"unquantized", "fp8_w8a16:channel", "fp8_w8a16:block128"}) {
      ExpectClose({.scheme = scheme, .hidden = 256, .intermediate = 128, .experts = 2, .dtype = dtype},
                  GetParam(), {1, 3, 40});
    }
  }
}

/// A scheme that leaves activations alone does not say what they are multiplied in; the plan does.
TEST(CpuPlan_InputDtype, IsThatOfTheTiles) {
  const auto input = [](LayerSpec spec, const char* isa, const char* mode = "") {
    Layer layer = MakeLayer(spec);
    layer.problem.isa = isa;
    layer.problem.mode = mode;
    return kCpuFusedBackend.plan(layer.problem, MachineWithTiles()).input_dtype;
  };
  EXPECT_EQ(input({.scheme = "nvfp4_w4a16"}, "avx2"), "I15");
  EXPECT_EQ(input({.scheme = "nvfp4_w4a16", .mode = ActivationMode::kA8}, "avx2"), "I8");
  EXPECT_EQ(input({.scheme = "fp8_w8a16:channel"}, "avx2"), "F32");
  EXPECT_EQ(input({.scheme = "nvfp4_w4a4"}, "avx2"), "") << "codes";
  EXPECT_EQ(input({.scheme = "nvfp4_w4a4", .mode = ActivationMode::kWeightOnly}, "avx2"), "I15");
  EXPECT_EQ(input({.scheme = "nvfp4_w4a16"}, "amx", "throughput"), "I15, BF16 on tiles");
}

/// The bound of `--check` follows from what the plan says.
TEST(CpuPlan_IntermediateDtype, IsThatOfTheKernels) {
  const auto mid = [](LayerSpec spec, const char* isa) {
    Layer layer = MakeLayer(spec);
    layer.problem.isa = isa;
    return kCpuFusedBackend.plan(layer.problem, MachineFor(isa)).intermediate_dtype;
  };
  if (!MachineFor("avx512_bf16").Has(Isa::kAvx512Bf16)) {
    GTEST_SKIP() << "needs avx512_vnni";
  }
  for (const char* scheme : {"unquantized", "fp8_w8a16:channel"}) {
    EXPECT_EQ(mid({.scheme = scheme}, "avx512_bf16"), "BF16") << scheme;
    EXPECT_EQ(mid({.scheme = scheme, .dtype = DType::kF16}, "avx512_bf16"), "F32") << scheme;
    EXPECT_EQ(mid({.scheme = scheme, .dtype = DType::kF32}, "avx512_bf16"), "F32") << scheme;
    EXPECT_EQ(mid({.scheme = scheme}, "avx512_vnni"), "F32") << scheme;
  }
  EXPECT_EQ(mid({.weight_dtype = DType::kF16}, "avx512_bf16"), "F32");
  EXPECT_EQ(mid({.scheme = "fp8_w8a8:channel"}, "avx512_bf16"), "F32");
  EXPECT_EQ(mid({.scheme = "nvfp4_w4a16"}, "avx512_bf16"), "F32");
}

TEST_P(EveryIsa, QuantizedActivations_AgreeWithTheScheme) {
  std::vector<const char*> schemes(std::begin(kQuantizedOnTiles), std::end(kQuantizedOnTiles));
  schemes.insert(schemes.end(),
                 {"nvfp4_w4a8", "int4_w4a8:g32", "int4_w4afp8:g128", "int4_w4afp8:g64", "int4_w4afp8:g32",
                  "w_mxfp6_e2m3_a_mxfp6_e2m3", "mxfp4_w4a8_out:out32_tensor"});
  for (const char* scheme : schemes) {
    ExpectClose({.scheme = scheme, .hidden = 256, .intermediate = 128, .experts = 3}, GetParam(), {1, 4, 23});
    ExpectClose(
        {.scheme = scheme, .hidden = 128, .intermediate = 128, .bias = true, .different_scales = true},
        GetParam(), {6});
  }
}

TEST_P(EveryIsa, EveryActivation_AgreesWithFp64) {
  for (int kind = 0; kind < kActivationKinds; ++kind) {
    for (const float limit : {0.0F, 0.5F}) {
      ExpectClose({.hidden = 70,
                   .intermediate = 40,
                   .activation = {static_cast<ActivationKind>(kind), 1.702F, 1.0F, limit},
                   .bias = true,
                   .weight_dtype = DType::kF32},
                  GetParam(), {6});
    }
  }
}

TEST_P(EveryIsa, TopKOfAllExperts_AgreesWithFp64) {
  ExpectClose({.scheme = "nvfp4_w4a16", .hidden = 128, .intermediate = 64, .experts = 5, .top_k = 5},
              GetParam(), {1, 8, 33});
}

TEST_P(EveryIsa, Forced_IsTheOneThatRuns) {
  Layer layer = MakeLayer({});
  layer.problem.isa = GetParam();
  const Runner runner = MakeRunner(layer);
  const auto& experts = static_cast<const cpu::CpuExperts&>(*runner.experts);
  if (GetParam() == "amx") {
    EXPECT_STREQ(experts.matrix_unit()->name, "amx");
  } else {
    EXPECT_EQ(experts.kernels().isa, GetParam());
  }
  EXPECT_EQ(kCpuFusedBackend.plan(layer.problem, MachineFor(GetParam())).isa, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Host, EveryIsa, testing::ValuesIn(HostIsas()),
                         [](const auto& each) { return each.param; });

}  // namespace
}  // namespace fusedmoe::cpu_test
