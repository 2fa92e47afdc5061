#include <fusedmoe/jobs/bench.hpp>

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "jobs/bench/ceilings.hpp"
#include "jobs/bench/config.hpp"
#include "jobs/bench/layer_rotation.hpp"
#include "jobs/bench/measure.hpp"
#include "jobs/bench/routings.hpp"
#include "platform/cuda/card.hpp"

namespace fusedmoe {
namespace {

using namespace bench;  // NOLINT: the pieces of this job

Result<MoeConfig> ConfigFor(const Problem& problem, const BenchOptions& options) {
  FMOE_ASSIGN_OR_RETURN(MoeConfig config, ConfigOf(problem, options.num_experts));
  config.max_tokens = *std::max_element(options.tokens.begin(), options.tokens.end());
  if (options.routing == BenchRouting::kGiven) {
    FMOE_RETURN_IF_ERROR(CheckGivenIds(options.topk_ids, config.top_k(), config.num_experts));
  }
  FMOE_RETURN_IF_ERROR(Validate(config));
  return config;
}

Status CheckBenchOptions(const BenchOptions& options) {
  if (options.problems.empty()) {
    return Status::Usage("no problem to measure");
  }
  if (options.tokens.empty()) {
    return Status::Usage("no token count to measure");
  }
  FMOE_RETURN_IF_ERROR(CheckTokens(options.tokens));
  if (options.num_experts < 0 || options.num_layers < 0 || options.max_bytes < 0 ||
      !(options.seconds_per_row >= 0)) {
    return Status::Usage(fmt::format(
        "num_experts={}, num_layers={}, max_bytes={}, seconds_per_row={}: each must be at least 0",
        options.num_experts, options.num_layers, options.max_bytes, options.seconds_per_row));
  }
  return Status::Ok();
}

/// One problem in one scheme, over all instruction sets, modes and token counts.
class SchemeRun {
 public:
  SchemeRun(const BenchOptions& options, const Problem& problem, CeilingSampler& ceilings,
            BenchReport& report)
      : options_(options), problem_(problem), ceilings_(ceilings), report_(report) {}

  Status Run(const std::string& scheme_name) {
    FMOE_ASSIGN_OR_RETURN(const MoeConfig config, ConfigFor(problem_, options_));
    const int64_t sizes[] = {config.hidden, config.intermediate};
    FMOE_ASSIGN_OR_RETURN(const Scheme scheme, ParseScheme(scheme_name, sizes));
    LayerRotation rotation(config, scheme, options_);
    Measurement measurement(config, scheme, options_, ceilings_);
    for (const std::string& isa : OrFree(options_.isas)) {
      for (const std::string& mode : OrFree(options_.modes)) {
        for (const int64_t tokens : options_.tokens) {
          BenchRow row;
          row.problem = problem_.name;
          row.scheme = scheme.name;
          row.tokens = tokens;
          bool planned = false;
          const Status status = One(rotation, measurement, isa, mode, row, planned);
          // A misspelt backend ends the run; a kernel that wants something else than given ids does not.
          if (status.code() == StatusCode::kSystem || (status.code() == StatusCode::kUsage && !planned)) {
            return status;
          }
          if (status.ok()) {
            report_.rows.push_back(std::move(row));
          } else {
            report_.refusals.push_back({problem_.name, scheme.name, tokens, status});
          }
        }
      }
    }
    return Status::Ok();
  }

 private:
  static std::vector<std::string> OrFree(const std::vector<std::string>& names) {
    return names.empty() ? std::vector<std::string>{""} : names;
  }

  Status One(LayerRotation& rotation, Measurement& measurement, const std::string& isa,
             const std::string& mode, BenchRow& row, bool& planned) {
    if (options_.progress) {
      options_.progress(fmt::format("{} {}, {}", row.problem, row.scheme, CountText(row.tokens, "token")));
    }
    LayerOptions layer_options;
    layer_options.device = options_.device;
    layer_options.backend = options_.backend;
    layer_options.isa = isa;
    layer_options.mode = mode;
    layer_options.activation = options_.activation;
    layer_options.cpu_costs = options_.cpu_costs;
    layer_options.max_tokens = layer_options.plan_tokens = row.tokens;
    layer_options.executor = options_.executor;
    FMOE_RETURN_IF_ERROR(rotation.Plan(layer_options, row.plan));
    planned = true;
    FMOE_RETURN_IF_ERROR(rotation.Build());
    return measurement.Run(rotation, row);
  }

  const BenchOptions& options_;
  const Problem& problem_;
  CeilingSampler& ceilings_;
  BenchReport& report_;
};

}  // namespace

Result<BenchReport> RunBench(const BenchOptions& options) {
  FMOE_RETURN_IF_ERROR(CheckBenchOptions(options));
  // Names first: a misspelt one at the end must not cost the minutes before it.
  for (const Problem& problem : options.problems) {
    FMOE_RETURN_IF_ERROR(ConfigFor(problem, options).status());
  }
  for (const std::string& scheme : options.schemes) {
    FMOE_RETURN_IF_ERROR(ParseScheme(scheme).status());
  }
  const bool on_card = options.device != "cpu";
  if (on_card) {
    FMOE_RETURN_IF_ERROR(cuda::CheckCard(HostMachine()));
  }
  FMOE_ASSIGN_OR_RETURN(CeilingSampler ceilings,
                        on_card ? CeilingSampler::CreateForCard() : CeilingSampler::Create(options.executor));
  BenchReport report;
  report.num_threads = options.executor.num_threads;
  for (const Problem& problem : options.problems) {
    SchemeRun run(options, problem, ceilings, report);
    for (const std::string& scheme :
         options.schemes.empty() ? std::vector<std::string>{problem.scheme} : options.schemes) {
      FMOE_RETURN_IF_ERROR(run.Run(scheme));
    }
  }
  report.ceilings = ceilings.ceilings();
  if (on_card) {
    report.card = ReadCardState();
  }
  return report;
}

}  // namespace fusedmoe
