#include <immintrin.h>

#include "routing/router_kernels.hpp"

namespace fusedmoe {
namespace {

/// Lanes 0..7 and 8..15.
struct Lanes {
  __m256 low, high;
};

inline Lanes Zero() {
  return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}

inline Lanes MultiplyAdd(const Lanes& a, const Lanes& b, const Lanes& sum) {
  return {_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)};
}

inline void Store(const Lanes& lanes, float* to) {
  _mm256_storeu_ps(to, lanes.low);
  _mm256_storeu_ps(to + 8, lanes.high);
}

template <RouterElement element>
inline __m256 LoadHalf(const std::byte* row, int64_t column) {
  if constexpr (element == RouterElement::kF32) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(row) + column);
  } else {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + column * 2));
    if constexpr (element == RouterElement::kF16) {
      return _mm256_cvtph_ps(codes);
    } else {
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(codes), 16));
    }
  }
}

template <RouterElement element>
inline Lanes Load(const std::byte* row, int64_t column) {
  return {LoadHalf<element>(row, column), LoadHalf<element>(row, column + 8)};
}

constexpr int kTileTokens = 4;

#include "routing/router_tile.inc"

}  // namespace

const RouterKernels kRouterKernelsAvx2 = {Tile, kTileTokens};

}  // namespace fusedmoe
