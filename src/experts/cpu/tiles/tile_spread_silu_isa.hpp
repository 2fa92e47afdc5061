#pragma once

#include <stdint.h>

#include "experts/cpu/tiles/tile_spread_isa.hpp"

/// SiLU between the tile instructions of two steps, on its way to the tiles of the second GEMM. What a token
/// waits for is ready when its next part comes, since two (to bf16) or three (to NVFP4) are on their way:
///
///   place           1             2        3            4       5    6         7           8
///   bf16    step 0                                      t-1: to its tile
///           step 1  t: gate, up | e^-gate ........................ |           | h
///   NVFP4   step 0                t-2: quotient       | code      | its tile;  t-1: largest magnitude
///           step 1  t: as above                t-1: block scale              | reciprocal
///
/// Sums are read in the second step only: those that leave the tiles in the first one are there then.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// The rows of the tiles of the second GEMM, one token after the other.
struct TileRowWalk {
  uint8_t *out, *next_tile;
  int64_t row, rows, tile_step, block_bytes;

  /// `tokens` of nobody come before the first one, and go to a place of their own.
  FMOE_INLINE void Begin(TileSilu& a, int64_t tokens) {
    TileTrail& trail = a.trail;
    trail.out = trail.spare;
    trail.rows = TileTokens(a.num_tokens);
    trail.row = trail.rows - tokens;
    trail.next_tile = MidOf(a, 0);
    trail.tile_step = 1024;
  }
  FMOE_INLINE TileRowWalk Of(const TileSilu& a) {
    const TileTrail& t = a.trail;
    return {t.out, t.next_tile, t.row, t.rows, t.tile_step, kTileTokens * a.row_bytes};
  }
  FMOE_INLINE void Save(const TileRowWalk& w, TileTrail& trail) {
    trail.out = w.out;
    trail.next_tile = w.next_tile;
    trail.row = w.row;
    trail.tile_step = w.tile_step;
  }
  FMOE_INLINE void Next(TileRowWalk& w) {
    const bool tile_ends = ++w.row == w.rows;
    w.row = tile_ends ? 0 : w.row;
    w.out = tile_ends ? w.next_tile : w.out + 64;
    w.next_tile += tile_ends ? w.tile_step : 0;
    w.tile_step = tile_ends ? w.block_bytes - w.tile_step : w.tile_step;
  }
};

/// SiLU of a token over the places of a step.
template <TileSums kSums>
struct StepSilu {
  Silu<kSums> silu;
  SiluValues values;
  ExpOfNegative power;
  Reals h;  // ready behind the last place

  FMOE_INLINE StepSilu Of(const TileSilu& a) {
    const Reals h = LoadReals(a.trail.waiting);
    return {Silu<kSums>::Of(a), {h, h, h}, {h, h, h}, h};
  }
  template <int kPlace>
  FMOE_INLINE void At(StepSilu& s, FinishWalk& w) {
    if constexpr (kPlace == 0) {
      const float* const sums = FinishWalk::First(w);
      s.values = Silu<kSums>::Sums(s.silu, w.token, sums, sums + 256);
    } else if constexpr (kPlace == 1) {
      s.power = ExpOfNegative::Of(s.values.gate);
    } else if constexpr (kPlace < 5) {
      ExpOfNegative::Terms<(kPlace - 2) * 2, 2>(s.power);
    } else if constexpr (kPlace == 5) {
      s.values.divisor = ExpOfNegative::AndOne(s.power);
    } else if constexpr (kPlace == 7) {
      s.h = Silu<kSums>::Value(s.values);
      FinishWalk::Next(w, 1);
    }
  }
};

/// To bf16, every four k of a token in the order 0, 2, 1, 3.
struct TileSpread {
  static constexpr int64_t kTokens = 1;
  static constexpr int kSteps = 2;

  StepSilu<kPlainSums> silu;
  TileRowWalk walk;

  FMOE_INLINE bool Takes(const void* context) { return ((const TileSilu*)context)->permuted != 0; }
  FMOE_INLINE void Begin(void* context) { TileRowWalk::Begin(*(TileSilu*)context, 1); }
  FMOE_INLINE TileSpread Of(const void* context) {
    const TileSilu& a = *(const TileSilu*)context;
    TileSpread s{StepSilu<kPlainSums>::Of(a), TileRowWalk::Of(a)};
    // The shift of tokens, with up: a power of two.
    const Reals factor = SetReals(a.shift != 0 ? 0x1p96F : 1.0F);
    s.silu.silu.up_scale = MultiplyReals(s.silu.silu.up_scale, factor);
    s.silu.silu.up_bias = MultiplyReals(s.silu.silu.up_bias, factor);
    return s;
  }
  FMOE_INLINE void Save(const TileSpread& s, void* context) {
    TileTrail& trail = ((TileSilu*)context)->trail;
    StoreReals(trail.waiting, s.silu.h);
    TileRowWalk::Save(s.walk, trail);
  }
  template <int kStep, int kPlace>
  FMOE_INLINE void At(TileSpread& s, bool, FinishWalk& w) {
    if (FinishWalk::Left(w)) {
      if constexpr (kStep == 1) {
        StepSilu<kPlainSums>::template At<kPlace>(s.silu, w);
      } else if constexpr (kPlace == 3) {
        Put(s);
      }
    }
  }
  FMOE_INLINE void End(void* context) {
    TileSpread s = Of(context);
    Put(s);
  }

 private:
  FMOE_INLINE void Put(TileSpread& s) {
    StoreBf16<true>(s.walk.out, s.silu.h, s.silu.h, 1.0F);
    TileRowWalk::Next(s.walk);
  }
};

/// Rounded to NVFP4.
struct Nvfp4Spread {
  static constexpr int64_t kTokens = 1;
  static constexpr int kSteps = 2;

  StepSilu<kScaledSums> silu;  // t
  Reals tensor_scale;
  Reals value, largest, full, inverse, shifted;  // t - 1, then t - 2
  Reals code;                                    // t - 2
  TileRowWalk walk;

  /// Whether all quotients are of the kind that needs no division (StoreNvfp4Codes): block scales are zero,
  /// which any code will do for, or 2^-9 to 448.
  FMOE_INLINE bool Takes(const void* context) {
    const float scale = ((const TileSilu*)context)->tensor_scale;
    return scale >= 0x1p-80F && scale <= 0x1p80F;
  }
  FMOE_INLINE void Begin(void* context) { TileRowWalk::Begin(*(TileSilu*)context, 2); }
  FMOE_INLINE Nvfp4Spread Of(const void* context) {
    const TileSilu& a = *(const TileSilu*)context;
    const TileTrail& trail = a.trail;
    Nvfp4Spread s;
    s.silu = StepSilu<kScaledSums>::Of(a);
    s.tensor_scale = SetReals(a.tensor_scale);
    s.value = s.largest = s.code = LoadReals(trail.value);
    s.full = LoadReals(trail.full);
    s.inverse = LoadReals(trail.inverse);
    s.shifted = LoadReals(trail.shifted);
    s.walk = TileRowWalk::Of(a);
    return s;
  }
  FMOE_INLINE void Save(const Nvfp4Spread& s, void* context) {
    TileTrail& trail = ((TileSilu*)context)->trail;
    StoreReals(trail.waiting, s.silu.h);
    StoreReals(trail.value, s.value);
    StoreReals(trail.full, s.full);
    StoreReals(trail.inverse, s.inverse);
    StoreReals(trail.shifted, s.shifted);
    TileRowWalk::Save(s.walk, trail);
  }
  template <int kStep, int kPlace>
  FMOE_INLINE void At(Nvfp4Spread& s, bool, FinishWalk& w) {
    if (FinishWalk::Left(w)) {
      Behind<kStep, kPlace>(s);
      if constexpr (kStep == 1) {
        StepSilu<kScaledSums>::template At<kPlace>(s.silu, w);
      }
    }
  }
  /// The last two tokens.
  FMOE_INLINE void End(void* context) {
    Nvfp4Spread s = Of(context);
    Unroll<8>([&](auto place) FMOE_FLAT { Behind<0, decltype(place){}>(s); });
    Unroll<8>([&](auto place) FMOE_FLAT { Behind<1, decltype(place){}>(s); });
    Unroll<8>([&](auto place) FMOE_FLAT { Behind<0, decltype(place){}>(s); });
  }

 private:
  /// What becomes of the two tokens before.
  template <int kStep, int kPlace>
  FMOE_INLINE void Behind(Nvfp4Spread& s) {
    if constexpr (kStep == 0) {
      if constexpr (kPlace == 1) {
        s.code = DivideBy(s.value, s.full, s.inverse);
      } else if constexpr (kPlace == 3) {
        s.code = Nvfp4Code(s.code);
      } else if constexpr (kPlace == 5) {
        StoreBf16<true>(s.walk.out, MultiplyReals(WithSign(s.code, s.value), s.shifted), s.code, 1.0F);
        TileRowWalk::Next(s.walk);
      } else if constexpr (kPlace == 6) {
        s.value = s.silu.h;
        s.largest = LargestOfAll(s.value);
      }
    } else if constexpr (kPlace == 2) {
      s.full = Nvfp4Scales(s.largest, s.tensor_scale);
    } else if constexpr (kPlace == 6) {
      s.shifted = MultiplyReals(s.full, SetReals(0x1p96F));
      s.full = MultiplyReals(s.full, s.tensor_scale);
      s.inverse = DivideReals(SetReals(1.0F), s.full);
    }
  }
};

template <typename Spread>
struct SpreadType {
  using Is = Spread;
};
/// use(SpreadType<Spread>{}) and true if it is that, of those that there are.
template <bool kThere, typename Spread, typename Use>
FMOE_INLINE bool UseIf(bool is, const Use& use) {
  if constexpr (kThere) {
    if (is) {
      use(SpreadType<Spread>{});
      return true;
    }
  }
  return false;
}
template <bool kThere, TileSums kSums, typename Use>
FMOE_INLINE bool UseRowsIf(TileFinish finish, const Use& use) {
  const bool adds = finish == &FinishRows<kSums, false>, puts = finish == &FinishRows<kSums, true>;
  if constexpr (kSums == kIntegerSums) {  // beside bytes that stand ready no load is to spare
    return UseIf<kThere, RowSpread<kSums, kAdds>>(adds, use) ||
           UseIf<kThere, RowSpread<kSums, kPuts>>(puts, use);
  } else {
    return UseIf<kThere, RowSpread<kSums, kAddsOrPuts>>(adds || puts, use);
  }
}
/// use(SpreadType<...>{}) of what does the work of `finish` between tile instructions. There: of a
/// TileEngine.
template <typename There, typename Use>
FMOE_INLINE void WithSpread(TileFinish finish, const Use& use) {
  constexpr bool kPlain = There::kPlain, kScaled = There::kScaled, kInteger = There::kInteger;
  constexpr TileFinish kSiluToTiles = &SiluToTiles;
  if (!(UseRowsIf<kPlain, kPlainSums>(finish, use) || UseRowsIf<kScaled, kScaledSums>(finish, use) ||
        UseRowsIf<kInteger, kIntegerSums>(finish, use) ||
        UseIf<kPlain, TileSpread>(finish == kSiluToTiles, use) ||
        UseIf<There::kNvfp4, Nvfp4Spread>(finish == &SiluToNvfp4, use) ||
        UseIf<kScaled, SiluSpread<kScaledSums>>(finish == &SiluToRows<kScaledSums>, use) ||
        UseIf<kInteger, SiluSpread<kIntegerSums>>(finish == &SiluToRows<kIntegerSums>, use))) {
    use(SpreadType<NoSpread>{});
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
