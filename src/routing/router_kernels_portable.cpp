#include <cmath>
#include <cstring>

#include "numerics/codecs.hpp"
#include "routing/router_kernels.hpp"

namespace fusedmoe {
namespace {

/// Plain arrays. Slow where the compiler's baseline has no fused multiply-add, but the same bits as the fast
/// kernels.
struct Lanes {
  float value[16];
};

inline Lanes Zero() {
  return {};
}

inline Lanes MultiplyAdd(const Lanes& a, const Lanes& b, const Lanes& sum) {
  Lanes result;
  for (int lane = 0; lane < 16; ++lane) {
    result.value[lane] = std::fma(a.value[lane], b.value[lane], sum.value[lane]);
  }
  return result;
}

inline void Store(const Lanes& lanes, float* to) {
  std::memcpy(to, lanes.value, sizeof lanes.value);
}

template <RouterElement element>
inline Lanes Load(const std::byte* row, int64_t column) {
  Lanes lanes;
  for (int64_t lane = 0; lane < 16; ++lane) {
    if constexpr (element == RouterElement::kF32) {
      std::memcpy(&lanes.value[lane], row + (column + lane) * 4, 4);
    } else {
      uint16_t code = 0;
      std::memcpy(&code, row + (column + lane) * 2, 2);
      lanes.value[lane] = element == RouterElement::kF16 ? DecodeFp16(code) : DecodeBf16(code);
    }
  }
  return lanes;
}

constexpr int kTileTokens = 4;

#include "routing/router_tile.inc"

}  // namespace

const RouterKernels kRouterKernelsPortable = {Tile, kTileTokens};

}  // namespace fusedmoe
