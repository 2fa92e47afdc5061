#include <charconv>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/oracle.hpp>
#include <fusedmoe/parallel.hpp>
#include <fusedmoe/problems.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "options.hpp"
#include "ranks.hpp"

namespace fusedmoe::cli {
namespace {

struct ExplainFlags {
  CheckpointFlags checkpoint;
  PlanFlags plan;
  ParallelSizes parallel;
  bool sequence_parallel = false;
  int64_t rank = 0;
  std::optional<int64_t> layer;
  std::string problem;
  std::string scheme;
  std::string platform = "host";
  std::vector<std::string> diff;
  std::string why_not;
  std::vector<std::string> env;
  int64_t tokens = 1;
  int threads = 0;
  bool threads_given = false;  // not by the environment
};

// The layer in question, from a checkpoint or described.
Status TakeLayer(const ExplainFlags& flags, ExplainRequest& request) {
  if (flags.checkpoint.directory.empty() == flags.problem.empty()) {
    return Status::Usage(flags.problem.empty()
                             ? "a checkpoint or --problem is required"
                             : "a checkpoint and --problem are given; one of them is the layer")
        .WithHint("see fusedmoe explain --help");
  }
  if (flags.checkpoint.directory.empty()) {
    if (const std::string idle = IdleWithoutCheckpoint(flags.checkpoint); !idle.empty()) {
      return Status::Usage(
          fmt::format("{} has no effect on a described layer, which is read from no files", idle));
    }
    FMOE_ASSIGN_OR_RETURN(const Problem problem, ReadProblem(flags.problem));
    FMOE_ASSIGN_OR_RETURN(request.scheme, ParseScheme(flags.scheme.empty() ? problem.scheme : flags.scheme));
    request.problem = problem.name;
    request.config = problem.config;
    return Status::Ok();
  }
  if (!flags.scheme.empty()) {
    return Status::Usage("--scheme goes with --problem; a checkpoint has its own scheme");
  }
  FMOE_ASSIGN_OR_RETURN(const std::shared_ptr<const Checkpoint> checkpoint, OpenCheckpoint(flags.checkpoint));
  FMOE_ASSIGN_OR_RETURN(const int64_t layer, ResolveLayer(flags.layer, *checkpoint));
  FMOE_ASSIGN_OR_RETURN(const LayerDescription description, checkpoint->Describe(layer));
  request.problem = fmt::format("{} layer {}", checkpoint->directory(), layer);
  request.config = description.config;
  request.scheme = description.scheme;
  // Zero points, activation order, smoothing factors and the type of scales are a matter of the tensors,
  // alike in all experts.
  FMOE_ASSIGN_OR_RETURN(const ExpertSource experts, checkpoint->Experts(layer));
  FMOE_ASSIGN_OR_RETURN(const CanonicalExpert expert, experts.load(0));
  if (expert.gate.empty() || expert.gate.stored == expert.up.stored) {
    request.gate_up_stored = expert.up.stored;
  }
  request.down_stored = expert.down.stored;
  std::optional<DType> scales;
  for (const CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
    request.weights_have_zero_points = request.weights_have_zero_points || !matrix->zero_point.empty();
    request.weights_have_group_index = request.weights_have_group_index || !matrix->group_index.empty();
    request.weights_have_pre_quant_scale =
        request.weights_have_pre_quant_scale || !matrix->pre_quant_scale.empty();
    if (!matrix->block_scale.empty()) {
      const DType own = matrix->format.block_scale_dtype;
      scales = scales.value_or(own) == own ? own : DType::kF32;
    }
  }
  request.scheme.weight.block_scale_dtype = scales.value_or(request.scheme.weight.block_scale_dtype);
  FMOE_ASSIGN_OR_RETURN(const std::optional<LatentWeights> latent, checkpoint->Latent(layer));
  if (latent) {
    for (const Tensor* part :
         {&latent->to_latent, &latent->to_latent_bias, &latent->from_latent, &latent->from_latent_bias}) {
      request.latent_bytes += part->empty() ? 0 : part->view().total_bytes();
    }
  }
  return Status::Ok();
}

Status SetParallel(ParallelSizes sizes, bool sequence_parallel, int64_t rank, ExplainRequest& request) {
  if (sequence_parallel) {
    sizes.sp = SequenceParallelSize(sizes);
  }
  FMOE_RETURN_IF_ERROR(MakeParallelConfig(sizes).status());
  FMOE_ASSIGN_OR_RETURN(const ParallelRanks place, RanksOf(sizes, rank));
  FMOE_ASSIGN_OR_RETURN(request.config.parallel, MakeParallelConfig(sizes, place));
  return Status::Ok();
}

// What chooses among the kernels of this build says nothing of upstream's backends. `--diff` may ask about
// both.
Status CheckPlatform(const ExplainFlags& flags) {
  FMOE_ASSIGN_OR_RETURN(const Platform platform, FindPlatform(flags.platform));
  const char* idle = !flags.plan.isa.empty()    ? "--isa"
                     : !flags.plan.mode.empty() ? "--mode"
                     : !flags.plan.tune.empty() ? "--tune"
                     : flags.threads_given      ? "--threads"
                                                : nullptr;
  if (platform.runs_this_build || idle == nullptr || !flags.diff.empty()) {
    return Status::Ok();
  }
  return Status::Usage(
      fmt::format("{} has no effect on the platform {}: it is of the CPU kernels of this build, which host "
                  "and cpu-... have",
                  idle, platform.name));
}

Result<ExplainRequest> RequestOf(const ExplainFlags& flags) {
  ExplainRequest request;
  FMOE_ASSIGN_OR_RETURN(const LayerOptions plan, Resolve(flags.plan));
  FMOE_RETURN_IF_ERROR(CheckPlatform(flags));
  FMOE_RETURN_IF_ERROR(TakeLayer(flags, request));
  FMOE_RETURN_IF_ERROR(SetParallel(flags.parallel, flags.sequence_parallel, flags.rank, request));
  request.platform = flags.platform;
  request.device = plan.device;
  request.tokens = flags.tokens;
  request.num_threads = flags.threads == 0 ? HostMachine().num_cores : flags.threads;
  request.determinism = plan.determinism;
  request.activation = plan.activation;
  request.isa = plan.isa;
  request.mode = plan.mode;
  request.cpu_costs = plan.cpu_costs;
  if (!flags.plan.activation_format.empty()) {
    request.activation_format = plan.activation_format;
  }
  request.selection.backend = plan.backend;
  request.selection.env = flags.env;
  return request;
}

// One side of --diff: the question with another platform, deployment, or both, as "sm90", "dp=8,ep" or
// "sm90,dp=8,ep,all2all=deepep_low_latency". A word of a deployment replaces that of the options.
Result<ExplainRequest> Side(const ExplainFlags& flags, const ExplainRequest& question,
                            const std::string& text) {
  ExplainRequest side = question;
  ParallelSizes sizes = flags.parallel;
  bool sequence_parallel = flags.sequence_parallel;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    int64_t* size = name == "tp"    ? &sizes.tp
                    : name == "dp"  ? &sizes.dp
                    : name == "pcp" ? &sizes.pcp
                                    : nullptr;
    if (size != nullptr) {
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), *size);
      if (error != std::errc() || end != value.data() + value.size() || *size < 1 || *size > 1 << 20) {
        return Status::Usage(fmt::format("--diff: '{}' needs a size, as in {}=8", word, name));
      }
    } else if (name == "all2all" && !value.empty()) {
      sizes.all2all = value;
    } else if (word == "ep" || word == "no-ep") {
      sizes.enable_expert_parallel = word == "ep";
    } else if (word == "eplb") {
      sizes.enable_eplb = true;
    } else if (word == "sp") {
      sequence_parallel = true;
    } else if (FindPlatform(word).ok()) {
      side.platform = word;
    } else {
      std::vector<std::string> names = {"tp=N", "dp=N", "pcp=N",        "ep",  "no-ep",
                                        "sp",   "eplb", "all2all=NAME", "host"};
      for (const Platform& platform : DescribedPlatforms()) {
        names.push_back(platform.name);
      }
      return UnknownName("--diff", word, names);
    }
  }
  FMOE_RETURN_IF_ERROR(SetParallel(sizes, sequence_parallel, 0, side));
  return side;
}

// `--diff A` holds the question's own answer against A, `--diff A B` holds A against B.
Status AddDiff(const ExplainFlags& flags, const Explanation& own, Json& document, std::string& text) {
  Explanation first = own;
  std::string first_name = own.request.platform;
  if (flags.diff.size() == 2) {
    first_name = flags.diff.front();
    FMOE_ASSIGN_OR_RETURN(const ExplainRequest request, Side(flags, own.request, first_name));
    FMOE_ASSIGN_OR_RETURN(first, Explain(request));
  }
  FMOE_ASSIGN_OR_RETURN(const ExplainRequest request, Side(flags, own.request, flags.diff.back()));
  FMOE_ASSIGN_OR_RETURN(const Explanation second, Explain(request));
  const std::vector<Difference> differences = Diff(first, second);
  Json list = Json::array();
  for (const Difference& difference : differences) {
    list.push_back({{"field", difference.field}, {"first", difference.first}, {"second", difference.second}});
  }
  document["diff"] = {{"first", first_name},
                      {"second", flags.diff.back()},
                      {"platform", request.platform},
                      {"differences", list}};
  text += fmt::format("\n{} against {}\n", first_name, flags.diff.back()) + ToString(differences);
  return Status::Ok();
}

// What the options of explain mean, word by word, from the tables that decide.
std::string Words() {
  std::string problems, platforms, switches;
  for (const Problem& problem : Problems()) {
    problems += (problems.empty() ? "" : ", ") + problem.name;
  }
  for (const Platform& platform : DescribedPlatforms()) {
    platforms += (platforms.empty() ? "host, " : ", ") + platform.name;
  }
  for (const SwitchInfo& info : SwitchTable()) {
    switches += fmt::format("  {} (default '{}'; {})\n      {}\n", info.name, info.default_value,
                            info.families.empty()  ? "no scheme"
                            : info.families == "*" ? "all schemes"
                                                   : info.families,
                            info.what);
  }
  return fmt::format(
      "Problems: {}\n\nPlatforms: {}\n\n--diff A [B]: a platform, a deployment, or both, as sm90 or "
      "sm100,dp=8,ep,all2all=deepep_low_latency\n\nSwitches for --env (set and true are two questions):\n{}\n"
      "Codes of the verdicts, order of the tables, switches: docs/oracle.md. Words of scales, here and "
      "upstream: "
      "docs/scales.md. All options and the JSON: docs/cli.md.\nExit codes: 0 ok, 2 usage, 3 bad input, 4 "
      "nothing can "
      "be chosen, 5 system.",
      problems, platforms, switches);
}

Json MachineJson(const Platform& platform) {
  Json json = {{"platform", platform.name},
               {"model", platform.model},
               {"kind", PlatformKindName(platform.kind)},
               {"capability", platform.capability},
               {"memory_gbps", platform.memory_gbps},
               {"f16_tflops", platform.f16_tflops},
               {"fp8_tflops", platform.fp8_tflops},
               {"fp4_tflops", platform.fp4_tflops},
               {"int8_tops", platform.int8_tops},
               {"memory_bytes", platform.memory_bytes}};
  if (platform.runs_this_build) {
    json["host"] = ToJson(platform.machine);
  }
  return json;
}

Json CostsJson(const Costs& costs) {
  return {{"active_experts", costs.active_experts},
          {"weight_bytes", costs.weight_bytes},
          {"read_bytes", costs.read_bytes},
          {"flops", costs.flops},
          {"workspace_bytes", costs.workspace_bytes},
          {"exchange_bytes", costs.exchange_bytes},
          {"memory_bytes", costs.memory_bytes},
          {"read_seconds", costs.read_seconds},
          {"compute_seconds", costs.compute_seconds},
          {"seconds", costs.seconds},
          {"rate", costs.rate}};
}

Json ParallelJson(const ParallelConfig& parallel) {
  return {{"tp_size", parallel.tp_size}, {"pcp_size", parallel.pcp_size},      {"dp_size", parallel.dp_size},
          {"ep_size", parallel.ep_size}, {"sp_size", parallel.sp_size},        {"use_ep", parallel.use_ep},
          {"all2all", parallel.all2all}, {"enable_eplb", parallel.enable_eplb}};
}

Json VerdictsJson(const std::vector<Verdict>& verdicts) {
  Json json = Json::array();
  for (const Verdict& verdict : verdicts) {
    json.push_back({{"code", ReasonCode(verdict.reason)},
                    {"reason", verdict.sentence},
                    {"actual", verdict.actual},
                    {"required", verdict.required}});
  }
  return json;
}

Json ExplanationJson(const Explanation& explanation) {
  const ExplainRequest& request = explanation.request;
  const Selection& selection = explanation.selection;
  return {{"problem",
           {{"name", request.problem},
            {"scheme", request.scheme.name},
            {"tokens", request.tokens},
            {"threads", request.num_threads},
            {"determinism", DeterminismName(request.determinism)},
            {"config", ToJson(request.config)},
            {"parallel", ParallelJson(request.config.parallel)},
            {"rank_config", ToJson(explanation.rank_config)},
            {"env", request.selection.env}}},
          {"machine", MachineJson(explanation.platform)},
          {"family", explanation.family},
          {"chosen", selection.chosen ? ToJson(*selection.chosen) : Json(nullptr)},
          {"candidates", CandidatesToJson(selection)},
          {"notes", selection.notes},
          {"prepare_finalize", CandidatesToJson(explanation.prepare_finalize)},
          {"costs", CostsJson(explanation.costs)},
          {"alternatives", explanation.alternatives}};
}

// Plans reserve memory for threads where kernels need some of their own, and never for fewer than there are
// cores.
Status NoteIdleThreads(ExplainRequest request, Explanation& explanation) {
  const int asked = std::exchange(request.num_threads, HostMachine().num_cores);
  FMOE_ASSIGN_OR_RETURN(const Explanation usual, Explain(request));
  const auto bytes = [](const Explanation& of) {
    return of.selection.chosen ? of.selection.chosen->workspace_bytes : 0;
  };
  if (bytes(usual) == bytes(explanation)) {
    explanation.selection.notes.push_back(fmt::format("--threads {} has no effect: the plan is that of {}",
                                                      asked, CountText(request.num_threads, "thread")));
  }
  return Status::Ok();
}

Status ExplainLayer(const ExplainFlags& flags, Output& output) {
  FMOE_ASSIGN_OR_RETURN(const ExplainRequest request, RequestOf(flags));
  FMOE_ASSIGN_OR_RETURN(Explanation explanation, Explain(request));
  if (flags.threads_given) {
    FMOE_RETURN_IF_ERROR(NoteIdleThreads(request, explanation));
  }
  Json document = ExplanationJson(explanation);
  std::string text = ToString(explanation);
  if (!flags.why_not.empty()) {
    FMOE_ASSIGN_OR_RETURN(const WhyNotAnswer answer, WhyNot(request, flags.why_not));
    document["why_not"] = {{"backend", answer.backend},     {"chosen_already", answer.chosen_already},
                           {"reachable", answer.reachable}, {"verdicts", VerdictsJson(answer.verdicts)},
                           {"changes", answer.changes},     {"remaining", VerdictsJson(answer.remaining)}};
    text += "\n" + ToString(answer);
  }
  if (!flags.diff.empty()) {
    FMOE_RETURN_IF_ERROR(AddDiff(flags, explanation, document, text));
  }
  output.Document(document);
  output.Text(text);
  return ToStatus(explanation.selection);
}

}  // namespace

Action DefineExplain(CLI::App& app) {
  auto flags = std::make_shared<ExplainFlags>();
  AddCheckpoint(app, flags->checkpoint, false);
  CLI::Option* layer = AddLayer(app, flags->layer);
  app.add_option("--problem", flags->problem,
                 "A described layer instead of a checkpoint: its name, or a JSON file")
      ->excludes(layer);
  app.add_option("--scheme", flags->scheme,
                 "Scheme of a described layer; without it that of the published model");
  app.add_option("--platform", flags->platform,
                 "host, or a described platform such as sm90, gfx942, cpu-amx");
  app.add_option("--tokens", flags->tokens, "Tokens of one forward")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  AddPlan(app, flags->plan);
  flags->plan.activation_format.clear();  // the all-to-all backend decides
  AddThreads(app, flags->threads);
  AddParallel(app, flags->parallel, flags->sequence_parallel);
  app.add_option("--rank", flags->rank, "The plan of this rank of the deployment; shares may be uneven");
  app.add_option("--env", flags->env, "An upstream switch as NAME=VALUE; may be given several times");
  app.add_option("--why-not", flags->why_not, "What would have to change for this backend to be chosen");
  app.add_option("--diff", flags->diff,
                 "Compare with the answer on this platform or deployment, or two with each other")
      ->expected(1, 2);
  app.footer(Words());
  return [flags, threads = app.get_option("--threads")](Output& output) {
    flags->threads_given = threads->count() > 0;
    // `--diff A DIRECTORY`: the option takes two words when it can; the second was meant as the checkpoint.
    if (flags->checkpoint.directory.empty() && flags->problem.empty() && flags->diff.size() == 2) {
      flags->checkpoint.directory = flags->diff.back();
      flags->diff.pop_back();
    }
    return ExplainLayer(*flags, output);
  };
}

}  // namespace fusedmoe::cli
