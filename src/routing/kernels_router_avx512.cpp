// GCC 12 takes the undefined sources inside its own conversion intrinsics for ours.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "routing/router_kernels.hpp"

namespace fusedmoe {
namespace {

using Lanes = __m512;

inline Lanes Zero() {
  return _mm512_setzero_ps();
}

inline Lanes MultiplyAdd(Lanes a, Lanes b, Lanes sum) {
  return _mm512_fmadd_ps(a, b, sum);
}

inline void Store(Lanes lanes, float* to) {
  _mm512_storeu_ps(to, lanes);
}

template <RouterElement element>
inline Lanes Load(const std::byte* row, int64_t column) {
  if constexpr (element == RouterElement::kF32) {
    return _mm512_loadu_ps(row + column * 4);
  } else {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + column * 2));
    if constexpr (element == RouterElement::kF16) {
      return _mm512_cvtph_ps(codes);
    } else {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16));
    }
  }
}

// 24 sums and what they are made of fill the 32 registers: each row that was converted serves four experts,
// each of weights six tokens. [32, 4096] x [256, 4096] in BF16, both in L2, one thread of Zen 5: 4 x 4 176 to
// 192 GFLOP/s, 8 x 3 200, 5 x 5 222, 6 x 4 223 to 226.
constexpr int kTileTokens = 6;

#include "routing/router_tile.inc"

}  // namespace

const RouterKernels kRouterKernelsAvx512 = {Tile, kTileTokens};

}  // namespace fusedmoe
