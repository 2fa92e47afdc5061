#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/intrinsics_isa.hpp"
#include "experts/cpu/kernels/unroll_isa.hpp"

/// What is the same beside registers of 256 bits (simd_avx2_isa.hpp) and of 512 (simd_avx512_isa.hpp).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

FMOE_INLINE float FloatOfF16(uint16_t x) {
  return _cvtsh_ss(x);
}

/// Keeps an addition where it stands: GCC 12 reassociates sums of products to a tree, for which there are no
/// registers.
template <typename Vector>
FMOE_INLINE void InPlace(Vector& x) {
  asm("" : "+v"(x));
}

/// Sixteen codes, 128 * high + low where there are two planes, as words in the order 0 2 1 3 of each four.
FMOE_INLINE void StoreWordPairs(void* out, const int8_t* codes, const int8_t* low) {
  __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)codes));
  if (low != 0) {
    const __m256i lower = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)low));
    x = _mm256_add_epi16(_mm256_slli_epi16(x, 7), lower);
  }
  x = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(x, 0xd8), 0xd8);
  _mm256_storeu_si256((__m256i*)out, x);
}

FMOE_INLINE void Prefetch(const uint8_t* p) {
  _mm_prefetch((const char*)p, _MM_HINT_T0);
}
FMOE_INLINE void PrefetchFar(const uint8_t* p) {
  _mm_prefetch((const char*)p, _MM_HINT_T1);
}
/// Kept at this place among the operations on `x` by an asm that claims to change it: compilers move plain
/// prefetches.
template <typename Vector>
FMOE_INLINE void PrefetchBeside(const uint8_t* p, Vector& x) {
  asm("prefetcht0 %1" : "+v"(x) : "m"(*p));
}
template <typename Vector>
FMOE_INLINE void PrefetchFarBeside(const uint8_t* p, Vector& x) {
  asm("prefetcht1 %1" : "+v"(x) : "m"(*p));
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
