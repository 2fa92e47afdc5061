#include "oracle/explain.hpp"

#include <algorithm>

#include <fmt/format.h>

#include <fusedmoe/problems.hpp>

#include "core/checked_math.hpp"
#include "moe/latent_projections.hpp"
#include "oracle/alternatives.hpp"
#include "oracle/costs.hpp"
#include "oracle/described.hpp"
#include "oracle/select.hpp"

namespace fusedmoe {
namespace {

MoeProblem HostProblem(const Question& question, const ExplainRequest& request) {
  MoeProblem problem;
  problem.config = question.config;
  problem.config.activation_format = question.format;
  const ParallelConfig& parallel = question.config.parallel;
  if (const int64_t ranks = NumRanks(parallel); ranks > 1) {
    // The experts see the tokens of all ranks; those that were given the same tokens bring in a share each.
    const int64_t groups = std::max<int64_t>(1, parallel.dp_size * parallel.pcp_size);
    const int64_t sharing = parallel.sp_size > 1 ? 1 : std::max<int64_t>(1, ranks / groups);
    problem.config.max_tokens = ranks * CeilDiv(problem.config.max_tokens, sharing);
    problem.config.num_experts += parallel.num_redundant_experts;
  }
  problem.scheme = question.scheme;
  problem.determinism = question.determinism;
  problem.activation = question.activation_mode;
  problem.weights = question.weights;
  problem.isa = request.isa;
  problem.device = request.device;
  problem.mode = request.mode;
  problem.cpu_costs = request.cpu_costs;
  problem.plan_tokens = request.tokens;
  problem.num_threads = request.num_threads;
  return problem;
}

Status CheckRange(std::string_view what, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most) {
    return Status::Usage(fmt::format("{} is {}; {} to {} would do", what, value, least, most));
  }
  return Status::Ok();
}

/// Keeps every product of sizes below 2^63, so that costs need no checked arithmetic.
Status CheckSizes(const MoeConfig& config, int64_t tokens) {
  constexpr int64_t kMaxTokens = int64_t{1} << 24;
  FMOE_RETURN_IF_ERROR(CheckRange("hidden", config.hidden, 1, 1 << 16));
  FMOE_RETURN_IF_ERROR(CheckRange("latent", config.latent, 0, 1 << 16));
  FMOE_RETURN_IF_ERROR(CheckRange("intermediate", config.intermediate, 1, 1 << 18));
  FMOE_RETURN_IF_ERROR(CheckRange("num_experts", config.num_experts, 1, 1 << 13));
  FMOE_RETURN_IF_ERROR(CheckRange("shared intermediate", config.shared.intermediate, 0, 1 << 18));
  FMOE_RETURN_IF_ERROR(CheckRange("top_k", config.routing.top_k, 1, config.num_experts));
  const ParallelConfig& parallel = config.parallel;
  FMOE_RETURN_IF_ERROR(CheckRange("dp size", parallel.dp_size, 1, 1 << 12));
  FMOE_RETURN_IF_ERROR(CheckRange("tp size", parallel.tp_size, 1, 1 << 16));
  FMOE_RETURN_IF_ERROR(CheckRange("ep size", parallel.ep_size, 1, 1 << 16));
  FMOE_RETURN_IF_ERROR(CheckRange("redundant experts", parallel.num_redundant_experts, 0, 1 << 13));
  return CheckRange("tokens", tokens, 1, std::min(config.max_tokens, kMaxTokens / parallel.dp_size));
}

/// The shared experts as a layer of one expert that every token visits, planned on their own.
std::shared_ptr<const Plan> PlanShared(const Question& question, const ExplainRequest& request) {
  Question shared = question;
  shared.config = MoeConfig{};
  shared.config.num_experts = 1;
  shared.config.num_local_experts = 1;
  shared.config.hidden = request.config.hidden;  // whatever the routed experts read
  shared.config.intermediate = question.config.shared.intermediate;
  shared.config.activation = question.config.activation;
  shared.config.dtype = question.config.dtype;
  shared.config.max_tokens = question.config.max_tokens;
  shared.format = ActivationFormatKind::kStandard;
  Result<Selection> selection = SelectFor(shared, request);
  return selection.ok() && selection->chosen ? std::make_shared<const Plan>(*selection->chosen) : nullptr;
}

}  // namespace

Result<Question> MakeQuestion(const ExplainRequest& request) {
  Question question;
  FMOE_RETURN_IF_ERROR(CheckSizes(request.config, request.tokens));
  const ParallelConfig& parallel = request.config.parallel;
  if (!ParseAllToAll(parallel.all2all)) {
    return UnknownName("all2all backend", parallel.all2all, AllToAllNames());
  }
  FMOE_ASSIGN_OR_RETURN(question.platform, FindPlatform(request.platform));
  // Upstream divides evenly or not at all; here any size can be split.
  FMOE_ASSIGN_OR_RETURN(question.config, question.platform.runs_this_build
                                             ? PerRank(request.config, parallel, request.scheme)
                                             : PerRank(request.config, parallel));
  question.config = RoutedConfig(question.config);
  if (question.platform.name == "host") {
    question.platform.memory_gbps = request.host_memory_gbps;
  }
  FMOE_ASSIGN_OR_RETURN(question.switches, Switches::Parse(request.selection.env));
  question.scheme = request.scheme;
  question.weight = WeightKeyOf(request.scheme.weight);
  question.activation = ActivationKeyOf(request.scheme.activation);
  question.family =
      SchemeFamilyOf(request.scheme, request.config.activation.kind == ActivationKind::kSwigluOai);
  question.platform_bit = BitOf(question.platform);
  // Here pplx runs by its own protocol; upstream it has become a gather.
  const bool batches = question.platform.runs_this_build ? WireOf(parallel) == WireProtocol::kExpertRows
                                                         : UseBatchedActivationFormat(parallel);
  question.format = request.activation_format.value_or(batches ? ActivationFormatKind::kBatchedExperts
                                                               : request.config.activation_format);
  question.determinism = request.determinism;
  question.activation_mode = request.activation;
  question.weights = request.weights;
  question.lora = request.selection.lora;
  question.on_card = request.device != "cpu";
  question.router_logits_dtype = request.selection.router_logits_dtype;
  question.allow_vllm_cutlass = request.selection.allow_vllm_cutlass.value_or(
      question.weight == WeightKey::kFp8Channel && question.activation == ActivationKey::kFp8Token);
  return question;
}

Result<Selection> SelectFor(const Question& question, const ExplainRequest& request) {
  if (question.platform.runs_this_build) {
    return SelectBackend(HostProblem(question, request), question.platform.machine, request.selection);
  }
  return SelectDescribed(question, request.selection, request.tokens);
}

Status TakeWeights(const ExpertSource& experts, ExplainRequest& request) {
  if (experts.num_local_experts == 0) {
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(const CanonicalExpert expert, experts.load(0));
  MoeProblem problem;
  problem.config.has_bias = request.config.has_bias;
  problem.scheme = request.scheme;
  TakeFeatures(expert, problem);
  request.config.has_bias = problem.config.has_bias;
  request.scheme.weight = WeightsOf(problem);
  request.weights = problem.weights;
  return Status::Ok();
}

Result<Explanation> Explain(const ExplainRequest& request) {
  FMOE_ASSIGN_OR_RETURN(const Question question, MakeQuestion(request));
  Explanation explanation;
  explanation.request = request;
  explanation.rank_config = question.config;
  explanation.rank_config.hidden = request.config.hidden;
  explanation.rank_config.latent = request.config.latent;
  explanation.platform = question.platform;
  explanation.family = question.platform.runs_this_build ? "this build" : std::string(Name(question.family));
  FMOE_ASSIGN_OR_RETURN(explanation.selection, SelectFor(question, request));
  explanation.prepare_finalize = SelectPrepareFinalize(question);
  std::optional<Plan>& chosen = explanation.selection.chosen;
  if (chosen) {
    if (request.config.latent > 0) {
      const int64_t bytes = request.latent_bytes > 0 ? request.latent_bytes
                                                     : ProjectionBytes(request.config, request.config.dtype);
      DescribeProjections(request.config.hidden, request.config.latent, bytes, *chosen);
    }
    if (question.platform.runs_this_build && question.config.shared.intermediate > 0) {
      chosen->shared = PlanShared(question, request);
    }
    chosen->prepare_finalize =
        explanation.prepare_finalize.chosen ? explanation.prepare_finalize.chosen->backend : std::string();
    if (!explanation.prepare_finalize.chosen) {
      explanation.selection.notes.push_back(
          "no prepare and finalize step can serve this deployment: see its candidates");
    }
  }
  explanation.costs =
      chosen ? EstimateCosts(question, request.tokens, chosen->activation, chosen->weight_bytes,
                             chosen->workspace_bytes)
             : EstimateCosts(question, request.tokens, request.activation, CanonicalBytes(question), 0);
  if (!chosen) {
    explanation.alternatives = Alternatives(request, explanation.selection);
  }
  return explanation;
}

}  // namespace fusedmoe
