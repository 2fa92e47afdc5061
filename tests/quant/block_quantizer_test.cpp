#include "quant/block_quantizer.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_formats.hpp"

namespace fusedmoe {
namespace {

using quant_testing::GaussianRow;

template <typename T>
MutableTensorView View(std::vector<T>& values, DType dtype, const Shape& shape) {
  return {reinterpret_cast<std::byte*>(values.data()), dtype, shape};
}

struct Matrix {
  int64_t rows, columns;
  std::vector<float> values;
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  GroupShape block;

  Matrix(int64_t r, int64_t c, GroupShape b, uint32_t seed = 1)
      : rows(r), columns(c), values(GaussianRow(r * c, seed)), codes(values.size()), block(b) {
    scales.resize(static_cast<size_t>(BlockScaleShape(b, r, c).count()));
  }
  Status Quantize(DType element, const ActivationRule& rule = {}) {
    return QuantizeBlocks(block, rule, View(values, DType::kF32, {rows, columns}),
                          View(codes, element, {rows, columns}),
                          View(scales, DType::kF32, BlockScaleShape(block, rows, columns)));
  }
  std::vector<float> Dequantize(DType element) {
    std::vector<float> out(values.size());
    EXPECT_TRUE(DequantizeBlocks(block, View(codes, element, {rows, columns}),
                                 View(scales, DType::kF32, BlockScaleShape(block, rows, columns)),
                                 View(out, DType::kF32, {rows, columns}))
                    .ok());
    return out;
  }
};

TEST(BlockQuantizer, AnyShape_HasTheAmaxOfItsBlocksAndHalfAStepOfError) {
  for (const GroupShape block :
       {GroupShape{128, 128}, GroupShape{32, 64}, GroupShape{1, 32}, kPerRow, kPerTensor}) {
    for (const auto& [rows, columns] :
         std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {130, 257}, {33, 63}, {128, 128}}) {
      for (const DType element : {DType::kF8E4M3, DType::kI8}) {
        Matrix matrix(rows, columns, block, static_cast<uint32_t>(rows));
        ASSERT_TRUE(matrix.Quantize(element).ok());
        const auto decoded = matrix.Dequantize(element);
        const int64_t height = block.row == -1 ? rows : block.row;
        const int64_t width = block.col == -1 ? columns : block.col;
        const int64_t across = (columns + width - 1) / width;
        std::vector<float> amax(matrix.scales.size());
        for (int64_t i = 0; i < rows * columns; ++i) {
          const auto at = static_cast<size_t>(i / columns / height * across + i % columns / width);
          amax[at] = std::max(amax[at], std::fabs(matrix.values[static_cast<size_t>(i)]));
        }
        for (size_t i = 0; i < amax.size(); ++i) {
          ASSERT_EQ(matrix.scales[i], amax[i] / LargestValue(element));
        }
        for (int64_t i = 0; i < rows * columns; ++i) {
          const auto at = static_cast<size_t>(i / columns / height * across + i % columns / width);
          const float value = matrix.values[static_cast<size_t>(i)];
          // Half a step: of e4m3 2^-4 of the value or half of its smallest subnormal, of int8 half a scale.
          const float step = element == DType::kI8
                                 ? matrix.scales[at] / 2
                                 : std::max(std::fabs(value) / 16, matrix.scales[at] * 0x1p-10F);
          ASSERT_NEAR(decoded[static_cast<size_t>(i)], value, step * 1.00001F);
        }
      }
    }
  }
}

TEST(BlockQuantizer, Requantizing_MakesPowersOfTwoAndKeepsTheValuesNear) {
  Matrix matrix(70, 96, {32, 64});
  ASSERT_TRUE(matrix.Quantize(DType::kF8E4M3).ok());
  const auto before = matrix.Dequantize(DType::kF8E4M3);
  const MutableTensorView codes = View(matrix.codes, DType::kF8E4M3, {70, 96});
  const MutableTensorView scales = View(matrix.scales, DType::kF32, {3, 2});
  ASSERT_TRUE(RequantizeBlocksToPowersOfTwo(matrix.block, {}, codes, scales, codes, scales).ok())
      << "in place";
  const auto after = matrix.Dequantize(DType::kF8E4M3);
  for (const float scale : matrix.scales) {
    EXPECT_EQ(std::exp2(std::round(std::log2(scale))), scale);
  }
  for (size_t i = 0; i < after.size(); ++i) {
    ASSERT_NEAR(after[i], before[i], std::max(std::fabs(before[i]) / 16, matrix.scales[0] * 0x1p-9F));
  }
}

TEST(BlockQuantizer, RescaleCodes_RoundsOnceToNearest) {
  std::vector<uint8_t> codes(256);
  for (size_t i = 0; i < 256; ++i) {
    codes[i] = static_cast<uint8_t>(i);
  }
  const MutableTensorView view = View(codes, DType::kF8E4M3, {1, 256});
  ASSERT_TRUE(RescaleCodes(0.03F, 0.05F, view).ok());
  for (uint32_t code = 0; code < 256; ++code) {
    const float value = DecodeCode(DType::kF8E4M3, code);
    const float moved = DecodeCode(DType::kF8E4M3, codes[code]);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(moved));
    } else {
      EXPECT_EQ(moved, DecodeCode(DType::kF8E4M3, EncodeCode(DType::kF8E4M3, value * 0.6F)));
    }
  }
  for (const float bad : {0.0F, -1.0F, INFINITY, std::nanf("")}) {
    EXPECT_FALSE(RescaleCodes(bad, 1.0F, view).ok());
    EXPECT_FALSE(RescaleCodes(1.0F, bad, view).ok());
  }
}

TEST(BlockQuantizer, NanStaysInItsBlock) {
  Matrix matrix(4, 8, {2, 4});
  matrix.values[0] = std::nanf("");
  ASSERT_TRUE(matrix.Quantize(DType::kF8E4M3).ok());
  const auto decoded = matrix.Dequantize(DType::kF8E4M3);
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_EQ(std::isnan(decoded[i]), i / 8 < 2 && i % 8 < 4) << i;
  }
}

TEST(BlockQuantizer, Scaled_KeepsZeroBlocksAndNanToThemselves) {
  Matrix matrix(4, 8, {2, 4});
  for (const size_t i : {0U, 1U, 2U, 3U, 8U, 9U, 10U, 11U}) {
    matrix.values[i] = 0.0F;
  }
  matrix.values[4] = std::nanf("");
  ASSERT_TRUE(ScaledQuantizeBlocks(matrix.block, View(matrix.values, DType::kF32, {4, 8}),
                                   View(matrix.codes, DType::kF8E4M3, {4, 8}),
                                   View(matrix.scales, DType::kF32, {2, 2}))
                  .ok());
  EXPECT_EQ(matrix.scales[0], 1.0F / (1.0F / 1e-12F * 448.0F));
  const auto decoded = matrix.Dequantize(DType::kF8E4M3);
  for (size_t i = 0; i < 32; ++i) {
    const bool first_rows = i / 8 < 2, first_columns = i % 8 < 4;
    EXPECT_EQ(std::isnan(decoded[i]), first_rows && !first_columns) << i;
    EXPECT_TRUE(!(first_rows && first_columns) || decoded[i] == 0.0F) << i;
  }
}

TEST(BlockQuantizer, OperandsThatDoNotFit_AreRefused) {
  Matrix matrix(4, 8, {2, 4});
  EXPECT_FALSE(ScaledQuantizeBlocks(matrix.block, View(matrix.values, DType::kF32, {4, 8}),
                                    View(matrix.codes, DType::kU8, {4, 8}),
                                    View(matrix.scales, DType::kF32, {2, 2}))
                   .ok());
  EXPECT_FALSE(matrix.Quantize(DType::kF4E2M1).ok());
  EXPECT_FALSE(matrix.Quantize(DType::kU8).ok());
  matrix.block = {0, 4};
  EXPECT_FALSE(QuantizeBlocks(matrix.block, {}, View(matrix.values, DType::kF32, {4, 8}),
                              View(matrix.codes, DType::kI8, {4, 8}),
                              View(matrix.scales, DType::kF32, {2, 2}))
                   .ok());
  const Status scales =
      DequantizeBlocks({2, 4}, View(matrix.codes, DType::kI8, {4, 8}),
                       View(matrix.scales, DType::kF32, {4, 1}), View(matrix.values, DType::kF32, {4, 8}));
  EXPECT_EQ(scales.code(), StatusCode::kBadInput);
  EXPECT_NE(scales.message().find("[2, 2]"), std::string::npos) << scales.message();
}

}  // namespace
}  // namespace fusedmoe
