#include "experts/reference/reference_backend.hpp"

#include <utility>

#include "experts/reference/reference_experts.hpp"
#include "moe/cost.hpp"
#include "moe/objections.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

std::vector<Verdict> Supports(const MoeProblem& problem, const Machine& /*machine*/) {
  std::vector<Verdict> verdicts;
  RefuseInputWeights(verdicts, problem);
  RefuseBatchScale(verdicts, problem, ActivationOf(problem));
  if (problem.activation == ActivationMode::kA8 && problem.scheme.activation.quantized()) {
    Refuse(verdicts, Reason::kScheme, "a8 replaces 16-bit activations; this scheme quantizes its own",
           problem.scheme.name, "a weight-only scheme");
  }
  if (!problem.isa.empty()) {
    Refuse(verdicts, Reason::kIsa, "the reference has one portable code path, no instruction-set levels",
           problem.isa, "none");
  }
  if (!problem.mode.empty() && problem.mode != "reference") {
    Refuse(verdicts, Reason::kIsa, "the reference has one mode", problem.mode, "reference");
  }
  return verdicts;
}

Plan MakePlan(const MoeProblem& problem, const Machine& /*machine*/) {
  Plan plan;
  plan.backend = std::string(kReferenceBackend.name);
  plan.mode = "reference";
  plan.activation_format = problem.config.activation_format;
  plan.activation = problem.activation;
  plan.recipe = {"cpu", "canonical"};
  plan.intermediate_dtype = "F32";
  DescribeCost(problem.config, ExpertBytes(problem), problem.plan_tokens, plan);
  return plan;
}

void BookWorkspace(const MoeProblem& problem, const Machine& /*machine*/, WorkspaceBook& book) {
  WorkspaceSlot block, mid, lists;
  ReferenceExperts::BookWorkspace(problem, book, &block, &mid, &lists);
}

// The rules of backends that keep one stored input scale: for all experts, or for gate and up of each.
void ShareInputScales(ActivationMode mode, std::vector<CanonicalExpert>& experts) {
  const auto larger = [](std::optional<float> a, std::optional<float> b) {
    return !a || (b && *b > *a) ? b : a;
  };
  std::optional<float> input, mid;
  for (CanonicalExpert& expert : experts) {
    const std::optional<float> own = larger(expert.gate.input_tensor_scale, expert.up.input_tensor_scale);
    input = larger(input, own);
    mid = larger(mid, expert.down.input_tensor_scale);
    if (mode == ActivationMode::kMaxGateUp) {
      expert.gate.input_tensor_scale = expert.up.input_tensor_scale = own;
    }
  }
  if (mode == ActivationMode::kMaxExpanded) {
    for (CanonicalExpert& expert : experts) {
      expert.gate.input_tensor_scale = expert.up.input_tensor_scale = input;
      expert.down.input_tensor_scale = mid;
    }
  }
}

Result<PreparedWeights> Prepare(const MoeProblem& problem, const Machine& /*machine*/,
                                const ExpertSource& source, const Executor& executor) {
  PreparedWeights prepared;
  prepared.layout_key = "canonical";
  prepared.recipe = {"cpu", "canonical"};
  prepared.canonical.resize(static_cast<size_t>(source.num_local_experts));
  std::vector<Status> statuses(static_cast<size_t>(source.num_local_experts));
  ParallelFor(executor, source.num_local_experts, [&](int64_t expert) {
    const auto index = static_cast<size_t>(expert);
    Result<CanonicalExpert> loaded = source.load(expert);
    if (!loaded.ok()) {
      statuses[index] = loaded.status();
      return;
    }
    statuses[index] = ValidateCanonical(*loaded);
    prepared.canonical[index] = *std::move(loaded);
  });
  for (size_t expert = 0; expert < statuses.size(); ++expert) {
    if (!statuses[expert].ok()) {
      return std::move(statuses[expert]).WithContext("expert " + std::to_string(expert));
    }
  }
  ShareInputScales(problem.activation, prepared.canonical);
  return prepared;
}

Result<std::unique_ptr<Experts>> Create(const MoeProblem& problem, const Machine& /*machine*/,
                                        std::shared_ptr<const PreparedWeights> weights, WorkspaceBook& book) {
  if (weights->layout_key != "canonical") {
    return Status::Unsupported("REFERENCE reads canonical weights, these are in layout '" +
                               weights->layout_key + "'");
  }
  return std::unique_ptr<Experts>(new ReferenceExperts(problem, std::move(weights), book));
}

}  // namespace

const Backend kReferenceBackend = {"REFERENCE", &Supports, &MakePlan, &BookWorkspace,
                                   &Prepare,    &Create,   "cpu",     "canonical"};

}  // namespace fusedmoe
