#if defined(__x86_64__)

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

// Tiles 0 to 3 add up, 4 and 5 are the operands.
inline __attribute__((always_inline)) void BeginTiles() {
  static const TileConfig kConfig;
  _tile_loadconfig(&kConfig);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
}

}  // namespace

void SpinInt8Amx(int64_t rounds) {
  BeginTiles();
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbssd(0, 4, 5);
    _tile_dpbssd(1, 4, 5);
    _tile_dpbssd(2, 4, 5);
    _tile_dpbssd(3, 4, 5);
  }
  _tile_release();
}

void SpinBf16Amx(int64_t rounds) {
  BeginTiles();
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_release();
}

}  // namespace fusedmoe

#endif
