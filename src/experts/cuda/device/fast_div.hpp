#pragma once

#include <cstdint>

#include "numerics/host_device.hpp"

namespace fusedmoe::cuda {

/// n / divisor by a multiplication, for 0 <= n with n * divisor < 2^40: the multiplier is rounded up by less
/// than divisor / 2^40, so that the quotient's error stays below 1 / divisor.
struct FastDiv {
  uint64_t multiplier = uint64_t{1} << 40;
  int divisor = 1;

  static constexpr FastDiv By(int64_t divisor) {
    const auto d = static_cast<uint64_t>(divisor);
    return {((uint64_t{1} << 40) + d - 1) / d, static_cast<int>(divisor)};
  }
  FMOE_HOST_DEVICE constexpr int Div(int n) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * multiplier >> 40);
  }
};

}  // namespace fusedmoe::cuda
