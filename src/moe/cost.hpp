#pragma once

#include <cstdint>

#include <fusedmoe/config.hpp>
#include <fusedmoe/quant.hpp>

namespace fusedmoe {

/// Bytes of an encoded matrix [rows, cols] with its scales (zero points: one byte a group), as the canonical
/// form holds it.
int64_t EncodedBytes(const WeightFormat& format, int64_t rows, int64_t cols);

/// Bytes of one expert: gate and up (or up alone) and down.
int64_t ExpertBytes(const MoeConfig& config, const WeightFormat& format);

/// Experts of this rank that `num_tokens` tokens are expected to touch, when each chooses top_k of
/// num_experts uniformly: E_local * (1 - (1 - k / E)^M).
double ExpectedExperts(const MoeConfig& config, int64_t num_tokens);

/// Floating-point operations (two per multiply-add) of one forward: 2 * M * k * (projections) * H * I, for
/// the share of the experts that is local.
int64_t ForwardFlops(const MoeConfig& config, int64_t num_tokens);

}  // namespace fusedmoe
