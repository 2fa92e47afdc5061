#include "moe/objections.hpp"

#include <fmt/format.h>

#include "quant/activation_quantizer.hpp"

namespace fusedmoe {

void Refuse(std::vector<Verdict>& verdicts, Reason reason, std::string sentence, std::string_view actual,
            std::string_view required) {
  verdicts.push_back({reason, std::move(sentence), std::string(actual), std::string(required)});
}

void RefuseInputWeights(std::vector<Verdict>& verdicts, const MoeProblem& problem) {
  if (problem.config.apply_router_weight_on_input && problem.config.top_k() != 1) {
    Refuse(verdicts, Reason::kRouterWeightOnInput, "router weights on the input need one expert per token",
           std::to_string(problem.config.top_k()), "1");
  }
}

void RefuseForeignMode(std::vector<Verdict>& verdicts, const MoeProblem& problem) {
  const std::string& mode = problem.mode;
  const bool batched = problem.config.activation_format == ActivationFormatKind::kBatchedExperts;
  const bool exists = batched ? mode == "masked" : mode == "latency" || mode == "throughput";
  if (!mode.empty() && !exists) {
    Refuse(verdicts, Reason::kActivationFormat,
           fmt::format("mode '{}' does not exist for this activation format", mode), mode,
           batched ? "masked" : "latency or throughput");
  }
}

void RefuseBatchScale(std::vector<Verdict>& verdicts, const MoeProblem& problem,
                      const ActivationFormat& activation) {
  if (problem.determinism >= Determinism::kBatchInvariant && NeedsDynamicTensorScale(activation)) {
    Refuse(verdicts, Reason::kDeterminism,
           "the scheme takes one activation scale over the whole batch, so tokens depend on their neighbours",
           DeterminismName(problem.determinism), "thread_invariant");
  }
}

}  // namespace fusedmoe
