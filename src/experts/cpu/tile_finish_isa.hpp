#pragma once

#include <stdint.h>

#include "experts/cpu/exp_isa.hpp"
#include "experts/cpu/tile_table_isa.hpp"
#include "experts/cpu/tile_unit_isa.hpp"

/// What becomes of finished sums: the activation, and the tokens or rows of the second GEMM; or the weighted
/// addition to the output. All of it runs a few tokens at a time between tile instructions, where every load
/// and every instruction counts: what stays the same for all tokens is held in registers.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// The sums of a token with 16 rows, as fp32, with its own scale.
template <TileSums kSums>
FMOE_INLINE Reals SumsOf(const TileSides& sides, int64_t token, const float* sums) {
  if constexpr (kSums == kPlainSums) {
    return LoadReals(sums);
  } else {
    const Reals x =
        kSums == kIntegerSums ? IntegersToReals(sums, -128 * (int32_t)sides.codes[token]) : LoadReals(sums);
    return MultiplyReals(x, SetReals(sides.scale[token]));
  }
}

/// In place, for activations that are left to the vector kernels.
template <TileSums kSums>
void ScaleSums(const TileSides* sides, int64_t first_token, int64_t count, float* first, float* second) {
  for (int64_t i = 0; kSums != kPlainSums && i < count; ++i) {
    StoreReals(first + i * 16, SumsOf<kSums>(*sides, first_token + i, first + i * 16));
    StoreReals(second + i * 16, SumsOf<kSums>(*sides, first_token + i, second + i * 16));
  }
}

// ------------------------------------------------------------------------------------- to the output

/// TileKernels::add, or put.
template <TileSums kSums, bool kPut>
void FinishRows(void* context, int64_t first_token, int64_t tokens, float* first, float* second) {
  const TileAdd* a = (const TileAdd*)context;
  float* const rows = a->rows;
  const int64_t stride = a->stride;
  const bool two = a->stripes == 2;
  const Reals none = SetReals(0.0F);
  const Reals scale[2] = {LoadReals(a->scale), LoadReals(a->scale + (two ? 16 : 0))};
  const Reals bias[2] = {a->bias == nullptr ? none : LoadReals(a->bias),
                         a->bias == nullptr || !two ? none : LoadReals(a->bias + 16)};
  const TileSides sides = a->sides;
  const int32_t* const places = a->places;
  const float* const weights = a->weights;
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t token = first_token + i;
    float* row = rows + (kPut ? token : places[token]) * stride;
    const Reals weight = SetReals(kPut ? 1.0F : weights[token]);
    const auto finish = [&](int half, const float* sums) FMOE_FLAT {
      const Reals x = MultiplyAddReals(SumsOf<kSums>(sides, token, sums + i * 16), scale[half], bias[half]);
      float* to = row + half * 16;
      if constexpr (kPut) {
        StoreReals(to, x);
      } else {
        StoreReals(to, MultiplyAddReals(weight, x, LoadReals(to)));
        // Rows lie pages apart, and no hardware prefetch follows.
        PrefetchToL2((const uint8_t*)(to + 32));
      }
    };
    finish(0, first);
    if (two) {
      finish(1, second);
    }
  }
}

/// A line of each slot's row at a time: eight streams that hardware follows.
void AddSlots(const TileSlotSum* sum) {
  const TileSlotSum s = *sum;
  for (int64_t column = 0; column < s.columns; column += 16) {
    Reals total = s.fresh ? SetReals(0.0F) : LoadReals(s.sums + column);
    for (int64_t i = 0; i < s.count; ++i) {
      const float* row = s.rows + (s.slots[i] - s.first_slot) * s.stride;
      total = MultiplyAddReals(SetReals(s.weights[s.slots[i]]), LoadReals(row + column), total);
    }
    StoreReals(s.sums + column, total);
  }
}

// ------------------------------------------------------------------------------------------- SwiGLU

/// e^x as in exp_isa.hpp.
FMOE_INLINE Reals ExpReals(Reals x) {
  x = MaxReals(SetReals(kExpLowest), MinReals(SetReals(kExpHighest), x));
  const Reals n = RoundReals(MultiplyReals(x, SetReals(kLog2OfE)));
  Reals r = NegativeMultiplyAddReals(n, SetReals(kLn2High), x);
  r = NegativeMultiplyAddReals(n, SetReals(kLn2Low), r);
  Reals p = SetReals(kExpTaylor[0]);
  Unroll<kExpDegree>([&](auto i) FMOE_FLAT { p = MultiplyAddReals(p, r, SetReals(kExpTaylor[i + 1])); });
  return ScaleReals(p, n);
}

/// silu(gate) * up of 16 columns, one token at a time: the activation of nearly all models without the detour
/// through the vector kernels.
template <TileSums kSums>
struct Silu {
  Reals gate_scale, gate_bias, up_scale, up_bias;
  TileSides sides;

  FMOE_INLINE Silu Of(const TileSilu& a) {
    return {LoadReals(a.gate_scale), LoadReals(a.gate_bias), LoadReals(a.up_scale), LoadReals(a.up_bias),
            a.sides};
  }
  FMOE_INLINE Reals At(const Silu& s, int64_t token, const float* gates, const float* ups) {
    const Reals gate = MultiplyAddReals(SumsOf<kSums>(s.sides, token, gates), s.gate_scale, s.gate_bias);
    const Reals up = MultiplyAddReals(SumsOf<kSums>(s.sides, token, ups), s.up_scale, s.up_bias);
    const Reals e = ExpReals(NegativeMultiplyAddReals(gate, SetReals(1.0F), SetReals(0.0F)));
    return MultiplyReals(DivideReals(gate, AddReals(SetReals(1.0F), e)), up);
  }
};

/// Where 16 columns of a token stand in the tiles of the second GEMM.
FMOE_INLINE uint8_t* MidOf(const TileSilu& a, int64_t token) {
  return a.mid + TileTokenOffset(a.row_bytes, a.num_tokens, token) +
         (a.k >> 5) * TileStepBytes(a.num_tokens) + (a.k & 31) * 2;
}

/// To bf16.
void SiluToTiles(void* context, int64_t first_token, int64_t tokens, float* first, float* second) {
  using Plain = Silu<kPlainSums>;
  const TileSilu* a = (const TileSilu*)context;
  Plain silu = Plain::Of(*a);
  // The shift of tokens, with up: a power of two.
  const Reals factor = SetReals(a->shift != 0 ? 0x1p96F : 1.0F);
  silu.up_scale = MultiplyReals(silu.up_scale, factor);
  silu.up_bias = MultiplyReals(silu.up_bias, factor);
  const bool permuted = a->permuted != 0;
  uint8_t* out = MidOf(*a, first_token);
  for (int64_t i = 0; i < tokens; ++i, out += 64) {
    const Reals h = Plain::At(silu, first_token + i, first + i * 16, second + i * 16);
    if (permuted) {
      StoreBf16<true>(out, h, factor, 1.0F);
    } else {
      StoreBf16<false>(out, h, factor, 1.0F);
    }
  }
}

/// To rows in fp32, where the scale of a row needs all of it.
template <TileSums kSums>
void SiluToRows(void* context, int64_t first_token, int64_t tokens, float* first, float* second) {
  const TileSilu* a = (const TileSilu*)context;
  const Silu<kSums> silu = Silu<kSums>::Of(*a);
  const int64_t stride = a->row_stride;
  float* out = a->rows + first_token * stride + a->k;
  for (int64_t i = 0; i < tokens; ++i, out += stride) {
    StoreReals(out, Silu<kSums>::At(silu, first_token + i, first + i * 16, second + i * 16));
  }
}

// -------------------------------------------------------------------------------------------- NVFP4

/// Four groups of 16 values to NVFP4 and, in bf16, which holds a code times its block scale exactly, to
/// `count` tokens of a tile. The bits of QuantizeRow (quant/): the scales of four groups share the vectors
/// that compute them.
FMOE_INLINE void RoundToNvfp4(const Reals* values, Reals tensor_scale, int64_t count, uint8_t* out) {
  const Reals largest = LargestOfFour(values[0], values[1], values[2], values[3]);
  Reals scale = DivideReals(DivideReals(largest, SetReals(6.0F)), tensor_scale);
  scale = OnSmallGrid<3, -6>(MinReals(scale, SetReals(448.0F)));
  // NaN where a value is not finite.
  scale = AddReals(scale, NegativeMultiplyAddReals(largest, SetReals(1.0F), largest));
  const Reals full = MultiplyReals(scale, tensor_scale), shifted = MultiplyReals(scale, SetReals(0x1p96F));
  Unroll<4>([&](auto i) FMOE_FLAT {
    constexpr int kToken = decltype(i){};
    if (kToken < count) {
      // Where the scale is zero the quotient is no number, and any code will do.
      const Reals quotient = DivideReals(values[kToken], Quarter<kToken>(full));
      const Reals code = OnSmallGrid<1, 0>(MinReals(Magnitude(quotient), SetReals(6.0F)));
      const Reals value = MultiplyReals(WithSign(code, values[kToken]), Quarter<kToken>(shifted));
      StoreBf16<true>(out + kToken * 64, value, scale, 1.0F);
    }
  });
}

void SiluToNvfp4(void* context, int64_t first_token, int64_t tokens, float* first, float* second) {
  using Scaled = Silu<kScaledSums>;
  const TileSilu* a = (const TileSilu*)context;
  const Scaled silu = Scaled::Of(*a);
  const Reals tensor_scale = SetReals(a->tensor_scale);
  uint8_t* out = MidOf(*a, first_token);
  for (int64_t i = 0; i < tokens; i += 4, out += 4 * 64) {
    Reals h[4];
    // Beyond the last token the tile goes on, with something.
    Unroll<4>([&](auto j) FMOE_FLAT {
      h[j] = Scaled::At(silu, first_token + i + j, first + (i + j) * 16, second + (i + j) * 16);
    });
    RoundToNvfp4(h, tensor_scale, tokens - i, out);
  }
}

/// The same of values that the vector kernels made: values[token][16], room for a multiple of four tokens.
void PackTileNvfp4(const float* values, float tensor_scale, int64_t tokens, uint8_t* tile, int64_t k) {
  uint8_t* out = tile + k % 32 * 2;
  for (int64_t i = 0; i < tokens; i += 4, out += 4 * 64) {
    const Reals x[4] = {LoadReals(values + i * 16), LoadReals(values + (i + 1) * 16),
                        LoadReals(values + (i + 2) * 16), LoadReals(values + (i + 3) * 16)};
    RoundToNvfp4(x, SetReals(tensor_scale), tokens - i, out);
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
