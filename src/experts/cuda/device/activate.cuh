#pragma once

#include "moe/activation.hpp"

namespace fusedmoe::cuda {

/// x * sigmoid(slope * x) with the fast exponential and division: the error of the first, 2 + 1.2 |slope x|
/// units in the last place, stays below 2^-16 where the result is not negligible, far under the rounding of
/// the operand that follows.
__device__ __forceinline__ float FastSwish(float x, float slope) {
  return __fdividef(x, 1.0F + __expf(-slope * x));
}

/// Out of line: erf and tanh would take registers from the main loops.
inline __device__ __noinline__ float ActivateOutOfLine(ActivationKind kind, float alpha, float beta,
                                                       float limit, float gate, float up) {
  if (kind == ActivationKind::kSilu || kind == ActivationKind::kSwigluOai) {
    if (limit > 0.0F) {
      gate = activation::ClampAbove(gate, limit);
      up = activation::Clamp(up, limit);
    }
    return kind == ActivationKind::kSilu ? FastSwish(gate, 1.0F) * up : FastSwish(gate, alpha) * (up + beta);
  }
  ActivationSpec spec;
  spec.kind = kind;
  spec.alpha = alpha;
  spec.limit = limit;
  return Activate(spec, gate, up);
}

/// One output of any activation, as Activate defines it (moe/activation.hpp).
__device__ __forceinline__ float ActivateAny(const ActivationSpec& spec, float gate, float up) {
  return ActivateOutOfLine(spec.kind, spec.alpha, spec.beta, spec.limit, gate, up);
}

}  // namespace fusedmoe::cuda
