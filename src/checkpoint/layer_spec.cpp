#include "checkpoint/layer_spec.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "checkpoint/matrix_reader.hpp"

namespace fusedmoe::checkpoint {
namespace {

constexpr int64_t kMaxExperts = 65536;
constexpr int64_t kMaxTopK = 1024;
constexpr int64_t kMaxSize = int64_t{1} << 24;

constexpr std::string_view kExpertsKeys =
    "num_experts moe_num_experts n_routed_experts num_local_experts ffn_config.moe_num_experts";
constexpr std::string_view kTopKKeys =
    "num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k top_k_experts num_selected_experts "
    "ffn_config.moe_top_k";
constexpr std::string_view kIntermediateKeys =
    "moe_intermediate_size moe_ffn_hidden_size expert_ffn_hidden_size ffn_config.ffn_hidden_size "
    "intermediate_size";
constexpr std::string_view kHiddenKeys = "hidden_size d_model n_embd";
constexpr std::string_view kScoreKeys =
    "scoring_func score_function moe_router_activation_func moe_router_activation expert_selection_fn";
constexpr std::string_view kRenormalizeKeys = "norm_topk_prob moe_renormalize norm_expert_weight";
constexpr std::string_view kScalingKeys =
    "routed_scaling_factor moe_router_scaling_factor route_scale router_scaling_factor "
    "moe_routed_scaling_factor";
constexpr std::string_view kActivationKeys =
    "mlp_hidden_act hidden_act hidden_activation activation_function ffn_config.ffn_act_fn.name";

Result<ScoreFunction> ResolveScore(const ModelConfig& config, const FamilyRouting& routing) {
  if (routing.ignore_score_key)
    return routing.score;
  FMOE_ASSIGN_OR_RETURN(const std::optional<std::string> word, config.Text(kScoreKeys));
  if (!word)
    return routing.score;
  if (*word == "softmax")
    return ScoreFunction::kSoftmax;
  if (*word == "sigmoid")
    return ScoreFunction::kSigmoid;
  if (*word == "sqrtsoftplus")
    return ScoreFunction::kSqrtSoftplus;
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
      if (has_bias)
        return RoutingMethod::kDeepSeekV3;
      if (grouped)
        return RoutingMethod::kGroupedTopK;
      return routing.renormalize ? RoutingMethod::kSigmoidRenorm : RoutingMethod::kSigmoid;
    case ScoreFunction::kSoftmax:
      if (has_bias)
        return RoutingMethod::kSoftmaxBias;
      if (grouped)
        return RoutingMethod::kGroupedTopK;
      return routing.renormalize ? RoutingMethod::kRenormalize : RoutingMethod::kDefault;
  }
  return RoutingMethod::kUnspecified;
}

// A swiglustep that clamps nothing is silu.
ActivationSpec WithoutLimit(ActivationSpec spec) {
  if (spec.kind == ActivationKind::kSwigluStep && spec.limit == 0.0F)
    spec.kind = ActivationKind::kSilu;
  return spec;
}

Result<ActivationSpec> ResolveActivation(const ModelConfig& config, const Family& family, int64_t layer,
                                         bool has_gate) {
  const FamilyActivation& row = family.activation;
  ActivationSpec spec;
  spec.kind = row.kind;
  spec.alpha = row.alpha;
  spec.beta = row.beta;
  spec.limit = row.limit;
  if (!row.fixed) {
    FMOE_ASSIGN_OR_RETURN(const std::optional<std::string> word, config.Text(kActivationKeys));
    if (word) {
      const std::optional<ActivationKind> kind = ParseActivation(*word);
      if (!kind) {
        return Status::Unsupported(fmt::format("the activation '{}' is not supported", *word))
            .WithFile(config.path());
      }
      spec.kind = *kind;
    }
  }
  if (!has_gate) {
    const std::optional<ActivationKind> ungated =
        ParseActivation(std::string(ActivationName(spec.kind)) + "_no_mul");
    if (ungated)
      spec.kind = *ungated;
  }
  if (spec.gated() != has_gate) {
    return Status::Unsupported(
               fmt::format("the activation {} {} a gate projection, and the checkpoint has {}",
                           ActivationName(spec.kind), spec.gated() ? "needs" : "has no use for",
                           has_gate ? "one" : "none"))
        .WithFile(config.path());
  }
  if (row.has_limit) {
    FMOE_ASSIGN_OR_RETURN(const std::optional<double> alpha, config.Number("swiglu_alpha", -1));
    FMOE_ASSIGN_OR_RETURN(const std::optional<double> limit,
                          config.Number("swiglu_limit swiglu_limits", layer));
    if (alpha)
      spec.alpha = static_cast<float>(*alpha);
    if (limit)
      spec.limit = static_cast<float>(*limit);
    if (spec.limit < 0.0F) {
      return Status::BadInput(fmt::format("'swiglu_limit' is {}; at least 0 is needed", spec.limit))
          .WithFile(config.path());
    }
  }
  return WithoutLimit(spec);
}

// The shared expert's activation where it is not that of the routed ones.
Result<std::optional<ActivationSpec>> ResolveSharedActivation(const ModelConfig& config, const Family& family,
                                                              int64_t layer, const ActivationSpec& routed) {
  std::optional<ActivationSpec> own;
  if (family.activation.shared_unclamped) {
    own = routed;
    own->limit = 0.0F;
  } else if (family.activation.kind == ActivationKind::kSwigluStep) {
    FMOE_ASSIGN_OR_RETURN(const std::optional<double> limit, config.Number("swiglu_limits_shared", layer));
    ActivationSpec spec{.kind = ActivationKind::kSwigluStep,
                        .limit = static_cast<float>(limit.value_or(0.0))};
    own = WithoutLimit(spec);
  }
  return own == routed ? std::nullopt : own;
}

// The axes of fused tensors; shapes decide only where the family leaves it to them.
Result<FusedAxes> ResolveAxes(const TensorStore& store, const Family& family, const LayerNames& names,
                              const MoeConfig& config, const std::string& override_text) {
  FMOE_ASSIGN_OR_RETURN(const std::optional<FusedAxes> forced, ParseExpertLayout(override_text));
  if (names.experts.form == ExpertForm::kPerExpert)
    return FusedAxes{};
  FusedAxes axes;
  axes.in_out = family.fused == FusedLayout::kInOut || family.fused == FusedLayout::kInOutInterleaved;
  axes.interleaved =
      family.fused == FusedLayout::kInOutInterleaved || family.fused == FusedLayout::kOutInInterleaved;
  const TensorInfo* up = store.Find(names.experts.up + names.experts.weight_suffix);
  if (family.fused == FusedLayout::kByShape && up != nullptr && up->shape.rank() == 3) {
    const int64_t out = (names.experts.form == ExpertForm::kFused ? 2 : 1) * config.intermediate;
    axes.in_out = up->shape[2] == out && up->shape[1] != out;
  }
  // MXFP4 blocks lie along the input, whatever the axes of the unquantized form.
  if (up == nullptr && (store.Has(names.experts.up + "_blocks") || store.Has(names.experts.up + ".blocks")))
    axes.in_out = false;
  if (forced)
    axes = *forced;
  return axes;
}

// Switches that change what a layer computes, in ways that no part of this library does.
Status CheckOddities(const ModelConfig& config) {
  const auto refuse = [&](std::string_view key, std::string_view why) {
    return Status::Unsupported(fmt::format("'{}' is {}: {}", key, config.Find(key)->ToString(), why))
        .WithFile(config.path());
  };
  if (config.Find("moe_latent_size") != nullptr)
    return refuse("moe_latent_size", "experts behind a projection to a smaller space are not supported");
  if (const JsonValue* value = config.Find("moe_apply_router_weight_on_input");
      value != nullptr && value->boolean())
    return refuse("moe_apply_router_weight_on_input", "only Llama-4 weighs the input of its experts");
  const JsonValue* norm = config.Find("ffn_config.moe_normalize_expert_weights");
  if (norm != nullptr && (!norm->is_number() || norm->number() != 1.0))
    return refuse("ffn_config.moe_normalize_expert_weights",
                  "router weights are normalized to a sum of 1, or not at all");
  return Status::Ok();
}

}  // namespace

Result<std::optional<FusedAxes>> ParseExpertLayout(const std::string& text) {
  if (text.empty())
    return std::optional<FusedAxes>();
  FusedAxes axes;
  for (const std::string_view word : SplitWords(text, ',')) {
    if (word == "in_out" || word == "out_in") {
      axes.in_out = word == "in_out";
    } else if (word == "interleaved" || word == "chunked") {
      axes.interleaved = word == "interleaved";
    } else {
      return Status::Usage(fmt::format(
          "expert layout '{}' is unknown; in_out or out_in, with ,interleaved or ,chunked, are known", text));
    }
  }
  return std::optional<FusedAxes>(axes);
}

Result<RoutingConfig> ResolveRouting(const ModelConfig& config, const Family& family, int64_t layer,
                                     bool has_correction_bias) {
  const FamilyRouting& row = family.routing;
  RoutingConfig routing;
  FMOE_ASSIGN_OR_RETURN(routing.top_k, config.RequiredInteger(kTopKKeys, layer, 1, kMaxTopK));
  FMOE_ASSIGN_OR_RETURN(routing.score, ResolveScore(config, row));
  FMOE_ASSIGN_OR_RETURN(const std::optional<bool> renormalize, config.Boolean(kRenormalizeKeys));
  Renormalize rule = row.renormalize;
  // DBRX: an explicit null means that nothing is normalized.
  const JsonValue* ffn = config.Find("ffn_config");
  const bool explicit_null =
      ffn != nullptr && std::any_of(ffn->members().begin(), ffn->members().end(), [](const auto& member) {
        return member.first == "moe_normalize_expert_weights" && member.second.is_null();
      });
  if (explicit_null)
    rule = Renormalize::kNever;
  switch (rule) {
    case Renormalize::kAlways:
      routing.renormalize = true;
      break;
    case Renormalize::kNever:
      routing.renormalize = false;
      break;
    case Renormalize::kConfigTrue:
    case Renormalize::kConfigFalse:
      routing.renormalize = renormalize.value_or(rule == Renormalize::kConfigTrue);
      break;
  }
  if (!row.ignore_groups) {
    FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> groups,
                          config.Integer("n_group num_expert_group", -1, 0, kMaxExperts));
    FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> kept,
                          config.Integer("topk_group", -1, 0, kMaxExperts));
    FMOE_ASSIGN_OR_RETURN(const std::optional<std::string> how, config.Text("topk_method"));
    routing.num_groups = std::max<int64_t>(1, groups.value_or(1));
    routing.topk_groups = std::max<int64_t>(1, kept.value_or(1));
    if (how == "greedy")
      routing.num_groups = routing.topk_groups = 1;
    if (routing.topk_groups > routing.num_groups) {
      return Status::BadInput(fmt::format("'topk_group' is {}, but there are {} groups", routing.topk_groups,
                                          routing.num_groups))
          .WithFile(config.path());
    }
  }
  FMOE_ASSIGN_OR_RETURN(const std::optional<double> scaling, config.Number(kScalingKeys, -1));
  routing.scaling_factor = static_cast<float>(scaling.value_or(1.0));
  FMOE_ASSIGN_OR_RETURN(const std::optional<double> softcap,
                        config.Number("router_logit_softcapping moe_router_logit_softcapping", -1));
  routing.logit_softcap = softcap ? static_cast<float>(*softcap) : row.softcap;
  FMOE_ASSIGN_OR_RETURN(const std::optional<double> jitter, config.Number("router_jitter_noise", -1));
  if (jitter && row.method == RoutingMethod::kSparseMixer)
    routing.jitter = static_cast<float>(*jitter);
  FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> zero_experts,
                        config.Integer("zero_expert_num", -1, 0, kMaxExperts));
  routing.num_zero_experts = zero_experts.value_or(0);
  routing.norm_epsilon = row.norm_epsilon;
  routing.method = row.method;
  if (row.single_group && routing.num_groups > 1) {
    return Status::Unsupported(
               fmt::format("{} expert groups are not supported for {}: its groups rank by the sum of "
                           "two softmax scores",
                           routing.num_groups, family.name))
        .WithFile(config.path());
  }
  // Only a true group-limited choice needs the grouped method, and that of DeepSeek-V3 means sigmoid scores.
  if (row.method == RoutingMethod::kUnspecified ||
      (row.method == RoutingMethod::kGroupedTopK && routing.num_groups == 1) ||
      (row.method == RoutingMethod::kDeepSeekV3 && routing.score != ScoreFunction::kSigmoid)) {
    routing.method = DeriveMethod(routing, has_correction_bias);
  }
  return routing;
}

Result<LinearFormat> FormatAt(const TensorStore& store, const QuantRules& rules, const std::string& base,
                              const std::string& weight_suffix) {
  FMOE_ASSIGN_OR_RETURN(LinearFormat format, rules.format_of(base));
  const auto has = [&](std::string_view suffix) {
    return store.Has(base + std::string(suffix)) ||
           (weight_suffix.empty() &&
            (suffix == ".weight" ? store.Has(base) : store.Has(base + "_" + std::string(suffix.substr(1)))));
  };
  if (rules.producer == "fp8" && format.quantized()) {
    for (const std::string_view scale : {".weight_scale_inv", ".scale_inv", ".scale", ".weight_scale"}) {
      if (has(scale)) {
        format.scale = scale;
        break;
      }
    }
    // transformers leaves matrices alone that 128 does not divide, and says so nowhere.
    const TensorInfo* info = store.Find(base + weight_suffix);
    const bool plain = info != nullptr && (info->dtype == DType::kBF16 || info->dtype == DType::kF16 ||
                                           info->dtype == DType::kF32);
    if (plain && !has(format.scale))
      return LinearFormat{};
  }
  if (format.input_scale_optional && !has(format.input_scale)) {
    format.activation = {};
    format.input_scale = "";
  }
  if (has(format.codes) || (format.codes.starts_with('_') && has("." + std::string(format.codes.substr(1)))))
    return format;
  // What is there instead, for the message.
  std::string present;
  for (const TensorInfo& info : store.tensors()) {
    if (!info.name.starts_with(base) || info.name.size() == base.size() ||
        (info.name[base.size()] != '.' && info.name[base.size()] != '_')) {
      continue;
    }
    present += fmt::format("{}{}", present.empty() ? "" : ", ", info.name.substr(base.size()));
  }
  return store.Blame(
      Status::BadInput(fmt::format("the tensor is missing; {} stores weights there, the checkpoint has {}",
                                   rules.producer == "none" ? "an unquantized checkpoint" : rules.producer,
                                   present.empty() ? "none of this module" : present)),
      format.codes == ".weight" ? base + weight_suffix : base + std::string(format.codes));
}

Result<LayerSpec> ResolveLayer(const TensorStore& store, const ModelConfig& config, const Family& family,
                               const std::string& prefix, int64_t layer, const std::string& expert_layout) {
  std::optional<LayerNames> names = FindLayerNames(store, family, prefix);
  if (!names) {
    if (config.SaysMoe(layer).value_or(false)) {
      return store.Blame(Status::BadInput(fmt::format(
                             "the experts of layer {} are missing, though config.json gives it some", layer)),
                         prefix + std::string(SplitWords(family.blocks)[0]) + ".experts");
    }
    return Status::Usage(fmt::format("layer {} has no routed experts", layer)).WithFile(config.path());
  }
  LayerSpec spec;
  spec.layer = layer;
  spec.family = &family;
  spec.names = *std::move(names);
  MoeConfig& moe = spec.config;
  FMOE_ASSIGN_OR_RETURN(moe.num_experts, config.RequiredInteger(kExpertsKeys, layer, 1, kMaxExperts));
  moe.num_local_experts = moe.num_experts;
  FMOE_ASSIGN_OR_RETURN(moe.hidden, config.RequiredInteger(kHiddenKeys, -1, 1, kMaxSize));
  const std::string keys = std::string(family.intermediate_keys) + " " + std::string(kIntermediateKeys);
  FMOE_ASSIGN_OR_RETURN(moe.intermediate, config.RequiredInteger(keys, layer, 1, kMaxSize));
  moe.dtype = config.ComputeType();
  FMOE_RETURN_IF_ERROR(CheckOddities(config));
  const ExpertNames& experts = spec.names.experts;
  const bool fused = experts.form == ExpertForm::kFused;
  const bool has_gate = !experts.gate.empty() || (fused && family.activation.gated);
  FMOE_ASSIGN_OR_RETURN(moe.activation, ResolveActivation(config, family, layer, has_gate));
  moe.has_correction_bias = !spec.names.correction_bias.empty();
  moe.has_router_bias = !spec.names.router_bias.empty();
  FMOE_ASSIGN_OR_RETURN(moe.routing, ResolveRouting(config, family, layer, moe.has_correction_bias));
  if (moe.routing.top_k > moe.num_experts + moe.routing.num_zero_experts) {
    return Status::BadInput(
               fmt::format("each token takes {} experts of {}", moe.routing.top_k, moe.num_experts))
        .WithFile(config.path());
  }
  if (moe.num_experts % moe.routing.num_groups != 0) {
    return Status::BadInput(fmt::format("{} experts do not divide into {} groups", moe.num_experts,
                                        moe.routing.num_groups))
        .WithFile(config.path());
  }
  moe.apply_router_weight_on_input = moe.routing.method == RoutingMethod::kLlama4;
  if (moe.apply_router_weight_on_input && moe.routing.top_k != 1) {
    return Status::Unsupported(
               fmt::format("router weights on the input need one expert a token; the model takes {}",
                           moe.routing.top_k))
        .WithFile(config.path());
  }
  const std::string first_up = experts.Up(0);
  moe.has_bias =
      store.Has(first_up + ".bias") || store.Has(first_up + "_bias") || !spec.names.output_bias.empty();
  if (spec.names.router.empty()) {
    return store.Blame(Status::BadInput("the router's weight is missing"),
                       spec.names.block + std::string(SplitWords(family.router)[0]));
  }
  FMOE_ASSIGN_OR_RETURN(moe.shared.activation,
                        ResolveSharedActivation(config, family, layer, moe.activation));
  FMOE_ASSIGN_OR_RETURN(const std::optional<std::string> combination,
                        config.Text("shared_expert_combination_strategy"));
  const bool averages = family.name == "cohere2_moe" && combination.value_or("average") == "average";
  if (averages && !spec.names.shared_up.empty()) {
    moe.shared.weight = 0.5F;
    moe.routing.scaling_factor *= 0.5F;
  }
  FMOE_ASSIGN_OR_RETURN(spec.axes, ResolveAxes(store, family, spec.names, moe, expert_layout));
  return spec;
}

}  // namespace fusedmoe::checkpoint
