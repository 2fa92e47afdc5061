#pragma once

#include <stdint.h>
#include <string.h>

#include "experts/cpu/kernels/kernel_table_isa.hpp"
#include "experts/cpu/kernels/lines_isa.hpp"
#include "experts/cpu/kernels/unit_scale_isa.hpp"

/// Values of one token into a tile of its own (layout: TileView), 64 at a time, and tiles of one token into
/// tiles of several.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

void PackF32(const PackArguments* arguments) {
  memcpy(arguments->tile.codes, arguments->values, (size_t)arguments->units * 64 * sizeof(float));
}

/// Eight words of 16 / kHeight runs of each token are the sixteen rows of a transposition.
template <int kHeight>
void InterleaveTokens(const int32_t* const* tokens, int64_t words, int32_t* out) {
  constexpr int kRuns = 16 / kHeight;
  alignas(64) int32_t lines[8 * 16];
  for (int64_t w = 0; w < words; w += 8 * kRuns, out += 8 * kRuns * kHeight) {
    const uint8_t* rows[16];
    Unroll<16>([&](int i)
                   FMOE_FLAT { rows[i] = (const uint8_t*)(tokens[i % kHeight] + w + 8 * (i / kHeight)); });
    Ints line[8 * kHalves];
    LoadTransposed(rows, 0, line);
    Unroll<8>([&](int v) FMOE_FLAT { StoreLine<false>((uint8_t*)(lines + 16 * v), line + v * kHalves); });
    Unroll<8>([&](int v) FMOE_FLAT {
      Unroll<kRuns>([&](int s) FMOE_FLAT {
        memcpy(out + (8 * s + v) * kHeight, lines + 16 * v + s * kHeight, kHeight * sizeof(int32_t));
      });
    });
  }
}

void Interleave(const int32_t* const* tokens, int64_t words, int height, int32_t* out) {
  switch (height) {
    case 1:
      memcpy(out, tokens[0], (size_t)words * sizeof(int32_t));
      break;
    case 2:
      InterleaveTokens<2>(tokens, words, out);
      break;
    case 4:
      InterleaveTokens<4>(tokens, words, out);
      break;
    default:
      InterleaveTokens<8>(tokens, words, out);
      break;
  }
}

/// What the kernel subtracts for each group of a unit: -zero * sum as int32, or the sum itself as fp32.
/// `out` is the correction of the unit's first group; groups stand `stride` words apart.
FMOE_INLINE void StoreCorrections(Correction correction, const int32_t* sums16, int32_t* out,
                                  int64_t stride) {
  const int group16 = correction.group / 16;
  int32_t sum = 0;
  for (int i = 0; i < 4; ++i) {
    sum += sums16[i];
    if ((i + 1) % group16 != 0) {
      continue;
    }
    if (correction.sums) {
      const float value = (float)sum;
      memcpy(out, &value, 4);
    } else {
      *out = -correction.zero * sum;
    }
    out += stride;
    sum = 0;
  }
}

/// Splits codes into planes of 7 bits, the highest first: code = 16384 h + 128 m + l, or 128 h + l.
template <TileKind kKind>
FMOE_INLINE void SplitPlanes(Ints code, Ints* planes) {
  if constexpr (kKind == kTileA24) {
    planes[0] = ShiftRightSigned<14>(IntAdd(code, IntSet(8192)));
    code = IntSubtract(code, ShiftLeft<14>(planes[0]));
  }
  if constexpr (kKind != kTileA8) {
    constexpr int kUpper = Planes(kKind) - 2;
    planes[kUpper] = ShiftRightSigned<7>(IntAdd(code, IntSet(64)));
    code = IntSubtract(code, ShiftLeft<7>(planes[kUpper]));
  }
  planes[Planes(kKind) - 1] = code;
}

/// Sums of 16 codes each, of 16 * kPieces codes: four at a time in registers, since the sum of a whole
/// register is a chain of shuffles.
template <int kPieces>
FMOE_INLINE void SumCodes(const int8_t* codes, int32_t* sums) {
  int32_t fours[4 * kPieces];
  Unroll<4 * kPieces / kLanes>([&](int v) FMOE_FLAT {
    StoreInts(fours + kLanes * v, SumOfQuads(SumsOfFours(LoadInts(codes + 4 * kLanes * v))));
  });
  Unroll<kPieces>([&](int i) FMOE_FLAT { sums[i] = fours[4 * i]; });
}

template <TileKind kKind>
void PackIntegers(const PackArguments* a) {
  constexpr int kPlanes = Planes(kKind);
  constexpr float kLargestCode = kPlanes == 3 ? 127.0F * 16384.0F : kPlanes == 2 ? 127.0F * 128.0F : 127.0F;
  const int64_t groups = 64 / a->correction.group;
  const int64_t stride = Corrections(kKind);
  int8_t* codes = (int8_t*)a->tile.codes;
  for (int64_t unit = 0; unit < a->units; ++unit, codes += 64 * kPlanes) {
    Floats x[kUnitVectors];
    Unroll<kUnitVectors>([&](int v) FMOE_FLAT { x[v] = Load(a->values + 64 * unit + v * kLanes); });
    constexpr int kScales = kKind == kTileMx ? 2 : 1, kVectors = kUnitVectors / kScales;
    UnitScale scales[kScales];
    Unroll<kScales>([&](int i) FMOE_FLAT {
      const uint32_t largest = LargestBits<kVectors>(x + i * kVectors);
      scales[i] = kKind == kTileMx ? PowerScaleOf(largest) : ScaleOf(largest, kLargestCode);
      a->tile.scale[unit * kScales + i] = scales[i].scale;
    });
    Unroll<kUnitVectors>([&](int v) FMOE_FLAT {
      const int step = v * kLanes / 16;
      const float multiplier = scales[v / kVectors].encode_multiplier;
      const Ints code = multiplier > 0.0F ? ToIntsEven(Multiply(x[v], Set(multiplier))) : IntZero();
      Ints planes[kPlanes];
      SplitPlanes<kKind>(code, planes);
      Unroll<kPlanes>([&](int p) FMOE_FLAT {
        StoreBytes(codes + (step * kPlanes + p) * 16 + v * kLanes % 16, planes[p]);
      });
    });
  }
  // In a second pass, because wide loads of codes that were just stored in pieces would wait for them.
  codes = (int8_t*)a->tile.codes;
  for (int64_t unit = 0; unit < a->units; ++unit, codes += 64 * kPlanes) {
    int32_t sums[4 * kPlanes], sums16[4], high_sums16[4];
    SumCodes<4 * kPlanes>(codes, sums);
    const bool high_apart = kKind == kTileA24 && !a->correction.sums;
    Unroll<4>([&](int step) FMOE_FLAT {
      const int32_t* of = sums + step * kPlanes;
      sums16[step] = of[kPlanes - 1];
      if constexpr (kPlanes > 1) {
        sums16[step] += 128 * of[kPlanes - 2];
      }
      high_sums16[step] = high_apart ? of[0] : 0;
      if (kPlanes == 3 && !high_apart) {
        sums16[step] += 16384 * of[0];
      }
    });
    int32_t* correction = a->tile.correction + unit * groups * stride;
    StoreCorrections(a->correction, sums16, correction, stride);
    if constexpr (kKind == kTileA24) {
      StoreCorrections(a->correction, high_sums16, correction + 1, stride);
    }
  }
}

/// Codes that come with their scales.
void PackCodes(const PackCodesArguments* a) {
  const int64_t groups = 64 / a->correction.group;
  memcpy(a->tile.codes, a->codes, (size_t)a->units * 64);
  memcpy(a->tile.scale, a->scales, (size_t)(a->units * a->scales_per_unit) * sizeof(float));
  for (int64_t unit = 0; unit < a->units; ++unit) {
    int32_t sums16[4];
    SumCodes<4>(a->codes + 64 * unit, sums16);
    StoreCorrections(a->correction, sums16, a->tile.correction + unit * groups, 1);
  }
}

// ---------------------------------------------------------------------------------------------- rows of
// hidden states

void Bf16ToFloat(const void* values, int64_t count, float* out) {
  const uint16_t* in = (const uint16_t*)values;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Store(out + i, LoadBf16(in + i));
  }
  for (; i < count; ++i) {
    out[i] = FloatOfBits((uint32_t)in[i] << 16);
  }
}

void F16ToFloat(const void* values, int64_t count, float* out) {
  const uint16_t* in = (const uint16_t*)values;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Store(out + i, LoadF16(in + i));
  }
  for (; i < count; ++i) {
    out[i] = FloatOfF16(in[i]);
  }
}

void CopyFloats(const void* values, int64_t count, float* out) {
  memcpy(out, values, (size_t)count * sizeof(float));
}
void CopyFloatsOut(const float* values, int64_t count, void* out) {
  memcpy(out, values, (size_t)count * sizeof(float));
}

void FloatToBf16(const float* values, int64_t count, void* out) {
  uint16_t* to = (uint16_t*)out;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    StoreWords(to + i, Bf16Of(Load(values + i)));
  }
  if (i < count) {
    float last[kLanes] = {};
    uint16_t words[kLanes];
    memcpy(last, values + i, (size_t)(count - i) * sizeof(float));
    StoreWords(words, Bf16Of(Load(last)));
    memcpy(to + i, words, (size_t)(count - i) * sizeof(uint16_t));
  }
}

void FloatToF16(const float* values, int64_t count, void* out) {
  uint16_t* to = (uint16_t*)out;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    StoreF16(to + i, Load(values + i));
  }
  if (i < count) {
    float last[kLanes] = {};
    uint16_t words[kLanes];
    memcpy(last, values + i, (size_t)(count - i) * sizeof(float));
    StoreF16(words, Load(last));
    memcpy(to + i, words, (size_t)(count - i) * sizeof(uint16_t));
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
