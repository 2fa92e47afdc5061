#include "numerics/finite_rows.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "numerics/rows.hpp"

namespace fusedmoe {
namespace {

// Every code, last in a row of 37 ones.
TEST(FiniteRows_, SayOfEveryCodeWhatItsValueSays) {
  for (const DType dtype : {DType::kF8E4M3, DType::kF8E5M2, DType::kF8E8M0, DType::kF16, DType::kBF16}) {
    const int bytes = DTypeBits(dtype) / 8;
    const std::vector<float> ones(38, 1.0F);
    std::vector<std::byte> row(38 * static_cast<size_t>(bytes));
    EncodeRow(dtype, ones.data(), 38, row.data());
    for (const bool may_be_negative : {false, true}) {
      const FiniteRows finite(dtype, may_be_negative);
      for (uint32_t code = 0; code < 1U << DTypeBits(dtype); ++code) {
        std::memcpy(row.data() + static_cast<ptrdiff_t>(37) * bytes, &code, static_cast<size_t>(bytes));
        const float value = DecodeCode(dtype, code);
        const bool right = std::isfinite(value) && (may_be_negative || !std::signbit(value));
        ASSERT_EQ(finite.Hold(row.data(), 38), right) << DTypeName(dtype) << " " << code;
        ASSERT_TRUE(finite.Hold(row.data(), 37));
      }
    }
  }
}

TEST(FiniteRows_, SayItOfFp32) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float values[] = {0.0F,   -0.0F,    1.0F,      -1.0F,        std::numeric_limits<float>::max(),
                          1e-45F, infinity, -infinity, std::nanf("")};
  for (const bool may_be_negative : {false, true}) {
    const FiniteRows finite(DType::kF32, may_be_negative);
    for (const float value : values) {
      const float row[] = {1.0F, value, 2.0F};
      EXPECT_EQ(finite.Hold(reinterpret_cast<const std::byte*>(row), 3),
                std::isfinite(value) && (may_be_negative || !std::signbit(value)))
          << value;
    }
  }
}

TEST(FiniteRows_, LeaveOtherTypesToACloserLook) {
  const std::byte row[16] = {};
  EXPECT_FALSE(FiniteRows(DType::kF4E2M1, false).Hold(row, 1));
  EXPECT_FALSE(FiniteRows(DType::kF64, false).Hold(row, 1));
}

}  // namespace
}  // namespace fusedmoe
