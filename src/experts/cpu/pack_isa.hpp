#pragma once

#include <stdint.h>
#include <string.h>

#include "experts/cpu/kernel_table_isa.hpp"
#include "experts/cpu/simd_isa.hpp"

/// Values of one token into its column of a tile (layout: TileView), 64 at a time.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

constexpr int kUnitVectors = 64 / kLanes;

void PackF32(const PackArguments* arguments) {
  float* out =
      (float*)arguments->tile.codes + arguments->first_unit * 64 * arguments->height + arguments->token;
  const int64_t count = arguments->units * 64;
  if (arguments->height == 1) {
    memcpy(out, arguments->values, (size_t)count * sizeof(float));
    return;
  }
  for (int64_t k = 0; k < count; ++k, out += arguments->height) {
    *out = arguments->values[k];
  }
}

/// Sixteen bytes, four k a word, to the words of one plane of a step.
FMOE_INLINE void StoreStep(const int8_t* bytes, int32_t* words, int height) {
  for (int q = 0; q < 4; ++q) {
    memcpy(words + q * height, bytes + 4 * q, 4);
  }
}

/// What the kernel subtracts for each group: -zero * sum as int32, or the sum itself as fp32.
FMOE_INLINE void StoreCorrections(const PackArguments* a, const int32_t* sums16, int64_t unit) {
  const int group16 = a->correction.group / 16;
  int32_t* out = a->tile.correction + unit * (4 / group16) * a->height + a->token;
  int32_t sum = 0;
  for (int i = 0; i < 4; ++i) {
    sum += sums16[i];
    if ((i + 1) % group16 != 0) {
      continue;
    }
    if (a->correction.zero != 0) {
      *out = -a->correction.zero * sum;
    } else {
      const float value = (float)sum;
      memcpy(out, &value, 4);
    }
    out += a->height;
    sum = 0;
  }
}

/// |x| as integers: larger floats have larger bits, and NaN and infinity stand above all of them.
FMOE_INLINE uint32_t LargestBits(const Floats* x) {
  Ints largest = IntZero();
  Unroll<kUnitVectors>([&](auto v) FMOE_FLAT { largest = IntMaxUnsigned(largest, Bits(Absolute(x[v]))); });
  return MaxUnsignedOf(largest);
}

constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kNanBits = 0x7fc00000;
/// 2^-110: the reciprocal of a scale below it would overflow. Such a unit counts as zero; it is 2^-100 of any
/// weight.
constexpr uint32_t kTinyBits = (127 - 110) << 23;

FMOE_INLINE float FloatOfBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

/// Scale and its reciprocal for codes up to `largest_code`. A unit with NaN or infinity gets a NaN scale,
/// which spoils its own token and no other.
struct UnitScale {
  float scale, encode_multiplier;
};
FMOE_INLINE UnitScale ScaleOf(uint32_t amax_bits, float largest_code) {
  if (amax_bits >= kInfinityBits) {
    return {FloatOfBits(kNanBits), 0.0F};
  }
  if (amax_bits < kTinyBits) {
    return {0.0F, 0.0F};
  }
  const float amax = FloatOfBits(amax_bits);
  return {amax / largest_code, largest_code / amax};
}

template <TileKind kKind>
void PackIntegers(const PackArguments* a) {
  constexpr bool kTwoPlanes = kKind == kTileA16;
  constexpr float kLargestCode = kTwoPlanes ? 16256.0F : 127.0F;  // 16256 = 127 * 128
  const int step_words = Planes(kKind) * 4 * a->height;
  for (int64_t i = 0; i < a->units; ++i) {
    const int64_t unit = a->first_unit + i;
    const float* values = a->values + 64 * i;
    Floats x[kUnitVectors];
    Unroll<kUnitVectors>([&](auto v) FMOE_FLAT { x[v] = Load(values + v * kLanes); });
    const uint32_t amax = LargestBits(x);
    UnitScale unit_scale = ScaleOf(amax, kLargestCode);
    int32_t sums16[4] = {0, 0, 0, 0};
    alignas(64) int8_t high[64], low[64];
    const bool usable = unit_scale.encode_multiplier > 0.0F;
    const bool shared = !kTwoPlanes && a->row_scale != nullptr;
    Unroll<kUnitVectors>([&](auto v) FMOE_FLAT {
      Ints code = IntZero();
      if (usable) {
        Floats scaled;
        if (shared) {
          scaled = Divide(x[v], Set(*a->row_scale));
          scaled = Max(Set(-128.0F), Min(Set(127.0F), scaled));
        } else {
          scaled = Multiply(x[v], Set(unit_scale.encode_multiplier));
        }
        code = ToIntsEven(scaled);
      }
      sums16[v * kLanes / 16] += SumOf(code);
      if constexpr (kTwoPlanes) {
        const Ints upper = ShiftRightSigned<7>(IntAdd(code, IntSet(64)));
        StoreBytes(high + v * kLanes, upper);
        StoreBytes(low + v * kLanes, IntSubtract(code, ShiftLeft<7>(upper)));
      } else {
        StoreBytes(high + v * kLanes, code);
      }
    });
    int32_t* words = (int32_t*)a->tile.codes + unit * 4 * step_words + a->token;
    for (int step = 0; step < 4; ++step, words += step_words) {
      StoreStep(high + 16 * step, words, a->height);
      if constexpr (kTwoPlanes) {
        StoreStep(low + 16 * step, words + 4 * a->height, a->height);
      }
    }
    StoreCorrections(a, sums16, unit);
    a->tile.scale[unit * a->height + a->token] =
        shared && amax < kInfinityBits ? *a->row_scale : unit_scale.scale;
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
    out[i] = _cvtsh_ss(in[i]);
  }
}

void CopyFloats(const void* values, int64_t count, float* out) {
  memcpy(out, values, (size_t)count * sizeof(float));
}
void CopyFloatsOut(const float* values, int64_t count, void* out) {
  memcpy(out, values, (size_t)count * sizeof(float));
}

/// To nearest even: adds half a unit less one, plus the last bit that stays. NaN becomes the quiet NaN
/// 0x7fc0.
FMOE_INLINE Ints Bf16Of(Floats x) {
  const Ints bits = Bits(x);
  const Ints odd = IntAnd(ShiftRight16(bits), IntSet(1));
  const Ints rounded = ShiftRight16(IntAdd(bits, IntAdd(odd, IntSet(0x7fff))));
  return SelectNan(x, IntSet(0x7fc0), rounded);
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
