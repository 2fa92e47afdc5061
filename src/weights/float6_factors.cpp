#include "weights/float6_factors.hpp"

#include <algorithm>
#include <array>

namespace fusedmoe {
namespace {

constexpr std::array<uint8_t, 32> FactorsOf(int exponent_bits) {
  const int mantissa_bits = 5 - exponent_bits, upper_bits = mantissa_bits - 2;
  std::array<uint8_t, 32> factors{};
  for (int n = 0; n < 16; ++n) {
    const int exponent = n >> upper_bits & ((1 << exponent_bits) - 1);
    const int mantissa = (n & ((1 << upper_bits) - 1)) << 2 | (exponent == 0 ? 0 : 1 << mantissa_bits);
    // The smallest value is 2^-3 of e2m3, and 2^-4 of e3m2.
    const int power = std::max(exponent - 1, 0) + (exponent_bits == 2 ? 1 : 0);
    factors[static_cast<size_t>(n)] = static_cast<uint8_t>(mantissa);
    factors[static_cast<size_t>(16 + n)] = static_cast<uint8_t>(n < 8 ? 1 << power : -(1 << power));
  }
  return factors;
}
constexpr std::array<uint8_t, 32> kE2m3 = FactorsOf(2), kE3m2 = FactorsOf(3);

}  // namespace

const uint8_t* Float6Factors(DType code) {
  return (code == DType::kF6E2M3 ? kE2m3 : kE3m2).data();
}

}  // namespace fusedmoe
