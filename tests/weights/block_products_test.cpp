#include "weights/block_products.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "numerics/rows.hpp"

namespace fusedmoe {
namespace {

/// Every code in each row, every scale in two rows.
CanonicalMatrix EveryPair(DType element, DType scale) {
  CanonicalMatrix matrix;
  matrix.format.element = element;
  matrix.format.block_scale_dtype = scale;
  matrix.format.block = {2, 1};
  matrix.cols = 256;
  matrix.rows = 512;
  matrix.codes = *Tensor::Allocate(element, Shape{matrix.rows, matrix.cols});
  matrix.block_scale = *Tensor::Allocate(scale, Shape{256, matrix.cols});
  const int64_t bytes = matrix.codes.view().stride_bytes(0);
  auto* codes = reinterpret_cast<uint8_t*>(matrix.codes.mutable_view().data());
  auto* scales = reinterpret_cast<uint8_t*>(matrix.block_scale.mutable_view().data());
  for (int64_t row = 0; row < matrix.rows; ++row) {
    std::iota(codes + row * bytes, codes + (row + 1) * bytes, uint8_t{0});
    std::fill_n(scales + row / 2 * matrix.cols, matrix.cols, static_cast<uint8_t>(row / 2));
  }
  return matrix;
}

TEST(BlockProducts_EveryCodeAndScale, AreExactAsFarAsBf16Reaches) {
  for (const DType element : {DType::kF4E2M1, DType::kF8E4M3}) {
    for (const DType scale : {DType::kF8E4M3, DType::kF8E8M0}) {
      const CanonicalMatrix matrix = EveryPair(element, scale);
      ASSERT_TRUE(BecomesProducts(matrix.format));
      std::vector<uint16_t> products(static_cast<size_t>(matrix.cols));
      for (int64_t row = 0; row < matrix.rows; ++row) {
        MultiplyRow(matrix, row, products.data());
        const std::byte* codes = matrix.codes.view().data() + row * matrix.codes.view().stride_bytes(0);
        const auto factor = static_cast<double>(DecodeCode(scale, static_cast<uint32_t>(row / 2)));
        for (int64_t col = 0; col < matrix.cols; ++col) {
          const double want =
              static_cast<double>(DecodeCode(element, LoadCode(element, codes, col))) * factor;
          const auto value =
              static_cast<double>(DecodeCode(DType::kBF16, products[static_cast<size_t>(col)]));
          if (std::isnan(want)) {
            ASSERT_TRUE(std::isnan(value)) << DTypeName(element) << " " << DTypeName(scale) << " " << row;
          } else if (std::fabs(want) < 0x1p-126) {
            ASSERT_LE(std::fabs(value - want), 0x1p-133) << row << " " << col;
          } else if (std::fabs(want) < 0x1p128) {
            ASSERT_EQ(value, want) << DTypeName(element) << " " << DTypeName(scale) << " " << row << " "
                                   << col;
          } else {
            ASSERT_TRUE(std::isinf(value)) << row << " " << col;
          }
        }
      }
    }
  }
}

TEST(BlockProducts_OtherWeights, KeepTheirScales) {
  WeightFormat format;
  format.element = DType::kF8E4M3;
  EXPECT_FALSE(BecomesProducts(format)) << "no block scales";
  format.block_scale_dtype = DType::kF8E8M0;
  format.block = {1, 32};
  EXPECT_FALSE(BecomesProducts(format)) << "blocks along the inputs";
  format.block = {32, 1};
  EXPECT_TRUE(BecomesProducts(format));
  format.block_scale_dtype = DType::kF32;
  EXPECT_FALSE(BecomesProducts(format)) << "24 bits of scale";
  format.block_scale_dtype = DType::kF8E8M0;
  format.element = DType::kU8;
  EXPECT_FALSE(BecomesProducts(format)) << "integers have zero points";
}

}  // namespace
}  // namespace fusedmoe
