#pragma once

#include <cstdint>

#include <fusedmoe/config.hpp>
#include <fusedmoe/plan.hpp>
#include <fusedmoe/quant.hpp>

#include "moe/backend.hpp"

namespace fusedmoe {

/// Bytes of one expert: gate and up (or up alone) and down.
int64_t ExpertBytes(const MoeConfig& config, const WeightFormat& format);

/// The same, with the zero points and the type of scales that the weights have.
int64_t ExpertBytes(const MoeProblem& problem);

/// Experts of this rank that `num_tokens` tokens are expected to touch, when each chooses top_k of
/// num_experts uniformly: E_local * (1 - (1 - k / E)^M).
double ExpectedExperts(const MoeConfig& config, int64_t num_tokens);

/// Floating-point operations (two per multiply-add) of one forward: 2 * M * k * (projections) * H * I, for
/// the share of the experts that is local.
int64_t ForwardFlops(const MoeConfig& config, int64_t num_tokens);

/// Writes into `plan` what one forward of `num_tokens` costs when each local expert holds `expert_bytes` as
/// the backend prepared it: tokens, weight_bytes, read_bytes, flops.
void DescribeCost(const MoeConfig& config, int64_t expert_bytes, int64_t num_tokens, Plan& plan);

}  // namespace fusedmoe
