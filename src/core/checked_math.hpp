#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <span>

#include <fusedmoe/dtype.hpp>

namespace fusedmoe {

/// Sums and products of sizes that come from outside: nothing where the result does not fit.
inline std::optional<int64_t> CheckedAdd(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::nullopt : std::optional<int64_t>(sum);
}

inline std::optional<int64_t> CheckedMultiply(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::nullopt : std::optional<int64_t>(product);
}

/// The integer that a number from a file is; nothing for fractions, and from 2^53 on, where a double no
/// longer tells neighbours apart.
inline std::optional<int64_t> ExactInteger(double number) {
  return std::abs(number) < 0x1p53 && number == std::trunc(number)
             ? std::optional(static_cast<int64_t>(number))
             : std::nullopt;
}

/// Product of the dimensions; nothing when one is negative or the product overflows. Empty: 1 (a scalar).
std::optional<int64_t> CheckedElementCount(std::span<const int64_t> shape);

/// Bytes of a packed tensor of that shape; nothing on overflow or when the elements do not fill whole bytes.
std::optional<int64_t> CheckedTensorBytes(DType dtype, std::span<const int64_t> shape);

/// Both need a >= 0 and b > 0.
constexpr int64_t CeilDiv(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
constexpr int64_t RoundUp(int64_t a, int64_t b) {
  return CeilDiv(a, b) * b;
}

}  // namespace fusedmoe
