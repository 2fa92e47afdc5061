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

/// Tokens of a wide pass: 16 sums of integers, and most of those of floats in L1 (TileView::wide_slabs).
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
/// have zero points. Asked for in the loop instead, with sums that start at a correction or at zero, that
/// took 3 of 83 cycles a unit.
template <WeightKernel kWeight, bool kHasZeros>
struct PackedPair {
  using Panel = IntegerPanel<kWeight>;
  static constexpr int kGroup = Panel::kGroup, kGroups = 64 / kGroup;
  static constexpr bool kScales = Panel::kE2m1 || Panel::kGrouped, kZeros = kHasZeros;
  static constexpr bool kMinima = kHasZeros && Panel::kSuper;  // in place of zero points

  const uint8_t* codes;
  Sides sides;
  int64_t stride;  ///< from the first stripe to the second
  typename Panel::Table table;

  /// With what is known when this is compiled.
  FMOE_INLINE GroupScales TypeOf(GroupScales type) {
    return Panel::kSuper ? GroupScales{kRowF32, kHasZeros ? kZeroBytes : kZeroNone, 0} : type;
  }
  FMOE_INLINE Sides SidesOf(const PackedPair& pair, int stripe, GroupScales type) {
    const int64_t offset = stripe * pair.stride;
    return {pair.sides.groups + offset, pair.sides.units + offset, type};
  }

  /// Eight k of a stripe as two vectors of bytes.
  static constexpr int PhaseOf(int eight) { return Panel::PhaseOf(eight); }
  template <int kPhase>
  FMOE_INLINE void Load8(const PackedPair& pair, int stripe, int eight, Ints* out) {
    Panel::template DecodeEight<kPhase>(pair.codes + stripe * pair.stride, eight, 0, pair.table, out);
  }
  /// Scales of kCount groups and both stripes, with one branch for their type.
  template <int kCount>
  FMOE_INLINE void LoadScales(const PackedPair& pair, int group, Floats (*out)[2]) {
    const GroupScales type = pair.sides.type;
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
  FMOE_INLINE void LoadZeros(const PackedPair& pair, int group, Floats (*out)[2]) {
    const GroupScales type = pair.sides.type;
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
  FMOE_INLINE void LoadOfType(const PackedPair& pair, GroupScales type, int group, Floats (*out)[2]) {
    Unroll<2 * kCount>([&](auto i) FMOE_FLAT {
      const Sides sides = SidesOf(pair, i % 2, type);
      if constexpr (kOfZeros) {
        out[i / 2][i % 2] = LoadGroupZero<kWeight>(sides, group + i / 2, 0);
      } else {
        out[i / 2][i % 2] = LoadGroupScale<kWeight>(sides, group + i / 2, 0);
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
  FMOE_INLINE void Load8(const DecodedPair& pair, int stripe, int eight, Ints* out) {
    out[0] = LoadInts(pair.codes[eight][stripe]);
    out[1] = LoadInts(pair.codes[eight][stripe] + 64);
  }
  template <int kCount>
  FMOE_INLINE void LoadScales(const DecodedPair& pair, int group, Floats (*out)[2]) {
    Unroll<2 * kCount>([&](auto i)
                           FMOE_FLAT { out[i / 2][i % 2] = Load(pair.scales[group + i / 2][i % 2]); });
  }
  template <int kCount>
  FMOE_INLINE void LoadZeros(const DecodedPair& pair, int group, Floats (*out)[2]) {
    Unroll<2 * kCount>([&](auto i) FMOE_FLAT { out[i / 2][i % 2] = Load(pair.zeros[group + i / 2][i % 2]); });
  }

  template <class Packed>
  FMOE_INLINE void Decode(const Packed& packed, DecodedPair* out) {
    Unroll<16>([&](auto i) FMOE_FLAT {
      constexpr int kEight = decltype(i)() / 2, kStripe = decltype(i)() % 2;
      Ints weights[2];
      Packed::template Load8<Packed::PhaseOf(kEight)>(packed, kStripe, kEight, weights);
      StoreInts(out->codes[kEight][kStripe], weights[0]);
      StoreInts(out->codes[kEight][kStripe] + 64, weights[1]);
    });
    if constexpr (kScales) {
      Floats scales[kGroups][2];
      Packed::template LoadScales<kGroups>(packed, 0, scales);
      Unroll<2 * kGroups>([&](auto i) FMOE_FLAT { Store(out->scales[i / 2][i % 2], scales[i / 2][i % 2]); });
    }
    if constexpr (kZeros) {
      Floats zeros[kGroups][2];
      Packed::template LoadZeros<kGroups>(packed, 0, zeros);
      Unroll<2 * kGroups>([&](auto i) FMOE_FLAT { Store(out->zeros[i / 2][i % 2], zeros[i / 2][i % 2]); });
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
    Unroll<kTokens>([&](auto t) FMOE_FLAT {
      const int token = first + t < tile.tokens ? first + t : tile.tokens - 1;
      at.rows[t] = (const char*)tile.rows[token];
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

/// Words of a wide pass that `vpdpbusd` reads from memory by itself, once for each stripe: of every second
/// token. With fewer there are more instructions, with more there is nothing but loads.
template <TileKind kKind, int kTokens>
constexpr bool DotsMemory(int token) {
  return kTokens > kTallTokens<kKind> && token % 2 == 0;
}

/// One unit of 64 k: sums[stripe][token] += weights times tokens.
///
/// Where tokens are few, two groups of k, or two halves of one, have integers of their own, so that sixteen
/// chains of additions overlap: an instruction takes four cycles and two begin in each (INT4 per channel with
/// eight chains: 82 % of the peak, with sixteen 88).
template <class Pair, TileKind kKind, int kTokens>
FMOE_INLINE void TallUnit(const Pair& pair, const TallTokens<Pair, kKind, kTokens>& tokens,
                          Floats (*sums)[kTokens]) {
  using Tokens = TallTokens<Pair, kKind, kTokens>;
  constexpr int kPlanes = Planes(kKind), kGroups = Pair::kGroups;
  constexpr int kAtOnce = kTokens > kTallTokens<kKind> ? 1 : 2;
  constexpr int kChains = kGroups == 1 ? kAtOnce : kGroups;  // pieces of k with integers of their own
  constexpr int kEights = 8 / kChains;
  using End = GroupEnd<kKind, kGroups, Pair::kScales, Pair::kMinima>;
  Floats unit_sums[2][kTokens];
  const auto add_groups = [&](auto first, auto count, Ints(*dots)[kPlanes][2][kTokens]) FMOE_FLAT {
    constexpr int kFirst = decltype(first)(), kCount = decltype(count)();
    Floats sum[kCount][2][kTokens];
    Unroll<kCount * 2 * kTokens>([&](auto i) FMOE_FLAT {
      constexpr int g = decltype(i)() / (2 * kTokens), s = decltype(i)() / kTokens % 2,
                    t = decltype(i)() % kTokens;
      Ints whole = dots[g][kPlanes - 1][s][t];
      if constexpr (kPlanes == 2) {
        whole = IntAdd(ShiftLeft<7>(dots[g][0][s][t]), whole);
      }
      sum[g][s][t] = ToFloats(whole);
    });
    Floats zeros[kCount][2];
    if constexpr (Pair::kZeros) {
      Pair::template LoadZeros<kCount>(pair, kFirst, zeros);
    }
    if constexpr (Pair::kZeros && !Pair::kMinima) {
      Unroll<kCount * 2 * kTokens>([&](auto i) FMOE_FLAT {
        constexpr int g = decltype(i)() / (2 * kTokens), s = decltype(i)() / kTokens % 2,
                      t = decltype(i)() % kTokens;
        const int32_t* codes = Tokens::Correction(tokens, t) + kFirst + g;
        sum[g][s][t] = End::LessZero(sum[g][s][t], zeros[g][s], codes);
      });
    }
    Floats scales[kCount][2];
    Pair::template LoadScales<kCount>(pair, kFirst, scales);
    Unroll<kCount * 2 * kTokens>([&](auto i) FMOE_FLAT {
      constexpr int g = decltype(i)() / (2 * kTokens), s = decltype(i)() / kTokens % 2,
                    t = decltype(i)() % kTokens;
      constexpr int kGroup = kFirst + g;
      End::Add(sum[g][s][t], scales[g][s], Pair::kMinima, zeros[g][s], Tokens::Correction(tokens, t) + kGroup,
               Tokens::Scale(tokens, t) + (HasGroupScales(kKind) ? kGroup : 0), kGroup == 0, unit_sums[s][t],
               sums[s][t]);
    });
  };
  Unroll<kChains / kAtOnce>([&](auto part) FMOE_FLAT {
    Ints dots[kAtOnce][kPlanes][2][kTokens];
    Unroll<kAtOnce * kPlanes * kTokens>([&](auto i) FMOE_FLAT {
      constexpr int kChain = decltype(i)() / (kPlanes * kTokens), kPlane = decltype(i)() / kTokens % kPlanes;
      constexpr int kToken = decltype(i)() % kTokens, kAt = decltype(part)() * kAtOnce + kChain;
      Ints start = IntZero();
      if constexpr (kPlane + 1 == kPlanes && kAt < kGroups && !Pair::kZeros) {
        start = IntSet(Tokens::Correction(tokens, kToken)[kAt]);
      }
      dots[kChain][kPlane][0][kToken] = dots[kChain][kPlane][1][kToken] = start;
    });
    Unroll<kAtOnce * kEights>([&](auto i) FMOE_FLAT {
      constexpr int kChain = decltype(i)() % kAtOnce;
      constexpr int kEight = (decltype(part)() * kAtOnce + kChain) * kEights + decltype(i)() / kAtOnce;
      Ints weights[2][2];
      Unroll<2>([&](auto s)
                    FMOE_FLAT { Pair::template Load8<Pair::PhaseOf(kEight)>(pair, s, kEight, weights[s]); });
      Unroll<2 * kPlanes * kTokens>([&](auto j) FMOE_FLAT {
        constexpr int q = decltype(j)() / (kPlanes * kTokens), kPlane = decltype(j)() / kTokens % kPlanes;
        constexpr int kToken = decltype(j)() % kTokens;
        constexpr int kWord = (kEight / 2 * kPlanes + kPlane) * 4 + kEight % 2 * 2 + q;
        const int32_t* word = Tokens::Words(tokens, kToken) + kWord;
        const Ints both = IntSet(*word);
        Unroll<2>([&](auto s) FMOE_FLAT {
          Ints& sum = dots[kChain][kPlane][s][kToken];
          if constexpr (DotsMemory<kKind, kTokens>(kToken)) {
            sum = ByteDotWord(sum, weights[s][q], word);
          } else {
            sum = ByteDot(sum, weights[s][q], both);
          }
        });
      });
    });
    if constexpr (kGroups == 1 && kAtOnce == 2) {
      Unroll<2 * kPlanes * kTokens>([&](auto i) FMOE_FLAT {
        Ints* first = &dots[0][0][0][0];
        first[i] = IntAdd(first[i], (&dots[1][0][0][0])[i]);
      });
      add_groups(Index<0>(), Index<1>(), dots);
    } else {
      add_groups(Index<decltype(part)() * kAtOnce>(), Index<kAtOnce>(), dots);
    }
  });
  if constexpr (End::kUnitSums) {
    Unroll<2 * kTokens>([&](auto i) FMOE_FLAT {
      constexpr int kToken = decltype(i)() / 2, kStripe = decltype(i)() % 2;
      Floats& sum = sums[kStripe][kToken];
      sum = MultiplyAdd(unit_sums[kStripe][kToken], Set(*Tokens::Scale(tokens, kToken)), sum);
    });
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
