#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>

#include "support/tensors.hpp"
#include "weights/steps/flashinfer.hpp"
#include "weights/steps/layout_ops.hpp"
#include "weights/steps/output_scales.hpp"
#include "weights/steps/recipes.hpp"
#include "weights/steps/row_maps.hpp"

namespace fusedmoe {
namespace {

Tensor RandomMatrix(DType dtype, const Shape& shape, uint32_t seed) {
  std::mt19937 random(seed);
  Tensor tensor = *Tensor::Allocate(dtype, shape);
  for (int64_t index = 0; index < tensor.view().total_bytes(); ++index) {
    // Below 0x7f, so that the bytes are finite in every one-byte type.
    tensor.mutable_view().data()[index] = static_cast<std::byte>(random() % 0x7F);
  }
  return tensor;
}

TEST(LayoutStep, EveryLosslessStep_IsUndoneByItsInverse) {
  const int64_t f8 = static_cast<int64_t>(DType::kF8E4M3), f4 = static_cast<int64_t>(DType::kF4E2M1);
  const int64_t u8 = static_cast<int64_t>(DType::kU8);
  const std::vector<std::pair<LayoutStep, Tensor>> cases = {
      {{LayoutOp::kPadRows, "t", {2, 20, 32}}, RandomMatrix(DType::kU8, {40, 9}, 1)},
      {{LayoutOp::kPadColumns, "t", {10, 48}}, RandomMatrix(DType::kF4E2M1, {7, 10}, 2)},
      {{LayoutOp::kSwapHalves, "t", {}}, RandomMatrix(DType::kU8, {6, 5}, 3)},
      {{LayoutOp::kInterleaveRows, "t", {1}}, RandomMatrix(DType::kU8, {14, 5}, 4)},
      {{LayoutOp::kInterleaveRows, "t", {64}}, RandomMatrix(DType::kU8, {384, 3}, 5)},
      {{LayoutOp::kShuffleRows, "t", {128}}, RandomMatrix(DType::kU8, {96, 3}, 6)},
      {{LayoutOp::kShuffleRows, "t", {64}}, RandomMatrix(DType::kU8, {48, 3}, 7)},
      {{LayoutOp::kBlockMajorK, "t", {128}}, RandomMatrix(DType::kU8, {5, 384}, 8)},
      {{LayoutOp::kSwizzleScales, "t", {128, 100, 6}}, RandomMatrix(DType::kU8, {100, 6}, 9)},
      {{LayoutOp::kSwizzleScales, "t", {8, 9, 5}}, RandomMatrix(DType::kU8, {9, 5}, 10)},
      {{LayoutOp::kRepeatRows, "t", {2, 128, 2, 200}}, RandomMatrix(DType::kF32, {4, 3}, 11)},
      {{LayoutOp::kMarlinWeights, "t", {f4, 16}}, RandomMatrix(DType::kF4E2M1, {128, 48}, 12)},
      {{LayoutOp::kMarlinWeights, "t", {f8, 8}}, RandomMatrix(DType::kF8E4M3, {64, 96}, 13)},
      {{LayoutOp::kMarlinScales, "t", {1}}, RandomMatrix(DType::kBF16, {128, 5}, 14)},
      {{LayoutOp::kMarlinScales, "t", {0}}, RandomMatrix(DType::kF32, {64, 1}, 15)},
      {{LayoutOp::kMarlinFours, "t", {}}, RandomMatrix(DType::kU8, {3, 64}, 16)},
      {{LayoutOp::kFlipSign, "t", {static_cast<int64_t>(DType::kI8)}}, RandomMatrix(DType::kI8, {3, 8}, 17)},
      {{LayoutOp::kMarlinZeroPoints, "t", {u8, 8}}, RandomMatrix(DType::kU8, {64, 3}, 18)},
      {{LayoutOp::kTensorRows, "t", {5}}, RandomMatrix(DType::kF32, {1, 2}, 19)},
      {{LayoutOp::kMarlinExponents, "t", {6}}, RandomMatrix(DType::kU8, {3, 8}, 20)},
  };
  for (const auto& [step, matrix] : cases) {
    const Result<Tensor> there = ApplyStep(step, matrix.view());
    ASSERT_TRUE(there.ok()) << InfoOf(step.op).name << ": " << there.status().ToString();
    const Result<Tensor> back = InvertStep(step, there->view());
    ASSERT_TRUE(back.ok()) << InfoOf(step.op).name << ": " << back.status().ToString();
    EXPECT_TRUE(test::SameBytes(*back, matrix)) << InfoOf(step.op).name;
  }
}

TEST(LayoutStep, SizesThatDoNotFit_AreRefusedWithBothNumbers) {
  const Tensor odd = RandomMatrix(DType::kU8, {33, 4}, 1);
  EXPECT_FALSE(ApplyStep({LayoutOp::kSwapHalves, "t", {}}, odd.view()).ok());
  const Result<Tensor> shuffled = ApplyStep({LayoutOp::kShuffleRows, "t", {128}}, odd.view());
  ASSERT_FALSE(shuffled.ok());
  EXPECT_NE(shuffled.status().message().find("33"), std::string::npos);
  EXPECT_NE(shuffled.status().message().find("32"), std::string::npos);
  EXPECT_FALSE(ApplyStep({LayoutOp::kBlockMajorK, "t", {128}}, odd.view()).ok());
  EXPECT_FALSE(ApplyStep({LayoutOp::kMarlinWeights, "t", {}}, odd.view()).ok());
}

TEST(LayoutRecipe, Text_IsReadBack) {
  LayoutProblem problem;
  problem.hidden = 272;
  problem.intermediate = 80;
  problem.format = {.element = DType::kF4E2M1,
                    .block = {1, 16},
                    .block_scale_dtype = DType::kF8E4M3,
                    .has_tensor_scale = true};
  problem.has_input_scales = problem.fold = true;
  for (const LayoutRecipe& recipe :
       {FlashInferTrtllmRecipe(problem), FlashInferCutlassRecipe(problem), VllmCutlassRecipe(problem),
        MarlinRecipe(problem), FlashInferCuteDslRecipe(problem, true),
        FlashInferCuteDslRecipe(problem, false)}) {
    ASSERT_FALSE(recipe.steps.empty());
    const Result<LayoutRecipe> parsed = LayoutRecipe::Parse(recipe.ToText());
    ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
    EXPECT_EQ(*parsed, recipe);
  }
}

TEST(LayoutRecipe, TextThatIsNoStep_IsRefused) {
  for (const std::string text :
       {"", "swap_halves", "swap_halves()", "no_such_step(gate_up)", "shuffle_rows(gate_up)",
        "shuffle_rows(gate_up, tile=12x)", "shuffle_rows(gate_up, rows=128)",
        "marlin_weights(down, element=F5, activation_bits=16)"}) {
    const Result<LayoutRecipe> parsed = LayoutRecipe::Parse(std::vector<std::string>{text});
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(parsed.status().code(), StatusCode::kBadInput);
  }
}

// Slip 2: zeros behind both halves would make a kernel that splits at the padded size take up rows for gate
// rows.
TEST(UpstreamSlips, GatedPadding_StandsBehindEachHalf) {
  const Tensor gate_up = RandomMatrix(DType::kF8E4M3, {1, 40, 8}, 1);
  const Tensor down = RandomMatrix(DType::kF8E4M3, {1, 8, 20}, 2);
  const Result<AlignedFp8Weights> aligned = AlignFp8MoeWeights(gate_up.view(), down.view(), true);
  ASSERT_TRUE(aligned.ok()) << aligned.status().ToString();
  EXPECT_EQ(aligned->intermediate, 32);
  const std::byte* padded = aligned->gate_up.view().data();
  EXPECT_EQ(std::memcmp(padded, gate_up.view().data(), 20 * 8), 0) << "gate";
  EXPECT_EQ(std::memcmp(padded + 32 * 8, gate_up.view().data() + 20 * 8, 20 * 8), 0) << "up starts at 32";
  for (int64_t index = 20 * 8; index < 32 * 8; ++index) {
    EXPECT_EQ(padded[index], std::byte{0}) << "behind gate";
    EXPECT_EQ(padded[32 * 8 + index], std::byte{0}) << "behind up";
  }
}

// Slip 5: a missing input scale, read as 0, must not become a factor.
TEST(UpstreamSlips, MissingInputScale_IsRefused) {
  const std::vector<float> weights = {0.5F, 0.25F};
  EXPECT_TRUE(MakeFp8OutputScales(weights, 0.1F, weights, 0.2F).ok());
  for (const float bad :
       {0.0F, -1.0F, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    EXPECT_FALSE(MakeFp8OutputScales(weights, bad, weights, 0.2F).ok()) << bad;
    EXPECT_FALSE(MakeFp8OutputScales(weights, 0.1F, weights, bad).ok()) << bad;
  }
}

// Slip 3: two tensor scales become one only by rescaling the other half, and both stay in the file.
TEST(UpstreamSlips, GateAndUpScales_AreFoldedNotDropped) {
  ExpertTensors expert;
  expert.Set("gate_up_block_scale", RandomMatrix(DType::kF8E4M3, {4, 3}, 3));
  Tensor scales = *Tensor::Allocate(DType::kF32, {1, 2});
  scales.mutable_view().as<float>()[0] = 0.25F;
  scales.mutable_view().as<float>()[1] = 1.0F;
  expert.Set("gate_up_tensor_scale", scales);
  const ExpertTensors before = expert;
  LayoutRecipe recipe;
  recipe.Add(LayoutOp::kFoldTensorScale, "gate_up_block_scale");
  ASSERT_TRUE(recipe.Apply({}, expert).ok());
  const float* folded = expert.Find("gate_up_tensor_scale")->view().as<float>();
  EXPECT_EQ(folded[0], 1.0F);
  EXPECT_EQ(folded[1], 1.0F);
  EXPECT_FALSE(test::SameBytes(*expert.Find("gate_up_block_scale"), *before.Find("gate_up_block_scale")));
  EXPECT_GE(expert.squared_error, 0.0);
  ASSERT_TRUE(recipe.Invert(expert).ok());
  EXPECT_TRUE(test::SameBytes(*expert.Find("gate_up_block_scale"), *before.Find("gate_up_block_scale")));
  EXPECT_TRUE(test::SameBytes(*expert.Find("gate_up_tensor_scale"), *before.Find("gate_up_tensor_scale")));
}

TEST(PrepareFp8, PlainFunction_TakesTheStepsOfTheRecipes) {
  LayoutProblem problem;
  problem.format = {.element = DType::kF8E4M3, .has_tensor_scale = true};
  for (const bool gated : {true, false}) {
    for (const bool trtllm : {true, false}) {
      for (const bool blocks : {true, false}) {
        problem.gated = gated;
        problem.hidden = blocks ? 256 : 64;
        problem.intermediate = blocks ? 128 : 20;
        problem.format.block = blocks ? GroupShape{128, 128} : kPerTensor;
        problem.format.has_tensor_scale = !blocks;
        const int64_t rows = problem.parts() * problem.intermediate;
        const Tensor gate_up = RandomMatrix(DType::kF8E4M3, {1, rows, problem.hidden}, 7);
        const Tensor down = RandomMatrix(DType::kF8E4M3, {1, problem.hidden, problem.intermediate}, 8);
        Tensor scale, down_scale;
        if (blocks) {
          scale = RandomMatrix(DType::kF32, {1, rows / 128, problem.hidden / 128}, 9);
          down_scale = *Tensor::Allocate(DType::kF32, {1, problem.hidden / 128, 1});  // zeros are clamped
        }
        const auto made = PrepareFp8ForFlashInfer(gate_up.view(), down.view(), scale.view(),
                                                  down_scale.view(), gated, trtllm);
        ASSERT_TRUE(made.ok()) << made.status().ToString();
        ExpertTensors expert;
        const auto set = [&](const char* name, const Tensor& stacked) {
          if (!stacked.empty()) {
            expert.Set(name, Tensor::Borrow(stacked.view()[0], stacked.owner()));
          }
        };
        set("gate_up", gate_up);
        set("down", down);
        set("gate_up_block_scale", scale);
        set("down_block_scale", down_scale);
        const LayoutRecipe recipe =
            trtllm ? FlashInferTrtllmRecipe(problem) : FlashInferCutlassRecipe(problem);
        ASSERT_TRUE(recipe.Apply({}, expert).ok());
        const auto same = [&](const char* name, const Tensor& ours) {
          const TensorView theirs = expert.Find(name)->view();
          return ours.view().total_bytes() == theirs.total_bytes() &&
                 std::memcmp(ours.view().data(), theirs.data(), static_cast<size_t>(theirs.total_bytes())) ==
                     0;
        };
        EXPECT_TRUE(same("gate_up", made->gate_up)) << gated << trtllm << blocks;
        EXPECT_TRUE(same("down", made->down)) << gated << trtllm << blocks;
        if (blocks) {
          EXPECT_TRUE(same("gate_up_block_scale", made->gate_up_block_scale));
          EXPECT_TRUE(same("down_block_scale", made->down_block_scale));
        }
      }
    }
  }
}

TEST(RotateWeights, Trtllm_InterleavesTheHalvesThenShuffles) {
  const Tensor gate_up = RandomMatrix(DType::kF8E4M3, {2, 64, 4}, 4);
  const Tensor down = RandomMatrix(DType::kF8E4M3, {2, 32, 32}, 5);
  const Result<RotatedWeights> rotated = RotateWeightsForTrtllmFp8(gate_up.view(), down.view(), true);
  ASSERT_TRUE(rotated.ok()) << rotated.status().ToString();
  const std::vector<int32_t> both = Compose(*InterleavedHalves(64), *ShuffledRows(64, 128));
  for (int64_t expert = 0; expert < 2; ++expert) {
    for (int64_t row = 0; row < 64; ++row) {
      EXPECT_EQ(std::memcmp(rotated->gate_up.view().data() + (expert * 64 + row) * 4,
                            gate_up.view().data() + (expert * 64 + both[static_cast<size_t>(row)]) * 4, 4),
                0);
    }
  }
}

}  // namespace
}  // namespace fusedmoe
