#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// What the sums of both GEMMs of each expert are multiplied by: weight scale * input scale.
struct Fp8GemmScales {
  std::vector<float> gate_up, down;  ///< [E]
};
/// kBadInput unless every scale is finite and > 0.
Result<Fp8GemmScales> MakeFp8GemmScales(std::span<const float> gate_up_tensor_scale, float input_tensor_scale,
                                        std::span<const float> down_tensor_scale, float mid_tensor_scale);

/// The factors that FP8 kernels with one scale per tensor multiply their sums by. All decode by
/// multiplication except the one named so.
struct Fp8OutputScales {
  std::vector<float> gate_output_scale;         ///< [E] input * weight: a sum of GEMM1 as a number
  std::vector<float> requantized_output_scale;  ///< [E] the same in units of mid_tensor_scale
  std::vector<float> down_output_scale;         ///< [E] mid * weight
  float mid_encode_multiplier = 0.0F;           ///< 1 / mid_tensor_scale
};

/// kBadInput unless every scale is finite and > 0: a missing input scale read as 0 would make every output of
/// its expert infinite or NaN.
Result<Fp8OutputScales> MakeFp8OutputScales(std::span<const float> gate_up_tensor_scale,
                                            float input_tensor_scale,
                                            std::span<const float> down_tensor_scale, float mid_tensor_scale);

/// Largest tiles of two generations of kernels.
inline constexpr int64_t kTileTokensOfVllm = 64;
inline constexpr int64_t kTileTokensOfFlashInfer = 128;

/// Tokens of one tile: 1.3 times the mean load of an expert, as a power of two between 8 and `largest`.
int64_t TileTokens(int64_t num_tokens, int64_t top_k, int64_t num_experts,
                   int64_t largest = kTileTokensOfVllm);

}  // namespace fusedmoe
