#include "numerics/rows.hpp"
#include "numerics/element_types.hpp"
#include "numerics/row_math.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace fusedmoe {
namespace {

constexpr DType kAll[] = {
#define FMOE_TEST_DTYPE(id, name, bits, what) DType::id,
    FMOE_DTYPE_TABLE(FMOE_TEST_DTYPE)
#undef FMOE_TEST_DTYPE
};

std::vector<DType> Numeric() {
  std::vector<DType> types;
  for (const DType dtype : kAll) {
    if (IsNumeric(dtype)) {
      types.push_back(dtype);
    }
  }
  return types;
}

class RowTest : public testing::TestWithParam<DType> {};

INSTANTIATE_TEST_SUITE_P(EveryType, RowTest, testing::ValuesIn(Numeric()),
                         [](const auto& test) { return std::string(DTypeName(test.param)); });

std::vector<float> RandomValues(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 3.0F);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

bool SameBits(float a, float b) {
  return std::memcmp(&a, &b, 4) == 0 || (std::isnan(a) && std::isnan(b));
}

TEST_P(RowTest, EveryCode_IsTheSameAloneInARowAndAtAnyPosition) {
  const DType dtype = GetParam();
  if (DTypeBits(dtype) > 16) {
    EXPECT_EQ(EncodeCode(dtype, 1.0F), 0U) << "codes are for elements of at most 16 bits";
    return;
  }
  const int64_t count = int64_t{1} << DTypeBits(dtype);
  std::vector<std::byte> row(static_cast<size_t>(PackedBytes(dtype, count)));
  for (int64_t code = 0; code < count; ++code) {
    StoreCode(dtype, row.data(), code, static_cast<uint32_t>(code));
  }
  std::vector<float> decoded(static_cast<size_t>(count));
  DecodeRow(dtype, row.data(), 0, count, decoded.data());
  for (int64_t code = 0; code < count; ++code) {
    ASSERT_EQ(LoadCode(dtype, row.data(), code), static_cast<uint32_t>(code));
    float single = 0.0F;
    DecodeRow(dtype, row.data(), code, 1, &single);
    ASSERT_TRUE(SameBits(single, decoded[static_cast<size_t>(code)])) << "code " << code;
    ASSERT_TRUE(SameBits(DecodeCode(dtype, static_cast<uint32_t>(code)), single));
  }
}

TEST_P(RowTest, SlicesAtAnyOffset_EqualTheWholeRow) {
  const DType dtype = GetParam();
  const int64_t count = 41;
  const auto values = RandomValues(count, 7);
  std::vector<std::byte> row(static_cast<size_t>(PackedBytes(dtype, count)));
  EncodeRow(dtype, values.data(), count, row.data());
  std::vector<float> whole(41);
  DecodeRow(dtype, row.data(), 0, count, whole.data());
  for (int64_t first = 0; first <= count; ++first) {
    for (int64_t length = 0; first + length <= count; ++length) {
      std::vector<float> slice(static_cast<size_t>(length) + 1, -77.0F);
      DecodeRow(dtype, row.data(), first, length, slice.data());
      for (int64_t i = 0; i < length; ++i) {
        ASSERT_TRUE(SameBits(slice[static_cast<size_t>(i)], whole[static_cast<size_t>(first + i)]));
      }
      ASSERT_EQ(slice.back(), -77.0F) << "wrote beyond the slice";
    }
  }
}

TEST_P(RowTest, Encode_EqualsElementByElement_AndWritesNoByteMore) {
  const DType dtype = GetParam();
  for (int64_t count = 0; count <= 13; ++count) {
    const auto values = RandomValues(count, static_cast<uint32_t>(count) + 1);
    const auto bytes = static_cast<size_t>(PackedBytes(dtype, count));
    std::vector<std::byte> row(bytes + 2, std::byte{0xa5});
    EncodeRow(dtype, values.data(), count, row.data());
    EXPECT_EQ(row[bytes], std::byte{0xa5});
    if (DTypeBits(dtype) <= 16) {
      std::vector<std::byte> expected(bytes);
      for (int64_t i = 0; i < count; ++i) {
        StoreCode(dtype, expected.data(), i, EncodeCode(dtype, values[static_cast<size_t>(i)]));
      }
      row.resize(bytes);
      EXPECT_EQ(row, expected) << "count " << count << " (unused bits are zero)";
    }
  }
}

TEST_P(RowTest, RoundRow_IsIdempotent) {
  const DType dtype = GetParam();
  auto values = RandomValues(600, 3);
  RoundRow(dtype, values.data(), 600);
  auto again = values;
  RoundRow(dtype, again.data(), 600);
  for (size_t i = 0; i < 600; ++i) {
    ASSERT_TRUE(SameBits(values[i], again[i]));
  }
}

TEST_P(RowTest, Largest_IsReachedAndNotExceeded) {
  const DType dtype = GetParam();
  const float largest = LargestValue(dtype);
  float value = largest;
  RoundRow(dtype, &value, 1);
  EXPECT_EQ(value, largest);
  const bool overflows_to_infinity = dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF32;
  value = 3.4e38F;
  RoundRow(dtype, &value, 1);
  if (dtype == DType::kI32 || dtype == DType::kU32) {
    EXPECT_GE(value, largest);  // INT32_MAX itself is no fp32 number
  } else if (!overflows_to_infinity && dtype != DType::kF64) {
    EXPECT_EQ(value, largest);
  }
}

TEST(Rows, SixBitStream_IsLittleEndianFourInThreeBytes) {
  std::byte row[3] = {};
  const uint32_t codes[4] = {0x01, 0x22, 0x3f, 0x15};
  for (int64_t i = 0; i < 4; ++i) {
    StoreCode(DType::kF6E3M2, row, i, codes[i]);
  }
  const uint32_t word = codes[0] | codes[1] << 6 | codes[2] << 12 | codes[3] << 18;
  EXPECT_EQ(row[0], static_cast<std::byte>(word & 0xff));
  EXPECT_EQ(row[1], static_cast<std::byte>(word >> 8 & 0xff));
  EXPECT_EQ(row[2], static_cast<std::byte>(word >> 16));
}

TEST(Rows, EvenElementOfABytePair_IsTheLowNibble) {
  const float values[2] = {0.5F, -6.0F};
  std::byte byte{};
  EncodeRow(DType::kF4E2M1, values, 2, &byte);
  EXPECT_EQ(byte, std::byte{0xf1});
}

TEST(Rows, StoreCode_LeavesNeighboursAlone) {
  for (const DType dtype : {DType::kF4E2M1, DType::kU4, DType::kF6E2M3, DType::kF6E3M2, DType::kU8}) {
    std::byte row[12];
    for (const int fill : {0x00, 0xff}) {
      for (int64_t i = 0; i < 12; ++i) {
        std::memset(row, fill, sizeof(row));
        StoreCode(dtype, row, i, 0x2a);
        const uint32_t mask = (1U << DTypeBits(dtype)) - 1;
        for (int64_t j = 0; j < 12; ++j) {
          EXPECT_EQ(LoadCode(dtype, row, j), j == i ? 0x2a & mask : static_cast<uint32_t>(fill) & mask);
        }
      }
    }
  }
}

TEST(Rows, Unnumeric_GivesZerosAndStoresNothing) {
  for (const DType dtype : {DType::kBool, DType::kC64, DType::kI64, DType::kU64}) {
    EXPECT_FALSE(IsNumeric(dtype));
    std::byte row[16];
    std::memset(row, 0x55, sizeof(row));
    float out = 3.0F;
    DecodeRow(dtype, row, 0, 1, &out);
    EXPECT_EQ(out, 0.0F);
    EncodeRow(dtype, &out, 1, row);
    EXPECT_EQ(row[0], std::byte{0x55});
    EXPECT_EQ(LargestValue(dtype), 0.0F);
  }
}

TEST(Rows, Amax_KeepsNanAndTheFiniteFormSkipsIt) {
  const float values[5] = {-3.0F, 2.0F, -0.0F, INFINITY, 1.0F};
  EXPECT_EQ(RowAmax(values, 3), 3.0F);
  EXPECT_EQ(RowAmax(values, 4), INFINITY);
  EXPECT_EQ(RowFiniteAmax(values, 5), 3.0F);
  EXPECT_EQ(RowAmax(values, 0), 0.0F);
  EXPECT_FALSE(std::signbit(RowAmax(values + 2, 1)));
  for (size_t at = 0; at < 4; ++at) {
    float with_nan[4] = {1.0F, INFINITY, 2.0F, 3.0F};
    with_nan[at] = -std::nanf("");
    EXPECT_TRUE(std::isnan(RowAmax(with_nan, 4))) << at;
    EXPECT_EQ(RowFiniteAmax(with_nan, 4), at == 3 ? 2.0F : 3.0F);
  }
}

TEST(Rows, Wide_IntegersRoundHalfEvenAndSaturate) {
  const float values[6] = {2.5F, -3.5F, 4194304.5F, 3e9F, -3e9F, 8388609.0F};
  int32_t out[6];
  EncodeRow(DType::kI32, values, 6, reinterpret_cast<std::byte*>(out));
  EXPECT_EQ(out[0], 2);
  EXPECT_EQ(out[1], -4);
  EXPECT_EQ(out[2], 4194304);
  EXPECT_EQ(out[3], INT32_MAX);
  EXPECT_EQ(out[4], INT32_MIN);
  EXPECT_EQ(out[5], 8388609);
}

TEST(Rows, DotRowsOfEveryLengthIsTheExactSum) {
  // Small integers: every partial sum is exact, so the order of additions cannot hide a lost element.
  std::vector<float> a, b;
  double expected = 0.0;
  for (int64_t count = 0; count <= 40; ++count) {
    EXPECT_EQ(DotRows(a.data(), b.data(), count), expected) << "length " << count;
    a.push_back(static_cast<float>(count + 1));
    b.push_back(static_cast<float>(3 - 2 * count));
    expected += static_cast<double>(a.back()) * static_cast<double>(b.back());
  }
}

}  // namespace
}  // namespace fusedmoe
