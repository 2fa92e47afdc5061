#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/dot_prefetch_isa.hpp"
#include "experts/cpu/kernels/integer_panel_isa.hpp"

/// A unit of 64 k of two stripes of integers, as the panel or L1 holds it, with tokens of a tall tile
/// (dot_tall_isa.hpp).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Tokens that meet the weights at a time. With 16 sums of integers and 8 of floats the registers are full.
template <TileKind kKind>
constexpr int kTallTokens = 4 / Planes(kKind);

/// Or one less, so that no token is computed that does not exist: 4 and 3 add up to every number from 6 on, 2
/// and 1 to all of them.
template <TileKind kKind>
constexpr int kFewerTokens = kTallTokens<kKind> - 1;

/// Tokens of a wide pass: 16 sums of integers, and most of those of floats in L1
/// (TileView::TallTile::wide_slabs).
template <TileKind kKind>
constexpr int kWideTokens = 2 * kTallTokens<kKind>;

/// How many of the `left` last tokens of a tile meet the weights next.
template <TileKind kKind>
constexpr int NextTokens(int left) {
  const bool fewer = Planes(kKind) == 1 ? left <= 3 || left == 5 || left == 6 : left == 1;
  return fewer ? kFewerTokens<kKind> : kTallTokens<kKind>;
}

template <TileKind kKind>
constexpr int64_t NumPasses(int tokens) {
  return (tokens + kTallTokens<kKind> - 1) / kTallTokens<kKind>;
}

/// A unit of two stripes as the panel holds it, decoded in registers. kHasZeros: whether integers in groups
/// have zero points. A branch in the loop instead, with sums that start at a correction or at zero, took 3 of
/// 83 cycles a unit.
template <WeightKernel kWeight, bool kHasZeros>
struct PackedPair {
  using Panel = IntegerPanel<kWeight>;
  static constexpr int kGroup = Panel::kGroup, kGroups = 64 / kGroup;
  static constexpr bool kScales = Panel::kE2m1 || Panel::kGrouped, kZeros = kHasZeros;
  static constexpr bool kMinima = kHasZeros && Panel::kSuper;  // in place of zero points

  const uint8_t* codes;
  QuantParams params;
  int64_t stride;  ///< from the first stripe to the second
  typename Panel::Table table;

  /// With what is known when this is compiled.
  FMOE_INLINE GroupScales TypeOf(GroupScales type) {
    return Panel::kSuper ? GroupScales{kRowF32, kHasZeros ? kZeroBytes : kZeroNone, 0} : type;
  }
  FMOE_INLINE QuantParams ParamsOf(const PackedPair& pair, int stripe, GroupScales type) {
    const int64_t offset = stripe * pair.stride;
    return {pair.params.groups + offset, pair.params.units + offset, type};
  }

  /// Eight k of a stripe as two vectors of bytes.
  static constexpr int PhaseOf(int eight) { return Panel::PhaseOf(eight); }
  template <int kPhase>
  FMOE_NESTED void Load8(const PackedPair& pair, int stripe, int eight, Ints* out) {
    Panel::template DecodeEight<kPhase>(pair.codes + stripe * pair.stride, eight, 0, pair.table, out);
  }
  /// Scales of kCount groups and both stripes, with one branch for their type.
  template <int kCount>
  FMOE_NESTED void LoadScales(const PackedPair& pair, int group, Floats (*out)[2]) {
    const GroupScales type = pair.params.type;
    if (Panel::kSuper) {
      LoadOfType<kCount, false>(pair, TypeOf(type), group, out);
    } else if (!Panel::kGrouped || type.type == kRowBf16) {
      LoadOfType<kCount, false>(pair, {kRowBf16, type.zeros, 0}, group, out);
    } else if (type.type == kRowF16) {
      LoadOfType<kCount, false>(pair, {kRowF16, type.zeros, 0}, group, out);
    } else {
      LoadOfType<kCount, false>(pair, {kRowF32, type.zeros, 0}, group, out);
    }
  }
  /// The same of zero points.
  template <int kCount>
  FMOE_NESTED void LoadZeros(const PackedPair& pair, int group, Floats (*out)[2]) {
    const GroupScales type = pair.params.type;
    if (Panel::kSuper) {
      LoadOfType<kCount, true>(pair, TypeOf(type), group, out);
    } else if (type.zeros == kZeroBytes) {
      LoadOfType<kCount, true>(pair, {type.type, kZeroBytes, 0}, group, out);
    } else {
      LoadOfType<kCount, true>(pair, {kRowF32, kZeroFloats, 0}, group, out);
    }
  }

 private:
  /// out[group][stripe] of scales or zero points of a type that is known here.
  template <int kCount, bool kOfZeros>
  FMOE_NESTED void LoadOfType(const PackedPair& pair, GroupScales type, int group, Floats (*out)[2]) {
    Unroll<2 * kCount>([&](int i) FMOE_FLAT {
      const QuantParams params = ParamsOf(pair, i % 2, type);
      if constexpr (kOfZeros) {
        out[i / 2][i % 2] = LoadGroupZero<kWeight>(params, group + i / 2, 0);
      } else {
        out[i / 2][i % 2] = LoadGroupScale<kWeight>(params, group + i / 2, 0);
      }
    });
  }
};

/// The same decoded. Formats that look alike share it, and what multiplies it.
template <int kGroupK, bool kHasScales, bool kHasZeros, bool kHasMinima>
struct alignas(64) DecodedPair {
  static constexpr int kGroup = kGroupK, kGroups = 64 / kGroup;
  static constexpr bool kScales = kHasScales, kZeros = kHasZeros, kMinima = kHasMinima;

  uint8_t codes[8][2][128];
  float scales[kGroups][2][16];
  float zeros[kZeros ? kGroups : 1][2][16];

  static constexpr int PhaseOf(int) { return 0; }
  template <int>
  FMOE_NESTED void Load8(const DecodedPair& pair, int stripe, int eight, Ints* out) {
    out[0] = LoadInts(pair.codes[eight][stripe]);
    out[1] = LoadInts(pair.codes[eight][stripe] + 64);
  }
  template <int kCount>
  FMOE_NESTED void LoadScales(const DecodedPair& pair, int group, Floats (*out)[2]) {
    Unroll<2 * kCount>([&](int i) FMOE_FLAT { out[i / 2][i % 2] = Load(pair.scales[group + i / 2][i % 2]); });
  }
  template <int kCount>
  FMOE_NESTED void LoadZeros(const DecodedPair& pair, int group, Floats (*out)[2]) {
    Unroll<2 * kCount>([&](int i) FMOE_FLAT { out[i / 2][i % 2] = Load(pair.zeros[group + i / 2][i % 2]); });
  }

  template <class Packed>
  FMOE_NESTED void Decode(const Packed& packed, DecodedPair* out) {
    Unroll<16>([&](auto i) FMOE_FLAT {
      constexpr int kEight = i / 2, kStripe = i % 2;
      Ints weights[2];
      Packed::template Load8<Packed::PhaseOf(kEight)>(packed, kStripe, kEight, weights);
      StoreInts(out->codes[kEight][kStripe], weights[0]);
      StoreInts(out->codes[kEight][kStripe] + 64, weights[1]);
    });
    if constexpr (kScales) {
      Floats scales[kGroups][2];
      Packed::template LoadScales<kGroups>(packed, 0, scales);
      Unroll<2 * kGroups>([&](int i) FMOE_FLAT { Store(out->scales[i / 2][i % 2], scales[i / 2][i % 2]); });
    }
    if constexpr (kZeros) {
      Floats zeros[kGroups][2];
      Packed::template LoadZeros<kGroups>(packed, 0, zeros);
      Unroll<2 * kGroups>([&](int i) FMOE_FLAT { Store(out->zeros[i / 2][i % 2], zeros[i / 2][i % 2]); });
    }
  }
};

/// A unit of some tokens, each of which is a tile of its own. Tokens that do not exist repeat the last one.
template <class Pair, TileKind kKind, int kTokens>
struct TallTokens {
  const char* rows[kTokens];
  int64_t words, correction, scale;  ///< where those of the unit stand in a row

  FMOE_INLINE TallTokens At(const TileView& tile, int64_t units, int64_t unit, int first) {
    TallTokens at;
    Unroll<kTokens>([&](int t) FMOE_FLAT {
      const int token = first + t < tile.tokens ? first + t : tile.tokens - 1;
      at.rows[t] = (const char*)tile.tall_tile.rows[token];
    });
    at.words = 0;
    at.correction = units * (64 * Planes(kKind));
    at.scale = at.correction + units * (4 * Pair::kGroups * Corrections(kKind));
    Advance(at, unit);
    return at;
  }
  FMOE_INLINE void Advance(TallTokens& at, int64_t units) {
    at.words += units * (64 * Planes(kKind));
    at.correction += units * (4 * Pair::kGroups * Corrections(kKind));
    at.scale += units * (4 * (HasGroupScales(kKind) ? Pair::kGroups : 1));
  }
  FMOE_INLINE const int32_t* Words(const TallTokens& at, int token) {
    return (const int32_t*)(at.rows[token] + at.words);
  }
  FMOE_INLINE const int32_t* Correction(const TallTokens& at, int token) {
    return (const int32_t*)(at.rows[token] + at.correction);
  }
  FMOE_INLINE const float* Scale(const TallTokens& at, int token) {
    return (const float*)(at.rows[token] + at.scale);
  }
};

/// Words of a wide pass that are broadcast memory operands of `vpdpbusd`, read once for each stripe, instead
/// of being broadcast into a register first: those of every second token. With fewer there are more
/// instructions, with more the load ports are the limit.
template <TileKind kKind, int kTokens>
constexpr bool DotsMemory(int token) {
  return kTokens > kTallTokens<kKind> && token % 2 == 0;
}

/// dots[plane][stripe][token] += eight k of weights times those of the tokens. kPhase: of `eight`
/// (Pair::PhaseOf).
template <class Pair, TileKind kKind, int kTokens, int kPhase>
FMOE_NESTED void DotEight(const Pair& pair, const TallTokens<Pair, kKind, kTokens>& tokens, int eight,
                          Ints (*dots)[2][kTokens]) {
  constexpr int kPlanes = Planes(kKind);
  Ints weights[2][2];
  Unroll<2>([&](int s) FMOE_FLAT { Pair::template Load8<kPhase>(pair, s, eight, weights[s]); });
  Unroll<2 * kPlanes * kTokens>([&](int i) FMOE_FLAT {
    const int q = i / (kPlanes * kTokens), plane = i / kTokens % kPlanes, t = i % kTokens;
    const int32_t* words = TallTokens<Pair, kKind, kTokens>::Words(tokens, t);
    const int32_t* word = words + (eight / 2 * kPlanes + plane) * 4 + eight % 2 * 2 + q;
    const Ints both = IntSet(*word);
    Unroll<2>([&](int s) FMOE_FLAT {
      Ints& sum = dots[plane][s][t];
      if (DotsMemory<kKind, kTokens>(t)) {
        sum = ByteDotWord(sum, weights[s][q], word);
      } else {
        sum = ByteDot(sum, weights[s][q], both);
      }
    });
  });
}

/// Groups [first, first + kCount) of a unit end: dots[group][plane][stripe][token] become part of its sums,
/// or of those of the tokens.
template <class Pair, TileKind kKind, int kTokens, int kCount>
FMOE_NESTED void EndGroups(const Pair& pair, const TallTokens<Pair, kKind, kTokens>& tokens, int first,
                           const Ints (*dots)[Planes(kKind)][2][kTokens], Floats (*unit_sums)[kTokens],
                           Floats (*sums)[kTokens]) {
  using Tokens = TallTokens<Pair, kKind, kTokens>;
  using End = GroupEnd<kKind, Pair::kGroups, Pair::kScales, Pair::kMinima>;
  constexpr int kPlanes = Planes(kKind), kSums = kCount * 2 * kTokens;
  Floats sum[kCount][2][kTokens];
  Unroll<kSums>([&](int i) FMOE_FLAT {
    const int g = i / (2 * kTokens), s = i / kTokens % 2, t = i % kTokens;
    Ints whole = dots[g][kPlanes - 1][s][t];
    if constexpr (kPlanes == 2) {
      whole = IntAdd(ShiftLeft<7>(dots[g][0][s][t]), whole);
    }
    sum[g][s][t] = ToFloats(whole);
  });
  Floats zeros[kCount][2];
  if constexpr (Pair::kZeros) {
    Pair::template LoadZeros<kCount>(pair, first, zeros);
  }
  if constexpr (Pair::kZeros && !Pair::kMinima) {
    Unroll<kSums>([&](int i) FMOE_FLAT {
      const int g = i / (2 * kTokens), s = i / kTokens % 2, t = i % kTokens;
      sum[g][s][t] = End::LessZero(sum[g][s][t], zeros[g][s], Tokens::Correction(tokens, t) + first + g);
    });
  }
  Floats scales[kCount][2];
  Pair::template LoadScales<kCount>(pair, first, scales);
  Unroll<kSums>([&](int i) FMOE_FLAT {
    const int g = i / (2 * kTokens), s = i / kTokens % 2, t = i % kTokens;
    const int group = first + g;
    End::Add(sum[g][s][t], scales[g][s], Pair::kMinima, zeros[g][s], Tokens::Correction(tokens, t) + group,
             Tokens::Scale(tokens, t) + (HasGroupScales(kKind) ? group : 0), group == 0, unit_sums[s][t],
             sums[s][t]);
  });
}

/// One unit of 64 k: sums[stripe][token] += weights times tokens.
///
/// Where tokens are few, two groups of k, or two halves of one, have integers of their own, so that sixteen
/// chains of additions overlap: an instruction takes four cycles and two begin in each (INT4 per channel with
/// eight chains: 82 % of the peak, with sixteen 88).
template <class Pair, TileKind kKind, int kTokens>
FMOE_NESTED void TallUnit(const Pair& pair, const TallTokens<Pair, kKind, kTokens>& tokens,
                          Floats (*sums)[kTokens]) {
  using Tokens = TallTokens<Pair, kKind, kTokens>;
  constexpr int kPlanes = Planes(kKind), kGroups = Pair::kGroups;
  constexpr int kAtOnce = kTokens > kTallTokens<kKind> ? 1 : 2;
  constexpr int kChains = kGroups == 1 ? kAtOnce : kGroups;  // pieces of k with integers of their own
  constexpr int kEights = 8 / kChains;
  Floats unit_sums[2][kTokens];
  Unroll<kChains / kAtOnce>([&](auto part) FMOE_FLAT {
    Ints dots[kAtOnce][kPlanes][2][kTokens];
    Unroll<kAtOnce * kPlanes * kTokens>([&](int i) FMOE_FLAT {
      const int chain = i / (kPlanes * kTokens), plane = i / kTokens % kPlanes, t = i % kTokens;
      const int at = part * kAtOnce + chain;
      Ints start = IntZero();
      if (plane + 1 == kPlanes && at < kGroups && !Pair::kZeros) {
        start = IntSet(Tokens::Correction(tokens, t)[at]);
      }
      dots[chain][plane][0][t] = dots[chain][plane][1][t] = start;
    });
    Unroll<kAtOnce * kEights>([&](auto i) FMOE_FLAT {
      constexpr int kChain = i % kAtOnce, kEight = (part * kAtOnce + kChain) * kEights + i / kAtOnce;
      DotEight<Pair, kKind, kTokens, Pair::PhaseOf(kEight)>(pair, tokens, kEight, dots[kChain]);
    });
    if constexpr (kGroups == 1 && kAtOnce == 2) {
      Unroll<2 * kPlanes * kTokens>([&](int i) FMOE_FLAT {
        Ints* first = &dots[0][0][0][0];
        first[i] = IntAdd(first[i], (&dots[1][0][0][0])[i]);
      });
      EndGroups<Pair, kKind, kTokens, 1>(pair, tokens, 0, dots, unit_sums, sums);
    } else {
      EndGroups<Pair, kKind, kTokens, kAtOnce>(pair, tokens, part * kAtOnce, dots, unit_sums, sums);
    }
  });
  if constexpr (GroupEnd<kKind, kGroups, Pair::kScales, Pair::kMinima>::kUnitSums) {
    Unroll<2 * kTokens>([&](int i) FMOE_FLAT {
      const int token = i / 2, stripe = i % 2;
      Floats& sum = sums[stripe][token];
      sum = MultiplyAdd(unit_sums[stripe][token], Set(*Tokens::Scale(tokens, token)), sum);
    });
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
