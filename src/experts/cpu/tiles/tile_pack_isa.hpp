#pragma once

#include <stdint.h>
#include <string.h>

#include "experts/cpu/tiles/tile_finish_isa.hpp"
#include "experts/cpu/tiles/tile_table_isa.hpp"
#include "experts/cpu/tiles/tile_unit_isa.hpp"

/// What stands before the product: tokens to tiles.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

template <bool kPermuted>
void PackTileRow(const TilePack* p) {
  // Weights carry 2^-112 where tokens carry a shift: sums of tokens do as well.
  const float factor = p->shift != 0 ? 0x1p96F : 1.0F, back = p->shift != 0 ? 0x1p-112F : 1.0F;
  uint8_t* out = p->token + p->k / 32 * p->step_bytes + p->k % 32 * 2;
  Reals sums = SetReals(0.0F);
  for (int64_t i = 0; i < p->count; i += 16) {
    const Reals x = MultiplyReals(LoadReals(p->values + i), SetReals(factor));
    sums = StoreBf16<kPermuted>(out, x, sums, back);
    const int64_t k = p->k + i + 16;
    out += k % 32 == 0 ? p->step_bytes - 32 : 32;
    if (p->sum != nullptr && k % p->sum_group == 0) {
      p->sum[(k / p->sum_group - 1) * p->sum_stride] = SumReals(sums);
      sums = SetReals(0.0F);
    }
  }
}

template <bool kPermuted>
void PackRoundedRow(const TilePack* p, const float* divisors, int64_t group) {
  const Reals factor = SetReals(p->shift != 0 ? 0x1p96F : 1.0F), none = SetReals(0.0F);
  uint8_t* out = p->token + p->k / 32 * p->step_bytes;
  for (int64_t first = 0; first < p->count; first += group, ++divisors) {
    const int64_t end = first + group < p->count ? first + group : p->count;
    // Saturating: the quotient of the limit is 448, or rounds to it.
    const Reals divisor = SetReals(*divisors), limit = SetReals(*divisors * 448.0F);
    const Reals inverse = DivideReals(SetReals(1.0F), divisor);
    for (int64_t i = first; i < end; i += 32, out += p->step_bytes) {
      Unroll<2>([&](int half) FMOE_FLAT {
        const Reals x = LoadReals(p->values + i + half * 16);
        const Reals code = OnSmallGrid<3, -6>(DivideBy(MinReals(Magnitude(x), limit), divisor, inverse));
        StoreBf16<kPermuted>(out + half * 32, WithSign(MultiplyReals(code, factor), x), none, 1.0F);
      });
    }
  }
}

void PackTileRounded(const TilePack* p, const float* divisors, int64_t group) {
  p->permuted ? PackRoundedRow<true>(p, divisors, group) : PackRoundedRow<false>(p, divisors, group);
}

void PackTileCodes(const int8_t* codes, int64_t units, uint8_t* token, int64_t step_bytes,
                   int32_t* correction) {
  Words total = SetWords(0);
  for (int64_t unit = 0; unit < units; ++unit, codes += 64, token += step_bytes) {
    const Words x = LoadWords(codes);
    total = AddCodes(total, x);
    StoreWords(token, x);
  }
  *correction = -128 * SumIntegers(total);
}

/// Lines of up to 16 tokens side by side: written in the order of memory, which is what takes the time.
void GatherTile(const uint8_t* const* tokens, int64_t count, int64_t steps, uint8_t* tile,
                int64_t step_bytes) {
  for (int64_t step = 0; step < steps; ++step, tile += step_bytes) {
    for (int64_t token = 0; token < count; ++token) {
      StoreWords(tile + token * 64, LoadWords(tokens[token] + step * 64));
    }
  }
}

void PackTile(const TilePack* p) {
  p->permuted ? PackTileRow<true>(p) : PackTileRow<false>(p);
}

void PackTileBlock(const float* values, int64_t tokens, uint8_t* tile, int64_t k, int shift, int permuted) {
  const Reals factor = SetReals(shift != 0 ? 0x1p96F : 1.0F), none = SetReals(0.0F);
  uint8_t* out = tile + k % 32 * 2;
  for (int64_t token = 0; token < tokens; ++token) {
    const Reals x = MultiplyReals(LoadReals(values + token * 16), factor);
    if (permuted) {
      StoreBf16<true>(out + token * 64, x, none, 1.0F);
    } else {
      StoreBf16<false>(out + token * 64, x, none, 1.0F);
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
