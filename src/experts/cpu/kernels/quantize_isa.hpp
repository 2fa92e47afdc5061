#pragma once

#include <stdint.h>
#include <string.h>

#include "experts/cpu/kernels/kernel_table_isa.hpp"
#include "experts/cpu/kernels/lines_isa.hpp"
#include "experts/cpu/kernels/pack_isa.hpp"

/// Activations to the grids of schemes, many at once, with the bits of QuantizeRow (quant/): the largest
/// magnitudes, and the rounding. Scales of groups are few and stay with the scalar formulas, except for those
/// of NVFP4, one for every 16 values.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

// ------------------------------------------------------------------------------------------- magnitudes

FMOE_INLINE Ints MagnitudeBits(Floats x, bool finite_only) {
  const Floats magnitude = Absolute(x);
  // Comparisons with NaN are false.
  return finite_only
             ? Bits(SelectLess(magnitude, FromBits(IntSet((int32_t)kInfinityBits)), magnitude, Zero()))
             : Bits(magnitude);
}

FMOE_INLINE uint32_t LargestOf(const float* values, int64_t count, bool finite_only) {
  Ints a = IntZero(), b = IntZero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    a = IntMaxUnsigned(a, MagnitudeBits(Load(values + i), finite_only));
    b = IntMaxUnsigned(b, MagnitudeBits(Load(values + i + kLanes), finite_only));
  }
  for (; i < count; i += kLanes) {
    if (i + kLanes <= count) {
      a = IntMaxUnsigned(a, MagnitudeBits(Load(values + i), finite_only));
    } else {
      float last[kLanes] = {};
      memcpy(last, values + i, (size_t)(count - i) * sizeof(float));
      a = IntMaxUnsigned(a, MagnitudeBits(Load(last), finite_only));
    }
  }
  return MaxUnsignedOf(IntMaxUnsigned(a, b));
}

void Amax(const AmaxArguments* a) {
  for (int64_t first = 0, g = 0; first < a->count; first += a->group, ++g) {
    const int64_t left = a->count - first;
    a->largest[g] = LargestOf(a->values + first, left < a->group ? left : a->group, a->finite_only);
  }
}

// --------------------------------------------------------------------------------------------- rounding

/// A small float: its mantissa bits, the exponent of its smallest normal value, its largest value.
template <int kGrid>
struct SmallFloat {
  static constexpr int kMantissaBits = kGrid == kGridE2m1                         ? 1
                                       : kGrid == kGridE3m2 || kGrid == kGridE5m2 ? 2
                                                                                  : 3;
  static constexpr int kMinExponent = kGrid == kGridE2m1 || kGrid == kGridE2m3 ? 0
                                      : kGrid == kGridE3m2                     ? -2
                                      : kGrid == kGridE4m3                     ? -6
                                                                               : -14;
  static constexpr float kLargest = kGrid == kGridE2m1   ? 6.0F
                                    : kGrid == kGridE2m3 ? 7.5F
                                    : kGrid == kGridE3m2 ? 28.0F
                                    : kGrid == kGridE4m3 ? 448.0F
                                                         : 57344.0F;
  static constexpr bool kHasNan = kGrid == kGridE4m3 || kGrid == kGridE5m2;
};

/// |x| on the grid, saturating; NaN stays where the grid has one and is the largest value elsewhere.
///
/// Steps of the grid are 2^(e - M) in the binade 2^e of x, and those of the smallest normal below it. Adding
/// 2^(e - M + 23) leaves the nearest step to the adder of fp32, ties to the even one; subtracting it is
/// exact.
template <int kGrid>
FMOE_INLINE Floats MagnitudeOnGrid(Floats x) {
  using Grid = SmallFloat<kGrid>;
  const Floats largest = Set(Grid::kLargest);
  const Floats magnitude = Grid::kHasNan ? Min(largest, Absolute(x)) : Min(Absolute(x), largest);
  const Ints binade = IntMaxUnsigned(IntAnd(Bits(magnitude), IntSet((int32_t)kInfinityBits)),
                                     IntSet((127 + Grid::kMinExponent) << 23));
  const Floats shifter = FromBits(IntAdd(binade, IntSet((23 - Grid::kMantissaBits) << 23)));
  return Subtract(Add(magnitude, shifter), shifter);
}

template <int kGrid>
FMOE_INLINE Floats OnGrid(Floats x) {
  const Ints magnitude = Bits(MagnitudeOnGrid<kGrid>(x));
  const Ints sign = IntAnd(Bits(x), IntSet((int32_t)0x80000000));
  if constexpr (SmallFloat<kGrid>::kHasNan) {
    return FromBits(IntOr(magnitude, sign));
  } else {
    return FromBits(SelectNan(x, magnitude, IntOr(magnitude, sign)));  // NaN has no sign there
  }
}

/// int8 from floats, saturating; NaN is 0.
template <int kGrid>
FMOE_INLINE Ints IntegerOf(Floats x) {
  Floats rounded = Max(Set(-128.0F), Min(Set(127.0F), x));
  if constexpr (kGrid == kGridInt8Away) {
    const Floats whole = Truncate(rounded);
    const Floats rest = Absolute(Subtract(rounded, whole));
    const Floats away = SelectLess(rounded, Zero(), Set(-1.0F), Set(1.0F));
    rounded = SelectLess(rest, Set(0.5F), whole, Add(whole, away));
  } else if constexpr (kGrid == kGridInt8Truncate) {
    rounded = Truncate(rounded);
  }
  return SelectNan(x, IntZero(), ToIntsEven(rounded));
}

template <int kGrid>
FMOE_INLINE void RoundVector(Floats x, const RoundStep& step, float* out, int8_t* codes) {
  x = step.multiply ? Multiply(x, Set(step.factor)) : Divide(x, Set(step.factor));
  Floats value;
  if constexpr (kGrid <= kGridInt8Truncate) {
    const Ints code = IntegerOf<kGrid>(x);
    if (codes != 0) {
      StoreBytes(codes, code);
    }
    value = ToFloats(code);
  } else {
    value = OnGrid<kGrid>(x);
    if (kGrid == kGridE2m1 && codes != 0) {
      StoreBytes(codes, ToIntsEven(Add(value, value)));
    }
  }
  if (out != 0) {
    Store(out, Multiply(value, Set(step.multiplier)));
  }
}

template <int kGrid>
void RoundOn(const RoundArguments* a) {
  for (int64_t first = 0, g = 0; first < a->count; first += a->group, ++g) {
    const RoundStep step = a->steps[g];
    const int64_t left = a->count - first;
    const int64_t end = first + (left < a->group ? left : a->group);
    int64_t i = first;
    for (; i + kLanes <= end; i += kLanes) {
      RoundVector<kGrid>(Load(a->values + i), step, a->out == 0 ? 0 : a->out + i,
                         a->codes == 0 ? 0 : a->codes + i);
    }
    if (i < end) {
      float last[kLanes] = {};
      int8_t last_codes[kLanes];
      memcpy(last, a->values + i, (size_t)(end - i) * sizeof(float));
      RoundVector<kGrid>(Load(last), step, last, last_codes);
      if (a->out != 0) {
        memcpy(a->out + i, last, (size_t)(end - i) * sizeof(float));
      }
      if (a->codes != 0) {
        memcpy(a->codes + i, last_codes, (size_t)(end - i));
      }
    }
  }
}

void Round(const RoundArguments* a) {
  switch (a->grid) {
    case kGridInt8Even:
      return RoundOn<kGridInt8Even>(a);
    case kGridInt8Away:
      return RoundOn<kGridInt8Away>(a);
    case kGridInt8Truncate:
      return RoundOn<kGridInt8Truncate>(a);
    case kGridE2m1:
      return RoundOn<kGridE2m1>(a);
    case kGridE2m3:
      return RoundOn<kGridE2m3>(a);
    case kGridE3m2:
      return RoundOn<kGridE3m2>(a);
    case kGridE4m3:
      return RoundOn<kGridE4m3>(a);
    default:
      return RoundOn<kGridE5m2>(a);
  }
}

// -------------------------------------------------------------------------------------------- two levels
//
//   16 groups of 16 --- transposed ---> 16 magnitudes --> 16 scales, their reciprocals --- broadcast --.
//        '----------------------------------------------------------------> quotients -> codes <-------'
//
// With the scales one after the other by the scalar formula a group took 25 ns (Zen 5), this way 4.

/// What stands beside the codes of sixteen groups.
struct TwoLevelScales {
  alignas(64) float block[16];    ///< e4m3
  alignas(64) float divisor[16];  ///< of the values: block * tensor scale
  alignas(64) float inverse[16];  ///< the float nearest to 1 / divisor; 0 where that is 0
};

FMOE_INLINE Floats BlockScales(const TwoLevelArguments* a, Floats largest) {
  const Floats zero_scale = Set(a->zero_scale);
  largest = Min(Set(a->bound), largest);
  Floats scale = a->reciprocals
                     ? Multiply(Set(1.0F / a->tensor_scale), Multiply(largest, Set(1.0F / a->divisor)))
                     : Divide(Divide(largest, Set(a->divisor)), Set(a->tensor_scale));
  scale = Max(Set(a->floor), SelectLess(Zero(), scale, scale, zero_scale));
  scale = MagnitudeOnGrid<kGridE4m3>(scale);
  return SelectLess(Zero(), scale, scale, MagnitudeOnGrid<kGridE4m3>(zero_scale));
}

/// False where a magnitude is not finite, or where a quotient's residual could leave the normal numbers.
FMOE_INLINE bool ScalesOfGroups(const TwoLevelArguments* a, const float* values, TwoLevelScales* scales) {
  const uint8_t* rows[16];
  Unroll<16>([&](int r) FMOE_FLAT { rows[r] = (const uint8_t*)(values + 16 * r); });
  Ints magnitude[kHalves], worst = IntZero();
  Unroll<kHalves>([&](int h) FMOE_FLAT { magnitude[h] = IntZero(); });
  Unroll<2>([&](int i) FMOE_FLAT {
    Ints line[8 * kHalves];
    LoadTransposed(rows, 32 * i, line);
    Unroll<8 * kHalves>([&](int v) FMOE_FLAT {
      const int half = v % kHalves;
      magnitude[half] = IntMaxUnsigned(magnitude[half], IntAnd(line[v], IntSet(0x7fffffff)));
    });
  });
  constexpr float kFarthest = 0x1p90F;
  Unroll<kHalves>([&](int h) FMOE_FLAT {
    const Floats largest = FromBits(magnitude[h]);
    const Floats block = BlockScales(a, largest);
    const Floats divisor = Multiply(block, Set(a->tensor_scale));
    const Floats inverse = SelectLess(Zero(), divisor, Divide(Set(1.0F), divisor), Zero());
    Store(scales->block + h * kLanes, block);
    Store(scales->divisor + h * kLanes, divisor);
    Store(scales->inverse + h * kLanes, inverse);
    // As bits, where infinity and NaN stand above all numbers: 2^128 comes down to 2^90.
    worst = IntMaxUnsigned(worst, IntMaxUnsigned(Bits(divisor), Bits(inverse)));
    worst = IntMaxUnsigned(worst, Bits(Multiply(largest, Set(0x1p-38F))));
  });
  float farthest = kFarthest;
  uint32_t bound;
  memcpy(&bound, &farthest, 4);
  return MaxUnsignedOf(worst) <= bound;
}

/// x / y from r, the float nearest to 1 / y: the residual of a quotient that is less than one unit off is
/// exact, and adding r times it rounds as the division does; the first step leads there from two units. Five
/// instructions instead of 16 cycles of the divider (cores of Intel). By reciprocals: x * r.
FMOE_INLINE Floats QuotientOf(Floats x, Floats y, Floats r, bool reciprocals) {
  Floats quotient = Multiply(x, r);
  if (!reciprocals) {
    quotient = MultiplyAdd(NegativeMultiplyAdd(quotient, y, x), r, quotient);
    quotient = MultiplyAdd(NegativeMultiplyAdd(quotient, y, x), r, quotient);
  }
  return quotient;
}

/// kTwoLevelBatch values.
FMOE_INLINE bool RoundTwoLevelBatch(const TwoLevelArguments* a, const float* values, int8_t* codes,
                                    float* scales, float* out) {
  TwoLevelScales of;
  if (!ScalesOfGroups(a, values, &of)) {
    return false;
  }
  for (int v = 0; scales != 0 && v < 16; v += kLanes) {
    Store(scales + v, Multiply(Load(of.divisor + v), Set(0.5F)));
  }
  for (int g = 0; g < 16; ++g) {
    const Floats divisor = Set(of.divisor[g]), inverse = Set(of.inverse[g]), block = Set(of.block[g]);
    Unroll<16 / kLanes>([&](int v) FMOE_FLAT {
      const int at = 16 * g + v * kLanes;
      const Floats x = Load(values + at);
      // A quotient beyond fp32 leaves no number, which counts as the largest one.
      const Ints code = Bits(MagnitudeOnGrid<kGridE2m1>(QuotientOf(x, divisor, inverse, a->reciprocals)));
      const Floats value = FromBits(IntOr(code, IntAnd(Bits(x), IntSet((int32_t)0x80000000))));
      if (codes != 0) {
        StoreBytes(codes + at, ToIntsEven(Add(value, value)));
      }
      if (out != 0) {
        Store(out + at, Multiply(value, block));
      }
    });
  }
  return true;
}

int64_t RoundTwoLevel(const TwoLevelArguments* a) {
  int64_t first = 0;
  for (; first + kTwoLevelBatch <= a->count; first += kTwoLevelBatch) {
    if (!RoundTwoLevelBatch(a, a->values + first, a->codes == 0 ? 0 : a->codes + first,
                            a->scales == 0 ? 0 : a->scales + first / 16, a->out == 0 ? 0 : a->out + first)) {
      return first;
    }
  }
  if (first == a->count) {
    return first;
  }
  const size_t left = (size_t)(a->count - first);
  float values[kTwoLevelBatch] = {}, scales[kTwoLevelBatch / 16];
  int8_t codes[kTwoLevelBatch];
  memcpy(values, a->values + first, left * sizeof(float));
  if (!RoundTwoLevelBatch(a, values, codes, scales, values)) {
    return first;
  }
  if (a->codes != 0) {
    memcpy(a->codes + first, codes, left);
  }
  if (a->scales != 0) {
    memcpy(a->scales + first / 16, scales, (left + 15) / 16 * sizeof(float));
  }
  if (a->out != 0) {
    memcpy(a->out + first, values, left * sizeof(float));
  }
  return a->count;
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
