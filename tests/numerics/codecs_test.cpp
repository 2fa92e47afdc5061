#include "numerics/codecs.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "numerics/integer_codecs.hpp"

namespace fusedmoe {
namespace {

TEST(Bf16, EveryCode_SurvivesTheRoundTrip) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const float value = DecodeBf16(static_cast<uint16_t>(code));
    if (std::isnan(value)) {
      EXPECT_EQ(EncodeBf16Rne(value), (code & 0x8000U) | 0x7fc0U);
    } else {
      ASSERT_EQ(EncodeBf16Rne(value), code);
      ASSERT_EQ(FloatBits(value), code << 16);
    }
  }
}

TEST(Bf16, EveryMidpointAndItsNeighbours_RoundToNearestEven) {
  for (uint32_t code = 0; code < 0x7f80;
       ++code) {  // 0x7f80 is infinity: the last midpoint is the overflow edge
    const uint32_t middle = (code << 16) | 0x8000U;
    for (const uint32_t sign : {0U, 0x8000U}) {
      const uint32_t upper = sign | (code + 1);
      const uint32_t lower = sign | code;
      ASSERT_EQ(EncodeBf16Rne(FloatFromBits(sign << 16 | (middle - 1))), lower);
      ASSERT_EQ(EncodeBf16Rne(FloatFromBits(sign << 16 | middle)), code % 2 == 0 ? lower : upper);
      ASSERT_EQ(EncodeBf16Rne(FloatFromBits(sign << 16 | (middle + 1))), upper);
    }
  }
}

TEST(Bf16, Overflow_IsInfinity) {
  const float largest = std::numeric_limits<float>::max();
  EXPECT_EQ(EncodeBf16Rne(largest), 0x7f80);
  EXPECT_EQ(EncodeBf16Rne(-largest), 0xff80);
  EXPECT_EQ(EncodeBf16Rne(FloatFromBits(0x7f800001U)), 0x7fc0) << "NaN stays NaN";
}

TEST(E2m1TiesTowardZero, DiffersFromNearestEvenOnlyAtTiesAndZero) {
  for (int i = 0; i <= 800; ++i) {
    const float value = static_cast<float>(i) / 100.0F;
    const bool tie = value == 0.75F || value == 1.75F || value == 3.5F;
    const int expected = tie ? EncodeE2m1RneSaturating(value) - 1 : EncodeE2m1RneSaturating(value);
    EXPECT_EQ(EncodeE2m1TiesTowardZero(value) & 7, expected) << value;
    EXPECT_EQ(EncodeE2m1TiesTowardZero(-value) & 7, expected) << value;
    EXPECT_EQ(EncodeE2m1TiesTowardZero(-value) & 8, 8);
    EXPECT_EQ(EncodeE2m1TiesTowardZero(value) & 8, i == 0 ? 8 : 0) << "zero carries the sign bit";
  }
}

TEST(E8m0, EveryCode_IsAPowerOfTwo) {
  for (int code = 0; code < 255; ++code) {
    const float value = DecodeE8m0(static_cast<uint8_t>(code));
    EXPECT_EQ(static_cast<double>(value), std::ldexp(1.0, code - 127));
    EXPECT_EQ(EncodeE8m0Floor(value), code);
    EXPECT_EQ(EncodeE8m0Ceil(value), code);
    EXPECT_EQ(EncodeE8m0Nearest(value), code);
    EXPECT_EQ(FloorLog2(value), code - 127);
    EXPECT_EQ(CeilLog2(value), code - 127);
  }
  EXPECT_TRUE(std::isnan(DecodeE8m0(255)));
}

TEST(E8m0, BetweenPowers_EachRoundingDoesWhatItsNameSays) {
  for (int code = 0; code < 254; ++code) {
    const float low = DecodeE8m0(static_cast<uint8_t>(code));
    const float high = DecodeE8m0(static_cast<uint8_t>(code + 1));
    const float middle = low * 1.5F;
    for (const float value : {std::nextafterf(low, high), std::nextafterf(middle, low), middle,
                              std::nextafterf(middle, high), std::nextafterf(high, low)}) {
      EXPECT_EQ(EncodeE8m0Floor(value), code) << value;
      EXPECT_EQ(EncodeE8m0Ceil(value), code + 1) << value;
      EXPECT_EQ(EncodeE8m0Nearest(value), value < middle ? code : code + 1) << value;
      EXPECT_EQ(FloorLog2(value), code - 127);
      EXPECT_EQ(CeilLog2(value), code - 126);
    }
  }
}

TEST(E8m0, OutsideItsRange_ClampsOrIsNan) {
  for (const auto encode : {EncodeE8m0Floor, EncodeE8m0Ceil, EncodeE8m0Nearest}) {
    EXPECT_EQ(encode(0.0F), 0);
    EXPECT_EQ(encode(-0.0F), 0);
    EXPECT_EQ(encode(1e-45F), 0);
    EXPECT_EQ(encode(std::numeric_limits<float>::max()), 254);
    EXPECT_EQ(encode(INFINITY), 255);
    EXPECT_EQ(encode(-1.0F), 255);
    EXPECT_EQ(encode(std::nanf("")), 255);
  }
}

TEST(E8m0, Subnormals_HaveExactLogarithms) {
  for (int shift = 0; shift < 23; ++shift) {
    EXPECT_EQ(FloorLog2(FloatFromBits(1U << shift)), shift - 149);
    EXPECT_EQ(CeilLog2(FloatFromBits(1U << shift)), shift - 149);
    if (shift > 0) {
      EXPECT_EQ(FloorLog2(FloatFromBits((1U << shift) + 1)), shift - 149);
      EXPECT_EQ(CeilLog2(FloatFromBits((1U << shift) + 1)), shift - 148);
    }
  }
}

TEST(Int8, EveryQuarterStep_RoundsByItsName) {
  for (int quarter = -600; quarter <= 600; ++quarter) {
    const float value = static_cast<float>(quarter) / 4.0F;
    const auto clamp = [](double v) { return static_cast<int>(std::min(127.0, std::max(-128.0, v))); };
    EXPECT_EQ(EncodeInt8RneSaturating(value), clamp(std::nearbyint(static_cast<double>(value)))) << value;
    EXPECT_EQ(RoundHalfAway(value), std::round(value)) << value;
    EXPECT_EQ(Truncate(value), std::trunc(value)) << value;
    const auto clamp4 = [](double v) { return static_cast<int>(std::min(7.0, std::max(-8.0, v))); };
    EXPECT_EQ(DecodeInt4(EncodeInt4RneSaturating(value)), clamp4(std::nearbyint(static_cast<double>(value))));
    EXPECT_EQ(EncodeUint4RneSaturating(value),
              std::min(15.0, std::max(0.0, std::nearbyint(static_cast<double>(value)))));
    EXPECT_EQ(EncodeUint8RneSaturating(value),
              std::min(255.0, std::max(0.0, std::nearbyint(static_cast<double>(value)))));
  }
}

TEST(Int8, NeighboursOfTies_GoToTheNearerSide) {
  for (int i = -127; i < 127; ++i) {
    const float tie = static_cast<float>(i) + 0.5F;
    EXPECT_EQ(EncodeInt8RneSaturating(std::nextafterf(tie, -1000.0F)), i);
    EXPECT_EQ(EncodeInt8RneSaturating(std::nextafterf(tie, 1000.0F)), i + 1);
    EXPECT_EQ(RoundHalfAway(std::nextafterf(tie, -1000.0F)), static_cast<float>(i));
    EXPECT_EQ(RoundHalfAway(std::nextafterf(tie, 1000.0F)), static_cast<float>(i + 1));
  }
}

TEST(Int8, NanIsZeroAndInfinitySaturates) {
  EXPECT_EQ(EncodeInt8RneSaturating(std::nanf("")), 0);
  EXPECT_EQ(EncodeInt8RneSaturating(INFINITY), 127);
  EXPECT_EQ(EncodeInt8RneSaturating(-INFINITY), -128);
  EXPECT_EQ(EncodeInt8RneSaturating(3e38F), 127);
}

TEST(Int4, EveryNibble_HasItsValue) {
  for (int code = 0; code < 16; ++code) {
    EXPECT_EQ(DecodeInt4(static_cast<uint8_t>(code)), code < 8 ? code : code - 16);
    EXPECT_EQ(DecodeInt4(static_cast<uint8_t>(code | 0x50)), code < 8 ? code : code - 16);
  }
}

}  // namespace
}  // namespace fusedmoe
