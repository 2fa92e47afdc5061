#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/jobs/tune.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "options.hpp"

namespace fusedmoe::cli {
namespace {

struct TuneFlags {
  std::string schemes, isas, out;
  int threads = 0;
  double seconds = TuneOptions{}.seconds_per_point;
};

std::string PathText(const CpuPathCost& cost) {
  return fmt::format("{:.0f} / {:.2f} / {:.2f} / {:.2f} / {:.2f}", cost.fixed_ns, cost.read_ns,
                     cost.decode_ns, cost.row_ns, cost.token_ns);
}

std::string ReportText(const CpuCosts& costs) {
  std::vector<std::vector<std::string>> rows = {{"scheme", "isa", "kernel", "latency up to", "tiles from",
                                                 "vectors: fixed / read / decode / row / token ns", "tiles",
                                                 "misfit"}};
  for (const CpuCostRow& row : costs.rows) {
    const CpuCrossover crossover = CrossoverOf(row);
    rows.push_back({row.scheme, row.isa,
                    fmt::format("{} x {}{}", row.weights, row.activations, row.codes ? " codes" : ""),
                    fmt::format("{}", crossover.latency_tokens),
                    crossover.tile_tokens > 0 ? fmt::format("{}", crossover.tile_tokens) : "never",
                    PathText(row.vectors), row.has_tiles ? PathText(row.tiles) : "none",
                    fmt::format("{:.0f} %", row.misfit * 100)});
  }
  return fmt::format("{}, {}\n", costs.cpu, CountText(costs.threads, "thread")) + Table(rows);
}

Status Tune(const TuneFlags& flags, Output& output) {
  FMOE_RETURN_IF_ERROR(CheckPlace(flags.out));
  TuneOptions options;
  FMOE_ASSIGN_OR_RETURN(options.schemes, SplitList("--scheme", flags.schemes));
  FMOE_ASSIGN_OR_RETURN(options.isas, SplitList("--isa", flags.isas));
  options.seconds_per_point = flags.seconds;
  options.progress = [&output](std::string_view line) { output.Log(line); };
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<ThreadPool> pool, ThreadPool::Create(flags.threads));
  options.executor = pool->executor();
  FMOE_ASSIGN_OR_RETURN(const CpuCosts costs, RunTune(options));
  const std::string text = ToJson(costs);
  Json document = Json::parse(text);
  document.erase("schema_version");  // Output puts it in front
  document["crossovers"] = Json::array();
  for (const CpuCostRow& row : costs.rows) {
    const CpuCrossover crossover = CrossoverOf(row);
    document["crossovers"].push_back({{"scheme", row.scheme},
                                      {"isa", row.isa},
                                      {"latency_tokens", crossover.latency_tokens},
                                      {"tile_tokens", crossover.tile_tokens}});
  }
  if (!flags.out.empty()) {
    FMOE_RETURN_IF_ERROR(WriteText(flags.out, text));
  }
  output.Document(std::move(document));
  output.Text(ReportText(costs));
  return Status::Ok();
}

}  // namespace

Action DefineTune(CLI::App& app) {
  auto flags = std::make_shared<TuneFlags>();
  app.add_option("--scheme", flags->schemes,
                 "Schemes, separated by commas, with :a8 for --activation a8; without it one of each kernel");
  app.add_option("--isa", flags->isas, "Instruction sets, separated by commas; without it all of this CPU");
  AddThreads(app, flags->threads);
  app.add_option("--seconds", flags->seconds, "Timed calls of each token count")->check(Between(0, 60));
  app.add_option("--out", flags->out,
                 "Write the figures to this file, for --tune of run, bench, verify and explain");
  return [flags](Output& output) { return Tune(*flags, output); };
}

}  // namespace fusedmoe::cli
