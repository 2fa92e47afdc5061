#pragma once

#include <bit>
#include <cstdint>

/// Marks a function that CPU and device code share; empty for a compiler that knows no devices.
#if defined(__CUDACC__)
#define FMOE_HOST_DEVICE __host__ __device__
#else
#define FMOE_HOST_DEVICE
#endif

namespace fusedmoe {

/// The bit pattern of a single, and back.
FMOE_HOST_DEVICE constexpr uint32_t FloatBits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return std::bit_cast<uint32_t>(value);
#endif
}

FMOE_HOST_DEVICE constexpr float FloatFromBits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

}  // namespace fusedmoe
