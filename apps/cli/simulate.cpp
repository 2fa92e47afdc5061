#include <cmath>
#include <memory>
#include <optional>
#include <string>

#include <fmt/format.h>

#include <fusedmoe/jobs/simulate.hpp>
#include <fusedmoe/parallel.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "options.hpp"

namespace fusedmoe::cli {
namespace {

struct SimulateFlags {
  std::string problem;
  std::string link = "h800_cx7";
  SimulateOptions options;
  std::optional<int64_t> ranks_per_node;
  std::optional<double> network_gbps, local_gbps;
};

Json ExchangeJson(const ExchangeCost& cost) {
  return {{"row_bytes", cost.row_bytes},
          {"rows", cost.rows},
          {"bytes", cost.bytes},
          {"network_bytes", cost.network_bytes},
          {"local_bytes", cost.local_bytes},
          {"seconds", cost.seconds},
          {"slowest_seconds", cost.slowest_seconds}};
}

std::string ExchangeText(const char* name, const ExchangeCost& cost) {
  return fmt::format("{:<9}{:>9.0f} us {:>9.0f} us   {:.0f} rows of {} bytes, {} to other nodes, {} within\n",
                     name, cost.seconds * 1e6, cost.slowest_seconds * 1e6, cost.rows, cost.row_bytes,
                     BytesText(std::llround(cost.network_bytes)), BytesText(std::llround(cost.local_bytes)));
}

Status Run(const SimulateFlags& flags, Output& output) {
  FMOE_ASSIGN_OR_RETURN(const Problem problem, ReadProblem(flags.problem));
  SimulateOptions options = flags.options;
  FMOE_ASSIGN_OR_RETURN(options.link, ParseLink(flags.link));
  options.link.ranks_per_node = flags.ranks_per_node.value_or(options.link.ranks_per_node);
  options.link.network_gbps = flags.network_gbps.value_or(options.link.network_gbps);
  options.link.local_gbps = flags.local_gbps.value_or(options.link.local_gbps);
  FMOE_ASSIGN_OR_RETURN(const SimulateReport report, Simulate(problem, options));
  const double tokens = static_cast<double>(options.tokens * options.ranks);
  const LinkModel& link = options.link;
  output.Document(
      {{"problem", problem.name},
       {"scheme", report.scheme},
       {"ranks", options.ranks},
       {"tokens_per_rank", options.tokens},
       {"all2all", options.all2all},
       {"protocol", report.protocol},
       {"link",
        {{"name", link.name},
         {"what", link.what},
         {"ranks_per_node", link.ranks_per_node},
         {"network_gbps", link.network_gbps},
         {"local_gbps", link.local_gbps}}},
       {"dispatch", ExchangeJson(report.dispatch)},
       {"compute",
        {{"seconds", report.compute_seconds}, {"slowest_seconds", report.slowest_compute_seconds}}},
       {"combine", ExchangeJson(report.combine)},
       {"destinations", report.destinations},
       {"imbalance", {{"rows", report.row_imbalance}, {"slots", report.slot_imbalance}}},
       {"memory", {{"weight_bytes", report.weight_bytes}, {"buffer_bytes", report.buffer_bytes}}},
       {"seconds", report.seconds()},
       {"slowest_seconds", report.slowest_seconds()},
       {"tokens_per_second", tokens / report.slowest_seconds()}});
  std::string text =
      fmt::format("{} ({}) on {}, {} each, {} ({}), {}\n\n           balanced      slowest\n", problem.name,
                  report.scheme, CountText(options.ranks, "rank"), CountText(options.tokens, "token"),
                  options.all2all, report.protocol, link.what);
  text += ExchangeText("dispatch", report.dispatch);
  text += fmt::format("{:<9}{:>9.0f} us {:>9.0f} us\n", "compute", report.compute_seconds * 1e6,
                      report.slowest_compute_seconds * 1e6);
  text += ExchangeText("combine", report.combine);
  text +=
      fmt::format("{:<9}{:>9.0f} us {:>9.0f} us   {:.0f} tokens/s a layer\n\n", "layer",
                  report.seconds() * 1e6, report.slowest_seconds() * 1e6, tokens / report.slowest_seconds());
  text += fmt::format(
      "imbalance: busiest rank {:.2f} x the mean in rows, {:.2f} x in slots; a token goes to {:.2f} "
      "ranks\n",
      report.row_imbalance, report.slot_imbalance, report.destinations);
  text += fmt::format("memory of a rank: {} of weights, {} of buffers\n", BytesText(report.weight_bytes),
                      BytesText(report.buffer_bytes));
  output.Text(text);
  return Status::Ok();
}

}  // namespace

Action DefineSimulate(CLI::App& app) {
  auto flags = std::make_shared<SimulateFlags>();
  app.add_option("problem", flags->problem,
                 "Layer by name (fusedmoe explain --help lists them), or a JSON file that describes it")
      ->required();
  app.add_option("--ranks", flags->options.ranks, "Expert-parallel ranks")->required();
  app.add_option("--all2all", flags->options.all2all, "All-to-all backend: " + AllToAllNames());
  app.add_option("--tokens", flags->options.tokens, "Tokens on each rank");
  app.add_option("--link", flags->link, "The cluster: " + Join(LinkModels(), &LinkModel::name));
  app.add_option("--ranks-per-node", flags->ranks_per_node, "Instead of that of the link");
  app.add_option("--network-gbps", flags->network_gbps,
                 "GB/s a rank between nodes, instead of that of the link");
  app.add_option("--local-gbps", flags->local_gbps, "GB/s a rank within a node, instead of that of the link");
  app.add_option("--scheme", flags->options.scheme, "Instead of the scheme of the published checkpoint");
  app.add_option("--dispatch", flags->options.dispatch_format,
                 "Rows on the way to the experts: bf16, fp8, mxfp8, nvfp4, mxfp4; else as the scheme says");
  app.add_option("--combine-bytes", flags->options.combine_bytes, "Bytes of a value on the way back: 2 or 4");
  app.add_option("--zipf", flags->options.zipf, "Popularity of experts: 0 uniform, 1 strongly uneven");
  AddSeed(app, flags->options.seed, "Of the tokens that are drawn for the imbalance");
  return [flags](Output& output) { return Run(*flags, output); };
}

}  // namespace fusedmoe::cli
