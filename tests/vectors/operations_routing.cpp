#include <fusedmoe/routing.hpp>

#include "routing/route.hpp"
#include "routing/topk_ids.hpp"
#include "support/golden.hpp"

namespace fusedmoe::golden {
namespace {

template <typename T>
T ParameterOr(const GoldenCase& golden_case, const char* name, T fallback) {
  const auto found = golden_case.parameters().find(name);
  return found != golden_case.parameters().end() && !found->is_null() ? found->template get<T>() : fallback;
}

/// The method that a case names, or, where it names none, the one that has the parts it mentions.
std::optional<RoutingMethod> MethodOf(const GoldenCase& golden_case) {
  const std::string method = ParameterOr<std::string>(golden_case, "method", "");
  if (!method.empty()) {
    return ParseRoutingMethod(method);
  }
  if (golden_case.parameters().contains("groups")) {
    return RoutingMethod::kGroupedTopK;
  }
  if (golden_case.name().starts_with("softmax_bias")) {
    return RoutingMethod::kSoftmaxBias;
  }
  return RoutingMethod::kUnspecified;
}

std::optional<ScoreFunction> ScoreOf(const GoldenCase& golden_case) {
  const std::string scoring = ParameterOr<std::string>(golden_case, "scoring", "");
  if (!scoring.empty()) {
    return ParseScoreFunction(scoring);
  }
  return golden_case.name().starts_with("sigmoid")         ? ScoreFunction::kSigmoid
         : golden_case.name().starts_with("sqrt_softplus") ? ScoreFunction::kSqrtSoftplus
                                                           : ScoreFunction::kSoftmax;
}

Outcome RunRoute(const GoldenCase& golden_case) {
  const auto method = MethodOf(golden_case);
  const auto score = ScoreOf(golden_case);
  if (!method || !score) {
    return "unknown method or scoring function in " + golden_case.parameters().dump();
  }
  RoutingConfig config;
  config.method = *method;
  config.score = *score;
  config.top_k = golden_case.parameters().at("top_k").get<int64_t>();
  config.renormalize = ParameterOr(golden_case, "renormalize", true);
  config.num_groups = ParameterOr<int64_t>(golden_case, "groups", 1);
  config.topk_groups = ParameterOr<int64_t>(golden_case, "topk_group", config.num_groups);
  config.scaling_factor = ParameterOr(golden_case, "routed_scaling_factor", 1.0F);
  config.select_on_logits =
      ParameterOr<std::string>(golden_case, "spelling", "").find("logsumexp") != std::string::npos;
  RoutingInputs inputs;
  inputs.router_logits = golden_case.Input("logits");
  if (golden_case.Has("bias")) {
    inputs.correction_bias = golden_case.Input("bias");
  }
  if (golden_case.Has("hash_table")) {
    inputs.token_ids = golden_case.Input("token_ids");
    inputs.token_id_to_experts = golden_case.Input("hash_table");
  }
  const auto slots = static_cast<size_t>(inputs.router_logits.dim(0) * config.top_k);
  std::vector<int32_t> ids(slots), order(slots);
  std::vector<float> weights(slots);
  const Status status = RouteWithOrder(config, inputs, ids.data(), weights.data(), order.data(), {});
  if (!status.ok()) {
    return status.ToString();
  }
  return FirstOf({golden_case.CompareIntegers("topk_ids", {ids.begin(), ids.end()}),
                  golden_case.CompareFloats("topk_weights", weights),
                  golden_case.Has("selection_order")
                      ? golden_case.CompareIntegers("selection_order", {order.begin(), order.end()})
                      : Outcome()});
}

std::vector<int32_t> Ids(const GoldenCase& golden_case, const char* name) {
  const std::vector<int64_t> wide = golden_case.Integers(name);
  return {wide.begin(), wide.end()};
}

Outcome RunPacked(const GoldenCase& golden_case) {
  const std::vector<int32_t> ids = Ids(golden_case, "topk_ids");
  std::vector<int32_t> packed(ids.size());
  PackTopK(ids, golden_case.Floats("topk_weights"), packed);
  return golden_case.CompareIntegers("packed", {packed.begin(), packed.end()});
}

Outcome RunReplicas(const GoldenCase& golden_case) {
  const std::vector<int32_t> ids = Ids(golden_case, "topk_ids");
  std::vector<int32_t> physical(ids.size());
  const Status status =
      ChooseReplicas(ids, golden_case.Input("topk_ids").dim(1), Ids(golden_case, "replica_count"),
                     Ids(golden_case, "logical_to_physical"), physical);
  return status.ok() ? golden_case.CompareIntegers("physical_ids", {physical.begin(), physical.end()})
                     : Outcome(status.ToString());
}

Outcome RunMethodTypes(const nlohmann::json& table) {
  for (const auto& row : table.at("rows")) {
    const RouterDescription router{.score = ParseScoreFunction(row.at(0).get<std::string>()),
                                   .top_k = row.at(1).get<int64_t>(),
                                   .renormalize = row.at(2).get<bool>(),
                                   .num_expert_groups = row.at(3).is_null() ? 0 : row.at(3).get<int64_t>(),
                                   .has_correction_bias = row.at(4).get<bool>()};
    const RoutingMethod method = DeriveRoutingMethod(router, RoutingEra::kVllm202605);
    if (RoutingMethodName(method) != row.at(5).get<std::string>()) {
      return row.dump() + ": got " + std::string(RoutingMethodName(method));
    }
  }
  return std::nullopt;
}

/// The table does not name its era: it must be one of ours as a whole.
Outcome RunMethodValues(const nlohmann::json& table) {
  Outcome last;
  for (const RoutingEra era :
       {RoutingEra::kVllm202605, RoutingEra::kVllm202604, RoutingEra::kVllmNewest, RoutingEra::kFlashInfer}) {
    last.reset();
    for (const auto& row : table.at("rows")) {
      const auto method = ParseRoutingMethod(row.at(0).get<std::string>());
      const int value = row.at(1);
      if (!method || RoutingMethodValue(*method, era) != value ||
          RoutingMethodOfValue(value, era) != method) {
        last = row.dump() + " differs";
      }
    }
    if (!last) {
      return last;
    }
  }
  return last;
}

}  // namespace

Outcome RunRouting(const GoldenCase& golden_case) {
  const std::string& name = golden_case.name();
  if (golden_case.is_table()) {
    return name == "routing_method_type"     ? RunMethodTypes(golden_case.manifest())
           : name == "routing_method_values" ? RunMethodValues(golden_case.manifest())
                                             : Outcome("unknown table '" + name + "'");
  }
  return name.starts_with("packed") ? RunPacked(golden_case)
         : name.starts_with("eplb") ? RunReplicas(golden_case)
                                    : RunRoute(golden_case);
}

}  // namespace fusedmoe::golden
