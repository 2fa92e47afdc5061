#include "core/checked_math.hpp"

namespace fusedmoe {

std::optional<int64_t> CheckedElementCount(std::span<const int64_t> shape) {
  int64_t count = 1;
  bool has_zero = false;
  for (const int64_t dim : shape) {
    if (dim < 0) {
      return std::nullopt;
    }
    has_zero = has_zero || dim == 0;
  }
  if (has_zero) {
    return 0;  // [2^62, 2^62, 0] holds nothing; its partial product must not count as overflow
  }
  for (const int64_t dim : shape) {
    const auto product = CheckedMultiply(count, dim);
    if (!product) {
      return std::nullopt;
    }
    count = *product;
  }
  return count;
}

std::optional<int64_t> CheckedTensorBytes(DType dtype, std::span<const int64_t> shape) {
  const auto count = CheckedElementCount(shape);
  if (!count) {
    return std::nullopt;
  }
  const auto bits = CheckedMultiply(*count, DTypeBits(dtype));
  if (!bits || *bits % 8 != 0) {
    return std::nullopt;
  }
  return *bits / 8;
}

}  // namespace fusedmoe
