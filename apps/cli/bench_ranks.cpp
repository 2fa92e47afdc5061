#include "bench_ranks.hpp"

#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/jobs/bench_ranks.hpp>
#include <fusedmoe/machine.hpp>

#include "describe.hpp"
#include "options.hpp"

namespace fusedmoe::cli {
namespace {

double Overhead(const RankTraffic& traffic) {
  return traffic.minimum > 0 ? traffic.bytes() / traffic.minimum - 1 : 0;
}

Json TrafficJson(const RankTraffic& traffic) {
  return {{"bytes", traffic.bytes()},         {"local_bytes", traffic.local},
          {"remote_bytes", traffic.remote},   {"dispatch", traffic.dispatch},
          {"combine", traffic.combine},       {"control", traffic.control},
          {"minimum_bytes", traffic.minimum}, {"overhead", Overhead(traffic)}};
}

Json RowJson(const std::string& problem, const RankBenchRow& row) {
  Json ranks = Json::array();
  for (const RankTraffic& traffic : row.ranks) {
    ranks.push_back(TrafficJson(traffic));
  }
  const auto tokens = static_cast<double>(row.tokens);
  return {
      {"problem", problem},
      {"scheme", row.scheme},
      {"tokens", row.tokens},
      {"backend", row.plan.backend},
      {"isa", row.plan.isa},
      {"wire", row.wire},
      {"row_bytes", row.row_bytes},
      {"combine_row_bytes", row.combine_row_bytes},
      {"seconds", row.seconds},
      {"exchange_seconds", row.exchange_seconds},
      {"tokens_per_second", row.seconds > 0 ? tokens / row.seconds : 0},
      {"ranks", ranks},
      {"check", {{"against", "REFERENCE"}, {"rel_l2", row.rel_l2}, {"bound", row.bound}, {"ok", row.ok}}}};
}

void AddText(const std::string& problem, const RankBenchRow& row,
             std::vector<std::vector<std::string>>& table) {
  for (size_t rank = 0; rank < row.ranks.size(); ++rank) {
    const RankTraffic& traffic = row.ranks[rank];
    const bool first = rank == 0;
    table.push_back({first ? problem : "", first ? row.scheme : "",
                     first ? fmt::format("{}", row.tokens) : "", first ? row.plan.backend : "",
                     first ? fmt::format("{:.3f}", row.seconds * 1e3) : "",
                     first ? fmt::format("{}, {} B", row.wire, row.row_bytes) : "", fmt::format("{}", rank),
                     fmt::format("{:.0f}", traffic.bytes()), fmt::format("{:.0f}", traffic.local),
                     fmt::format("{:.0f}", traffic.remote), fmt::format("{:.0f}", traffic.minimum),
                     fmt::format("{:.1f} %", 100 * Overhead(traffic))});
  }
}

/// What the exchanges between cards take alone, and at which rate rank 0 sends then.
std::string ExchangeText(const std::string& problem, const RankBenchRow& row) {
  const double sent = row.ranks.empty() ? 0 : row.ranks.front().dispatch + row.ranks.front().combine;
  return row.exchange_seconds <= 0
             ? std::string()
             : fmt::format("{} {}, {}: exchanges alone {:.1f} us, {:.1f} GB/s out of rank 0 ({})\n", problem,
                           row.scheme, CountText(row.tokens, "token"), row.exchange_seconds * 1e6,
                           sent / row.exchange_seconds / 1e9, row.plan.communicator);
}

/// What was measured, as text and JSON show it.
struct Figures {
  Json results = Json::array();
  std::vector<std::vector<std::string>> table = {{"problem", "scheme", "tokens", "backend", "ms", "row",
                                                  "rank", "bytes sent", "local", "remote", "minimum",
                                                  "above"}};
  std::string exchanges;
  Status verdict;  // of the first row beyond its bound

  void Add(const std::string& problem, const RankBenchRow& row) {
    results.push_back(RowJson(problem, row));
    AddText(problem, row, table);
    exchanges += ExchangeText(problem, row);
    if (verdict.ok() && !row.ok) {
      verdict = Status::No(fmt::format("{} {} at {} tokens lies {:.2e} from the reference, {:.2e} is allowed",
                                       problem, row.scheme, row.tokens, row.rel_l2, row.bound));
    }
  }
};

Result<Figures> MeasureAll(const BenchOptions& bench, const RankGroup& group, int threads,
                           Determinism determinism, Output& output) {
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<ThreadPool> pool, ThreadPool::Create(group.Threads(threads)));
  RankBenchOptions options;
  options.tokens = bench.tokens;
  options.device = bench.device;
  options.backend = bench.backend;
  options.determinism = determinism;
  options.num_experts = bench.num_experts;
  options.seconds_per_row = bench.seconds_per_row;
  options.seed = bench.seed;
  options.parallel = group.parallel();
  options.communicator = group.communicator();
  options.executor = pool->executor();
  if (group.leads()) {
    options.progress = [&output](std::string_view line) { output.Log(line); };
  }
  Figures figures;
  for (const Problem& problem : bench.problems) {
    options.problem = problem;
    for (const std::string& scheme :
         bench.schemes.empty() ? std::vector<std::string>{problem.scheme} : bench.schemes) {
      options.scheme = scheme;
      FMOE_ASSIGN_OR_RETURN(const std::vector<RankBenchRow> rows, RunRankBench(options));
      for (const RankBenchRow& row : rows) {
        figures.Add(problem.name, row);
      }
    }
  }
  return figures;
}

}  // namespace

Status BenchOnRanks(const BenchOptions& bench, RankFlags flags, int threads, Determinism determinism,
                    Output& output) {
  const int64_t started = RankGroup::Started();
  if (flags.sizes.tp * flags.sizes.pcp * flags.sizes.dp == 1) {  // nothing said: a rank a group of experts
    flags.sizes.dp = started;
    flags.sizes.enable_expert_parallel = started > 1;
  }
  const Result<RankGroup> opened = RankGroup::Open(flags, bench.device);
  if (!opened.ok()) {
    EndJob(nullptr, opened.status(), output);
    return opened.status();
  }
  const RankGroup& group = *opened;
  const auto measure = [&]() -> Status {
    if (group.size() == 1) {
      return Status::Usage(
                 "--ranks measures the exchange between the ranks of an mpirun; here is one process")
          .WithHint("mpirun -n 2 fusedmoe bench --ranks ...");
    }
    FMOE_ASSIGN_OR_RETURN(const Figures figures, MeasureAll(bench, group, threads, determinism, output));
    if (group.leads()) {
      output.Document(
          {{"machine", ToJson(HostMachine())}, {"deployment", group.ToJson()}, {"results", figures.results}});
      output.Text(Table(figures.table) +
                  "bytes of one forward; minimum: each row that must go, once, without padding, headers and "
                  "verdicts\n" +
                  figures.exchanges);
    }
    return group.leads() ? figures.verdict : Status::Ok();
  };
  const Status status = measure();
  if (!status.ok() && status.code() != StatusCode::kNo) {
    EndJob(&group, status, output);
  }
  return status;
}

}  // namespace fusedmoe::cli
