#include "weights/fragment_offsets.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "numerics/rows.hpp"

/// Groups as scale * (code - zero) against their form of scale and offset, in fp64.
namespace fusedmoe {
namespace {

float Bf16(uint32_t bits) {
  return DecodeCode(DType::kBF16, bits & 0xffffU);
}

struct Group {
  FragmentCode code;
  std::vector<int> codes;  ///< from 0 on
  float scale, zero;

  bool nibbles() const { return code == FragmentCode::kInt4; }
  int middle() const { return nibbles() ? 8 : 128; }
  double Weight(size_t i) const {
    return static_cast<double>(scale) * (static_cast<double>(codes[i]) - zero);
  }
};

struct Moved {
  std::vector<int> codes;
  double scale, offset;

  double Weight(const Group& of, size_t i) const { return scale * (codes[i] - of.middle()) + offset; }
};

Moved Move(const Group& group) {
  const auto count = static_cast<int64_t>(group.codes.size());
  std::vector<uint8_t> staged(group.codes.size(), 0x88);
  for (size_t i = 0; i < group.codes.size(); ++i) {
    const auto code = static_cast<unsigned>(group.codes[i]);
    if (group.nibbles()) {
      staged[i / 2] = static_cast<uint8_t>(i % 2 == 0 ? 0x80U | code : (staged[i / 2] & 15U) | code << 4);
    } else {
      staged[i] = static_cast<uint8_t>(code ^ 0x80U);
    }
  }
  const uint32_t word = MoveToMiddle(group.code, group.scale, group.zero, count, staged.data());
  Moved moved{{}, Bf16(word), std::ldexp(Bf16(word >> 16), -kIntegerExponent)};
  for (size_t i = 0; i < group.codes.size(); ++i) {
    moved.codes.push_back(group.nibbles() ? staged[i / 2] >> (4 * (i % 2)) & 15 : staged[i] ^ 0x80);
  }
  return moved;
}

TEST(FragmentOffsets, CodesWithRoom_ZeroComesToTheMiddle) {
  std::mt19937 random(3);
  for (const auto& [code, highest] : {std::pair{FragmentCode::kInt8, 31},
                                      {FragmentCode::kInt8, 63},
                                      {FragmentCode::kInt4, 3},
                                      {FragmentCode::kInt4, 7}}) {
    for (int round = 0; round < 50; ++round) {
      Group group{
          code, {}, 0.37F, std::uniform_real_distribution<float>(0, static_cast<float>(highest))(random)};
      for (int i = 0; i < 16; ++i) {
        group.codes.push_back(static_cast<int>(random() % static_cast<unsigned>(highest + 1)));
      }
      const Moved moved = Move(group);
      EXPECT_LE(std::fabs(moved.offset), 0.5 * 0.37 * (1 + 0x1p-8)) << "codes to " << highest;
      for (size_t i = 0; i < 16; ++i) {
        EXPECT_EQ(moved.codes[i] - moved.codes[0], group.codes[i] - group.codes[0]) << "code " << i;
      }
    }
  }
}

// Nothing is lost where scales are BF16 and zero is the middle: symmetric weights, whatever their codes.
TEST(FragmentOffsets, Symmetric_Exact) {
  for (const FragmentCode code : {FragmentCode::kInt4, FragmentCode::kInt8}) {
    Group group{code, {}, 0.15625F, code == FragmentCode::kInt4 ? 8.0F : 128.0F};
    group.codes.resize(code == FragmentCode::kInt4 ? 16 : 256);
    std::iota(group.codes.begin(), group.codes.end(), 0);
    const Moved moved = Move(group);
    EXPECT_EQ(moved.offset, 0.0);
    for (size_t i = 0; i < group.codes.size(); ++i) {
      EXPECT_EQ(moved.Weight(group, i), group.Weight(i)) << "code " << i;
    }
  }
}

// Groups of one value, whose scale vanishes beside the zero point, and zero points on either side of all
// codes.
TEST(FragmentOffsets, ZeroFarAway_TheWeightWithinItsRounding) {
  for (const float zero : {-3e7F, -300.0F, -20.0F, 400.0F, 65000.0F, 1e30F}) {
    for (const FragmentCode code : {FragmentCode::kInt4, FragmentCode::kInt8}) {
      const Group group{code, {0, 3, 15, 1, 7}, 1.0F / zero, zero};  // an odd count: the last nibble is alone
      const Moved moved = Move(group);
      for (size_t i = 0; i < group.codes.size(); ++i) {
        EXPECT_NEAR(moved.Weight(group, i), group.Weight(i), 0x1.01p-8 * std::fabs(group.Weight(i)))
            << "zero " << zero << " code " << i;
      }
    }
  }
}

TEST(FragmentOffsets, NotANumber_StaysOne) {
  const float nan = std::nanf("");
  EXPECT_TRUE(std::isnan(Move({FragmentCode::kInt8, {1, 2}, nan, 3.0F}).scale));
  EXPECT_TRUE(std::isnan(Move({FragmentCode::kInt4, {1, 2}, 1.0F, nan}).offset));
}

// What a plan promises of its weights: also where codes leave no room to move, and with the kernel's rounding
// of the result.
TEST(FragmentOffsets, AllCodes_RootMeanSquareWithinThePromise) {
  std::mt19937 random(9);
  std::uniform_real_distribution<float> mantissa(1.0F, 2.0F);
  for (const FragmentCode code : {FragmentCode::kInt4, FragmentCode::kInt8}) {
    const int codes = code == FragmentCode::kInt4 ? 16 : 256;
    for (float where = -1.0F; where <= 2.0F; where += 0.0625F) {
      double error = 0, norm = 0;
      for (int round = 0; round < 200; ++round) {
        const auto all = static_cast<float>(codes);
        Group group{code, {}, mantissa(random), (where + mantissa(random) / 64) * all};
        group.codes.resize(static_cast<size_t>(codes));
        std::iota(group.codes.begin(), group.codes.end(), 0);
        const Moved moved = Move(group);
        for (size_t i = 0; i < group.codes.size(); ++i) {
          const auto sum = static_cast<float>(moved.Weight(group, i));
          const double difference = Bf16(EncodeCode(DType::kBF16, sum)) - group.Weight(i);
          error += difference * difference;
          norm += group.Weight(i) * group.Weight(i);
        }
      }
      EXPECT_LE(std::sqrt(error / norm), kOffsetError) << codes << " codes, zero at " << where << " of them";
    }
  }
}

}  // namespace
}  // namespace fusedmoe
