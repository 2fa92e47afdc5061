#include "weights/marlin.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "weights/canonical.hpp"
#include "weights/steps/marlin_ops.hpp"
#include "weights/steps/recipes.hpp"

namespace fusedmoe {
namespace {

const MarlinKind kKinds[] = {{4, 16}, {4, 8}, {8, 16}, {8, 8}};

TEST(Marlin_WeightPermutation, HoldsEveryCodeOfATileOnce) {
  for (const MarlinKind kind : kKinds) {
    const auto permutation = MarlinWeightPermutation(kind);
    const std::set<int32_t> distinct(permutation.begin(), permutation.end());
    EXPECT_EQ(permutation.size(), 1024U);
    EXPECT_EQ(distinct.size(), 1024U);
    EXPECT_EQ(*distinct.begin(), 0);
    EXPECT_EQ(*distinct.rbegin(), 1023);
  }
}

TEST(Marlin_EveryStep, HasAnInverse) {
  std::mt19937 generator(31);
  for (const MarlinKind kind : kKinds) {
    const int high = kind.bits == 4 ? 15 : 255;
    for (const auto& [inputs, outputs] : {std::pair<int64_t, int64_t>{32, 64}, {64, 128}, {160, 192}}) {
      const Tensor codes = RandomBytes(DType::kU8, Shape{inputs, outputs}, generator, 0, high);
      const auto packed = MarlinPackWeights(codes.view(), kind);
      ASSERT_TRUE(packed.ok()) << packed.status().ToString();
      const auto restored = MarlinUnpackWeights(packed->view(), kind);
      ASSERT_TRUE(restored.ok()) << restored.status().ToString();
      EXPECT_TRUE(std::equal(codes.view().as<uint8_t>(), codes.view().as<uint8_t>() + inputs * outputs,
                             restored->view().as<uint8_t>()));
      const Tensor zeros = RandomBytes(DType::kU8, Shape{3, outputs}, generator, 0, high);
      const auto packed_zeros = MarlinPackZeroPoints(zeros.view(), kind);
      ASSERT_TRUE(packed_zeros.ok()) << packed_zeros.status().ToString();
      const auto restored_zeros = MarlinUnpackZeroPoints(packed_zeros->view(), kind);
      ASSERT_TRUE(restored_zeros.ok()) << restored_zeros.status().ToString();
      EXPECT_TRUE(std::equal(zeros.view().as<uint8_t>(), zeros.view().as<uint8_t>() + 3 * outputs,
                             restored_zeros->view().as<uint8_t>()));
    }
  }
}

TEST(Marlin_ShapesThatDoNotFitTiles, AreRefusedWithTheirSizes) {
  std::mt19937 generator(32);
  const Tensor narrow = RandomBytes(DType::kU8, Shape{16, 32}, generator, 0, 15);
  EXPECT_NE(MarlinPackWeights(narrow.view(), {4, 16}).status().message().find("32 outputs"),
            std::string::npos);
  const Tensor shallow = RandomBytes(DType::kU8, Shape{16, 64}, generator, 0, 15);
  EXPECT_TRUE(MarlinPackWeights(shallow.view(), {4, 16}).ok());
  EXPECT_FALSE(MarlinPackWeights(shallow.view(), {4, 8}).ok())
      << "bands have 32 inputs with 8-bit activations";
  EXPECT_NE(MarlinPackWeights(shallow.view(), {3, 16}).status().message().find("3-bit"), std::string::npos);
  EXPECT_FALSE(
      MarlinPermuteScales(RandomFloats(DType::kF32, Shape{2, 48}, generator, 0, 1).view(), true).ok());
}

TEST(Marlin_CodesBesideE4m3Activations, ComeBackForEveryZeroPoint) {
  Tensor codes = *Tensor::Allocate(DType::kU4, Shape{16, 32});
  Tensor zeros = *Tensor::Allocate(DType::kU8, Shape{16, 2});
  for (int64_t row = 0; row < 16; ++row) {
    for (int64_t col = 0; col < 16; ++col) {  // all 16 codes, two a byte
      codes.mutable_view().data()[row * 16 + col] = static_cast<std::byte>(col << 4 | (15 - col));
    }
    zeros.mutable_view().as<uint8_t>()[2 * row] = static_cast<uint8_t>(row);
    zeros.mutable_view().as<uint8_t>()[2 * row + 1] = static_cast<uint8_t>(15 - row);
  }
  for (const TensorView& zero_points : {TensorView(zeros.view()), TensorView()}) {
    const auto made = ToMarlinFp8Codes(codes.view(), zero_points);
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    const auto back = FromMarlinFp8Codes(made->view(), zero_points);
    ASSERT_TRUE(back.ok()) << back.status().ToString();
    EXPECT_TRUE(std::equal(codes.view().data(), codes.view().data() + 16 * 16, back->view().data()));
  }
  EXPECT_FALSE(ToMarlinFp8Codes(codes.view(), codes.view()).ok()) << "zero points are U8";
}

// The largest scales that the kernels' types hold, and the next ones.
TEST(Marlin_ScaleTypes, EndWhereTheTypeOfTheModelEnds) {
  for (const auto& [dtype, exponent, largest, beyond] :
       {std::tuple(DType::kBF16, 120, 255.0F, 256.0F), std::tuple(DType::kF16, 8, 255.875F, 256.0F),
        std::tuple(DType::kF16, 0, 65504.0F, 65520.0F)}) {
    for (const auto& [value, fits] : {std::pair(largest, true), std::pair(beyond, false)}) {
      const TensorView one(reinterpret_cast<const std::byte*>(&value), DType::kF32, Shape{1, 1});
      const auto made = MarlinScaleType(one, dtype, exponent);
      ASSERT_EQ(made.ok(), fits) << value;
      if (fits) {
        EXPECT_EQ(MarlinScaleValues(made->view(), exponent)->view().as<float>()[0], value);
      } else {
        EXPECT_EQ(made.status().code(), StatusCode::kUnsupported);
      }
    }
  }
}

TEST(Marlin_Sizes, AreThoseOfThreadTilesAndWholeGroups) {
  const WeightFormat channel{.element = DType::kF8E4M3, .has_channel_scale = true};
  const WeightFormat block{.element = DType::kF8E4M3, .block = {128, 128}};
  const WeightFormat nvfp4{.element = DType::kF4E2M1, .block = {1, 16}, .block_scale_dtype = DType::kF8E4M3};
  const WeightFormat mxfp4{.element = DType::kF4E2M1, .block = {1, 32}, .block_scale_dtype = DType::kF8E8M0};
  struct Sizes {
    WeightFormat format;
    int64_t hidden, intermediate, padded_hidden, padded_intermediate;
  };
  for (const Sizes& sizes : {Sizes{channel, 256, 96, 256, 128}, Sizes{channel, 128, 64, 128, 64},
                             Sizes{channel, 100, 65, 128, 128}, Sizes{channel, 320, 64, 320, 128},
                             Sizes{block, 200, 130, 256, 256}, Sizes{nvfp4, 64, 48, 64, 128},
                             Sizes{nvfp4, 128, 48, 128, 64}, Sizes{mxfp4, 2880, 2880, 3072, 2944}}) {
    LayoutProblem problem;
    problem.format = sizes.format;
    problem.hidden = sizes.hidden;
    problem.intermediate = sizes.intermediate;
    const PaddedSizes padded = MarlinSizes(problem);
    EXPECT_EQ(padded.hidden, sizes.padded_hidden) << sizes.hidden << " x " << sizes.intermediate;
    EXPECT_EQ(padded.intermediate, sizes.padded_intermediate) << sizes.hidden << " x " << sizes.intermediate;
  }
}

// vLLM asks whether gate and up have groups with the inputs of down: a layer whose intermediate size is one
// group gets its scales in the order of channels, which its kernel does not read, and the other way round.
TEST(UpstreamSlips, GroupsOfGateAndUp_AreThoseOfTheirOwnInputs) {
  LayoutProblem problem;
  problem.format = {.element = DType::kU8, .block = {1, 64}, .block_scale_dtype = DType::kBF16};
  problem.hidden = 128;
  problem.intermediate = 64;
  std::string scales;
  for (const std::string& step : MarlinRecipe(problem).ToText()) {
    scales += step.starts_with("marlin_scales(") ? step + " " : "";
  }
  EXPECT_EQ(scales,
            "marlin_scales(gate_up_block_scale, grouped=1) marlin_scales(down_block_scale, grouped=0) ");
}

}  // namespace
}  // namespace fusedmoe
