#pragma once

#include "experts/cuda/device/ptx_panel.cuh"
#include "experts/cuda/prefill/prefill.hpp"

namespace fusedmoe::cuda {

/// gate * sigmoid(alpha gate) * (up + beta) with the clamps of FMOE_ACTIVATION_TABLE; see SwishOf in
/// prefill.hpp. Exponential and inverse are the units' own (2^-22): far below what moves a code.
__device__ __forceinline__ float GatedSwish(const SwishParams& s, float gate, float up) {
  gate = MinNan(gate, s.gate_limit);
  up = MaxNan(MinNan(up, s.up_limit), -s.up_limit);
  float exponential, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(s.slope_log2 * gate));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0F + exponential));
  return MinNan(gate * inverse, s.swish_limit) * (up + s.beta);
}

}  // namespace fusedmoe::cuda
