#pragma once

#include <cmath>
#include <cstdint>

#include <fusedmoe/config.hpp>

#include "numerics/host_device.hpp"

namespace fusedmoe {

/// The activations of FMOE_ACTIVATION_TABLE, once for host and device, with Real = float (what kernels
/// compute) or double (what they are held against). Nothing is rounded between the factors. NaN passes
/// through every clamp.
namespace activation {

template <typename Real>
FMOE_HOST_DEVICE inline Real ClampAbove(Real value, Real limit) {
  return value > limit ? limit : value;
}

template <typename Real>
FMOE_HOST_DEVICE inline Real Clamp(Real value, Real limit) {
  return value > limit ? limit : (value < -limit ? -limit : value);
}

/// x * sigmoid(slope * x). For large negative x the exponential overflows to infinity and the quotient is -0.
template <typename Real>
FMOE_HOST_DEVICE inline Real Swish(Real x, Real slope) {
  return x / (Real(1) + std::exp(-slope * x));
}

template <typename Real>
FMOE_HOST_DEVICE inline Real Silu(Real x) {
  return Swish(x, Real(1));
}

/// x * Phi(x). In double the textbook form, which is the definition; in float with erfc, since 1 + erf would
/// cancel and lose every digit below x = -5.
template <typename Real>
FMOE_HOST_DEVICE inline Real GeluErf(Real x) {
  constexpr Real kSqrtHalf = Real(0.70710678118654752440);
  if constexpr (sizeof(Real) == sizeof(double)) {
    return Real(0.5) * x * (Real(1) + std::erf(x * kSqrtHalf));
  } else {
    return Real(0.5) * x * std::erfc(-x * kSqrtHalf);
  }
}

/// 0.5 x (1 + tanh(z)), z = sqrt(2/pi) (x + 0.044715 x^3): the definition in double; in float by
/// (1 + tanh z) / 2 = sigmoid(2z), for the same reason.
template <typename Real>
FMOE_HOST_DEVICE inline Real GeluTanh(Real x) {
  const Real z = Real(0.79788456080286535588) * (x + Real(0.044715) * x * x * x);
  if constexpr (sizeof(Real) == sizeof(double)) {
    return Real(0.5) * x * (Real(1) + std::tanh(z));
  } else {
    return x / (Real(1) + std::exp(Real(-2) * z));
  }
}

template <typename Real>
FMOE_HOST_DEVICE inline Real Relu(Real x) {
  return x < Real(0) ? Real(0) : x;
}

template <typename Real>
FMOE_HOST_DEVICE inline Real Relu2(Real x) {
  return Relu(x) * Relu(x);
}

/// a tanh(x / a) * sigmoid(x).
template <typename Real>
FMOE_HOST_DEVICE inline Real Situ(Real x, Real bound) {
  return bound * std::tanh(x / bound) / (Real(1) + std::exp(-x));
}

}  // namespace activation

/// One output of the activation. Gated kinds take gate and up; the others take their input as `gate` and
/// ignore `up`.
template <typename Real>
FMOE_HOST_DEVICE inline Real Activate(const ActivationSpec& spec, Real gate, Real up) {
  const Real limit = Real(spec.limit);
  const bool clamped = spec.limit > 0.0F;
  switch (spec.kind) {
    case ActivationKind::kSilu:
      if (clamped) {
        return activation::Silu(activation::ClampAbove(gate, limit)) * activation::Clamp(up, limit);
      }
      return activation::Silu(gate) * up;
    case ActivationKind::kGelu:
      return activation::GeluErf(gate) * up;
    case ActivationKind::kGeluTanh:
      return activation::GeluTanh(gate) * up;
    case ActivationKind::kSwigluOai:
      if (clamped) {
        gate = activation::ClampAbove(gate, limit);
        up = activation::Clamp(up, limit);
      }
      return activation::Swish(gate, Real(spec.alpha)) * (up + Real(spec.beta));
    case ActivationKind::kSwigluStep:
      if (clamped) {
        return activation::ClampAbove(activation::Silu(gate), limit) * activation::Clamp(up, limit);
      }
      return activation::Silu(gate) * up;
    case ActivationKind::kRelu:
      return activation::Relu(gate) * up;
    case ActivationKind::kRelu2:
      return activation::Relu2(gate) * up;
    case ActivationKind::kSitu:
      if (clamped) {
        up = limit * std::tanh(up / limit);
      }
      return activation::Situ(gate, Real(spec.alpha)) * up;
    case ActivationKind::kSiluNoMul:
      return activation::Silu(gate);
    case ActivationKind::kGeluNoMul:
      return activation::GeluErf(gate);
    case ActivationKind::kGeluTanhNoMul:
      return activation::GeluTanh(gate);
    case ActivationKind::kReluNoMul:
      return activation::Relu(gate);
    case ActivationKind::kRelu2NoMul:
      return activation::Relu2(gate);
  }
  return gate;
}

/// Where gate and up of one output stand in a row of the first GEMM.
enum class GateUpLayout : uint8_t {
  kHalves,      ///< [gate(d) | up(d)]: the canonical form
  kInterleaved  ///< gate, up, gate, up: as gpt-oss checkpoints store it; the loader turns it into halves
};

/// A row of `width` outputs: reads 2 * width inputs where the kind is gated, else width. `output` may not
/// overlap `input` unless the kind is ungated.
template <typename Real>
FMOE_HOST_DEVICE inline void ActivateRow(const ActivationSpec& spec, const Real* input, int64_t width,
                                         GateUpLayout layout, Real* output) {
  if (!spec.gated()) {
    for (int64_t i = 0; i < width; ++i) {
      output[i] = Activate(spec, input[i], Real(0));
    }
    return;
  }
  const bool halves = layout == GateUpLayout::kHalves;
  const int64_t step = halves ? 1 : 2;
  const Real* up = input + (halves ? width : 1);
  for (int64_t i = 0; i < width; ++i) {
    output[i] = Activate(spec, input[i * step], up[i * step]);
  }
}

}  // namespace fusedmoe
