#include <arm_neon.h>

#include "routing/router_kernels.hpp"

namespace fusedmoe {
namespace {

struct Lanes {
  float32x4_t quarter[4];
};

inline Lanes Zero() {
  const float32x4_t zero = vdupq_n_f32(0.0F);
  return {{zero, zero, zero, zero}};
}

inline Lanes MultiplyAdd(const Lanes& a, const Lanes& b, const Lanes& sum) {
  Lanes result;
  for (int i = 0; i < 4; ++i) {
    result.quarter[i] = vfmaq_f32(sum.quarter[i], a.quarter[i], b.quarter[i]);
  }
  return result;
}

inline void Store(const Lanes& lanes, float* to) {
  for (int i = 0; i < 4; ++i) {
    vst1q_f32(to + 4 * i, lanes.quarter[i]);
  }
}

template <RouterElement element>
inline float32x4_t LoadQuarter(const std::byte* row, int64_t column) {
  if constexpr (element == RouterElement::kF32) {
    return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(row + column * 4)));
  } else {
    const uint16x4_t codes = vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(row + column * 2)));
    if constexpr (element == RouterElement::kF16) {
      return vcvt_f32_f16(vreinterpret_f16_u16(codes));
    } else {
      return vreinterpretq_f32_u32(vshll_n_u16(codes, 16));
    }
  }
}

template <RouterElement element>
inline Lanes Load(const std::byte* row, int64_t column) {
  Lanes lanes;
  for (int i = 0; i < 4; ++i) {
    lanes.quarter[i] = LoadQuarter<element>(row, column + 4 * i);
  }
  return lanes;
}

constexpr int kTileTokens = 4;

#include "routing/router_tile.inc"

}  // namespace

const RouterKernels kRouterKernelsNeon = {Tile, kTileTokens};

}  // namespace fusedmoe
