// Floats of six bits as products of two bytes.
#include "weights/float6_factors.hpp"

#include <gtest/gtest.h>

#include "numerics/rows.hpp"

namespace fusedmoe {
namespace {

TEST(Float6Factors, GiveEveryValueInSixteenths) {
  for (const DType type : {DType::kF6E2M3, DType::kF6E3M2}) {
    const uint8_t* factors = Float6Factors(type);
    for (uint32_t code = 0; code < 64; ++code) {
      const uint32_t upper = code >> 2, low = code & 3;
      ASSERT_EQ(factors[upper] & 3, 0) << DTypeName(type) << " leaves no room for the low bits of " << code;
      const int first = factors[upper] | static_cast<int>(low);
      const int second = static_cast<int8_t>(factors[16 + upper]);
      EXPECT_EQ(static_cast<float>(first * second), 16 * DecodeCode(type, code))
          << DTypeName(type) << " code " << code << ": " << first << " * " << second;
    }
  }
}

}  // namespace
}  // namespace fusedmoe
