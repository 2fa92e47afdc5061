// What the configuration and the family together say of routing and activation.
#include <algorithm>

#include <fmt/format.h>

#include "checkpoint/layers/layer_spec.hpp"

namespace fusedmoe::checkpoint {
namespace {

constexpr int64_t kMaxTopK = 1024;
constexpr std::string_view kTopKKeys =
    "num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k top_k_experts num_selected_experts "
    "moe_num_active_primary_experts ffn_config.moe_top_k";
constexpr std::string_view kScoreKeys =
    "scoring_func score_function moe_router_activation_func moe_router_activation expert_selection_fn "
    "moe_router_score_func router_score_func score_func";
constexpr std::string_view kRenormalizeKeys = "norm_topk_prob moe_renormalize norm_expert_weight route_norm";
constexpr std::string_view kScalingKeys =
    "routed_scaling_factor moe_router_scaling_factor route_scale router_scaling_factor "
    "moe_routed_scaling_factor";
constexpr std::string_view kLimitKeys = "swiglu_limit swiglu_limits expert_swiglu_limit_list";
constexpr std::string_view kActivationKeys =
    "mlp_hidden_act hidden_act hidden_activation activation_function ffn_config.ffn_act_fn.name";

Result<ScoreFunction> ResolveScore(const ModelConfig& config, const FamilyRouting& routing) {
  if (routing.ignore_score_key) {
    return routing.score;
  }
  FMOE_ASSIGN_OR_RETURN(const std::optional<std::string> word, config.Text(kScoreKeys));
  if (!word) {
    return routing.score;
  }
  if (*word == "softmax") {
    return ScoreFunction::kSoftmax;
  }
  // dots.llm1 calls its scores by the method that they serve.
  if (*word == "sigmoid" || *word == "noaux_tc") {
    return ScoreFunction::kSigmoid;
  }
  if (*word == "sqrtsoftplus") {
    return ScoreFunction::kSqrtSoftplus;
  }
  return Status::Unsupported(
             fmt::format("router scores by '{}' are not supported; softmax, sigmoid and sqrtsoftplus are",
                         *word))
      .WithFile(config.path());
}

RoutingMethod DeriveMethod(const RoutingConfig& routing, bool has_bias) {
  const bool grouped = routing.num_groups > 1;
  switch (routing.score) {
    case ScoreFunction::kSqrtSoftplus:
      return RoutingMethod::kDeepseekV4;
    case ScoreFunction::kSigmoid:
      if (has_bias) {
        return RoutingMethod::kDeepSeekV3;
      }
      if (grouped) {
        return RoutingMethod::kGroupedTopK;
      }
      return routing.renormalize ? RoutingMethod::kSigmoidRenorm : RoutingMethod::kSigmoid;
    case ScoreFunction::kSoftmax:
      if (has_bias) {
        return RoutingMethod::kSoftmaxBias;
      }
      if (grouped) {
        return RoutingMethod::kGroupedTopK;
      }
      return routing.renormalize ? RoutingMethod::kRenormalize : RoutingMethod::kDefault;
  }
  return RoutingMethod::kUnspecified;
}

Result<std::optional<ActivationKind>> ConfiguredActivation(const ModelConfig& config) {
  FMOE_ASSIGN_OR_RETURN(const std::optional<std::string> word, config.Text(kActivationKeys));
  std::string_view key;
  if (!word || config.Find(kActivationKeys, &key) == nullptr) {
    return std::optional<ActivationKind>();
  }
  const std::optional<ActivationKind> kind = ParseActivation(*word);
  if (!kind) {
    return Status::Unsupported(fmt::format("the activation '{}' ('{}') is not supported; there are {}", *word,
                                           key, ActivationNames()))
        .WithFile(config.path());
  }
  return kind;
}

// Kimi-K3: bounds of gate and up, which may be null.
Status ReadSitu(const ModelConfig& config, ActivationSpec& spec) {
  FMOE_ASSIGN_OR_RETURN(const std::optional<double> gate, config.Number("activation_situ_beta", -1));
  FMOE_ASSIGN_OR_RETURN(const std::optional<double> up, config.Number("activation_situ_linear_beta", -1));
  if (gate.value_or(0.0) < 0.0 || (up && !(*up > 0.0))) {
    return Status::BadInput(
               fmt::format("'activation_situ_beta' is {} and 'activation_situ_linear_beta' {}; numbers above "
                           "0 are needed",
                           gate.value_or(0.0), up.value_or(0.0)))
        .WithFile(config.path());
  }
  spec.alpha = gate.value_or(0.0) > 0.0 ? static_cast<float>(*gate) : 1.0F;
  spec.limit = static_cast<float>(up.value_or(0.0));
  return Status::Ok();
}

// A swiglustep that clamps nothing is silu, and so is a swigluoai whose configuration takes its parameters
// away.
ActivationSpec WithoutLimit(ActivationSpec spec) {
  if ((spec.kind == ActivationKind::kSwigluStep && spec.limit == 0.0F) ||
      spec == ActivationSpec{.kind = ActivationKind::kSwigluOai}) {
    spec.kind = ActivationKind::kSilu;
  }
  return spec;
}

Result<bool> ResolveRenormalize(const ModelConfig& config, const FamilyRouting& row, ScoreFunction score) {
  FMOE_ASSIGN_OR_RETURN(const std::optional<bool> said, config.Boolean(kRenormalizeKeys));
  // DBRX: an explicit null means that nothing is normalized.
  const JsonValue* ffn = config.Find("ffn_config");
  const bool explicit_null =
      ffn != nullptr && std::any_of(ffn->members().begin(), ffn->members().end(), [](const auto& member) {
        return member.first == "moe_normalize_expert_weights" && member.second.is_null();
      });
  switch (explicit_null ? Renormalize::kNever : row.renormalize) {
    case Renormalize::kAlways:
      return true;
    case Renormalize::kNever:
      return false;
    case Renormalize::kOnlySigmoid:
      return score == ScoreFunction::kSigmoid && said.value_or(true);
    case Renormalize::kUnlessSigmoid:
      return score != ScoreFunction::kSigmoid || said.value_or(true);
    case Renormalize::kConfigTrue:
      return said.value_or(true);
    case Renormalize::kConfigFalse:
      break;
  }
  return said.value_or(false);
}

Status ResolveGroups(const ModelConfig& config, RoutingConfig& routing) {
  FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> groups,
                        config.Integer("n_group num_expert_group", -1, 0, kMaxRoutedExperts));
  FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> kept,
                        config.Integer("topk_group", -1, 0, kMaxRoutedExperts));
  FMOE_ASSIGN_OR_RETURN(const std::optional<std::string> how, config.Text("topk_method"));
  FMOE_ASSIGN_OR_RETURN(const std::optional<bool> limited, config.Boolean("use_grouped_topk"));
  routing.num_groups = std::max<int64_t>(1, groups.value_or(1));
  routing.topk_groups = std::max<int64_t>(1, kept.value_or(1));
  if (how == "greedy" || !limited.value_or(true)) {
    routing.num_groups = routing.topk_groups = 1;
  }
  if (routing.topk_groups > routing.num_groups) {
    return Status::BadInput(fmt::format("'topk_group' is {}, but there are {} groups", routing.topk_groups,
                                        routing.num_groups))
        .WithFile(config.path());
  }
  return Status::Ok();
}

// The clamp of such keys; 0, which is none, where the configuration switches clamps off.
Result<std::optional<double>> ReadLimit(const ModelConfig& config, std::string_view keys, int64_t layer) {
  FMOE_ASSIGN_OR_RETURN(const std::optional<bool> clamps, config.Boolean("use_swiglu_clamp"));
  if (!clamps.value_or(true)) {
    return std::optional<double>(0.0);
  }
  return config.Number(keys, layer);
}

Status CheckGate(const ModelConfig& config, const Family& family, const ActivationSpec& spec, bool has_gate) {
  if (spec.gated() && !has_gate && family.activation.gated) {
    return Status::BadInput(
               fmt::format("the gate projections of the experts are missing: a tensor of a name that is not "
                           "known, perhaps; the activation {} of {} needs them",
                           ActivationName(spec.kind), family.name))
        .WithFile(config.path());
  }
  if (spec.gated() != has_gate) {
    return Status::Unsupported(
               fmt::format("the activation {} {} a gate projection, and the checkpoint has {}",
                           ActivationName(spec.kind), spec.gated() ? "needs" : "has no use for",
                           has_gate ? "one" : "none"))
        .WithFile(config.path());
  }
  return Status::Ok();
}

// The clamp, with the slopes that come with it, where the family has one.
Status ReadLimits(const ModelConfig& config, const Family& family, int64_t layer, ActivationSpec& spec) {
  const FamilyActivation& row = family.activation;
  FMOE_ASSIGN_OR_RETURN(const std::optional<double> limit, ReadLimit(config, kLimitKeys, layer));
  std::string_view limit_key, kind_key = "hidden_act";
  config.Find(kLimitKeys, &limit_key);
  config.Find(kActivationKeys, &kind_key);
  if (!row.has_limit && limit.value_or(0.0) > 0.0) {
    return Status::Unsupported(fmt::format("'{}' is {}: how experts of {} clamp is not known", limit_key,
                                           *limit, family.name))
        .WithFile(config.path());
  }
  if (!row.has_limit) {
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(const std::optional<double> alpha, config.Number("swiglu_alpha", -1));
  FMOE_ASSIGN_OR_RETURN(const std::optional<double> beta, config.Number("swiglu_beta", -1));
  spec.alpha = static_cast<float>(alpha.value_or(spec.alpha));
  spec.beta = static_cast<float>(beta.value_or(spec.beta));
  spec.limit = static_cast<float>(limit.value_or(spec.limit));
  if (spec.limit < 0.0F && spec.kind != ActivationKind::kSwigluOai) {
    spec.limit = 0.0F;  // Hunyuan 4 and K-EXAONE: none
  }
  if (spec.limit < 0.0F) {
    return Status::BadInput(fmt::format("'{}' is {}; at least 0 is needed", limit_key, spec.limit))
        .WithFile(config.path());
  }
  if (row.silu_is_kind && spec.kind != row.kind && spec.limit > 0.0F) {
    return Status::Unsupported(fmt::format("'{}' is {} and '{}' {}: {} clamps silu alone", limit_key,
                                           spec.limit, kind_key, ActivationName(spec.kind), family.name))
        .WithFile(config.path());
  }
  return Status::Ok();
}

}  // namespace

Result<ActivationSpec> ResolveActivation(const ModelConfig& config, const Family& family, int64_t layer,
                                         bool has_gate) {
  const FamilyActivation& row = family.activation;
  ActivationSpec spec;
  spec.kind = row.kind;
  spec.alpha = row.alpha;
  spec.beta = row.beta;
  spec.limit = row.limit;
  if (!row.fixed) {
    FMOE_ASSIGN_OR_RETURN(const std::optional<ActivationKind> kind, ConfiguredActivation(config));
    if (kind && *kind != spec.kind && !(row.silu_is_kind && *kind == ActivationKind::kSilu)) {
      spec = CanonicalActivation(*kind);
    }
  }
  // Of models whose experts have gates, a checkpoint without them has lost them, or spells them in a new way.
  if (!has_gate && !row.gated) {
    const std::optional<ActivationKind> ungated =
        ParseActivation(std::string(ActivationName(spec.kind)) + "_no_mul");
    if (ungated) {
      spec.kind = *ungated;
    }
  }
  FMOE_RETURN_IF_ERROR(CheckGate(config, family, spec, has_gate));
  if (spec.kind == ActivationKind::kSitu) {
    FMOE_RETURN_IF_ERROR(ReadSitu(config, spec));
  }
  FMOE_RETURN_IF_ERROR(ReadLimits(config, family, layer, spec));
  return WithoutLimit(spec);
}

// The shared expert's activation where it is not that of the routed ones.
Result<std::optional<ActivationSpec>> ResolveSharedActivation(const ModelConfig& config, const Family& family,
                                                              int64_t layer, const ActivationSpec& routed) {
  std::optional<ActivationSpec> own;
  if (family.activation.shared_unclamped) {
    own = routed;
    own->limit = 0.0F;
  } else if (family.activation.shared_by_config) {
    FMOE_ASSIGN_OR_RETURN(const std::optional<ActivationKind> kind, ConfiguredActivation(config));
    own = CanonicalActivation(kind.value_or(routed.kind));
  } else if (family.activation.has_limit) {
    FMOE_ASSIGN_OR_RETURN(const std::optional<double> limit,
                          ReadLimit(config, "swiglu_limits_shared share_expert_swiglu_limit_list", layer));
    // GGUF has this key for all; elsewhere the routed experts' limit is the shared ones' too, but for these.
    const bool apart = family.activation.kind == ActivationKind::kSwigluStep;
    if (limit || apart) {
      own = routed;
      const bool unclamped = apart && routed.kind == ActivationKind::kSilu;  // the routed ones
      own->kind = unclamped ? ActivationKind::kSwigluStep : routed.kind;
      own->limit = std::max(0.0F, static_cast<float>(limit.value_or(0.0)));  // below zero: none
      own = WithoutLimit(*own);
    }
  }
  return own == routed ? std::nullopt : own;
}

Result<RoutingConfig> ResolveRouting(const ModelConfig& config, const Family& family, int64_t layer,
                                     bool has_correction_bias) {
  const FamilyRouting& row = family.routing;
  RoutingConfig routing;
  FMOE_ASSIGN_OR_RETURN(routing.top_k, config.RequiredInteger(kTopKKeys, layer, 1, kMaxTopK));
  if (!family.routed_by_caller.empty()) {
    routing.method = RoutingMethod::kCustom;
    return routing;
  }
  FMOE_ASSIGN_OR_RETURN(routing.score, ResolveScore(config, row));
  FMOE_ASSIGN_OR_RETURN(routing.renormalize, ResolveRenormalize(config, row, routing.score));
  if (!row.ignore_groups) {
    FMOE_RETURN_IF_ERROR(ResolveGroups(config, routing));
  }
  if (row.every_group) {
    FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> groups,
                          config.Integer("router_n_groups", -1, -1, kMaxRoutedExperts));
    if (groups.value_or(0) > 1) {
      routing.num_groups = *groups;
      routing.topk_groups = kEveryGroup;
    }
  }
  FMOE_ASSIGN_OR_RETURN(const std::optional<double> scaling, config.Number(kScalingKeys, -1));
  routing.scaling_factor = static_cast<float>(scaling.value_or(1.0));
  if (!(routing.scaling_factor > 0.0F)) {  // zero would make the layer its shared experts, or nothing
    std::string_view key;
    config.Find(kScalingKeys, &key);
    return Status::BadInput(fmt::format("'{}' is {}; a number above 0, in F32, is needed", key, *scaling))
        .WithFile(config.path())
        .WithHint("without the key, router weights are taken as they are");
  }
  FMOE_ASSIGN_OR_RETURN(const std::optional<double> softcap,
                        config.Number("router_logit_softcapping moe_router_logit_softcapping", -1));
  routing.logit_softcap = softcap ? static_cast<float>(*softcap) : row.softcap;
  FMOE_ASSIGN_OR_RETURN(const std::optional<double> jitter, config.Number("router_jitter_noise", -1));
  if (jitter && row.method == RoutingMethod::kSparseMixer) {
    routing.jitter = static_cast<float>(*jitter);
  }
  FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> zero_experts,
                        config.Integer("zero_expert_num", -1, 0, kMaxRoutedExperts));
  routing.num_zero_experts = zero_experts.value_or(0);
  routing.norm_epsilon = row.norm_epsilon;
  routing.method = row.method;
  // Only a true group-limited choice needs the grouped method; those of DeepSeek-V3 and MiniMax-M2 mean
  // sigmoid scores.
  if (row.method == RoutingMethod::kUnspecified ||
      (row.method == RoutingMethod::kGroupedTopK && routing.num_groups == 1) ||
      ((row.method == RoutingMethod::kDeepSeekV3 || row.method == RoutingMethod::kMiniMax2) &&
       routing.score != ScoreFunction::kSigmoid)) {
    routing.method = DeriveMethod(routing, has_correction_bias);
  }
  if (row.groups_by_two && routing.num_groups > 1) {
    routing.method = RoutingMethod::kGroupedTopK;  // with a bias, of zeros: ResolveLayer
  }
  return routing;
}

}  // namespace fusedmoe::checkpoint
