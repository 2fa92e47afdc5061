#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/exp_isa.hpp"
#include "experts/cpu/tiles/tile_table_isa.hpp"
#include "experts/cpu/tiles/tile_unit_isa.hpp"

/// What becomes of finished sums: the activation, and the tokens or rows of the second GEMM; or the weighted
/// addition to the output. All of it runs a few tokens at a time between tile instructions, where every load
/// and every instruction counts: what stays the same for all tokens is held in registers.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// What the sums of a token lack, read once: the compiler cannot tell that storing results leaves it alone.
template <TileSums kSums>
struct TokenParams {
  Reals scale;
  Words correction;

  FMOE_INLINE TokenParams Of(const TileParams& params, int64_t token) {
    TokenParams own;
    if constexpr (kSums != kPlainSums) {
      own.scale = SetReals(params.scale[token]);
    }
    if constexpr (kSums == kIntegerSums) {
      own.correction = SpreadInteger(params.correction + token);
    }
    return own;
  }
};

/// The sums of a token with 16 rows, as fp32, with its own scale.
template <TileSums kSums>
FMOE_INLINE Reals SumsOf(const TokenParams<kSums>& own, const float* sums) {
  if constexpr (kSums == kPlainSums) {
    return LoadReals(sums);
  } else if constexpr (kSums == kScaledSums) {
    return MultiplyReals(LoadReals(sums), own.scale);
  } else {
    return MultiplyReals(IntegersToReals(sums, own.correction), own.scale);
  }
}

/// In place, for activations that are left to the vector kernels.
template <TileSums kSums>
void ScaleSums(const TileParams* params, int64_t first_token, int64_t count, float* first, float* second) {
  for (int64_t i = 0; kSums != kPlainSums && i < count; ++i) {
    const TokenParams<kSums> own = TokenParams<kSums>::Of(*params, first_token + i);
    StoreReals(first + i * 16, SumsOf<kSums>(own, first + i * 16));
    StoreReals(second + i * 16, SumsOf<kSums>(own, second + i * 16));
  }
}

// ------------------------------------------------------------------------------------- to the output

/// TileKernels::add and put, token by token: what is the same for all of them stands in registers.
template <TileSums kSums>
struct RowFinisher {
  Reals scale[2], bias[2];
  TileParams params;
  float* rows;
  int64_t stride;
  const int32_t* places;
  const float* weights;
  const SlotEnds* ends;
  bool two;

  FMOE_INLINE RowFinisher Of(const TileAdd& a) {
    RowFinisher f;
    const Reals none = SetReals(0.0F);
    f.two = a.stripes == 2;
    f.scale[0] = LoadReals(a.scale);
    f.scale[1] = LoadReals(a.scale + (f.two ? 16 : 0));
    f.bias[0] = a.bias == nullptr ? none : LoadReals(a.bias);
    f.bias[1] = a.bias == nullptr || !f.two ? none : LoadReals(a.bias + 16);
    f.params = a.params;
    f.rows = a.rows;
    f.stride = a.stride;
    f.places = a.places;
    f.weights = a.weights;
    f.ends = a.ends;
    return f;
  }

  template <bool kPut>
  FMOE_INLINE void Token(const RowFinisher& f, int64_t token, const float* first, const float* second) {
    float* const row = f.rows + (kPut ? token * kPutColumns : f.places[token] * f.stride);
    const Reals weight = SetReals(kPut ? 1.0F : f.weights[token]);
    const bool fresh = !kPut && f.ends[token].first;
    const TokenParams<kSums> own = TokenParams<kSums>::Of(f.params, token);
    const auto finish = [&](int half, const float* sums) FMOE_FLAT {
      const Reals x = MultiplyAddReals(SumsOf<kSums>(own, sums), f.scale[half], f.bias[half]);
      float* to = row + half * 16;
      if constexpr (kPut) {
        StoreReals(to, x);
      } else {
        StoreReals(to, MultiplyAddReals(weight, x, LoadRealsUnless(fresh, to)));
        // Rows lie pages apart, and no hardware prefetch follows.
        PrefetchToL2((const uint8_t*)(to + 32));
      }
    };
    finish(0, first);
    if (f.two) {
      finish(1, second);
    }
  }
};

template <TileSums kSums, bool kPut>
void FinishRows(void* context, int64_t first_token, int64_t tokens, float* first, float* second) {
  using Finisher = RowFinisher<kSums>;
  const Finisher finisher = Finisher::Of(*(const TileAdd*)context);
  for (int64_t i = 0; i < tokens; ++i) {
    Finisher::template Token<kPut>(finisher, first_token + i, first + i * 16, second + i * 16);
  }
}

/// Outputs that are added up together: their sums stay in L2, and neighbours of them share pages of slots.
constexpr int64_t kStripOutputs = 16;

/// Outputs first to last - 1, whose slots begin at `begin`.
FMOE_INLINE void AddStrip(const TileSlotSum& s, int64_t first, int64_t last, int64_t begin) {
  const int64_t block_stride = s.block_slots * kPutColumns;
  const float* block = s.rows - s.first_slot * kPutColumns;
  for (int64_t column = 0; column < s.columns; column += kPutColumns, block += block_stride) {
    const int64_t second = column + 16 < s.columns ? 16 : 0;  // 0: the same again
    int64_t i = begin;
    for (int64_t output = first; output < last; ++output) {
      float* const sums = s.sums + output * s.stride + column;
      Reals total[2] = {LoadRealsUnless(s.fresh, sums), LoadRealsUnless(s.fresh, sums + second)};
      for (; i < s.ends[output]; ++i) {
        const float* values = block + s.slots[i] * kPutColumns;
        const Reals weight = SetReals(s.weights[s.slots[i]]);
        PrefetchToL2((const uint8_t*)(values + block_stride));
        PrefetchToL2((const uint8_t*)(values + block_stride + 16));
        total[0] = MultiplyAddReals(weight, LoadReals(values), total[0]);
        total[1] = MultiplyAddReals(weight, LoadReals(values + second), total[1]);
      }
      StoreReals(sums, total[0]);
      StoreReals(sums + second, total[1]);
    }
  }
}

void AddSlots(const TileSlotSum* sum) {
  const TileSlotSum s = *sum;
  for (int64_t first = 0; first < s.outputs; first += kStripOutputs) {
    const int64_t last = first + kStripOutputs < s.outputs ? first + kStripOutputs : s.outputs;
    AddStrip(s, first, last, first == 0 ? s.begin : s.ends[first - 1]);
  }
}

// ------------------------------------------------------------------------------------------- SwiGLU

/// 1 + e^-x, by exp_isa.hpp's powers of two: three instructions and 20 cycles less than e^x by powers of e.
/// In parts, which may stand apart.
struct ExpOfNegative {
  Reals n, f, p;

  FMOE_INLINE ExpOfNegative Of(Reals x) {
    ExpOfNegative e;
    x = MaxReals(SetReals(-kExpHighest), MinReals(SetReals(-kExpLowest), x));
    const Reals factor = SetReals(-kLog2OfE), round = SetReals(kExp2Round);
    e.n = SubtractReals(MultiplyAddReals(x, factor, round), round);
    e.f = NegativeMultiplyAddReals(x, SetReals(kLog2OfELow), MultiplySubtractReals(x, factor, e.n));
    e.p = SetReals(kExp2[0]);
    return e;
  }
  /// kCount of kExp2Degree.
  template <int kFirst, int kCount>
  FMOE_INLINE void Terms(ExpOfNegative& e) {
    Unroll<kCount>([&](int i)
                       FMOE_FLAT { e.p = MultiplyAddReals(e.p, e.f, SetReals(kExp2[kFirst + 1 + i])); });
  }
  FMOE_INLINE Reals AndOne(const ExpOfNegative& e) { return AddReals(ScaleReals(e.p, e.n), SetReals(1.0F)); }
};

FMOE_INLINE Reals OnePlusExpOfNegative(Reals x) {
  ExpOfNegative e = ExpOfNegative::Of(x);
  ExpOfNegative::Terms<0, kExp2Degree>(e);
  return ExpOfNegative::AndOne(e);
}

/// silu(gate) * up of 16 columns, the activation of nearly all models without the detour through the vector
/// kernels, in stages:
///
///   tick 4   | sums -> gate, up, 1 + e^-gate | -> silu * up | -> scales of groups | -> codes |
///   tokens   | 16-19                         | 12-15        | 8-11                | 4-7      |
///
/// Out-of-order execution reaches two or three steps of the matrix unit ahead of the oldest instruction, some
/// 150 cycles. All of it one after the other takes 150 (bf16) to 400 (NVFP4), and the unit would stand still
/// for the rest of every piece; no stage takes more than 90. Each is so many tokens behind the one before
/// (TileBatch), and the last tokens of a pair are followed by empty ticks.
template <int kStages, typename Stages>
FMOE_INLINE void Tick(TileSilu* a, int64_t first_token, int64_t tokens, const Stages& stages) {
  static_assert(kStages <= kMostStages);
  const bool last = first_token + tokens == a->num_tokens;
  const int64_t ticks = (tokens + kTickTokens - 1) / kTickTokens + (last ? kStages - 1 : 0);
  for (int64_t i = 0; i < ticks; ++i, ++a->tick) {
    const int64_t left = tokens - i * kTickTokens;
    a->batches[a->tick % kMostStages].tokens = left < 0 ? 0 : left < kTickTokens ? left : kTickTokens;
    Unroll<kStages>([&](auto s) FMOE_FLAT {
      constexpr int kStage = kStages - 1 - decltype(s){};
      TileBatch& batch = a->batches[(a->tick - kStage) % kMostStages];
      if (batch.tokens > 0) {
        Stages::template Run<kStage>(stages, batch, i * kTickTokens);
      }
    });
  }
}

/// use(i) for the tokens of a batch, of which most are full: without a loop then.
template <typename Use>
FMOE_INLINE void ForTokens(int64_t tokens, const Use& use) {
  if (tokens == kTickTokens) {
    Unroll<kTickTokens>([&](int i) FMOE_FLAT { use((int64_t)i); });
  } else {
    for (int64_t i = 0; i < tokens; ++i) {
      use(i);
    }
  }
}

struct SiluValues {
  Reals gate, up, divisor;
};

/// The first stage, and what the second one begins with.
template <TileSums kSums>
struct Silu {
  Reals gate_scale, gate_bias, up_scale, up_bias;
  TileParams params;

  FMOE_INLINE Silu Of(const TileSilu& a) {
    return {LoadReals(a.gate_scale), LoadReals(a.gate_bias), LoadReals(a.up_scale), LoadReals(a.up_bias),
            a.params};
  }
  /// Without the divisor.
  FMOE_INLINE SiluValues Sums(const Silu& s, int64_t token, const float* gates, const float* ups) {
    const TokenParams<kSums> own = TokenParams<kSums>::Of(s.params, token);
    const Reals gate = MultiplyAddReals(SumsOf<kSums>(own, gates), s.gate_scale, s.gate_bias);
    return {gate, MultiplyAddReals(SumsOf<kSums>(own, ups), s.up_scale, s.up_bias), gate};
  }
  FMOE_INLINE SiluValues Start(const Silu& s, int64_t token, const float* gates, const float* ups) {
    SiluValues values = Sums(s, token, gates, ups);
    values.divisor = OnePlusExpOfNegative(values.gate);
    return values;
  }
  FMOE_INLINE Reals Value(const SiluValues& v) { return MultiplyReals(DivideReals(v.gate, v.divisor), v.up); }

  /// Of the tokens of a batch.
  FMOE_INLINE void Start(const Silu& s, int64_t token, const float* gates, const float* ups, TileBatch& to) {
    ForTokens(to.tokens, [&](int64_t i) FMOE_FLAT {
      const SiluValues values = Start(s, token + i, gates + i * 16, ups + i * 16);
      StoreReals(to.gate + i * 16, values.gate);
      StoreReals(to.up + i * 16, values.up);
      StoreReals(to.divisor + i * 16, values.divisor);
    });
  }
  FMOE_INLINE Reals Value(const TileBatch& batch, int64_t i) {
    return Value(
        {LoadReals(batch.gate + i * 16), LoadReals(batch.up + i * 16), LoadReals(batch.divisor + i * 16)});
  }
};

/// Where 16 columns of a token stand in the tiles of the second GEMM.
FMOE_INLINE uint8_t* MidOf(const TileSilu& a, int64_t token) {
  return a.mid + TileTokenOffset(a.row_bytes, a.num_tokens, token) +
         (a.k >> 5) * TileStepBytes(a.num_tokens) + (a.k & 31) * 2;
}

/// To bf16.
template <bool kPermuted>
struct TileStages {
  Silu<kPlainSums> silu;
  int64_t token;
  const float *gates, *ups;
  uint8_t* out;

  template <int kStage>
  FMOE_INLINE void Run(const TileStages& s, TileBatch& batch, int64_t i) {
    if constexpr (kStage == 0) {
      batch.out = s.out + i * 64;
      Silu<kPlainSums>::Start(s.silu, s.token + i, s.gates + i * 16, s.ups + i * 16, batch);
    } else {
      uint8_t* const out = batch.out;
      ForTokens(batch.tokens, [&](int64_t t) FMOE_FLAT {
        const Reals h = Silu<kPlainSums>::Value(batch, t);
        StoreBf16<kPermuted>(out + t * 64, h, h, 1.0F);
      });
    }
  }
};

template <bool kPermuted>
FMOE_INLINE void SiluToTiles(TileSilu* a, int64_t first_token, int64_t tokens, const float* first,
                             const float* second) {
  TileStages<kPermuted> stages{Silu<kPlainSums>::Of(*a), first_token, first, second, MidOf(*a, first_token)};
  // The shift of tokens, with up: a power of two.
  const Reals factor = SetReals(a->shift != 0 ? 0x1p96F : 1.0F);
  stages.silu.up_scale = MultiplyReals(stages.silu.up_scale, factor);
  stages.silu.up_bias = MultiplyReals(stages.silu.up_bias, factor);
  Tick<2>(a, first_token, tokens, stages);
}

void SiluToTiles(void* context, int64_t first_token, int64_t tokens, float* first, float* second) {
  TileSilu* a = (TileSilu*)context;
  a->permuted ? SiluToTiles<true>(a, first_token, tokens, first, second)
              : SiluToTiles<false>(a, first_token, tokens, first, second);
}

/// To rows in fp32, where the scale of a row needs all of it. Not in stages: where sums are scaled by groups,
/// steps have more beside them and hide more (FP8 in blocks: 1 to 2 % of the layer).
template <TileSums kSums>
void SiluToRows(void* context, int64_t first_token, int64_t tokens, float* first, float* second) {
  const TileSilu& a = *(const TileSilu*)context;
  const Silu<kSums> silu = Silu<kSums>::Of(a);
  const int64_t stride = a.row_stride;
  float* const out = a.rows + first_token * stride;
  for (int64_t i = 0; i < tokens; i += kTickTokens) {
    ForTokens(tokens - i < kTickTokens ? tokens - i : kTickTokens, [&](int64_t t) FMOE_FLAT {
      const int64_t at = i + t;
      const SiluValues values = Silu<kSums>::Start(silu, first_token + at, first + at * 16, second + at * 16);
      StoreReals(out + at * stride, Silu<kSums>::Value(values));
    });
  }
}

// -------------------------------------------------------------------------------------------- NVFP4
//
// Groups of 16 values of four tokens to NVFP4 and, in bf16, which holds a code times its block scale exactly,
// to a tile. The bits of QuantizeRow (quant/): the scales of four groups share the vectors that compute them.

/// The block scales of four groups, each in four lanes.
FMOE_INLINE Reals Nvfp4Scales(Reals largest, Reals tensor_scale) {
  Reals scale = DivideReals(DivideReals(largest, SetReals(6.0F)), tensor_scale);
  scale = OnSmallGrid<3, -6>(MinReals(scale, SetReals(448.0F)));
  // NaN where a value is not finite.
  return AddReals(scale, NegativeMultiplyAddReals(largest, SetReals(1.0F), largest));
}

/// x / y from r, the float nearest to 1 / y: the residual of a quotient that is less than one unit off is
/// exact, and adding r times it rounds as the division does; the first step leads there from two units. Five
/// instructions that do not wait for each other's units, instead of sixteen cycles of the divider a token.
FMOE_INLINE Reals DivideBy(Reals x, Reals y, Reals r) {
  Reals quotient = MultiplyReals(x, r);
  quotient = MultiplyAddReals(NegativeMultiplyAddReals(quotient, y, x), r, quotient);
  return MultiplyAddReals(NegativeMultiplyAddReals(quotient, y, x), r, quotient);
}

/// Of a quotient, without its sign. Where the scale is zero the quotient is no number, and any code will do.
FMOE_INLINE Reals Nvfp4Code(Reals quotient) {
  return OnSmallGrid<1, 0>(MinReals(Magnitude(quotient), SetReals(6.0F)));
}

FMOE_INLINE void StoreNvfp4Codes(const float* values, Reals scale, Reals tensor_scale, int64_t count,
                                 uint8_t* out) {
  const Reals full = MultiplyReals(scale, tensor_scale), shifted = MultiplyReals(scale, SetReals(0x1p96F));
  const auto store = [&](auto&& divide) FMOE_FLAT {
    Unroll<kTickTokens>([&](auto i) FMOE_FLAT {
      constexpr int kToken = decltype(i){};
      if (kToken < count) {
        const Reals x = LoadReals(values + kToken * 16);
        const Reals value = MultiplyReals(WithSign(Nvfp4Code(divide(x, i)), x), Quarter<kToken>(shifted));
        StoreBf16<true>(out + kToken * 64, value, scale, 1.0F);
      }
    });
  };
  // Where 1 / y or a residual would leave the range of normal numbers, by division.
  if (AllWithin(full, 0x1p-90F, 0x1p90F)) {
    const Reals inverse = DivideReals(SetReals(1.0F), full);
    store([&](Reals x, auto i) FMOE_FLAT {
      return DivideBy(x, Quarter<decltype(i){}>(full), Quarter<decltype(i){}>(inverse));
    });
  } else {
    store([&](Reals x, auto i) FMOE_FLAT { return DivideReals(x, Quarter<decltype(i){}>(full)); });
  }
}

FMOE_INLINE Reals LargestOfBatch(const float* values) {
  return LargestOfFour(LoadReals(values), LoadReals(values + 16), LoadReals(values + 32),
                       LoadReals(values + 48));
}

struct Nvfp4Stages {
  Silu<kScaledSums> silu;
  int64_t token;
  const float *gates, *ups;
  uint8_t* out;
  Reals tensor_scale;

  template <int kStage>
  FMOE_INLINE void Run(const Nvfp4Stages& s, TileBatch& batch, int64_t i) {
    if constexpr (kStage == 0) {
      batch.out = s.out + i * 64;
      Silu<kScaledSums>::Start(s.silu, s.token + i, s.gates + i * 16, s.ups + i * 16, batch);
    } else if constexpr (kStage == 1) {
      // Values beyond the last token are those of some token before.
      ForTokens(batch.tokens, [&](int64_t t) FMOE_FLAT {
        StoreReals(batch.value + t * 16, Silu<kScaledSums>::Value(batch, t));
      });
    } else if constexpr (kStage == 2) {
      StoreReals(batch.scale, Nvfp4Scales(LargestOfBatch(batch.value), s.tensor_scale));
    } else {
      StoreNvfp4Codes(batch.value, LoadReals(batch.scale), s.tensor_scale, batch.tokens, batch.out);
    }
  }
};

void SiluToNvfp4(void* context, int64_t first_token, int64_t tokens, float* first, float* second) {
  TileSilu* a = (TileSilu*)context;
  const Nvfp4Stages stages{Silu<kScaledSums>::Of(*a), first_token, first, second, MidOf(*a, first_token),
                           SetReals(a->tensor_scale)};
  Tick<4>(a, first_token, tokens, stages);
}

/// The same of values that the vector kernels made: values[token][16], room for a multiple of four tokens.
void PackTileNvfp4(const float* values, float tensor_scale, int64_t tokens, uint8_t* tile, int64_t k) {
  uint8_t* out = tile + k % 32 * 2;
  for (int64_t i = 0; i < tokens; i += kTickTokens, out += kTickTokens * 64) {
    const Reals scale = Nvfp4Scales(LargestOfBatch(values + i * 16), SetReals(tensor_scale));
    StoreNvfp4Codes(values + i * 16, scale, SetReals(tensor_scale), tokens - i, out);
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
