#include <immintrin.h>

#include "platform/peak_kernels.hpp"

namespace fusedmoe {

namespace {

/// Palette 1: every tile 16 rows of 64 bytes. The layout is that of the processor's manual, 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// Numbers to multiply: with zeros in its tiles the unit is a fifth faster (Sapphire Rapids class, one core
/// at one clock: 2.9 TFLOP/s against 2.35), which no product of two matrices sees. Random words; as bf16 of
/// either sign between 1/2 and 2.
struct alignas(64) Operand {
  uint16_t words[512];

  constexpr Operand(uint32_t seed, bool bf16) : words() {
    for (uint16_t& word : words) {
      seed = seed * 1664525 + 1013904223;
      word = static_cast<uint16_t>(bf16 ? (seed >> 16 & 0x80ff) | 0x3f00 : seed >> 16);
    }
  }
};

// Tiles 0 to 3 add up, 4 and 5 are the operands.
template <bool kBf16>
inline __attribute__((always_inline)) void BeginTiles() {
  static const TileConfig kConfig;
  static constexpr Operand kTokens(1, kBf16), kWeights(2, kBf16);
  _tile_loadconfig(&kConfig);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, kTokens.words, 64);
  _tile_loadd(5, kWeights.words, 64);
}

/// What stands between two products. While the core's other hardware thread is at work, products that follow
/// each other directly run at 1.4 to 1.8 TFLOP/s on a core that does 2.2 otherwise; with 8 to 32 empty
/// instructions behind each they run at 2.2 always (4 gain half of it, 48 cost a fifth). A product takes the
/// unit 16 cycles, in which a core begins far more than that. Kernels have other work there, so that a peak
/// without it would be below what they reach (Sapphire Rapids class, medians of 21 in turns, 24 sittings).
inline __attribute__((always_inline)) void Space() {
  __asm__ volatile(".fill 16, 1, 0x90");
}

}  // namespace

void SpinInt8Amx(int64_t rounds) {
  BeginTiles<false>();
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbssd(0, 4, 5);
    Space();
    _tile_dpbssd(1, 4, 5);
    Space();
    _tile_dpbssd(2, 4, 5);
    Space();
    _tile_dpbssd(3, 4, 5);
    Space();
  }
  _tile_release();
}

void SpinBf16Amx(int64_t rounds) {
  BeginTiles<true>();
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 5);
    Space();
    _tile_dpbf16ps(1, 4, 5);
    Space();
    _tile_dpbf16ps(2, 4, 5);
    Space();
    _tile_dpbf16ps(3, 4, 5);
    Space();
  }
  _tile_release();
}

}  // namespace fusedmoe
