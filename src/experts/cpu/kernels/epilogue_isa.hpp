#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/exp_isa.hpp"
#include "experts/cpu/kernels/kernel_table_isa.hpp"
#include "experts/cpu/kernels/simd_isa.hpp"

/// What happens to the sums of a micro-kernel: row scale, bias, the non-linearity, the weighted sum over
/// experts. All in fp32; the formulas are those of src/moe/activation.hpp.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// e^x as in exp_isa.hpp. NaN stays: it is the second operand, and passes.
FMOE_INLINE Floats Exp(Floats x) {
  x = Max(Set(kExpLowest), Min(Set(kExpHighest), x));
  const Floats n = RoundEven(Multiply(x, Set(kLog2OfE)));
  Floats r = NegativeMultiplyAdd(n, Set(kLn2High), x);
  r = NegativeMultiplyAdd(n, Set(kLn2Low), r);
  Floats p = Set(kExpTaylor[0]);
  Unroll<kExpDegree>([&](int i) FMOE_FLAT { p = MultiplyAdd(p, r, Set(kExpTaylor[i + 1])); });
  return ScaleByPowerOfTwo(p, n);
}

FMOE_INLINE Floats Negate(Floats x) {
  return Subtract(Zero(), x);
}

/// x / (1 + e^(-k x)). Where the exponential overflows the quotient is -0, its limit.
FMOE_INLINE Floats TimesSigmoid(Floats x, Floats kx) {
  return Divide(x, Add(Set(1.0F), Exp(Negate(kx))));
}

FMOE_INLINE Floats Silu(Floats x) {
  return TimesSigmoid(x, x);
}

/// x/2 (1 + tanh(y)) = x sigmoid(2y), y = sqrt(2/pi) (x + 0.044715 x^3)
FMOE_INLINE Floats GeluTanh(Floats x) {
  const Floats cube = Multiply(Multiply(x, x), x);
  const Floats y = Multiply(Set(0.797884561F), MultiplyAdd(Set(0.044715F), cube, x));
  return TimesSigmoid(x, Add(y, y));
}

/// x/2 erfc(-x / sqrt 2). erfc by the Chebyshev fit of W. J. Cody's form erfc(z) = t exp(-z^2 + P(t)), t =
/// 1/(1 + z/2), in the version of Numerical Recipes (erfcc): relative error below 1.2e-7 for every z >= 0.
FMOE_INLINE Floats Gelu(Floats x) {
  const Floats z = Multiply(Absolute(x), Set(0.707106781F));
  const Floats t = Divide(Set(1.0F), MultiplyAdd(Set(0.5F), z, Set(1.0F)));
  Floats p = Set(0.17087277F);
  p = MultiplyAdd(p, t, Set(-0.82215223F));
  p = MultiplyAdd(p, t, Set(1.48851587F));
  p = MultiplyAdd(p, t, Set(-1.13520398F));
  p = MultiplyAdd(p, t, Set(0.27886807F));
  p = MultiplyAdd(p, t, Set(-0.18628806F));
  p = MultiplyAdd(p, t, Set(0.09678418F));
  p = MultiplyAdd(p, t, Set(0.37409196F));
  p = MultiplyAdd(p, t, Set(1.00002368F));
  p = MultiplyAdd(p, t, Set(-1.26551223F));
  const Floats tail = Multiply(t, Exp(NegativeMultiplyAdd(z, z, p)));  // erfc(z), z >= 0
  const Floats factor = SelectLess(x, Zero(), tail, Subtract(Set(2.0F), tail));
  return Multiply(Multiply(Set(0.5F), x), factor);
}

FMOE_INLINE Floats Relu(Floats x) {
  return Max(Zero(), x);  // NaN is the second operand and passes
}

FMOE_INLINE Floats Relu2(Floats x) {
  return Multiply(Relu(x), Relu(x));
}

FMOE_INLINE Floats Clamp(Floats x, float limit) {
  return Max(Set(-limit), Min(Set(limit), x));
}

/// tanh x = (e^2x - 1) / (e^2x + 1), where e^2x - 1 is 2^n (e^r - 1) + (2^n - 1) of the exponential above:
/// small values keep their digits. From 10 on it is 1.
FMOE_INLINE Floats Tanh(Floats x) {
  x = Max(Set(-20.0F), Min(Set(20.0F), Add(x, x)));
  const Floats n = RoundEven(Multiply(x, Set(kLog2OfE)));
  Floats r = NegativeMultiplyAdd(n, Set(kLn2High), x);
  r = NegativeMultiplyAdd(n, Set(kLn2Low), r);
  Floats p = Set(kExpTaylor[0]);
  Unroll<kExpDegree - 1>([&](int i) FMOE_FLAT { p = MultiplyAdd(p, r, Set(kExpTaylor[i + 1])); });
  const Floats power = ScaleByPowerOfTwo(Set(1.0F), n);
  const Floats less_one = MultiplyAdd(Multiply(p, r), power, Subtract(power, Set(1.0F)));
  return Divide(less_one, Add(less_one, Set(2.0F)));
}

/// L tanh(x / L)
FMOE_INLINE Floats SoftClamp(Floats x, float limit) {
  return Multiply(Set(limit), Tanh(Divide(x, Set(limit))));
}

FMOE_INLINE Floats Activated(const ActivateArguments* a, Floats gate, Floats up) {
  switch (a->activation) {
    case kActSilu:
      if (a->limit > 0.0F) {
        gate = Min(Set(a->limit), gate);
        up = Clamp(up, a->limit);
      }
      return Multiply(Silu(gate), up);
    case kActGelu:
      return Multiply(Gelu(gate), up);
    case kActGeluTanh:
      return Multiply(GeluTanh(gate), up);
    case kActSwigluOai:
      if (a->limit > 0.0F) {
        gate = Min(Set(a->limit), gate);
        up = Clamp(up, a->limit);
      }
      return Multiply(TimesSigmoid(gate, Multiply(Set(a->alpha), gate)), Add(up, Set(a->beta)));
    case kActSwigluStep:
      gate = Silu(gate);
      if (a->limit > 0.0F) {
        gate = Min(Set(a->limit), gate);
        up = Clamp(up, a->limit);
      }
      return Multiply(gate, up);
    case kActRelu:
      return Multiply(Relu(gate), up);
    case kActRelu2:
      return Multiply(Relu2(gate), up);
    case kActSitu:
      if (a->limit > 0.0F) {
        up = SoftClamp(up, a->limit);
      }
      return Multiply(TimesSigmoid(SoftClamp(gate, a->alpha), gate), up);
    case kActSiluNoMul:
      return Silu(up);
    case kActGeluNoMul:
      return Gelu(up);
    case kActGeluTanhNoMul:
      return GeluTanh(up);
    case kActReluNoMul:
      return Relu(up);
    default:
      return Relu2(up);
  }
}

FMOE_INLINE Floats ScaledRow(const float* sums, const float* row_scale, const float* bias) {
  const Floats value = Multiply(Load(sums), Load(row_scale));
  return bias == nullptr ? value : Add(value, Load(bias));
}

void Activate(const ActivateArguments* a) {
  for (int token = 0; token < a->tokens; ++token) {
    for (int row = 0; row < 16; row += kLanes) {
      const int at = token * 16 + row;
      const Floats up =
          ScaledRow(a->up + at, a->up_row_scale + row, a->up_bias == nullptr ? nullptr : a->up_bias + row);
      Floats gate = up;
      if (a->gate != nullptr) {
        gate = ScaledRow(a->gate + at, a->gate_row_scale + row,
                         a->gate_bias == nullptr ? nullptr : a->gate_bias + row);
      }
      Store(a->mid + token * a->mid_stride + row, Activated(a, gate, up));
    }
  }
}

/// Rows lie far apart: their next columns but one are prefetched, as stripes come in pairs.
void Accumulate(const AccumulateArguments* a) {
  for (int token = 0; token < a->tokens; ++token) {
    const Floats weight = Set(a->weights[token]);
    Prefetch((const uint8_t*)(a->rows[token] + 32));
    for (int row = 0; row < 16; row += kLanes) {
      const Floats value = ScaledRow(a->dot + token * 16 + row, a->row_scale + row,
                                     a->bias == nullptr ? nullptr : a->bias + row);
      float* out = a->rows[token] + row;
      Store(out, MultiplyAdd(weight, value, Load(out)));
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
