#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/jobs/bench.hpp>
#include <fusedmoe/machine.hpp>
#include <fusedmoe/routing.hpp>
#include <fusedmoe/safetensors.hpp>

#include "bench_ranks.hpp"
#include "command.hpp"
#include "describe.hpp"
#include "options.hpp"

namespace fusedmoe::cli {
namespace {

struct BenchFlags {
  std::vector<std::string> problems;
  std::string schemes;
  std::string tokens = "1,4,16,64,256,1024";
  std::string isas, modes, pack_cache, tune;
  std::string routing = "uniform";
  std::string device = "cpu";
  std::string backend;
  std::string activation = "as_checkpoint";
  std::string plot;
  int threads = 0;
  int64_t experts = 0, layers = 0, max_bytes = 0;
  double seconds = 1;
  uint64_t seed = 1;
  bool on_ranks = false;
  RankFlags ranks;
  std::string determinism = "thread_invariant";
};

Result<std::vector<int64_t>> ParseTokens(const std::string& text) {
  std::vector<int64_t> tokens;
  FMOE_ASSIGN_OR_RETURN(const std::vector<std::string> words, SplitList("--tokens", text));
  for (const std::string& word : words) {
    const bool digits = word.find_first_not_of("0123456789") == std::string::npos && word.size() < 8;
    if (!digits || word == "0") {
      return Status::Usage("--tokens takes counts from 1 to 9999999, such as 1,4,16; '" + word + "' is none");
    }
    tokens.push_back(std::stoll(word));
  }
  if (tokens.empty()) {
    return Status::Usage("--tokens is empty; counts from 1 to 9999999, such as 1,4,16, are needed");
  }
  return tokens;
}

// The choices that a run wrote, or any file that holds topk_ids.
Result<Tensor> ReadIds(const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const SafetensorsFile file, ReadSafetensors(path));
  const Tensor* ids = file.Find("topk_ids");
  if (ids == nullptr || ids->dtype() != DType::kI32) {
    return Status::BadInput(fmt::format("is {}; I32 [tokens, top_k] is required",
                                        ids == nullptr ? "missing" : DTypeName(ids->dtype())))
        .WithFile(path)
        .WithTensor("topk_ids")
        .WithHint("`fusedmoe run --output` writes it");
  }
  return *ids;
}

Status TakeNames(const BenchFlags& flags, BenchOptions& options) {
  // Each name is checked as `run` checks the one it takes.
  PlanFlags plan;
  plan.device = flags.device;
  plan.backend = flags.backend;
  plan.activation = flags.activation;
  FMOE_ASSIGN_OR_RETURN(options.cpu_costs, ReadTune(flags.tune));
  FMOE_ASSIGN_OR_RETURN(options.isas, SplitList("--isa", flags.isas));
  FMOE_ASSIGN_OR_RETURN(options.modes, SplitList("--mode", flags.modes));
  FMOE_ASSIGN_OR_RETURN(const LayerOptions resolved, Resolve(plan));
  for (const std::string& isa : options.isas) {
    PlanFlags one = plan;
    one.isa = isa;
    FMOE_RETURN_IF_ERROR(Resolve(one).status());
  }
  for (const std::string& mode : options.modes) {
    PlanFlags one = plan;
    one.mode = mode;
    FMOE_RETURN_IF_ERROR(Resolve(one).status());
  }
  options.device = resolved.device;
  options.backend = resolved.backend;
  options.activation = resolved.activation;
  if (flags.routing == "uniform") {
    options.routing = BenchRouting::kUniform;
  } else if (flags.routing == "skewed") {
    options.routing = BenchRouting::kSkewed;
  } else {
    options.routing = BenchRouting::kGiven;
    FMOE_ASSIGN_OR_RETURN(options.topk_ids, ReadIds(flags.routing));
  }
  return Status::Ok();
}

Result<BenchOptions> OptionsOf(const BenchFlags& flags) {
  BenchOptions options;
  options.pack_cache = flags.pack_cache;
  for (const std::string& name : flags.problems) {
    FMOE_ASSIGN_OR_RETURN(Problem problem, ReadProblem(name));
    options.problems.push_back(std::move(problem));
  }
  FMOE_ASSIGN_OR_RETURN(options.schemes, SplitList("--scheme", flags.schemes));
  FMOE_ASSIGN_OR_RETURN(options.tokens, ParseTokens(flags.tokens));
  FMOE_RETURN_IF_ERROR(TakeNames(flags, options));
  options.num_experts = flags.experts;
  options.num_layers = flags.layers;
  options.max_bytes = flags.max_bytes;
  options.seconds_per_row = flags.seconds;
  options.seed = flags.seed;
  return options;
}

Json RowJson(const BenchRow& row) {
  Json json = {{"problem", row.problem},
               {"scheme", row.scheme},
               {"tokens", row.tokens},
               {"backend", row.plan.backend},
               {"isa", row.plan.isa},
               {"mode", row.plan.mode},
               {"activation", ActivationModeName(row.plan.activation)},
               {"tokens_per_expert", row.tokens_per_expert},
               {"checked", row.ok},
               {"check",
                {{"against", "REFERENCE"},
                 {"tokens", row.checked_tokens},
                 {"rel_l2", row.rel_l2},
                 {"bound", row.error_bound},
                 {"ok", row.ok}}}};
  if (row.ok) {
    json.update(
        {{"seconds", {{"min", row.seconds.min}, {"median", row.seconds.median}, {"max", row.seconds.max}}},
         {"samples", row.samples},
         {"disturbed_samples", row.disturbed_samples},
         {"tokens_per_second", row.tokens_per_second()},
         {"gbps", row.bytes_per_second() / 1e9},
         {"gflops", row.flops_per_second() / 1e9},
         {"bound", row.bound},
         {"share_of_bound", row.share_of_bound},
         {"ceiling", row.ceiling / 1e9},
         {"bytes", row.bytes},
         {"prepared_bytes", row.prepared_bytes},
         {"flops", row.flops},
         {"layers", row.num_layers},
         {"cold", row.cold}});
  }
  return json;
}

double RateOf(const BenchCeilings& ceilings, std::initializer_list<std::string_view> units) {
  for (const std::string_view unit : units) {
    for (const BenchCeilings::Peak& peak : ceilings.peaks) {
      if (peak.unit == unit) {
        return peak.rate / 1e9;
      }
    }
  }
  return 0;
}

Json CeilingsJson(const BenchCeilings& ceilings) {
  // The first four are always there; without the unit of that name the next best, or 0.
  Json json = {{"read_gbps", ceilings.read / 1e9},
               {"int8_gops",
                RateOf(ceilings, {"vnni_int8", "avx512_int8", "avx2_vnni_int8", "avx2_int8", "neon_int8"})},
               {"f16_gflops", RateOf(ceilings, {"f16_fma"})},
               {"f32_gflops", RateOf(ceilings, {"f32_fma", "avx2_f32_fma", "neon_f32_fma"})}};
  for (const BenchCeilings::Peak& peak : ceilings.peaks) {
    json[peak.name] = peak.rate / 1e9;
  }
  return json;
}

Json ReportJson(const BenchReport& report) {
  Json results = Json::array(), failed = Json::array(), refused = Json::array();
  for (const BenchRow& row : report.rows) {
    (row.ok ? results : failed).push_back(RowJson(row));
  }
  for (const BenchRefusal& refusal : report.refusals) {
    refused.push_back({{"problem", refusal.problem},
                       {"scheme", refusal.scheme},
                       {"tokens", refusal.tokens},
                       {"reason", refusal.status.message()}});
  }
  Json machine = ToJson(HostMachine());
  if (report.card.sm_mhz >= 0) {
    machine["card"] = {{"sm_mhz", report.card.sm_mhz},
                       {"memory_mhz", report.card.memory_mhz},
                       {"power_watts", report.card.power_watts},
                       {"power_limit_watts", report.card.power_limit_watts}};
  }
  return {{"machine", machine},
          {"threads", report.num_threads},
          {"ceilings", CeilingsJson(report.ceilings)},
          {"results", results},
          {"failed", failed},
          {"refused", refused}};
}

std::string ReportText(const BenchReport& report) {
  std::string ceilings = fmt::format("{}; read {:.1f} GB/s", CountText(report.num_threads, "thread"),
                                     report.ceilings.read / 1e9);
  for (const BenchCeilings::Peak& peak : report.ceilings.peaks) {
    ceilings += fmt::format(", {} {:.0f} G/s", peak.unit, peak.rate / 1e9);
  }
  if (report.card.sm_mhz >= 0) {
    ceilings += fmt::format("; SM {} MHz, {:.0f} of {:.0f} W after the last row", report.card.sm_mhz,
                            report.card.power_watts, report.card.power_limit_watts);
  }
  std::vector<std::vector<std::string>> rows = {{"problem", "scheme", "tokens", "per expert", "backend",
                                                 "isa", "mode", "ms", "spread", "tokens/s", "GB/s", "GFLOP/s",
                                                 "bound", "share", "error / bound"}};
  for (const BenchRow& row : report.rows) {
    std::vector<std::string> cells = {row.problem,
                                      row.scheme,
                                      fmt::format("{}", row.tokens),
                                      fmt::format("{:.1f}", row.tokens_per_expert),
                                      row.plan.backend,
                                      row.plan.isa,
                                      row.plan.mode};
    if (row.ok) {
      cells.insert(cells.end(), {fmt::format("{:.3f}", row.seconds.median * 1e3),
                                 fmt::format("{:.3f}..{:.3f}", row.seconds.min * 1e3, row.seconds.max * 1e3),
                                 fmt::format("{:.0f}", row.tokens_per_second()),
                                 fmt::format("{:.1f}", row.bytes_per_second() / 1e9),
                                 fmt::format("{:.0f}", row.flops_per_second() / 1e9),
                                 row.bound + (row.cold ? "" : " (warm)"),
                                 fmt::format("{:.0f} %", row.share_of_bound * 100)});
    } else {
      cells.insert(cells.end(), {"not timed", "", "", "", "", "", ""});
    }
    cells.push_back(fmt::format("{:.1e} / {:.1e}{}", row.rel_l2, row.error_bound, row.ok ? "" : " FAILED"));
    rows.push_back(std::move(cells));
  }
  return ceilings + "\n" + Table(rows);
}

std::string RefusalText(const BenchRefusal& refusal) {
  return fmt::format("{} {} at {}: {}", refusal.problem, refusal.scheme, CountText(refusal.tokens, "token"),
                     refusal.status.message());
}

// What the run says as a whole: a wrong result first, then what could not run.
Status VerdictOf(const BenchReport& report) {
  for (const BenchRow& row : report.rows) {
    if (!row.ok) {
      return Status::No(fmt::format("{} {} at {} tokens lies {:.2e} from the reference, {:.2e} is allowed",
                                    row.problem, row.scheme, row.tokens, row.rel_l2, row.error_bound));
    }
  }
  if (!report.refusals.empty()) {
    const BenchRefusal& refusal = report.refusals.front();
    return Status::Unsupported(RefusalText(refusal)).WithHint(refusal.status.hint());
  }
  return Status::Ok();
}

Status Bench(const BenchFlags& flags, Output& output) {
  FMOE_RETURN_IF_ERROR(CheckPlace(flags.plot));
  FMOE_RETURN_IF_ERROR(CheckOutput(flags.plot, flags.problems));
  FMOE_RETURN_IF_ERROR(CheckOutput(flags.plot, {flags.routing, flags.tune}));
  FMOE_ASSIGN_OR_RETURN(BenchOptions options, OptionsOf(flags));
  if (flags.on_ranks) {
    PlanFlags plan;
    plan.determinism = flags.determinism;
    FMOE_ASSIGN_OR_RETURN(const LayerOptions resolved, Resolve(plan));
    return BenchOnRanks(options, flags.ranks, flags.threads, resolved.determinism, output);
  }
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<ThreadPool> pool, ThreadPool::Create(flags.threads));
  options.executor = pool->executor();
  options.progress = [&output](std::string_view line) { output.Log(line); };
  Result<BenchReport> ran = RunBench(options);
  if (!ran.ok()) {
    const bool of_file = options.routing == BenchRouting::kGiven && ran.status().tensor() == "topk_ids";
    return of_file ? Status(ran.status()).WithFile(flags.routing) : ran.status();
  }
  const BenchReport report = *std::move(ran);
  const Status verdict = VerdictOf(report);
  for (const BenchRefusal& refusal : report.refusals) {
    if (const std::string text = RefusalText(refusal); text != verdict.message()) {
      output.Log(text);  // the verdict is said at the end
    }
  }
  output.Document(ReportJson(report));
  output.Text(ReportText(report));
  return verdict.ok() && !flags.plot.empty() ? WriteText(flags.plot, RooflineSvg(report)) : verdict;
}

}  // namespace

Action DefineBench(CLI::App& app) {
  auto flags = std::make_shared<BenchFlags>();
  flags->problems = {"qwen3-30b-a3b"};
  app.add_option("problem", flags->problems, "Layers by name, or JSON files that describe them");
  app.add_option("--scheme", flags->schemes,
                 "Schemes, separated by commas; without it those of the published models");
  app.add_option("--tokens", flags->tokens, "Token counts, separated by commas");
  AddThreads(app, flags->threads);
  app.add_option("--isa", flags->isas, "Force instruction sets, separated by commas");
  app.add_option("--mode", flags->modes, "Force modes, separated by commas");
  app.add_option("--backend", flags->backend, "Use this backend or fail");
  AddPackCache(app, flags->pack_cache);
  AddTune(app, flags->tune);
  app.add_option("--activation", flags->activation,
                 "a8 lets weight-only layers multiply with activations of 8 bits, and FP8 add up in f16");
  app.add_option("--routing", flags->routing,
                 "uniform, skewed (nine tokens of ten share an expert), or a safetensors file with topk_ids");
  app.add_option("--device", flags->device, "cpu or cuda");
  app.add_option("--experts", flags->experts, "Measure layers with this many experts, instead of their own")
      ->check(CLI::Range(int64_t{1}, kMaxRoutedExperts))
      ->default_str("");
  app.add_option("--layers", flags->layers,
                 "Copies of the layer in rotation; without it until weights are cold")
      ->check(CLI::Range(int64_t{1}, int64_t{4096}))
      ->default_str("");
  app.add_option("--max-bytes", flags->max_bytes,
                 "Prepared weights at a time; without it a quarter of the memory")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 50))
      ->default_str("");
  app.add_option("--seconds", flags->seconds, "Timed calls of each row")->check(Between(0, 3600));
  AddSeed(app, flags->seed, "Of weights, inputs and routings");
  CLI::Option* on_ranks = app.add_flag(
      "--ranks", flags->on_ranks,
      "Under mpirun: the layer on its ranks, and the bytes each of them sends; without sizes --dp N --ep");
  AddRanks(app, flags->ranks);
  app.add_option("--determinism", flags->determinism,
                 "With --ranks: rank_invariant sends every slot's row home");
  for (const char* name :
       {"--tp", "--dp", "--pcp", "--ep", "--sp", "--all2all", "--deadline", "--nccl", "--determinism"}) {
    app.get_option(name)->needs(on_ranks);
  }
  app.add_option("--plot", flags->plot, "Write the rows under the roofline as an SVG file");
  return [flags](Output& output) { return Bench(*flags, output); };
}

}  // namespace fusedmoe::cli
