#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "cpu_layer.hpp"
#include "experts/cpu/cpu_experts.hpp"

namespace fusedmoe::cpu_test {

std::vector<std::string> HostIsas() {
  std::vector<std::string> names;
  for (const Isa isa :
       {Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Vnni, Isa::kAvx512Bf16, Isa::kAvx512Fp16, Isa::kAmx}) {
    if (MachineFor(std::string(IsaName(isa))).Has(isa)) {
      names.emplace_back(IsaName(isa));
    }
  }
  return names;
}

namespace {

// Relative L2 errors of a layer, derived from how activations are held.
//
// fp32: sums of n products carry at most about sqrt(n) * 2^-24, here n <= 300, in three GEMMs and an
// activation whose slope is near one: 4 * 17 * 6e-8 = 4e-6.
constexpr double kFp32Bound = 4e-6;
// 15 bits with a scale per 64: a value errs by a uniform +-d/2, d = amax/16256. At worst the amax of 64 is 8
// times their rms, 8 / 16256 / sqrt(12) = 1.4e-4 a GEMM; gate and up err together (2x), down once: sqrt(5)
// * 1.4e-4 = 3.2e-4.
constexpr double kA16Bound = 3.2e-4;
// The same with d = amax/127.
constexpr double kA8Bound = kA16Bound * 128;

// Sums good to fp32 (2e-7) before the intermediate is quantized again move about 1e-5 of its values across a
// tie, each by one code step of at most a quarter of its size: sqrt(1e-5) / 4 = 8e-4 when all of them lie in
// one place. Rows here have some 10^4 intermediate values.
constexpr double kRequantizedBound = 8e-4;

// A matrix unit takes activations in bf16, each wrong by at most 2^-8 of itself (tiles_test.cpp).
constexpr double kBf16Bound = 0x1p-8;

// Two planes of bf16 leave less than 2^-18 of a value (docs/accuracy.md).
constexpr double kBf16PairBound = kFp32Bound + 0x1p-17;
// Sums of 64 k in f16: 6.6e-4 expected in each GEMM, gate and up and down: sqrt(3) times that, and four times
// what is expected (docs/accuracy.md). Through requantization to e4m3: sqrt(6.6e-4 / 8), four times.
constexpr double kF16Bound = 4.6e-3;
constexpr double kF16RequantizedBound = 3.6e-2;

double BoundOf(const LayerSpec& spec, const std::string& isa) {
  const DType weight = ParseScheme(spec.scheme)->weight.element;
  const bool fp8 = weight == DType::kF8E4M3;
  if (ParseScheme(spec.scheme)->activation.quantized()) {
    return isa == "avx512_fp16" && fp8 ? kF16RequantizedBound : kRequantizedBound;
  }
  if (fp8 && spec.mode == ActivationMode::kA8) {
    return isa == "avx512_fp16" ? kF16Bound : kBf16Bound;
  }
  if (isa == "amx") {
    return std::max(kBf16Bound, spec.mode == ActivationMode::kA8 ? kA8Bound : 0.0);
  }
  if (spec.mode == ActivationMode::kA8) {
    return kA8Bound;
  }
  const Result<PanelFormat> panel = ChoosePanelFormat(ParseScheme(spec.scheme)->weight);
  const DType code = panel->code;
  const bool integer = code == DType::kF4E2M1 || code == DType::kU4 || code == DType::kU8;
  return integer ? kA16Bound : isa == "avx512_bf16" && code != DType::kF32 ? kBf16PairBound : kFp32Bound;
}

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
  for (const char* scheme : {"nvfp4_w4a16", "mxfp4_w4a16", "int4_w4a16:g32", "int4_w4a16:g64",
                             "int4_w4a16:g128", "int4_w4a16:channel", "int8_w8a16:channel", "int8_w8a16:g32",
                             "int8_w8a16:g64", "int8_w8a16:g128", "fp8_w8a16:tensor", "fp8_w8a16:channel",
                             "fp8_w8a16:block128", "mxfp8_w8a16", "w_mxfp6_e3m2", "w_mxfp6_e2m3"}) {
    ExpectClose({.scheme = scheme, .hidden = 256, .intermediate = 128, .experts = 3}, GetParam(), {1, 4, 23});
    ExpectClose(
        {.scheme = scheme, .hidden = 384, .intermediate = 256, .experts = 4, .top_k = 4, .bias = true},
        GetParam(), {3, 16});
  }
}

TEST_P(EveryIsa, GroupsThatEndInsideABlock_AgreeWithFp64) {
  for (const char* scheme : {"nvfp4_w4a16", "mxfp4_w4a16", "int4_w4a16:g32", "mxfp8_w8a16"}) {
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

TEST_P(EveryIsa, EightBitActivations_StayWithinTheirBound) {
  for (const char* scheme : {"nvfp4_w4a16", "mxfp4_w4a16", "int4_w4a16:g128", "int8_w8a16:channel"}) {
    ExpectClose({.scheme = scheme, .hidden = 256, .intermediate = 128, .mode = ActivationMode::kA8},
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

TEST_P(EveryIsa, HiddenStatesOfEveryType_KeepTheirBits) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const char* scheme : {"unquantized", "fp8_w8a16:channel", "fp8_w8a16:block128"}) {
      ExpectClose({.scheme = scheme, .hidden = 256, .intermediate = 128, .experts = 2, .dtype = dtype},
                  GetParam(), {1, 3, 40});
    }
  }
}

TEST_P(EveryIsa, QuantizedActivations_AgreeWithTheScheme) {
  for (const char* scheme : {"nvfp4_w4a4",
                             "nvfp4_w4a8",
                             "mxfp4_w4a4",
                             "mxfp4_mxfp8",
                             "mxfp4_w4a8:static",
                             "mxfp4_w4a8:dynamic",
                             "int8_w8a8:channel",
                             "int8_w8a8:tensor",
                             "int8_w8a8:channel_static",
                             "int8_w8a8:block128",
                             "int4_w4a8:g128",
                             "int4_w4a8:g32",
                             "int4_w4afp8:g128",
                             "fp8_w8a8:channel",
                             "fp8_w8a8:tensor",
                             "fp8_w8a8:tensor_static",
                             "fp8_w8a8:block128",
                             "mxfp8_w8a8",
                             "w_mxfp4_a_mxfp6_e3m2",
                             "w_mxfp6_e2m3_a_mxfp6_e2m3"}) {
    ExpectClose({.scheme = scheme, .hidden = 256, .intermediate = 128, .experts = 3}, GetParam(), {1, 4, 23});
    ExpectClose(
        {.scheme = scheme, .hidden = 128, .intermediate = 128, .bias = true, .different_scales = true},
        GetParam(), {6});
  }
}

TEST_P(EveryIsa, EveryActivation_AgreesWithFp64) {
  for (int kind = 0; kind <= static_cast<int>(ActivationKind::kRelu2NoMul); ++kind) {
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
    EXPECT_STREQ(experts.tiles()->name, "amx");
  } else {
    EXPECT_EQ(experts.table().isa, GetParam());
  }
  EXPECT_EQ(kCpuFusedBackend.plan(layer.problem, MachineFor(GetParam())).isa, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Host, EveryIsa, testing::ValuesIn(HostIsas()),
                         [](const auto& each) { return each.param; });

}  // namespace
}  // namespace fusedmoe::cpu_test
