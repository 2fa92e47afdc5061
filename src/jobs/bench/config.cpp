#include "jobs/bench/config.hpp"

#include <fmt/format.h>

namespace fusedmoe::bench {

Result<MoeConfig> ConfigOf(const Problem& problem, int64_t num_experts) {
  MoeConfig config = RoutedConfig(problem.config);
  if (num_experts > 0) {
    config.num_experts = num_experts;
  }
  config.num_local_experts = config.num_experts;
  config.shared = SharedExpertConfig{};
  config.parallel = ParallelConfig{};
  const int64_t top_k = config.top_k();
  config.routing = RoutingConfig{};
  config.routing.top_k = top_k;
  config.has_correction_bias = config.has_router_bias = false;
  if (top_k > config.num_experts) {
    return Status::Usage(
        fmt::format("{}: top_k is {}, but num_experts is {}; raise num_experts to at least top_k",
                    problem.name, top_k, config.num_experts));
  }
  return config;
}

Status CheckTokens(std::span<const int64_t> counts) {
  for (const int64_t tokens : counts) {
    if (tokens < 1 || tokens > kMostBenchTokens) {
      return Status::Usage(fmt::format("tokens={} must be 1 to {}", tokens, kMostBenchTokens));
    }
  }
  return Status::Ok();
}

}  // namespace fusedmoe::bench
