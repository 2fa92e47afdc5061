#include <cmath>
#include <utility>

#include <fmt/format.h>
#include <fusedmoe/config.hpp>

#include "config/validate.hpp"
#include "core/checked_math.hpp"
#include "routing/methods.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kMaxWidth = int64_t{1}
                              << 24;  // of hidden and intermediate: a thousand times today's models

Status CheckRange(std::string_view field, int64_t value, int64_t lowest, int64_t highest) {
  if (value < lowest || value > highest) {
    return Status::BadInput(
        fmt::format("{} is {}; it must be between {} and {}", field, value, lowest, highest));
  }
  return Status::Ok();
}

Status CheckSizes(const MoeConfig& config) {
  FMOE_RETURN_IF_ERROR(CheckRange("num_experts", config.num_experts, 1, kMaxRoutedExperts));
  FMOE_RETURN_IF_ERROR(CheckRange("hidden", config.hidden, 1, kMaxWidth));
  FMOE_RETURN_IF_ERROR(CheckRange("latent", config.latent, 0, kMaxWidth));
  FMOE_RETURN_IF_ERROR(CheckRange("intermediate", config.intermediate, 1, kMaxWidth));
  FMOE_RETURN_IF_ERROR(CheckRange("shared.intermediate", config.shared.intermediate, 0, kMaxWidth));
  FMOE_RETURN_IF_ERROR(CheckRange("num_zero_experts", config.routing.num_zero_experts, 0, kMaxRoutedExperts));
  const int64_t num_outputs = config.num_experts + config.routing.num_zero_experts;
  FMOE_RETURN_IF_ERROR(CheckRange("top_k", config.top_k(), 1, num_outputs));
  FMOE_RETURN_IF_ERROR(CheckRange("max_tokens", config.max_tokens, 1, kMaxSlots / config.top_k()));
  const int64_t weights_of_expert[] = {config.num_experts, 2 * config.intermediate, config.expert_hidden(),
                                       8};
  if (!CheckedElementCount(weights_of_expert)) {
    return Status::BadInput(fmt::format("{} experts of {} x {} weights cannot be addressed in 63 bits",
                                        config.num_experts, 2 * config.intermediate, config.expert_hidden()));
  }
  if (config.latent > 0 && config.routing.num_zero_experts > 0) {
    return Status::BadInput(
        fmt::format("latent is {} beside {} experts that give back their input, which has {} columns",
                    config.latent, config.routing.num_zero_experts, config.hidden));
  }
  if (!(config.latent_norm_epsilon >= 0.0F) || !std::isfinite(config.latent_norm_epsilon) ||
      (config.latent_norm_epsilon > 0.0F && config.latent == 0)) {
    return Status::BadInput(
        fmt::format("latent_norm_epsilon is {} with latent {}; it must be at least 0, and above it there "
                    "must be a latent size",
                    config.latent_norm_epsilon, config.latent));
  }
  return Status::Ok();
}

/// Checks the deployment that a layer is split by, and how many of its experts are here.
Status CheckParallel(const MoeConfig& config) {
  const ParallelConfig& parallel = config.parallel;
  FMOE_RETURN_IF_ERROR(CheckDeployment(parallel));
  const int64_t physical = config.num_experts + parallel.num_redundant_experts;
  const int64_t expected = NumLocalExperts(physical, parallel.ep_size, parallel.ep_rank);
  if (config.num_local_experts != expected) {
    return Status::BadInput(fmt::format("num_local_experts is {}; rank {} of {} has {} of {} experts",
                                        config.num_local_experts, parallel.ep_rank, parallel.ep_size,
                                        expected, physical));
  }
  return Status::Ok();
}

bool HasClamp(ActivationKind kind) {
  return kind == ActivationKind::kSilu || kind == ActivationKind::kSwigluOai ||
         kind == ActivationKind::kSwigluStep || kind == ActivationKind::kSitu;
}

Status CheckActivation(const ActivationSpec& activation) {
  if (!std::isfinite(activation.alpha) || !std::isfinite(activation.beta) ||
      !std::isfinite(activation.limit) || activation.limit < 0.0F) {
    return Status::BadInput(
        fmt::format("activation {} has alpha {}, beta {}, limit {}; they must be finite, and the "
                    "limit at least 0 (0: none)",
                    ActivationName(activation.kind), activation.alpha, activation.beta, activation.limit));
  }
  // With the parameters of a kind that has none these two are silu(g) * u: they were left unset. A model that
  // means it says silu, and a reader of checkpoints writes that for it.
  ActivationSpec unset;
  unset.kind = activation.kind;
  if (activation == unset && !(activation == CanonicalActivation(activation.kind))) {
    const ActivationSpec own = CanonicalActivation(activation.kind);
    return Status::BadInput(fmt::format("activation {} has alpha {}, beta {}, limit {}, which make it silu",
                                        ActivationName(activation.kind), activation.alpha, activation.beta,
                                        activation.limit))
        .WithHint(
            fmt::format("set alpha {}, beta {}, limit {}, or say silu", own.alpha, own.beta, own.limit));
  }
  if (activation.limit > 0.0F && !HasClamp(activation.kind)) {
    return Status::BadInput(fmt::format(
        "activation {} has no clamp, but a limit of {} is set; silu, swigluoai, swiglustep and situ have one",
        ActivationName(activation.kind), activation.limit));
  }
  if (activation.kind == ActivationKind::kSitu && activation.alpha <= 0.0F) {
    return Status::BadInput(
        fmt::format("activation situ has alpha {}; the bound of its gate must be above 0", activation.alpha));
  }
  return Status::Ok();
}

Status CheckRouting(const MoeConfig& config) {
  RoutingConfig routing = config.routing;
  if (routing.method == RoutingMethod::kCustom && !routing.custom) {
    routing.custom = [](TensorView, TensorView, int64_t, bool, int32_t*, float*) {};
  }
  if (const Status status = ValidateRouting(routing, config.num_experts + routing.num_zero_experts);
      !status.ok()) {
    return Status::BadInput(status.message());
  }
  if (config.has_correction_bias && !RuleOf(routing).takes_bias) {
    return Status::BadInput(fmt::format("the router has a correction bias, which routing method {} does not",
                                        RoutingMethodName(routing.method)));
  }
  if (config.apply_router_weight_on_input && config.top_k() != 1) {
    return Status::BadInput(
        fmt::format("the router weight is to act on the input of the experts with top_k {}; top_k must be 1",
                    config.top_k()));
  }
  return Status::Ok();
}

}  // namespace

Status CheckDeployment(const ParallelConfig& parallel) {
  struct Dimension {
    const char* name;
    int64_t size, rank;
  };
  for (const Dimension& dimension :
       {Dimension{"tp", parallel.tp_size, parallel.tp_rank},
        Dimension{"pcp", parallel.pcp_size, parallel.pcp_rank},
        Dimension{"dp", parallel.dp_size, parallel.dp_rank},
        Dimension{"ep", parallel.ep_size, parallel.ep_rank}, Dimension{"sp", parallel.sp_size, 0}}) {
    if (dimension.size < 1 || dimension.rank < 0 || dimension.rank >= dimension.size) {
      return Status::BadInput(
          fmt::format("{} rank is {} of {}; sizes must be at least 1 and ranks below them", dimension.name,
                      dimension.rank, dimension.size));
    }
  }
  if ((parallel.use_ep ? parallel.tp_size : parallel.ep_size) != 1) {
    return Status::BadInput(fmt::format(
        "tp size {} and ep size {} with expert parallelism {}: a layer is split one way, the other "
        "size must be 1",
        parallel.tp_size, parallel.ep_size, parallel.use_ep ? "on" : "off"));
  }
  if (!ParseAllToAll(parallel.all2all)) {
    return Status::BadInput(
        fmt::format("unknown all2all backend '{}'; known: {}", parallel.all2all, AllToAllNames()));
  }
  return CheckRange("num_redundant_experts", parallel.num_redundant_experts, 0, kMaxRoutedExperts);
}

MoeConfig RoutedConfig(const MoeConfig& layer) {
  MoeConfig routed = layer;
  routed.hidden = layer.expert_hidden();
  routed.latent = 0;
  routed.latent_norm_epsilon = 0.0F;
  return routed;
}

Status Validate(const MoeConfig& config) {
  FMOE_RETURN_IF_ERROR(CheckSizes(config));
  FMOE_RETURN_IF_ERROR(CheckParallel(config));
  FMOE_RETURN_IF_ERROR(CheckActivation(config.activation));
  if (config.shared.activation) {
    if (Status status = CheckActivation(*config.shared.activation); !status.ok()) {
      return std::move(status).WithContext("shared experts");
    }
  }
  FMOE_RETURN_IF_ERROR(CheckRouting(config));
  if (config.dtype != DType::kF32 && config.dtype != DType::kF16 && config.dtype != DType::kBF16) {
    return Status::BadInput(
        fmt::format("dtype of hidden states is {}; it must be F32, F16 or BF16", DTypeName(config.dtype)));
  }
  if (config.shared.has_gate && config.shared.intermediate == 0) {
    return Status::BadInput(
        "a shared expert's gate is set, but shared.intermediate is 0; it must be at least 1");
  }
  return Status::Ok();
}

}  // namespace fusedmoe
