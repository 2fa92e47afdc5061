#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/cuda/device/ptx.cuh"
#include "weights/codebook.hpp"

/// Indices of 4 bits to the numbers that they stand for. An index is a selector of a byte permutation, whose
/// two operands are eight numbers: one permutation for the lower eight indices, one for the upper, and one
/// that chooses between both by the highest bit of the index.
namespace fusedmoe::cuda {

/// Four numbers of codebook IQ4, plus 128.
constexpr uint32_t Iq4Bytes(int first) {
  uint32_t word = 0;
  for (int i = first + 3; i >= first; --i) {
    word = word << 8 | static_cast<uint32_t>(kIq4Numbers[static_cast<size_t>(i)] + 128);
  }
  return word;
}

/// The numbers of eight indices, plus 128, as pairs: of the even and the odd bytes of each four (IndexBit in
/// weights/fragment_codes.hpp). Fifteen operations.
__device__ __forceinline__ void Iq4Pairs(uint32_t indices, uint32_t (&of)[4]) {
  constexpr uint32_t kLow[2] = {Iq4Bytes(0), Iq4Bytes(4)}, kHigh[2] = {Iq4Bytes(8), Iq4Bytes(12)};
  const uint32_t in_eight = indices & 0x77777777U;
  const uint32_t which = AndOr<0x44444444U>(indices >> 1, 0x32103210U);
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t low = Permute(kLow[0], kLow[1], in_eight >> (8 * i));
    const uint32_t high = Permute(kHigh[0], kHigh[1], in_eight >> (8 * i));
    const uint32_t bytes = Permute(low, high, which >> (8 * i));
    of[i] = bytes & 0x00FF00FFU;
    of[i + 1] = Permute(bytes, 0, 0x4341);
  }
}

}  // namespace fusedmoe::cuda
