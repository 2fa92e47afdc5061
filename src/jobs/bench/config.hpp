#pragma once

#include <cstdint>
#include <span>

#include <fusedmoe/problems.hpp>

namespace fusedmoe::bench {

inline constexpr int64_t kMostBenchTokens = int64_t{1} << 16;

/// The routed experts of the problem on one rank, with plain top-k: ids are given, and what the routers of
/// the models do besides costs the same for every kernel. Latent experts: on the rows that they read.
/// `num_experts`: of the layer; 0: as many as the problem has.
Result<MoeConfig> ConfigOf(const Problem& problem, int64_t num_experts);

/// kUsage for token counts that are not measured.
Status CheckTokens(std::span<const int64_t> counts);

}  // namespace fusedmoe::bench
