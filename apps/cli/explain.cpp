#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/oracle.hpp>
#include <fusedmoe/problems.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "explain_request.hpp"
#include "options.hpp"

namespace fusedmoe::cli {
namespace {

// `--diff A` holds the question's own answer against A, `--diff A B` holds A against B.
Status AddDiff(const ExplainFlags& flags, const AskedLayer& asked, const Explanation& own, Json& document,
               std::string& text) {
  Explanation first = own;
  std::string first_name = own.request.platform;
  if (flags.diff.size() == 2) {
    first_name = flags.diff.front();
    FMOE_ASSIGN_OR_RETURN(const ExplainRequest request, SideOf(flags, asked, own.request, first_name));
    FMOE_ASSIGN_OR_RETURN(first, Explain(request));
  }
  FMOE_ASSIGN_OR_RETURN(const ExplainRequest request, SideOf(flags, asked, own.request, flags.diff.back()));
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
  std::string switches;
  for (const SwitchInfo& info : SwitchTable()) {
    switches += fmt::format("  {} (default '{}'; {})\n      {}\n", info.name, info.default_value,
                            info.families.empty()  ? "no scheme"
                            : info.families == "*" ? "all schemes"
                                                   : info.families,
                            info.what);
  }
  return fmt::format(
      "Problems: {}\n\nPlatforms: host, {}\n\n--diff A [B]: a platform, a deployment, or both, as sm90 or "
      "sm100,dp=8,ep,all2all=deepep_low_latency\n\nSwitches for --env (set and true are two questions):\n{}\n"
      "Codes of the verdicts, order of the tables, switches: docs/oracle.md. Words of scales, here and "
      "upstream: "
      "docs/scales.md. All options and the JSON: docs/cli.md.\nExit codes: 0 ok, 2 usage, 3 bad input, 4 "
      "nothing can "
      "be chosen, 5 system.",
      Join(Problems(), &Problem::name), Join(DescribedPlatforms(), &Platform::name), switches);
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
  AskedLayer asked;
  FMOE_ASSIGN_OR_RETURN(const ExplainRequest request, RequestOf(flags, asked));
  FMOE_ASSIGN_OR_RETURN(Explanation explanation, Explain(request));
  if (flags.threads_given) {
    FMOE_RETURN_IF_ERROR(NoteIdleThreads(request, explanation));
  }
  if (const std::optional<Plan>& chosen = explanation.selection.chosen; chosen) {
    if (std::string idle = IdleTune(flags.plan, chosen->backend, chosen->costs); !idle.empty()) {
      explanation.selection.notes.push_back(std::move(idle));
    }
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
    FMOE_RETURN_IF_ERROR(AddDiff(flags, asked, explanation, document, text));
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
  AddDeployment(app, flags->parallel, flags->sequence_parallel);
  AddBalancing(app, flags->parallel);
  app.add_option("--rank", flags->rank, "The plan of this rank of the deployment; shares may be uneven");
  app.add_option("--env", flags->env, "An upstream switch as NAME=VALUE; may be given several times");
  app.add_flag("--lora", flags->lora, "LoRA adapters will be added to the experts");
  app.add_option("--logits-dtype", flags->logits_dtype, "Type of the router logits: F32, BF16 or F16");
  app.add_option(
      "--allow-vllm-cutlass", flags->allow_vllm_cutlass,
      "on or off: whether vLLM's FP8 oracle may take its CUTLASS pair; without it as vLLM decides");
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
