#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/oracle.hpp>
#include <fusedmoe/parallel.hpp>
#include <fusedmoe/problems.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "options.hpp"

namespace fusedmoe::cli {
namespace {

struct ExplainFlags {
  CheckpointFlags checkpoint;
  PlanFlags plan;
  ParallelSizes parallel;
  bool sequence_parallel = false;
  std::optional<int64_t> layer;
  std::string problem;
  std::string scheme;
  std::string platform = "host";
  std::string diff;
  std::string why_not;
  std::vector<std::string> env;
  int64_t tokens = 1;
  int threads = 0;
};

Result<Problem> ReadProblem(const std::string& name) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(name, ignored)) {
    return ParseProblem(name);
  }
  std::ifstream file(name, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) {
    return Status::System("cannot be read").WithFile(name);
  }
  Result<Problem> problem = ParseProblem(text);
  return problem.ok() ? std::move(problem) : Result<Problem>(std::move(problem).status().WithFile(name));
}

// The layer in question, from a checkpoint or described.
Status TakeLayer(const ExplainFlags& flags, ExplainRequest& request) {
  if (flags.checkpoint.directory.empty() == flags.problem.empty()) {
    return Status::Usage("either a checkpoint or --problem is required")
        .WithHint("see fusedmoe explain --help");
  }
  if (flags.checkpoint.directory.empty()) {
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
  return Status::Ok();
}

Result<ExplainRequest> RequestOf(const ExplainFlags& flags) {
  ExplainRequest request;
  FMOE_ASSIGN_OR_RETURN(const LayerOptions plan, Resolve(flags.plan));
  FMOE_RETURN_IF_ERROR(TakeLayer(flags, request));
  ParallelSizes sizes = flags.parallel;
  if (flags.sequence_parallel) {
    sizes.sp = SequenceParallelSize(sizes);
  }
  FMOE_ASSIGN_OR_RETURN(request.config.parallel, MakeParallelConfig(sizes));
  request.platform = flags.platform;
  request.tokens = flags.tokens;
  request.num_threads = flags.threads == 0 ? HostMachine().num_cores : flags.threads;
  request.determinism = plan.determinism;
  request.activation = plan.activation;
  request.isa = plan.isa;
  request.mode = plan.mode;
  if (!flags.plan.activation_format.empty()) {
    request.activation_format = plan.activation_format;
  }
  request.selection.backend = plan.backend;
  request.selection.env = flags.env;
  return request;
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

Status ExplainLayer(const ExplainFlags& flags, Output& output) {
  FMOE_ASSIGN_OR_RETURN(const ExplainRequest request, RequestOf(flags));
  FMOE_ASSIGN_OR_RETURN(const Explanation explanation, Explain(request));
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
    ExplainRequest other = request;
    other.platform = flags.diff;
    FMOE_ASSIGN_OR_RETURN(const Explanation second, Explain(other));
    const std::vector<Difference> differences = Diff(explanation, second);
    Json list = Json::array();
    for (const Difference& difference : differences) {
      list.push_back(
          {{"field", difference.field}, {"first", difference.first}, {"second", difference.second}});
    }
    document["diff"] = {{"platform", flags.diff}, {"differences", list}};
    text += fmt::format("\n{} against {}\n", request.platform, flags.diff) + ToString(differences);
  }
  output.Document(document);
  output.Text(text);
  return ToStatus(explanation.selection);
}

}  // namespace

Action DefineExplain(CLI::App& app) {
  auto flags = std::make_shared<ExplainFlags>();
  AddCheckpoint(app, flags->checkpoint, false);
  app.add_option("--layer", flags->layer, "Decoder layer; may be left out when only one has experts");
  app.add_option("--problem", flags->problem,
                 "A described layer instead of a checkpoint: its name, or a JSON file");
  app.add_option("--scheme", flags->scheme,
                 "Scheme of a described layer; without it that of the published model");
  app.add_option("--platform", flags->platform,
                 "host, or a described platform such as sm90, gfx942, cpu-amx");
  app.add_option("--tokens", flags->tokens, "Tokens of one forward")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  AddPlan(app, flags->plan);
  flags->plan.activation_format.clear();  // the all-to-all backend decides
  AddThreads(app, flags->threads);
  const CLI::Range size(int64_t{1}, int64_t{1} << 20);
  app.add_option("--tp", flags->parallel.tp, "Tensor-parallel size")->check(size);
  app.add_option("--dp", flags->parallel.dp, "Data-parallel size")->check(size);
  app.add_option("--pcp", flags->parallel.pcp, "Prefill-context-parallel size")->check(size);
  app.add_flag("--ep", flags->parallel.enable_expert_parallel, "Split by experts instead of by columns");
  app.add_flag("--sp", flags->sequence_parallel,
               "Sequence-parallel experts, where the deployment allows them");
  app.add_option("--all2all", flags->parallel.all2all, "All-to-all backend: " + AllToAllNames());
  app.add_flag("--eplb", flags->parallel.enable_eplb, "Expert load balancing");
  app.add_option("--env", flags->env, "An upstream switch as NAME=VALUE; may be given several times");
  app.add_option("--why-not", flags->why_not, "What would have to change for this backend to be chosen");
  app.add_option("--diff", flags->diff, "Compare with the answer on this platform");
  return [flags](Output& output) { return ExplainLayer(*flags, output); };
}

}  // namespace fusedmoe::cli
