#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "capi/handles.hpp"

namespace fusedmoe::capi {
namespace {

bool SameWord(std::string_view one, std::string_view other) {
  const auto lower = [](char letter) {
    return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
  };
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [&](char a, char b) { return lower(a) == lower(b); });
}

/// Sets `out` to what `name` means, whatever the case of its letters; a null name leaves it. `known`: the
/// names as "a, b, c"; `parse` may know more.
template <typename T>
Status TakeName(const char* name, std::string_view field, const std::string& known,
                std::optional<T> (*parse)(std::string_view), T& out) {
  if (name == nullptr) {
    return Status::Ok();
  }
  std::optional<T> parsed = parse(name);
  std::string_view rest = known;
  while (!parsed && !rest.empty()) {
    const std::string_view word = rest.substr(0, rest.find(", "));
    parsed = SameWord(word, name) ? parse(word) : std::nullopt;
    rest.remove_prefix(std::min(rest.size(), word.size() + 2));
  }
  if (!parsed) {
    return UnknownName(field, name, known);
  }
  out = *parsed;
  return Status::Ok();
}

/// Parameters that the caller left as init makes them stay those of the activation.
Result<ActivationSpec> ToActivation(const fmoe_layer_config& from) {
  ActivationKind kind = ActivationSpec().kind;
  FMOE_RETURN_IF_ERROR(TakeName(from.activation, "activation", ActivationNames(), &ParseActivation, kind));
  ActivationSpec spec = CanonicalActivation(kind);
  for (const auto& [given, parameter] :
       {std::pair{from.alpha, &spec.alpha}, {from.beta, &spec.beta}, {from.limit, &spec.limit}}) {
    if (!std::isnan(given)) {
      *parameter = given;
    }
  }
  return spec;
}

Result<RoutingConfig> ToRouting(const fmoe_layer_config& from) {
  RoutingConfig routing;
  FMOE_RETURN_IF_ERROR(
      TakeName(from.routing, "routing", RoutingMethodNames(), &ParseRoutingMethod, routing.method));
  FMOE_RETURN_IF_ERROR(
      TakeName(from.score, "score", ScoreFunctionNames(), &ParseScoreFunction, routing.score));
  routing.top_k = from.top_k;
  routing.renormalize = from.renormalize != 0;
  routing.num_groups = from.num_groups;
  routing.topk_groups = from.topk_groups;
  routing.scaling_factor = from.scaling_factor;
  routing.norm_epsilon = from.norm_epsilon;
  routing.logit_softcap = from.logit_softcap;
  routing.select_on_logits = from.select_on_logits != 0;
  routing.jitter = from.jitter;
  routing.num_zero_experts = from.num_zero_experts;
  if (routing.method == RoutingMethod::kSimulated) {
    routing.simulation = from.simulation == nullptr ? "uniform_random" : from.simulation;
    if (!IsSimulation(routing.simulation)) {
      return UnknownName("simulation", from.simulation, SimulationNames());
    }
    routing.simulation_seed = from.simulation_seed;
  }
  if (from.custom_routing != nullptr) {
    routing.custom = [choose = from.custom_routing, self = from.routing_self](
                         TensorView hidden, TensorView logits, int64_t top_k, bool renormalize, int32_t* ids,
                         float* weights) {
      const fmoe_tensor hidden_rows = FromView(hidden), logit_rows = FromView(logits);
      const int32_t code = choose(self, &hidden_rows, &logit_rows, top_k, renormalize ? 1 : 0, ids, weights);
      if (code != 0) {
        RefuseRouting(code, logits.dim(0) * top_k, ids);
      }
    };
  }
  return routing;
}

}  // namespace

Result<MoeConfig> ToConfig(const fmoe_layer_config& from) {
  MoeConfig config;
  config.num_experts = config.num_local_experts = from.num_experts;
  config.hidden = from.hidden;
  config.intermediate = from.intermediate;
  config.has_bias = from.has_bias != 0;
  config.has_router_bias = from.router_bias.data != nullptr;
  config.has_correction_bias = from.correction_bias.data != nullptr;
  config.apply_router_weight_on_input = from.apply_router_weight_on_input != 0;
  FMOE_ASSIGN_OR_RETURN(config.dtype, ToDType(from.dtype, "config"));
  FMOE_ASSIGN_OR_RETURN(config.activation, ToActivation(from));
  FMOE_ASSIGN_OR_RETURN(config.routing, ToRouting(from));
  FMOE_RETURN_IF_ERROR(Validate(config));
  return config;
}

Result<RouterWeights> ToRouter(const fmoe_layer_config& from) {
  RouterWeights router;
  FMOE_ASSIGN_OR_RETURN(router.weight, ToTensor(from.router_weight, "router_weight", nullptr));
  FMOE_ASSIGN_OR_RETURN(router.bias, ToTensor(from.router_bias, "router_bias", nullptr));
  FMOE_ASSIGN_OR_RETURN(router.correction_bias, ToTensor(from.correction_bias, "correction_bias", nullptr));
  FMOE_ASSIGN_OR_RETURN(router.token_id_to_experts,
                        ToTensor(from.token_id_to_experts, "token_id_to_experts", nullptr));
  return router;
}

Status CheckOneRank(const LayerOptions& options) {
  if (options.communicator != nullptr && options.communicator->size() > 1) {
    return Status::Usage(fmt::format("a layer of held experts runs on one rank, the communicator has {}",
                                     options.communicator->size()))
        .WithHint("fmoe_layer_load spreads the layer of a checkpoint");
  }
  return Status::Ok();
}

}  // namespace fusedmoe::capi

void fmoe_layer_config_init_sized(fmoe_layer_config* config, size_t struct_size) {
  const fusedmoe::MoeConfig defaults;
  fmoe_layer_config made{};
  made.dtype = static_cast<fmoe_dtype>(defaults.dtype);
  made.top_k = defaults.routing.top_k;
  made.alpha = made.beta = made.limit = std::numeric_limits<float>::quiet_NaN();  // the activation's own
  made.renormalize = defaults.routing.renormalize ? 1 : 0;
  made.num_groups = defaults.routing.num_groups;
  made.topk_groups = defaults.routing.topk_groups;
  made.scaling_factor = defaults.routing.scaling_factor;
  made.norm_epsilon = defaults.routing.norm_epsilon;
  made.logit_softcap = defaults.routing.logit_softcap;
  made.jitter = defaults.routing.jitter;
  made.select_on_logits = defaults.routing.select_on_logits ? 1 : 0;
  made.num_zero_experts = defaults.routing.num_zero_experts;
  made.simulation_seed = defaults.routing.simulation_seed;
  fusedmoe::capi::Init(made, config, struct_size);
}
