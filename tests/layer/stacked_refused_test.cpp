// What SourceOfStacked refuses, and in which words.
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "layer/stacked_cases.hpp"

namespace fusedmoe::stacked_test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(StackedRefused, WhatDoesNotFit_IsRefusedByName) {
  const auto as = [](const TensorView& view, DType dtype, const Shape& shape) {
    return TensorView(view.data(), dtype, shape);
  };
  const struct {
    const char* factory;
    std::function<void(Bent&)> bend;
    StatusCode code;
    const char* words;
  } refusals[] = {
      {"nvfp4", [](Bent& b) { b.weights.w1 = {}; }, StatusCode::kUsage,
       "w1 is missing; [experts, rows, columns] is required"},
      {"int4_w4a16",
       [&](Bent& b) {
         b.weights.w1 = as(b.weights.w1, DType::kI32, {4, 8, 256});
       },
       StatusCode::kBadInput, "w1 is I32 [4, 8, 256]; U8 is required for 'int4' weights (words of 32 bits"},
      {"fp8_w8a8",
       [&](Bent& b) {
         b.weights.w2 = as(b.weights.w2, DType::kF8E4M3Fnuz, {4, 128, 64});
       },
       StatusCode::kBadInput,
       "w2 is F8_E4M3FNUZ [4, 128, 64]; F8_E4M3 is required for 'float8_e4m3fn' weights"},
      {"unquantized",
       [&](Bent& b) {
         b.weights.w2 = as(b.weights.w2, DType::kF16, {4, 128, 64});
       },
       StatusCode::kBadInput,
       "w1 is BF16 [4, 128, 128] and w2 is F16 [4, 128, 64]; BF16, F16 or F32 of both"},
      {"nvfp4",
       [&](Bent& b) {
         b.weights.w1 = as(b.weights.w1, DType::kU8, {2, 256, 64});
       },
       StatusCode::kBadInput, "w1 holds 2 experts and w2 4"},
      {"nvfp4",
       [&](Bent& b) {
         b.weights.w1 = as(b.weights.w1, DType::kU8, {4, 256, 32});
       },
       StatusCode::kBadInput, "w1 has 64 columns and w2 128 rows; both must be the hidden size"},
      {"nvfp4",
       [&](Bent& b) {
         b.weights.w1 = as(b.weights.w1, DType::kU8, {4, 100, 64});
       },
       StatusCode::kBadInput, "w1 has 100 rows beside 64 columns of w2; 128 (gate and up) or 64 (no gate)"},
      {"nvfp4",
       [&](Bent& b) {
         b.quant.w1.scale = as(b.quant.w1.scale, DType::kU8, {4, 128, 8});
       },
       StatusCode::kBadInput, "w1_scale is U8 [4, 128, 8]; F8_E4M3 [4, 128, 8] is required"},
      {"nvfp4",
       [&](Bent& b) {
         b.quant.w2.scale = as(b.quant.w2.scale, DType::kF8E4M3, {4, 128, 8});
       },
       StatusCode::kBadInput, "w2_scale is F8_E4M3 [4, 128, 8]; F8_E4M3 [4, 128, 4] is required"},
      {"mxfp4_w4a16",
       [&](Bent& b) {
         b.quant.w1.scale = as(b.quant.w1.scale, DType::kF32, {4, 128, 4});
       },
       StatusCode::kBadInput, "w1_scale is F32 [4, 128, 4]; F8_E8M0 or U8 [4, 128, 4] is required"},
      {"nvfp4", [&](Bent& b) { b.quant.w1.global_scale = as(b.quant.w1.global_scale, DType::kF32, {8}); },
       StatusCode::kBadInput, "g1_alphas is F32 [8]; F32, BF16 or F16 [4] or [4, 2] is required"},
      {"nvfp4", [&](Bent& b) { b.quant.a2.global_scale = as(b.quant.a2.global_scale, DType::kF32, {2}); },
       StatusCode::kBadInput, "a2_gscale is F32 [2]; F32, BF16 or F16 [4] or one number is required"},
      {"nvfp4", [](Bent& b) { b.quant.a1.global_scale = b.quant.a2.global_scale = {}; }, StatusCode::kUsage,
       "a1_gscale is missing"},
      {"nvfp4",
       [](Bent& b) {
         b.quant.a1.global_scale = b.stacker.Floats({1, 1, kNaN, 1}, {4});
       },
       StatusCode::kBadInput, "a1_gscale[2] is nan; finite and > 0 is required"},
      {"nvfp4",
       [](Bent& b) {
         b.quant.a1.global_scale = b.stacker.Floats({1, 0, 1, 1}, {4});
       },
       StatusCode::kBadInput, "a1_gscale[1] is 0; finite and > 0 is required"},
      {"nvfp4",
       [](Bent& b) {
         b.quant.w1.global_scale = b.stacker.Floats({1, 1, 1, 1, 1, -1, 1, 1}, {4, 2});
       },
       StatusCode::kBadInput, "g1_alphas[2, 1] is -1; finite and > 0 is required"},
      {"nvfp4", [](Bent& b) { b.quant.a1.global_scale = b.stacker.Floats({1e-39F}, {1}); },
       StatusCode::kBadInput, "1 / a1_gscale[0] is inf; finite and > 0 is required"},
      {"fp8_w8a16",
       [](Bent& b) {
         b.quant.w1.scale = b.stacker.Floats(std::vector<float>(16, 1.0F), {4, 2, 2});
       },
       StatusCode::kBadInput,
       "[4] or [4, 2] is required (block_shape says how large the blocks of scales are)"},
      {"nvfp4_w4a16", [](Bent& b) { b.quant.a1.scale = b.quant.a2.scale = b.quant.w2.global_scale; },
       StatusCode::kUsage, "a1_scale is F32 [4]; nvfp4_w4a16 has no place for it, it must be absent"},
      {"mxfp4",
       [](Bent& b) { b.quant.w1.global_scale = b.quant.w2.global_scale = b.stacker.Floats({1}, {1}); },
       StatusCode::kUsage, "g1_alphas is F32 [1]; mxfp4_w4a4 has no place for it"},
      {"fp8_w8a16",
       [](Bent& b) { b.quant.w1.global_scale = b.quant.w2.global_scale = b.stacker.Floats({1}, {1}); },
       StatusCode::kUsage, "g1_alphas is F32 [1]; fp8_w8a16:channel has no place for it"},
      {"fp8_w8a8", [](Bent& b) { b.quant.a1.scale = b.quant.a2.scale = b.stacker.Floats({1}, {1}); },
       StatusCode::kUsage, "a1_scale is F32 [1]; fp8_w8a8:channel has no place for it"},
      {"int4_w4a16",
       [](Bent& b) { b.quant.a1.global_scale = b.quant.a2.global_scale = b.stacker.Floats({1}, {1}); },
       StatusCode::kUsage, "a1_gscale is F32 [1]; int4_w4a16:channel has no place for it"},
      {"biased", [](Bent& b) { b.quant.w2.bias = {}; }, StatusCode::kUsage,
       "w1_bias is given without w2_bias; both or neither are required"},
      {"biased",
       [&](Bent& b) {
         b.quant.w1.bias = as(b.quant.w1.bias, DType::kF32, {4, 64});
       },
       StatusCode::kBadInput, "w1_bias is F32 [4, 64]; F32, BF16 or F16 [4, 128] is required"},
      {"fp8_w8a8",
       [&](Bent& b) {
         b.quant.w1.scale = as(b.quant.w1.scale, DType::kF32, {4, 64});
       },
       StatusCode::kBadInput, "w1_scale is F32 [4, 64]; F32, BF16 or F16 [4, 128] is required"},
      {"int4_w4afp8", [](Bent& b) { b.quant.a1.shape = b.quant.a2.shape = kPerTensor; },
       StatusCode::kUnsupported,
       "the group shape of a1 is [-1, -1]; activations beside two-level INT4 weights"},
      {"fp8_w8a8",
       [](Bent& b) {
         b.quant.w1.shape = b.quant.w2.shape = GroupShape{1, 128};
       },
       StatusCode::kUnsupported,
       "the group shape of w1 is [1, 128]; scales of 'float8_e4m3fn' weights may be"},
      {"fp8_w8a8",
       [](Bent& b) {
         b.quant.a1.shape = b.quant.a2.shape = GroupShape{1, 64};
       },
       StatusCode::kUnsupported, "the group shape of a1 is [1, 64] beside weights with scales per channel"},
      {"mxfp4",
       [](Bent& b) {
         b.quant.w1.shape = b.quant.w2.shape = GroupShape{128, 128};
       },
       StatusCode::kUsage, "the group shape of w1 is [128, 128]; 'mxfp4' has groups of [1, 32]"},
      {"int8_w8a16",
       [](Bent& b) {
         b.quant.w1.shape = b.quant.w2.shape = GroupShape{0, 32};
       },
       StatusCode::kBadInput, "w1_scale is BF16 [4, 128, 1]; F32, BF16 or F16 [4, 128, 4] is required"},
      {"mxfp4_mxfp8", [](Bent& b) { b.quant.a1.kind = b.quant.a2.kind = QuantKind::kNvfp4; },
       StatusCode::kUnsupported, "w1 is 'mxfp4' and a1 is 'nvfp4': no scheme here has this pair"},
      {"mxfp4_mxfp8", [](Bent& b) { b.quant.a2.kind = QuantKind::kNvfp4; }, StatusCode::kUsage,
       "a1 is 'mxfp8' and a2 is 'nvfp4'"},
  };
  for (const auto& refusal : refusals) {
    SCOPED_TRACE(std::string(refusal.factory) + ": " + refusal.words);
    Bent bent(refusal.factory);
    refusal.bend(bent);
    const auto source = bent.Source();
    ASSERT_FALSE(source.ok());
    ExpectRefused(source.status(), refusal.code, refusal.words);
  }
}

TEST(StackedRefused, ZeroPoints_HaveTheShapeOfTheirScales) {
  for (const auto& [two_a_byte, scheme, words] :
       {std::tuple(true, "int4_w4a16:g64",
                   "w1_zp is U8 [4, 128, 2]; U8 [4, 64, 2], of 128 rows two a byte, is"),
        std::tuple(false, "int8_w8a16:g32",
                   "w1_zp is U8 [4, 64, 4]; U8 [4, 128, 4], of 128 rows one a byte, is")}) {
    const RandomLayer layer = MakeRandomLayer(Config({}, ActivationKind::kSilu), scheme, 11);
    ExpertStacker stacker(ExpertsOf(layer, true), GateUpOrder::kGateFirst);
    Arguments arguments;
    Blocks(DType::kBF16)(stacker, arguments);
    Zeros(!two_a_byte)(stacker, arguments);
    arguments.block_shape = layer.source.scheme.weight.block;
    const QuantConfig quant = *(two_a_byte ? Int4W4A16Config(arguments) : Int8W8A16Config(arguments));
    const auto source = SourceOfStacked({stacker.Codes(1, DType::kU8), stacker.Codes(2, DType::kU8)}, quant);
    ExpectRefused(source.status(), StatusCode::kBadInput, words);
  }
}

/// A kernel's tiles show where they are larger than the matrix.
TEST(StackedRefused, TilesOfAKernel_AreNamed) {
  const RandomLayer layer = MakeRandomLayer(Config({64, 32}, ActivationKind::kSilu), "nvfp4_w4a16", 11);
  ExpertStacker stacker(ExpertsOf(layer, false), GateUpOrder::kGateFirst);
  Arguments arguments;
  And(kNvfp4, TensorAlphas)(stacker, arguments);
  const std::vector<std::byte> tiles(static_cast<size_t>(kExperts * 128 * 4));
  arguments.w1_scale = TensorView(tiles.data(), DType::kF8E4M3, {kExperts, 128, 4});
  const auto source = SourceOfStacked({stacker.Codes(1, DType::kU8), stacker.Codes(2, DType::kU8)},
                                      *Nvfp4W4A16Config(arguments));
  ExpectRefused(
      source.status(), StatusCode::kBadInput,
      "w1_scale is F8_E4M3 [4, 128, 4]; F8_E4M3 [4, 64, 4] is required (these are tiles of a kernel");
}

TEST(StackedRefused, BlocksThatHoldBoth_AreRefused) {
  Case c = Bent::Find("fp8_w8a16");
  for (const Case& other : Cases()) {
    c = std::string_view(other.scheme) == "fp8_w8a16:block128" ? other : c;
  }
  const auto refusal = [&c](Sizes sizes, GateUpOrder order) {
    const RandomLayer layer = MakeRandomLayer(Config(sizes, ActivationKind::kSilu), c.scheme, 11);
    ExpertStacker stacker(ExpertsOf(layer, false), order);
    Arguments arguments;
    c.fill(stacker, arguments);
    return SourceOfStacked({stacker.Codes(1, c.codes), stacker.Codes(2, c.codes), order},
                           *MakeQuantConfig(c.factory, arguments))
        .status();
  };
  ExpectRefused(refusal(kOfBlocks, GateUpOrder::kInterleaved), StatusCode::kUnsupported,
                "w1_scale has blocks of 128 x 128, in which the interleaved rows of gate and up would share");
  ExpectRefused(refusal({256, 192}, GateUpOrder::kGateFirst), StatusCode::kUnsupported,
                "w1_scale has blocks of 128 x 128 over 192 rows each of gate and up; a multiple of 128 rows");
}

/// Large tensors are looked at when an expert is loaded: by the layer, which passes the refusal on.
TEST(StackedRefused, ScalesAndBiasesThatAreNotFinite_AreRefusedWithTheirPlace) {
  const struct {
    const char* factory;
    TensorView QuantDesc::*tensor;
    int64_t at;  ///< bytes
    uint32_t code;
    const char* words;
  } damages[] = {
      {"nvfp4", &QuantDesc::scale, (2 * 128 + 70) * 8 + 3, 0x7f,
       "w1_scale[2, 70, 3] is nan; finite and >= 0"},
      {"nvfp4", &QuantDesc::scale, (2 * 128 + 70) * 8 + 3, 0x80, "w1_scale[2, 70, 3] is -0; finite and >= 0"},
      {"mxfp4", &QuantDesc::scale, (3 * 128 + 1) * 4, 0xff, "w1_scale[3, 1, 0] is nan; finite"},
      {"fp8_w8a8", &QuantDesc::scale, (1 * 128 + 5) * 4, 0x7f800000,
       "w1_scale[1, 5] is inf; finite and >= 0"},
      {"biased", &QuantDesc::bias, (0 * 128 + 9) * 4, 0x7fc00000, "w1_bias[0, 9] is nan; finite is"},
      {"int4_w4afp8", &QuantDesc::global_scale, (3 * 256 + 128) * 4, 0x7fc00000, "g1_alphas[3, 128] is nan"},
  };
  for (const auto& damage : damages) {
    SCOPED_TRACE(damage.words);
    Bent bent(damage.factory);
    const TensorView& view = bent.quant.w1.*damage.tensor;
    auto* at = const_cast<std::byte*>(view.data()) + damage.at;
    std::memcpy(at, &damage.code, static_cast<size_t>(DTypeBits(view.dtype()) / 8));
    LayerOptions options;
    options.max_tokens = kTokens;
    const auto layer = MoeLayer::Create(bent.layer.config, *bent.Source(), RouterWeights{}, options);
    ASSERT_FALSE(layer.ok());
    ExpectRefused(layer.status(), StatusCode::kBadInput, damage.words);
  }
}

}  // namespace
}  // namespace fusedmoe::stacked_test
