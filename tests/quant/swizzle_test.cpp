#include "quant/swizzle.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace fusedmoe {
namespace {

constexpr BlockScaleLayout kLayouts[] = {BlockScaleLayout::kLinear, BlockScaleLayout::k128x4,
                                         BlockScaleLayout::k8x4};

TEST(Swizzle, AnyShape_HasAnInverseAndZeroPadding) {
  for (const auto layout : kLayouts) {
    for (const int64_t rows : {0, 1, 7, 8, 9, 31, 33, 127, 128, 129, 300}) {
      for (const int64_t columns : {0, 1, 3, 4, 5, 9, 44}) {
        for (const int64_t batch : {1, 3}) {
          std::vector<std::byte> linear(static_cast<size_t>(batch * rows * columns));
          for (size_t i = 0; i < linear.size(); ++i) {
            linear[i] = static_cast<std::byte>(i * 7 % 255 + 1);  // never 0, so that padding shows
          }
          std::vector<std::byte> there(
              static_cast<size_t>(batch * BlockScaleBytes(layout, rows, columns)) + 1, std::byte{0xff});
          SwizzleBlockScales(layout, linear.data(), batch, rows, columns, there.data());
          ASSERT_EQ(there.back(), std::byte{0xff}) << "wrote beyond the end";
          there.pop_back();
          const auto zeros = static_cast<size_t>(std::count(there.begin(), there.end(), std::byte{0}));
          ASSERT_EQ(zeros, there.size() - linear.size());
          std::vector<std::byte> back(linear.size());
          UnswizzleBlockScales(layout, there.data(), batch, rows, columns, back.data());
          ASSERT_EQ(back, linear) << rows << "x" << columns;
        }
      }
    }
  }
}

TEST(Swizzle, Layout128x4_IsTheTransposedView) {
  // The layout as a permutation of axes: [M/128, 4, 32, K/4, 4] -> [M/128, K/4, 32, 4, 4].
  const int64_t rows = 384, columns = 20;
  int64_t expected = 0;
  for (int64_t tile_row = 0; tile_row < 3; ++tile_row) {
    for (int64_t tile_column = 0; tile_column < 5; ++tile_column) {
      for (int64_t lane = 0; lane < 32; ++lane) {
        for (int64_t quarter = 0; quarter < 4; ++quarter) {
          for (int64_t k = 0; k < 4; ++k) {
            ASSERT_EQ(BlockScaleOffset(BlockScaleLayout::k128x4, tile_row * 128 + quarter * 32 + lane,
                                       tile_column * 4 + k, columns),
                      expected++);
          }
        }
      }
    }
  }
  EXPECT_EQ(expected, BlockScaleBytes(BlockScaleLayout::k128x4, rows, columns));
}

TEST(Swizzle, Layout8x4_WalksTilesOfEightRows) {
  int64_t expected = 0;
  for (int64_t tile_row = 0; tile_row < 3; ++tile_row) {
    for (int64_t tile_column = 0; tile_column < 2; ++tile_column) {
      for (int64_t row = 0; row < 8; ++row) {
        for (int64_t k = 0; k < 4; ++k) {
          ASSERT_EQ(BlockScaleOffset(BlockScaleLayout::k8x4, tile_row * 8 + row, tile_column * 4 + k, 8),
                    expected++);
        }
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe
