#include <fusedmoe/jobs/bench_ranks.hpp>

#include <utility>

#include <fmt/format.h>

#include "jobs/bench/random_weights.hpp"
#include "jobs/bench/rank_measurement.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 16;

Result<MoeConfig> ConfigOf(const RankBenchOptions& options) {
  MoeConfig config = RoutedConfig(options.problem.config);
  config.num_experts = options.num_experts > 0 ? options.num_experts : config.num_experts;
  config.num_local_experts = config.num_experts;
  config.shared = SharedExpertConfig{};
  config.parallel = ParallelConfig{};
  const int64_t top_k = config.top_k();
  config.routing = RoutingConfig{};
  config.routing.top_k = top_k;
  config.has_correction_bias = config.has_router_bias = false;
  if (top_k > config.num_experts) {
    return Status::Usage(
        fmt::format("{} chooses {} experts a token, of {}", options.problem.name, top_k, config.num_experts));
  }
  if (options.tokens.empty() || options.communicator == nullptr || !(options.seconds_per_row >= 0)) {
    return Status::Usage("token counts, a communicator and seconds of at least 0 are needed");
  }
  for (const int64_t tokens : options.tokens) {
    if (tokens < 1 || tokens > kMostTokens) {
      return Status::Usage(fmt::format("tokens={} must be 1 to {}", tokens, kMostTokens));
    }
  }
  if (options.parallel.enable_eplb) {
    return Status::Usage(
        "a placement that stays is measured; leave load balancing (parallel.enable_eplb) out");
  }
  return config;
}

}  // namespace

Result<std::vector<RankBenchRow>> RunRankBench(const RankBenchOptions& options) {
  FMOE_ASSIGN_OR_RETURN(const MoeConfig config, ConfigOf(options));
  const int64_t sizes[] = {config.hidden, config.intermediate};
  FMOE_ASSIGN_OR_RETURN(const Scheme scheme,
                        ParseScheme(options.scheme.empty() ? options.problem.scheme : options.scheme, sizes));
  FMOE_ASSIGN_OR_RETURN(const ExpertSource whole, bench::RandomExperts(config, scheme, options.seed, 0));
  std::vector<RankBenchRow> rows;
  for (const int64_t tokens : options.tokens) {
    if (options.progress) {
      options.progress(
          fmt::format("{} {}, {} tokens on each rank", options.problem.name, scheme.name, tokens));
    }
    RankBenchRow row;
    row.scheme = scheme.name;
    row.tokens = tokens;
    FMOE_RETURN_IF_ERROR(bench::RankMeasurement(options, config, scheme, whole, row).Run());
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace fusedmoe
