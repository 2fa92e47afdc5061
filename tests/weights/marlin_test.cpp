#include "weights/marlin.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "weights/canonical.hpp"

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

}  // namespace
}  // namespace fusedmoe
