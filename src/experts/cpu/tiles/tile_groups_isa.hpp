#pragma once

#include <stdint.h>

#include "experts/cpu/tiles/tile_decode_isa.hpp"
#include "experts/cpu/tiles/tile_walk_isa.hpp"

/// Sums of groups of k that are scaled in fp32, where bf16 cannot take the scales into the weights.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Two groups that follow each other, so that results are read and written once for both:
///
///   results  (+)=  (sums_0 - zero_0 * token_sum_0) * scale_0 * token_scale_0
///               +  (sums_1 - zero_1 * token_sum_1) * scale_1 * token_scale_1
///
/// in the order of k. Sums and results are [token tile][stripe][16 tokens][16 rows]. All of it is cut into
/// chunks of eight tokens with both stripes, which run between the steps of the groups that follow; or, where
/// the factor of a token is the same for all 16 rows, into the 64 vectors of a token and a stripe, one behind
/// nearly every tile instruction (RowScaler).
struct GroupPair {
  const float* sums[2];
  float* results;
  const uint8_t* scales[2][2];                 // [group][stripe]
  const float *token_scale[2], *token_sum[2];  // [group]
  int64_t tile_tokens;
  int groups;  // one where K ends
  int next, chunks;
  bool first;    // results begin
  bool by_rows;  // factors are ready
  GroupScales type;
  alignas(64) float factors[2][64];  // [group][token tile][stripe][16 tokens]

  bool Waits() const { return next < chunks; }
};
constexpr int kChunkTokens = 8;

template <typename Panel, bool kZeros, bool kIntegers, int kGroups, bool kFirst, bool kTokenScale>
FMOE_INLINE void ScaleChunk(const GroupPair& p, int chunk) {
  const int64_t tile = chunk / 2, row = chunk % 2 * kChunkTokens;
  const int64_t at = tile * 512 + row * 16, token = tile * p.tile_tokens + row;
  Reals scale[kGroups][2], zero[kGroups][2];
  Unroll<2 * kGroups>([&](int i) FMOE_FLAT {
    const uint8_t* scales = p.scales[i / 2][i % 2];
    if constexpr (Panel::kGrouped) {
      LoadScaleAndZero(scales, p.type, Panel::kU4 ? 8.0F : 128.0F, &scale[i / 2][i % 2], &zero[i / 2][i % 2]);
    } else if constexpr (Panel::kInFront) {
      scale[i / 2][i % 2] = SetReals(*(const float*)scales);
    } else {
      scale[i / 2][i % 2] = LoadReals((const float*)scales);
    }
  });
  // What belongs to tokens is loaded once and spread by shuffles: a core holds 192 loads until they retire,
  // and a tile takes 16 of them.
  Reals token_scale[kGroups], token_sum[kGroups];
  const float* sums[kGroups];
  Unroll<kGroups>([&](int group) FMOE_FLAT {
    sums[group] = p.sums[group] + at;
    if constexpr (kTokenScale) {
      token_scale[group] = LoadEightReals(p.token_scale[group] + token);
    }
    if constexpr (kZeros) {
      token_sum[group] = LoadEightReals(p.token_sum[group] + token);
    }
  });
  float* const results = p.results + at;
  Unroll<kChunkTokens / 4>([&](auto four) FMOE_FLAT {
    Reals four_scales[kGroups], four_sums[kGroups];
    Unroll<kGroups>([&](int group) FMOE_FLAT {
      if constexpr (kTokenScale) {
        four_scales[group] = Quarter<decltype(four){}>(token_scale[group]);
      }
      if constexpr (kZeros) {
        four_sums[group] = Quarter<decltype(four){}>(token_sum[group]);
      }
    });
    Unroll<4>([&](auto t) FMOE_FLAT {
      constexpr int kToken = decltype(t){};
      const int64_t here = (four * 4 + kToken) * 16;
      Reals total[2];
      if constexpr (!kFirst) {
        total[0] = LoadReals(results + here);
        total[1] = LoadReals(results + here + 256);
      }
      Unroll<kGroups>([&](int group) FMOE_FLAT {
        Reals own_scale, own_sum;
        if constexpr (kTokenScale) {
          own_scale = LaneOfQuarter<kToken>(four_scales[group]);
        }
        if constexpr (kZeros) {
          own_sum = LaneOfQuarter<kToken>(four_sums[group]);
        }
        Unroll<2>([&](int stripe) FMOE_FLAT {
          const float* const from = sums[group] + here + stripe * 256;
          Reals x = kIntegers ? LoadIntegers(from) : LoadReals(from), factor = scale[group][stripe];
          if constexpr (kZeros) {
            x = NegativeMultiplyAddReals(zero[group][stripe], own_sum, x);
          }
          if constexpr (kTokenScale) {
            factor = MultiplyReals(factor, own_scale);
          }
          total[stripe] =
              kFirst && group == 0 ? MultiplyReals(x, factor) : MultiplyAddReals(x, factor, total[stripe]);
        });
      });
      StoreReals(results + here, total[0]);
      StoreReals(results + here + 256, total[1]);
    });
  });
}

/// kIntegers: sums are int32, of codes without zero points.
template <typename Panel, bool kZeros, bool kIntegers>
struct GroupScaler {
  template <int kGroups, bool kFirst>
  static void Scale(const GroupPair& p, int chunk) {
    p.token_scale[0] != nullptr ? ScaleChunk<Panel, kZeros, kIntegers, kGroups, kFirst, true>(p, chunk)
                                : ScaleChunk<Panel, kZeros, kIntegers, kGroups, kFirst, false>(p, chunk);
  }

  static FMOE_APART void Next(GroupPair& p) {
    const int chunk = p.next++;
    if (p.groups == 2) {
      p.first ? Scale<2, true>(p, chunk) : Scale<2, false>(p, chunk);
    } else {
      p.first ? Scale<1, true>(p, chunk) : Scale<1, false>(p, chunk);
    }
  }

  static void Drain(GroupPair& p) {
    while (p.Waits()) {
      Next(p);
    }
  }
};

/// A pair of groups of two token tiles, a vector of results at a time. Chunks are calls that hold up the
/// tile instructions behind them (docs/kernels_amx.md has the figures).
struct RowScaler {
  static constexpr int kRows = 64;

  const float *sums[2], *factors;
  float* results;
  bool first;

  /// Where scales are those of 128 x 128 weights, fp32, and stripes lie in one such block (kOfStripe: they
  /// do): the factors of all tokens. Later scalings of `pair` may go by rows then.
  template <bool kOfStripe>
  FMOE_INLINE void Prepare(GroupPair& pair) {
    pair.by_rows = pair.groups == 2 && pair.token_scale[0] != nullptr;
    for (int i = 0; i < 4 && pair.by_rows; ++i) {
      const int group = i / 2, stripe = i % 2;
      const float* scale = (const float*)pair.scales[group][stripe];
      if constexpr (!kOfStripe) {
        pair.by_rows = AllWithin(LoadReals(scale), scale[0], scale[0]);
      }
      const Reals weights = SetReals(scale[0]);
      for (int tile = 0; tile < 2; ++tile) {
        const Reals tokens = LoadReals(pair.token_scale[group] + tile * pair.tile_tokens);
        StoreReals(pair.factors[group] + tile * 32 + stripe * 16, MultiplyReals(weights, tokens));
      }
    }
  }

  /// Row 16 (2 tile + stripe) + token.
  FMOE_INLINE void Scale(const RowScaler& s, int row) {
    float* const result = s.results + row * 16;
    Reals total = LoadRealsUnless(s.first, result);
    total = MultiplyAddReals(LoadReals(s.sums[0] + row * 16), SetReals(s.factors[row]), total);
    total = MultiplyAddReals(LoadReals(s.sums[1] + row * 16), SetReals(s.factors[kRows + row]), total);
    StoreReals(result, total);
  }
};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
