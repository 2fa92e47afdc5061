#pragma once

/// The widest registers that the flags of this file allow.
#if defined(__aarch64__)
#include "experts/cpu/kernels/simd_neon_isa.hpp"
#elif defined(__AVX512BW__)
#include "experts/cpu/kernels/simd_avx512_isa.hpp"
#else
#include "experts/cpu/kernels/simd_avx2_isa.hpp"
#endif

namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Bits [kFrom, kFrom + kCount) of every byte, at kTo.
template <int kFrom, int kTo, int kCount>
FMOE_INLINE Ints MoveBits(Ints x) {
  constexpr int kMask = (int)(((1U << kCount) - 1) * 0x01010101U << kTo);
  if constexpr (kFrom > kTo) {
    return IntAnd(ShiftRight<kFrom - kTo>(x), IntSet(kMask));
  } else if constexpr (kFrom < kTo) {
    return IntAnd(ShiftLeft<kTo - kFrom>(x), IntSet(kMask));
  } else {
    return IntAnd(x, IntSet(kMask));
  }
}

/// sum + the products of words, two of each lane.
FMOE_INLINE Ints WordDot(Ints sum, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, a, b);
#elif defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
  return IntAdd(sum, MultiplyAddWordPairs(a, b));
#endif
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
