#include <fusedmoe/jobs/bench_ranks.hpp>

#include <utility>

#include <fmt/format.h>

#include "jobs/bench/config.hpp"
#include "jobs/bench/random_weights.hpp"
#include "jobs/bench/rank_measurement.hpp"

namespace fusedmoe {
namespace {

Status CheckRankOptions(const RankBenchOptions& options) {
  if (options.tokens.empty()) {
    return Status::Usage("tokens is empty; at least one token count is required");
  }
  if (options.communicator == nullptr) {
    return Status::Usage("communicator is null; one that joins the ranks is required");
  }
  if (!(options.seconds_per_row >= 0)) {
    return Status::Usage(
        fmt::format("seconds_per_row is {}; at least 0 is required", options.seconds_per_row));
  }
  FMOE_RETURN_IF_ERROR(bench::CheckTokens(options.tokens));
  if (options.parallel.enable_eplb) {
    return Status::Usage(
        "a placement that stays is measured; leave load balancing (parallel.enable_eplb) out");
  }
  return Status::Ok();
}

}  // namespace

Result<std::vector<RankBenchRow>> RunRankBench(const RankBenchOptions& options) {
  FMOE_ASSIGN_OR_RETURN(const MoeConfig config, bench::ConfigOf(options.problem, options.num_experts));
  FMOE_RETURN_IF_ERROR(CheckRankOptions(options));
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
