#pragma once

#include <bit>
#include <cstdint>

#include "numerics/host_device.hpp"

/// The arithmetic of routing, once for host and device. Experts are chosen by comparing values, so a last bit
/// decides who computes a token: everything here is made of additions, multiplications, divisions and square
/// roots that IEEE 754 rounds alike everywhere, in a fixed order, fused nowhere (both compilers are told not
/// to). The C library's exp is not that: it differs between libraries, and between host and device.
namespace fusedmoe {

/// Sums over experts add in this many lanes (lane l takes the experts l, l + 32, ...), then lanes pairwise,
/// 16 apart, 8, 4, 2, 1: what a warp does.
inline constexpr int kScoreLanes = 32;

namespace score_math {

FMOE_HOST_DEVICE inline double DoubleFromBits(uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(static_cast<long long>(bits));
#else
  return std::bit_cast<double>(bits);
#endif
}

/// exp(x) for |x| < 700: 2^n by its bits times a Taylor polynomial on |r| <= ln(2) / 2, whose remainder is
/// below 2^-46.
FMOE_HOST_DEVICE inline double ExpInDouble(double x) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const double shifted = x * 1.4426950408889634 + kRound;
  const double n = shifted - kRound;
  // ln 2 in two parts: the first has 20 low zero bits, so that n times it is exact.
  const double r = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10;
  double p = 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  return p * DoubleFromBits(static_cast<uint64_t>(static_cast<int64_t>(n) + 1023) << 52);
}

/// log(1 + e) for 0 <= e <= 1: 2 atanh(e / (2 + e)), whose argument is at most 1/3; 18 terms leave 2^-58.
FMOE_HOST_DEVICE inline double Log1pInDouble(double e) {
  const double s = e / (2.0 + e);
  const double square = s * s;
  double sum = 1.0 / 35.0;
  for (int odd = 33; odd >= 1; odd -= 2) {
    sum = sum * square + 1.0 / odd;
  }
  return 2.0 * s * sum;
}

}  // namespace score_math

/// exp(x), correctly rounded except for one value in some thousands. 0 below the smallest float, infinity
/// above the largest, NaN of NaN.
FMOE_HOST_DEVICE inline float ScoreExp(float x) {
  if (x > 89.0F) {
    return FloatFromBits(0x7f800000U);
  }
  if (x < -104.0F) {
    return 0.0F;
  }
  return x != x ? x : static_cast<float>(score_math::ExpInDouble(x));
}

FMOE_HOST_DEVICE inline float ScoreSigmoid(float x) {
  return 1.0F / (1.0F + ScoreExp(-x));
}

/// log(1 + exp(x)).
FMOE_HOST_DEVICE inline float ScoreSoftplus(float x) {
  if (x != x || x > 20.0F) {
    return x;  // beyond 20 the logarithm is x itself in fp32
  }
  if (x < -104.0F) {
    return 0.0F;
  }
  const double magnitude = x < 0.0F ? -static_cast<double>(x) : static_cast<double>(x);
  const double tail = score_math::Log1pInDouble(score_math::ExpInDouble(-magnitude));
  return static_cast<float>(x < 0.0F ? tail : magnitude + tail);
}

/// cap * tanh(x / cap).
FMOE_HOST_DEVICE inline float ScoreSoftcap(float x, float cap) {
  const float quotient = x / cap;
  const double y = quotient < 0.0F ? -static_cast<double>(quotient) : static_cast<double>(quotient);
  if (quotient != quotient) {
    return quotient;
  }
  double tanh = 1.0;
  if (y < 1e-3) {
    tanh = y - y * y * y * (1.0 / 3.0);  // the next term is below 2^-52 of it; 1 - exp would cancel
  } else if (y < 20.0) {
    const double e = score_math::ExpInDouble(-2.0 * y);
    tanh = (1.0 - e) / (1.0 + e);
  }
  return cap * static_cast<float>(quotient < 0.0F ? -tanh : tanh);
}

FMOE_HOST_DEVICE inline float ZeroUnlessFinite(float value) {
  return value - value == 0.0F ? value : 0.0F;
}

/// The order of everything here: larger values first, equal values by lower index. -0 equals 0; no NaN gets
/// here.
FMOE_HOST_DEVICE inline bool Before(float value, int64_t index, float other, int64_t other_index) {
  return value > other || (value == other && index < other_index);
}

}  // namespace fusedmoe
