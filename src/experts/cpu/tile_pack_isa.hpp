#pragma once

#include <stdint.h>
#include <string.h>

#include "experts/cpu/tile_table_isa.hpp"
#include "experts/cpu/tile_unit_isa.hpp"

/// What stands before and behind the product: tokens to tiles, and finished sums to where they belong.
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

void PackTileCodes(const int8_t* codes, int64_t units, uint8_t* token, int64_t step_bytes, float* sum) {
  int32_t total = 0;
  for (int64_t unit = 0; unit < units; ++unit, codes += 64, token += step_bytes) {
    for (int i = 0; i < 64; ++i) {
      total += codes[i];
    }
    memcpy(token, codes, 64);
  }
  *sum = (float)total;
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

void AddRows(void* context, int64_t first_token, int64_t tokens, const float* first, const float* second) {
  const TileAdd* a = (const TileAdd*)context;
  const float* sums[2] = {first, second};
  for (int64_t token = 0; token < tokens; ++token) {
    float* row = a->rows + a->places[first_token + token] * a->stride;
    const Reals weight = SetReals(a->weights[first_token + token]);
    for (int64_t i = 0; i < a->stripes; ++i) {
      const Reals sum = LoadReals(sums[i] + token * 16), scale = LoadReals(a->scale + i * 16);
      const Reals value = a->bias == nullptr ? MultiplyReals(sum, scale)
                                             : MultiplyAddReals(sum, scale, LoadReals(a->bias + i * 16));
      StoreReals(row + i * 16, MultiplyAddReals(weight, value, LoadReals(row + i * 16)));
      // Rows lie pages apart, and no hardware prefetch follows.
      PrefetchToL2((const uint8_t*)(row + 32 + i * 16));
    }
  }
}

/// e^x as in epilogue_isa.hpp.
FMOE_INLINE Reals ExpReals(Reals x) {
  x = MaxReals(SetReals(-104.0F), MinReals(SetReals(89.0F), x));
  const Reals n = RoundReals(MultiplyReals(x, SetReals(1.44269504F)));
  Reals r = NegativeMultiplyAddReals(n, SetReals(0.693145752F), x);
  r = NegativeMultiplyAddReals(n, SetReals(1.42860677e-6F), r);
  Reals p = SetReals(1.0F / 5040.0F);
  p = MultiplyAddReals(p, r, SetReals(1.0F / 720.0F));
  p = MultiplyAddReals(p, r, SetReals(1.0F / 120.0F));
  p = MultiplyAddReals(p, r, SetReals(1.0F / 24.0F));
  p = MultiplyAddReals(p, r, SetReals(1.0F / 6.0F));
  p = MultiplyAddReals(p, r, SetReals(0.5F));
  p = MultiplyAddReals(p, r, SetReals(1.0F));
  p = MultiplyAddReals(p, r, SetReals(1.0F));
  return ScaleReals(p, n);
}

/// The activation of nearly all models without a detour: between tile instructions every call and every copy
/// of the general way (TileGemm::finish of the caller) took as long as the arithmetic.
void SiluRows(void* context, int64_t first_token, int64_t tokens, const float* first, const float* second) {
  const TileSilu* a = (const TileSilu*)context;
  const int64_t step_bytes = TileStepBytes(a->num_tokens);
  uint8_t* out = a->tokens + TileTokenOffset(a->row_bytes, a->num_tokens, first_token) +
                 (a->k >> 5) * step_bytes + (a->k & 31) * 2;
  const Reals factor = SetReals(a->shift != 0 ? 0x1p96F : 1.0F), one = SetReals(1.0F);
  for (int64_t token = 0; token < tokens; ++token, out += 64) {
    const Reals gate =
        MultiplyAddReals(LoadReals(first + token * 16), LoadReals(a->gate_scale), LoadReals(a->gate_bias));
    const Reals up =
        MultiplyAddReals(LoadReals(second + token * 16), LoadReals(a->up_scale), LoadReals(a->up_bias));
    const Reals e = ExpReals(NegativeMultiplyAddReals(gate, one, SetReals(0.0F)));
    const Reals h = MultiplyReals(MultiplyReals(DivideReals(gate, AddReals(one, e)), up), factor);
    if (a->permuted) {
      StoreBf16<true>(out, h, one, 1.0F);
    } else {
      StoreBf16<false>(out, h, one, 1.0F);
    }
  }
}

void PackTile(const TilePack* p) {
  p->permuted ? PackTileRow<true>(p) : PackTileRow<false>(p);
}

void PackTileGroups(const int8_t* codes, const float* scales, float factor, int64_t tokens, uint8_t* tile,
                    int64_t k) {
  const Reals shift = SetReals(0x1p96F);
  for (int64_t token = 0; token < tokens; ++token) {
    const Reals x = MultiplyReals(BytesToReals(codes + token * 16), SetReals(scales[token] * factor));
    StoreBf16<true>(tile + k % 32 * 2 + token * 64, MultiplyReals(x, shift), shift, 1.0F);
  }
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
