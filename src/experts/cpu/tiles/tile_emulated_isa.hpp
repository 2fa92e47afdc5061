#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "experts/cpu/kernels/unroll_isa.hpp"

/// Called, not inlined: the kernels unroll these hundreds of times, and inlined they take minutes to compile.
#define FMOE_EMULATED static inline __attribute__((noinline))

/// The names of tile_amx_isa.hpp in portable code, so that everything above them is tested on machines
/// without a matrix unit. Tiles follow the pseudo code of the processor's manual, vectors are loops over
/// arrays.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

struct Words {
  uint16_t at[32];
};
struct Reals {
  float at[16];
};

FMOE_INLINE float FloatOf(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
FMOE_INLINE uint32_t BitsOf(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
/// A matrix unit takes subnormal operands for zero.
FMOE_INLINE float Bf16Operand(uint16_t word) {
  return (word & 0x7f80) == 0 ? 0.0F : FloatOf((uint32_t)word << 16);
}

/// The sixteen columns of a row of sums. Loops over k and columns, compiled without a vectorizer, were two
/// thirds of the time of all tests of tiles.
typedef float RealColumns __attribute__((vector_size(64)));
typedef int32_t IntegerColumns __attribute__((vector_size(64)));

/// Products of bf16 operands are exact in fp32, so that adding them rounds as the processor's fused
/// multiplication does.
FMOE_EMULATED void DotWords(const uint8_t* tokens, const uint8_t* weights, int64_t rows, uint8_t* sums) {
  uint16_t word[16][32], column[16][32];
  RealColumns even[16], odd[16];
  memcpy(word, tokens, 1024);
  memcpy(column, weights, 1024);
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < 16; ++n) {
      even[k][n] = Bf16Operand(column[k][2 * n]);
      odd[k][n] = Bf16Operand(column[k][2 * n + 1]);
    }
  }
  for (int m = 0; m < rows; ++m) {
    RealColumns of_even = {}, of_odd = {}, sum;
    for (int k = 0; k < 16; ++k) {
      of_even += Bf16Operand(word[m][2 * k]) * even[k];
      of_odd += Bf16Operand(word[m][2 * k + 1]) * odd[k];
    }
    memcpy(&sum, sums + m * 64, 64);
    sum += of_even + of_odd;
    memcpy(sums + m * 64, &sum, 64);
  }
}

template <typename Weight>
FMOE_EMULATED void DotBytes(const uint8_t* tokens, const uint8_t* weights, int64_t rows, uint8_t* sums) {
  IntegerColumns column[64];
  for (int k = 0; k < 64; ++k) {
    for (int n = 0; n < 16; ++n) {
      column[k][n] = (Weight)weights[k / 4 * 64 + 4 * n + k % 4];
    }
  }
  for (int m = 0; m < rows; ++m) {
    IntegerColumns sum;
    memcpy(&sum, sums + m * 64, 64);
    for (int k = 0; k < 64; ++k) {
      sum += (int8_t)tokens[m * 64 + k] * column[k];
    }
    memcpy(sums + m * 64, &sum, 64);
  }
}

struct Tiles {
  alignas(64) uint8_t at[8][1024];
  int64_t rows = 0;

  void Configure(int64_t token_rows) {
    memset(at, 0, sizeof(at));
    rows = token_rows;
  }
  int64_t Bytes(int tile) const { return tile < 6 ? rows * 64 : 1024; }
  /// What a kernel reads after it must not look like data.
  void Release() { memset(at, 0xff, sizeof(at)); }
  void Space() {}
  template <int kTile>
  void Zero() {
    memset(at[kTile], 0, 1024);
  }
  template <int kTile>
  void Load(const void* p) {
    memcpy(at[kTile], p, (size_t)Bytes(kTile));
  }
  template <int kTile>
  void Stream(const void* p) {
    memcpy(at[kTile], p, (size_t)Bytes(kTile));
  }
  template <int kTile>
  void Store(void* p) {
    memcpy(p, at[kTile], (size_t)Bytes(kTile));
  }
  template <int kSum, int kTokens, int kWeights>
  void DotBf16() {
    DotWords(at[kTokens], at[kWeights], rows, at[kSum]);
  }
  template <int kSum, int kTokens, int kWeights>
  void DotInt8() {
    DotBytes<uint8_t>(at[kTokens], at[kWeights], rows, at[kSum]);
  }
  template <int kSum, int kTokens, int kWeights>
  void DotSigned() {
    DotBytes<int8_t>(at[kTokens], at[kWeights], rows, at[kSum]);
  }
};

template <typename Body>
FMOE_EMULATED Words EachWord(Body body) {
  Words out;
  for (int i = 0; i < 32; ++i) {
    out.at[i] = (uint16_t)body(i);
  }
  return out;
}
template <typename Body>
FMOE_EMULATED Reals EachReal(Body body) {
  Reals out;
  for (int i = 0; i < 16; ++i) {
    out.at[i] = body(i);
  }
  return out;
}

FMOE_EMULATED Words LoadWords(const void* p) {
  Words out;
  memcpy(out.at, p, 64);
  return out;
}
FMOE_EMULATED void StoreWords(void* p, const Words& x) {
  memcpy(p, x.at, 64);
}
FMOE_EMULATED Words SetWords(uint16_t x) {
  return EachWord([&](int) { return x; });
}
FMOE_EMULATED Words LookUp(const Words& index, const Words& table) {
  return EachWord([&](int i) { return table.at[index.at[i] & 31]; });
}
FMOE_EMULATED Words LookUpOfTwo(const Words& index, const Words& first, const Words& second) {
  return EachWord([&](int i) { return (index.at[i] & 32 ? second : first).at[index.at[i] & 31]; });
}
template <int kBits>
FMOE_EMULATED Words ShiftRight(const Words& x) {
  return EachWord([&](int i) { return x.at[i] >> kBits; });
}
template <int kBits>
FMOE_EMULATED Words ShiftRightArithmetic(const Words& x) {
  return EachWord([&](int i) { return (int16_t)x.at[i] >> kBits; });
}
template <int kBits>
FMOE_EMULATED Words ShiftLeft(const Words& x) {
  return EachWord([&](int i) { return x.at[i] << kBits; });
}
FMOE_EMULATED Words And(const Words& a, const Words& b) {
  return EachWord([&](int i) { return a.at[i] & b.at[i]; });
}
FMOE_EMULATED Words Or(const Words& a, const Words& b) {
  return EachWord([&](int i) { return a.at[i] | b.at[i]; });
}
FMOE_EMULATED Words SubtractSaturated(const Words& a, const Words& b) {
  return EachWord([&](int i) { return a.at[i] > b.at[i] ? a.at[i] - b.at[i] : 0; });
}
FMOE_EMULATED Words AddToNonZero(const Words& x, const Words& y) {
  return EachWord([&](int i) { return (x.at[i] & 0x7fff) != 0 ? x.at[i] + y.at[i] : x.at[i]; });
}
FMOE_EMULATED Words SubtractBytes(const Words& a, const Words& b) {
  return EachWord([&](int i) {
    const int low = a.at[i] - b.at[i], high = (a.at[i] >> 8) - (b.at[i] >> 8);
    return (low & 255) | high << 8;
  });
}
FMOE_EMULATED Words SubtractWords(const Words& a, const Words& b) {
  return EachWord([&](int i) { return a.at[i] - b.at[i]; });
}
FMOE_EMULATED Words MinSigned(const Words& a, const Words& b) {
  return EachWord([&](int i) { return (int16_t)a.at[i] < (int16_t)b.at[i] ? a.at[i] : b.at[i]; });
}
FMOE_EMULATED Words MaxSigned(const Words& a, const Words& b) {
  return EachWord([&](int i) { return (int16_t)a.at[i] > (int16_t)b.at[i] ? a.at[i] : b.at[i]; });
}

FMOE_EMULATED Words AddWords(const Words& a, const Words& b) {
  return EachWord([&](int i) { return a.at[i] + b.at[i]; });
}

/// f16 of every value that the kernels meet: finite.
FMOE_EMULATED float HalfToFloat(uint16_t half) {
  const float sign = (half & 0x8000) != 0 ? -1.0F : 1.0F;
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  return sign *
         (exponent == 0 ? ldexpf((float)mantissa, -24) : ldexpf((float)(1024 + mantissa), exponent - 25));
}
/// To nearest even.
FMOE_EMULATED uint16_t FloatToHalf(float value) {
  const uint16_t sign = (uint16_t)(BitsOf(value) >> 16 & 0x8000);
  const float magnitude = fabsf(value);
  if (magnitude < ldexpf(1.0F, -14)) {
    return (uint16_t)(sign | (uint16_t)nearbyintf(ldexpf(magnitude, 24)));
  }
  uint32_t bits = BitsOf(magnitude);
  bits += 0xfff + (bits >> 13 & 1);
  return (uint16_t)(sign | (((bits >> 23) - 112) << 10) | (bits >> 13 & 1023));
}
FMOE_EMULATED Words MultiplyHalves(const Words& a, const Words& b) {
  return EachWord([&](int i) { return FloatToHalf(HalfToFloat(a.at[i]) * HalfToFloat(b.at[i])); });
}
FMOE_EMULATED Words SubtractHalves(const Words& a, const Words& b) {
  return EachWord([&](int i) { return FloatToHalf(HalfToFloat(a.at[i]) - HalfToFloat(b.at[i])); });
}
FMOE_EMULATED Words MultiplyAddHalves(const Words& a, const Words& b, const Words& c) {
  return EachWord([&](int i) {
    return FloatToHalf(fmaf(HalfToFloat(a.at[i]), HalfToFloat(b.at[i]), HalfToFloat(c.at[i])));
  });
}
FMOE_EMULATED Words IntegersToHalves(const Words& x) {
  return EachWord([&](int i) { return FloatToHalf((float)x.at[i]); });
}
FMOE_EMULATED Words SpreadBytes(const uint8_t* p) {
  return EachWord([&](int i) { return p[i / 2]; });
}
FMOE_EMULATED Words SpreadBytesToFour(const uint8_t* p) {
  return EachWord([&](int i) { return p[i / 2] * 0x101; });
}

FMOE_EMULATED Reals LoadReals(const float* p) {
  Reals out;
  memcpy(out.at, p, 64);
  return out;
}
FMOE_EMULATED void StoreReals(float* p, const Reals& x) {
  memcpy(p, x.at, 64);
}
FMOE_EMULATED Reals SetReals(float x) {
  return EachReal([&](int) { return x; });
}
FMOE_EMULATED Reals AddReals(const Reals& a, const Reals& b) {
  return EachReal([&](int i) { return a.at[i] + b.at[i]; });
}
FMOE_EMULATED Reals DivideReals(const Reals& a, const Reals& b) {
  return EachReal([&](int i) { return a.at[i] / b.at[i]; });
}
FMOE_EMULATED Reals MinReals(const Reals& a, const Reals& b) {
  return EachReal([&](int i) { return a.at[i] < b.at[i] ? a.at[i] : b.at[i]; });
}
FMOE_EMULATED Reals MaxReals(const Reals& a, const Reals& b) {
  return EachReal([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; });
}
FMOE_EMULATED Reals ScaleReals(const Reals& a, const Reals& b) {
  return EachReal([&](int i) { return isnan(b.at[i]) ? b.at[i] : ldexpf(a.at[i], (int)b.at[i]); });
}
FMOE_EMULATED Reals MultiplyReals(const Reals& a, const Reals& b) {
  return EachReal([&](int i) { return a.at[i] * b.at[i]; });
}
FMOE_EMULATED Reals MultiplyAddReals(const Reals& a, const Reals& b, const Reals& c) {
  return EachReal([&](int i) { return fmaf(a.at[i], b.at[i], c.at[i]); });
}
FMOE_EMULATED Reals NegativeMultiplyAddReals(const Reals& a, const Reals& b, const Reals& c) {
  return EachReal([&](int i) { return fmaf(-a.at[i], b.at[i], c.at[i]); });
}
FMOE_EMULATED Reals SubtractReals(const Reals& a, const Reals& b) {
  return EachReal([&](int i) { return a.at[i] - b.at[i]; });
}
FMOE_EMULATED Reals MultiplySubtractReals(const Reals& a, const Reals& b, const Reals& c) {
  return EachReal([&](int i) { return fmaf(a.at[i], b.at[i], -c.at[i]); });
}
FMOE_EMULATED Reals LoadRealsUnless(bool zero, const float* p) {
  return zero ? SetReals(0.0F) : LoadReals(p);
}
FMOE_EMULATED Reals LoadBf16Reals(const uint8_t* p) {
  uint16_t words[16];
  memcpy(words, p, 32);
  return EachReal([&](int i) { return FloatOf((uint32_t)words[i] << 16); });
}
FMOE_EMULATED Reals LoadF16Reals(const uint8_t* p) {
  uint16_t words[16];
  memcpy(words, p, 32);
  return EachReal([&](int i) { return HalfToFloat(words[i]); });
}
FMOE_EMULATED Reals LoadByteReals(const uint8_t* p) {
  return EachReal([&](int i) { return (float)p[i]; });
}
FMOE_EMULATED Reals LoadSignedByteReals(const uint8_t* p) {
  return EachReal([&](int i) { return (float)(int8_t)p[i]; });
}
template <int kBit>
FMOE_EMULATED Reals LookUpBits(const Words& x, const Reals& table) {
  return EachReal([&](int i) { return table.at[x.at[2 * i + kBit / 16] >> kBit % 16 & 15]; });
}
template <int kByte>
FMOE_EMULATED Reals ByteReals(const Words& x) {
  return EachReal([&](int i) { return (float)(x.at[2 * i + kByte / 2] >> 8 * (kByte % 2) & 255); });
}
FMOE_EMULATED Reals QuietReals(const Reals& x) {
  return EachReal([&](int i) { return x.at[i] == x.at[i] ? x.at[i] : __builtin_nanf(""); });
}
FMOE_EMULATED Words RoundPairs(const Reals& first, const Reals& second) {
  return EachWord([&](int i) { return (BitsOf((i % 2 == 0 ? first : second).at[i / 2]) + 0x8000) >> 16; });
}
FMOE_EMULATED void SplitScale(const Reals& scale, const Reals& zero, Words* mantissa, Words* offset,
                              Words* exponent) {
  for (int i = 0; i < 32; ++i) {
    const uint32_t bits = BitsOf(scale.at[i / 2]);
    const float m = FloatOf((bits & 0x807fffffU) | 0x3f800000U);
    const int e = (int)(bits >> 23 & 255) - 15;
    mantissa->at[i] = FloatToHalf(m);
    offset->at[i] = FloatToHalf(-zero.at[i / 2] * m);
    exponent->at[i] = (uint16_t)((e < 0 ? 0 : e > 219 ? 219 : e) << 7);
  }
}
FMOE_EMULATED Words AddCodes(const Words& integers, const Words& codes) {
  int32_t sums[16];
  int8_t bytes[64];
  memcpy(sums, integers.at, 64);
  memcpy(bytes, codes.at, 64);
  for (int i = 0; i < 64; ++i) {
    sums[i / 4] += bytes[i];
  }
  return LoadWords(sums);
}
FMOE_EMULATED int32_t SumIntegers(const Words& integers) {
  int32_t sums[16], sum = 0;
  memcpy(sums, integers.at, 64);
  for (int i = 0; i < 16; ++i) {
    sum += sums[i];
  }
  return sum;
}

FMOE_EMULATED Reals Magnitude(const Reals& x) {
  return EachReal([&](int i) { return fabsf(x.at[i]); });
}
FMOE_EMULATED Reals WithSign(const Reals& magnitude, const Reals& sign) {
  return EachReal([&](int i) { return copysignf(magnitude.at[i], sign.at[i]); });
}
template <int kMantissaBits, int kMinExponent>
FMOE_EMULATED Reals OnSmallGrid(const Reals& x) {
  return EachReal([&](int i) {
    const int32_t binade = (int32_t)(BitsOf(x.at[i]) & 0x7f800000), least = (127 + kMinExponent) << 23;
    const float shifter =
        FloatOf((uint32_t)((binade > least ? binade : least) + ((23 - kMantissaBits) << 23)));
    return (x.at[i] + shifter) - shifter;
  });
}
FMOE_EMULATED Reals LargestOfFour(const Reals& a, const Reals& b, const Reals& c, const Reals& d) {
  const Reals* groups[4] = {&a, &b, &c, &d};
  return EachReal([&](int i) {
    uint32_t largest = 0;
    for (int k = 0; k < 16; ++k) {
      const uint32_t bits = BitsOf(fabsf(groups[i / 4]->at[k]));
      largest = bits > largest ? bits : largest;
    }
    return FloatOf(largest);
  });
}
FMOE_EMULATED Reals LargestOfAll(const Reals& x) {
  return LargestOfFour(x, x, x, x);
}
FMOE_EMULATED bool AllWithin(const Reals& x, float least, float most) {
  bool within = true;
  for (int i = 0; i < 16; ++i) {
    within = within && x.at[i] >= least && x.at[i] <= most;
  }
  return within;
}
template <int kIndex>
FMOE_EMULATED Reals Quarter(const Reals& x) {
  return EachReal([&](int i) { return x.at[4 * kIndex + i % 4]; });
}
template <int kIndex>
FMOE_EMULATED Reals LaneOfQuarter(const Reals& x) {
  return EachReal([&](int i) { return x.at[i / 4 * 4 + kIndex]; });
}
FMOE_EMULATED Reals LoadEightReals(const float* p) {
  return EachReal([&](int i) { return i < 8 ? p[i] : 0.0F; });
}
FMOE_EMULATED Words SpreadInteger(const int32_t* p) {
  int32_t integers[16];
  for (int32_t& to : integers) {
    to = *p;
  }
  return LoadWords(integers);
}
FMOE_EMULATED Reals LoadIntegers(const void* p) {
  int32_t integers[16];
  memcpy(integers, p, 64);
  return EachReal([&](int i) { return (float)integers[i]; });
}
FMOE_EMULATED Reals IntegersToReals(const void* p, const Words& add) {
  int32_t integers[16], added[16];
  memcpy(integers, p, 64);
  memcpy(added, add.at, 64);
  return EachReal([&](int i) { return (float)(integers[i] + added[i]); });
}
/// To nearest even; NaN becomes quiet, subnormals zero, as by the instruction.
FMOE_EMULATED uint16_t RoundToBf16(float value) {
  const uint32_t bits = BitsOf(value);
  if (isnan(value)) {
    return (uint16_t)(bits >> 16 | 64);
  }
  if ((bits & 0x7f800000) == 0) {
    return (uint16_t)(bits >> 16 & 0x8000);
  }
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <bool kPermuted>
FMOE_EMULATED Reals StoreBf16(void* p, const Reals& x, const Reals& sums, float back) {
  uint16_t words[16];
  Reals out = sums;
  for (int i = 0; i < 16; ++i) {
    const uint16_t word = RoundToBf16(x.at[i]);
    const int place = kPermuted ? (i & ~3) | (i & 1) << 1 | (i >> 1 & 1) : i;
    words[place] = word;
    out.at[i] = fmaf(FloatOf((uint32_t)word << 16), back, sums.at[i]);
  }
  memcpy(p, words, 32);
  return out;
}
FMOE_EMULATED float SumReals(const Reals& x) {
  float sum = 0;
  for (int i = 0; i < 16; ++i) {
    sum += x.at[i];
  }
  return sum;
}
FMOE_EMULATED void PrefetchToL2(const uint8_t*) {}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
