#pragma once

#include <cstdint>

#include <fusedmoe/config.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/weights.hpp>

namespace fusedmoe::bench {

/// Experts whose codes and scales are drawn directly, at memory speed: codes as normal weights would have
/// them, scales that give each projection an output of about the size of its input. Every expert has its own;
/// they depend on (seed, layer, expert) only, and loading one again gives the same. Integer weights are
/// symmetric. Errors: kUnsupported when a group of the scheme does not divide a matrix.
Result<ExpertSource> RandomExperts(const MoeConfig& config, const Scheme& scheme, uint64_t seed,
                                   int64_t layer);

}  // namespace fusedmoe::bench
