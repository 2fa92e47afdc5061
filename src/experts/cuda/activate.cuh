#pragma once

#include "moe/activation.hpp"

namespace fusedmoe::cuda {

/// The kinds that no kernel is tuned for, out of line: erf and tanh would take registers from the main loops.
inline __device__ __noinline__ float ActivateSlow(ActivationKind kind, float limit, float gate, float up) {
  ActivationSpec spec;
  spec.kind = kind;
  spec.limit = limit;
  return Activate(spec, gate, up);
}

/// x * sigmoid(slope * x) with the fast exponential: its error, 2 + 1.2 |slope x| units in the last place,
/// stays below 2^-16 where the result is not negligible, far under the rounding of the operand that follows.
__device__ __forceinline__ float FastSwish(float x, float slope) {
  return x / (1.0F + __expf(-slope * x));
}

/// One output of the activation, as Activate defines it (moe/activation.hpp).
__device__ __forceinline__ float ActivateFast(const ActivationSpec& spec, float gate, float up) {
  if (spec.kind == ActivationKind::kSilu || spec.kind == ActivationKind::kSwigluOai) {
    if (spec.limit > 0.0F) {
      gate = activation::ClampAbove(gate, spec.limit);
      up = activation::Clamp(up, spec.limit);
    }
    return spec.kind == ActivationKind::kSilu ? FastSwish(gate, 1.0F) * up
                                              : FastSwish(gate, spec.alpha) * (up + spec.beta);
  }
  return ActivateSlow(spec.kind, spec.limit, gate, up);
}

}  // namespace fusedmoe::cuda
