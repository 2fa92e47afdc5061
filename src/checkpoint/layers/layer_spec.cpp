#include "checkpoint/layers/layer_spec.hpp"

#include <algorithm>
#include <initializer_list>

#include <fmt/format.h>

#include "numerics/element_types.hpp"

namespace fusedmoe::checkpoint {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 24;

constexpr std::string_view kExpertsKeys =
    "num_experts moe_num_experts n_routed_experts num_local_experts moe_num_primary_experts "
    "ffn_config.moe_num_experts";
constexpr std::string_view kIntermediateKeys =
    "moe_intermediate_size moe_ffn_hidden_size expert_ffn_hidden_size ffn_config.ffn_hidden_size "
    "intermediate_size";
constexpr std::string_view kLatentKeys = "moe_latent_size routed_expert_hidden_size";
constexpr std::string_view kHiddenKeys = "hidden_size d_model n_embd";
// How many shared experts there are, or how wide they are.
constexpr std::string_view kSharedKeys =
    "n_shared_experts num_shared_experts moe_num_shared_experts num_shared_expert "
    "shared_expert_intermediate_size shared_intermediate_size";

// The axes of fused tensors; shapes decide only where the family leaves it to them.
Result<FusedAxes> ResolveAxes(const TensorStore& store, const Family& family, const LayerNames& names,
                              const MoeConfig& config, const std::string& override_text) {
  FMOE_ASSIGN_OR_RETURN(const std::optional<FusedAxes> forced, ParseExpertLayout(override_text));
  if (names.experts.form == ExpertForm::kPerExpert) {
    if (forced) {
      return Status::Usage(fmt::format("expert layout '{}' has no effect: no tensor holds several experts or "
                                       "projections",
                                       override_text))
          .WithTensor(names.experts.Up(0));
    }
    return FusedAxes{};
  }
  // GGUF and MLX have one order for all architectures. Families that join gate and up, in whatever order,
  // never store them apart themselves.
  const bool apart = names.experts.form == ExpertForm::kStacked && !names.experts.flattened;
  if ((store.is_gguf() || apart) && !forced) {
    return FusedAxes{};
  }
  FusedAxes axes;
  axes.in_out = !names.experts.per_expert() &&
                (family.fused == FusedLayout::kInOut || family.fused == FusedLayout::kInOutInterleaved);
  axes.interleaved = family.interleaved();
  const TensorInfo* up = store.Find(names.experts.up + names.experts.weight_suffix);
  if (family.fused == FusedLayout::kByShape && up != nullptr && up->shape.rank() == 3) {
    const int64_t out = (names.experts.form == ExpertForm::kFused ? 2 : 1) * config.intermediate;
    axes.in_out = up->shape[2] == out && up->shape[1] != out;
  }
  // MXFP4 blocks lie along the input, whatever the axes of the unquantized form.
  if (up == nullptr && (store.Has(names.experts.up + "_blocks") || store.Has(names.experts.up + ".blocks"))) {
    axes.in_out = false;
  }
  if (forced) {
    axes = *forced;
  }
  return axes;
}

// Whether a tool leaves such a matrix as it was and says so nowhere: transformers, in FP8, what 128 does not
// divide; tools that quantize linear modules, a parameter for all experts that they did not take apart
// (JetMoE, Longcat, Llama-4 by auto-round), which transformers may have taken apart when it saved the file of
// llm-compressor; bitsandbytes such parameters and the routers of some models. AWQ and GPTQ files leave out
// any module, by parts of names ("layers.0.", "shared_exp") or without a word, and vLLM goes by the tensors
// (so do files for SGLang, whose metadata have its own names of modules);
// where nothing at all has codes, the configuration is another model's.
bool KeepsPlain(const TensorStore& store, std::string_view producer, const LinearFormat& format,
                const TensorInfo& info) {
  const bool plain = IsPlainFloat(info.dtype);
  const bool joined = info.shape.rank() >= 3;
  if (producer == "gptq" || producer == "awq" || producer == "compressed-tensors" || producer == "sglang") {
    // Codes that are called as plain weights are told by their scales.
    const std::string_view sign = format.codes == ".weight" ? format.scale : format.codes;
    const auto has_codes = [&](const TensorInfo& other) { return other.name.ends_with(sign); };
    return plain && (joined || std::any_of(store.tensors().begin(), store.tensors().end(), has_codes));
  }
  if (producer == "quark" || producer == "auto-round") {
    return plain && joined;
  }
  return (producer == "fp8" && plain) || (producer == "bitsandbytes" && IsFloat(info.dtype));
}

// The tensors of a module, for a message that says what is there instead.
std::string PresentOf(const TensorStore& store, const std::string& base) {
  std::string present;
  for (const std::string_view name : store.Below(base)) {
    const std::string_view rest = name.substr(base.size());
    if (!rest.empty() && (rest.front() == '.' || rest.front() == '_')) {
      present += fmt::format("{}{}", present.empty() ? "" : ", ", rest);
    }
  }
  return present;
}

// Metadata that leave a quantized module alone: which of their fields to look at. Null for producers whose
// quantized tensors do not show.
const char* WhoLeavesAlone(std::string_view producer) {
  if (producer == "compressed-tensors") {
    return "'ignore' matches it, or no target of 'config_groups' does (of classes Linear alone is known)";
  }
  if (producer == "modelopt") {
    return "'ignore' or 'exclude_modules' matches it, or 'quantized_layers' lacks it";
  }
  if (producer == "gptq" || producer == "awq") {
    return "'modules_to_not_convert' or 'dynamic' matches it";
  }
  if (producer == "quark") {
    return "'exclude' matches it";
  }
  return producer == "fp8" ? "'modules_to_not_convert' or 'ignored_layers' matches it" : nullptr;
}

// What the numbers of experts say about each other.
Status CheckCounts(const ModelConfig& config, const MoeConfig& moe) {
  const RoutingConfig& routing = moe.routing;
  const auto wrong = [&](const std::string& what) { return Status::BadInput(what).WithFile(config.path()); };
  if (routing.top_k > moe.num_experts + routing.num_zero_experts) {
    return wrong(fmt::format("each token takes {} experts of {}", routing.top_k, moe.num_experts));
  }
  if (moe.num_experts % routing.num_groups != 0) {
    return wrong(fmt::format("{} experts do not divide into {} groups", moe.num_experts, routing.num_groups));
  }
  if (routing.method != RoutingMethod::kCustom) {
    if (const Status status = ValidateRouting(routing, moe.num_experts + routing.num_zero_experts);
        !status.ok()) {
      return wrong(status.message());
    }
  }
  if (routing.method == RoutingMethod::kSparseMixer && routing.top_k != 2) {
    return Status::Unsupported(
               fmt::format(
                   "the router of Phi-MoE chooses two experts a token, whatever the model says; it says {}",
                   routing.top_k))
        .WithFile(config.path());
  }
  if (moe.apply_router_weight_on_input && routing.top_k != 1) {
    return Status::Unsupported(
               fmt::format("router weights on the input need one expert a token; the model takes {}",
                           routing.top_k))
        .WithFile(config.path());
  }
  return Status::Ok();
}

// Latent experts: the width of their rows (Nemotron-3, Kimi-K3), 0 where they read the hidden states, and the
// epsilon of the norm behind them.
Status ReadLatent(const ModelConfig& config, const LayerNames& names, MoeConfig& moe) {
  FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> size, config.Integer(kLatentKeys, -1, 1, kMaxSize));
  moe.latent = size.value_or(0);
  if (names.latent_norm.empty()) {
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(const std::optional<double> epsilon, config.Number("rms_norm_eps", -1));
  moe.latent_norm_epsilon = static_cast<float>(epsilon.value_or(0.0));
  if (!(moe.latent_norm_epsilon > 0.0F)) {
    return Status::BadInput(fmt::format("'rms_norm_eps' is {}; the norm behind the experts needs one above 0",
                                        epsilon ? fmt::format("{}", *epsilon) : "missing"))
        .WithFile(config.path());
  }
  return Status::Ok();
}

// The activation of the shared experts, and, in Cohere 2, that they and the routed ones count half each.
Status ResolveShared(const ModelConfig& config, const Family& family, LayerSpec& spec) {
  MoeConfig& moe = spec.config;
  FMOE_ASSIGN_OR_RETURN(moe.shared.activation,
                        ResolveSharedActivation(config, family, spec.layer, moe.activation));
  FMOE_ASSIGN_OR_RETURN(const std::optional<std::string> combination,
                        config.Text("shared_expert_combination_strategy"));
  const bool cohere = family.name == "cohere2_moe";
  if (cohere && combination && *combination != "average" && *combination != "sum") {
    return Status::Unsupported(
               fmt::format("'shared_expert_combination_strategy' is '{}', which is not supported; "
                           "average and sum are",
                           *combination))
        .WithFile(config.path());
  }
  const bool averages = cohere && combination.value_or("average") == "average";
  if (averages && !spec.names.shared_up.empty()) {
    moe.shared.weight = 0.5F;
    moe.routing.scaling_factor *= 0.5F;
  }
  const JsonValue* promised = config.Find(kSharedKeys);
  spec.lacks_shared = spec.names.shared_up.empty() && !family.shared.empty() && promised != nullptr &&
                      promised->is_number() && promised->number() > 0.0;
  return Status::Ok();
}

// ModelOpt keeps one scale for a matrix of fused experts, whatever blocks its metadata promise. It also
// leaves out the extents of the scale of a matrix that is a single block, beside others that keep them.
bool HasScaleOfMatrix(const TensorStore& store, const std::string& base, const std::string& weight_suffix,
                      const LinearFormat& format) {
  const TensorInfo* scale = store.Find(base + std::string(format.scale));
  if (scale == nullptr || scale->shape.rank() != 0) {
    return false;
  }
  const TensorInfo* info = store.Find(base + weight_suffix);
  const auto& block = format.weight.block;
  return info == nullptr || info->shape.rank() != 2 || info->shape[0] > block.row ||
         info->shape[1] > block.col;
}

}  // namespace

Result<std::optional<FusedAxes>> ParseExpertLayout(const std::string& text) {
  if (text.empty()) {
    return std::optional<FusedAxes>();
  }
  FusedAxes axes;
  if (text.front() == ',' || text.back() == ',' || text.find(",,") != std::string::npos) {
    return Status::Usage(
        fmt::format("expert layout '{}' has an empty entry; a comma stands between two words", text));
  }
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

Result<LinearFormat> FormatAt(const TensorStore& store, const QuantRules& rules, const std::string& base,
                              const std::string& weight_suffix) {
  FMOE_ASSIGN_OR_RETURN(LinearFormat format, rules.format_of(base));
  const auto has = [&](std::string_view suffix) {
    return store.Has(base + std::string(suffix)) ||
           (weight_suffix.empty() &&
            (suffix == ".weight" ? store.Has(base) : store.Has(base + "_" + std::string(suffix.substr(1)))));
  };
  if (rules.producer == "fp8" && format.quantized()) {
    // transformers', DeepSeek's, vLLM's and Mistral's names, also of fused experts.
    const auto first = [&](std::initializer_list<std::string_view> names, std::string_view fallback) {
      const auto* const found = std::find_if(names.begin(), names.end(), has);
      return found == names.end() ? fallback : *found;
    };
    format.scale =
        first({".weight_scale_inv", ".scale_inv", ".scale", ".weight_scale", ".qscale_weight"}, format.scale);
    if (!format.input_scale.empty()) {
      format.input_scale = first({".input_scale", ".activation_scale", ".qscale_act"}, format.input_scale);
    }
    // Stacks of transformers are made of experts whose gate and up were quantized apart.
    format.blocks_begin_at_up = weight_suffix.empty();
  }
  if (rules.producer == "modelopt" && format.weight.block.row > 1 && !has(format.scale) &&
      has(".weight_scale_inv")) {
    format.scale = ".weight_scale_inv";  // blocks that are DeepSeek's own
  }
  const TensorInfo* info = store.Find(base + weight_suffix);
  if (info != nullptr && format.quantized() && !has(format.scale) &&
      (format.codes == ".weight" || !has(format.codes)) && KeepsPlain(store, rules.producer, format, *info)) {
    return LinearFormat{};
  }
  if (rules.producer == "modelopt" && format.weight.block.row > 1 &&
      HasScaleOfMatrix(store, base, weight_suffix, format)) {
    format.weight.block = kPerTensor;
    format.weight.has_tensor_scale = true;
  }
  if (format.input_scale_optional && !has(format.input_scale)) {
    format.LeaveInputsAlone();
  }
  const char* left_alone = format.quantized() ? nullptr : WhoLeavesAlone(rules.producer);
  if (left_alone != nullptr && (info == nullptr || !IsPlainFloat(info->dtype)) &&
      !PresentOf(store, base).empty()) {
    return store.Blame(
        Status::BadInput(fmt::format("the metadata of {} leave this module unquantized, and the checkpoint "
                                     "has {} of it",
                                     rules.producer, PresentOf(store, base)))
            .WithHint(left_alone),
        base + weight_suffix);
  }
  if (has(format.codes) ||
      (format.codes.starts_with('_') && has(fmt::format(".{}", format.codes.substr(1))))) {
    return format;
  }
  const std::string present = PresentOf(store, base);
  return store.Blame(
      Status::BadInput(fmt::format("the tensor is missing; {} stores weights there, the checkpoint has {}",
                                   rules.producer == "none" ? "an unquantized checkpoint" : rules.producer,
                                   present.empty() ? "none of this module" : present)),
      format.codes == ".weight" ? base + weight_suffix : base + std::string(format.codes));
}

// Any expert's, so that those of the others are missed by name.
bool AnyBias(const TensorStore& store, const ExpertNames& experts, int64_t num_experts) {
  for (int64_t expert = 0; expert < (experts.per_expert() ? num_experts : 1); ++expert) {
    for (const std::string& name : {experts.Gate(expert), experts.Up(expert), experts.Down(expert)}) {
      if (!name.empty() && (store.Has(name + ".bias") || store.Has(name + "_bias"))) {
        return true;
      }
    }
  }
  return false;
}

Result<LayerSpec> ResolveLayer(const TensorStore& store, const ModelConfig& model, const Family& family,
                               const std::string& prefix, int64_t layer, const std::string& expert_layout) {
  const ModelConfig config = model.ForLayer(layer);
  std::optional<LayerNames> names = FindLayerNames(store, family, prefix);
  if (!names) {
    const std::string left = RemainsOfExperts(store, family, prefix);
    const std::optional<bool> said = config.SaysMoe(layer);
    if (said.value_or(!left.empty())) {
      return store.Blame(
          Status::BadInput(fmt::format("the experts of layer {} are missing{}{}", layer,
                                       said ? ", though config.json gives it some" : "",
                                       left.empty() ? "" : fmt::format("; '{}' is there", left)))
              .WithHint("copy the checkpoint again, or leave all tensors of the layer's block away"),
          BlockName(prefix, SplitWords(family.blocks)[0]) + "experts");
    }
    return Status::Usage(fmt::format("layer {} has no routed experts", layer)).WithFile(config.path());
  }
  LayerSpec spec;
  spec.layer = layer;
  spec.family = &family;
  spec.names = *std::move(names);
  MoeConfig& moe = spec.config;
  FMOE_ASSIGN_OR_RETURN(moe.num_experts, config.RequiredInteger(kExpertsKeys, layer, 1, kMaxRoutedExperts));
  moe.num_local_experts = moe.num_experts;
  FMOE_ASSIGN_OR_RETURN(moe.hidden, config.RequiredInteger(kHiddenKeys, -1, 1, kMaxSize));
  const std::string keys = std::string(family.intermediate_keys) + " " + std::string(kIntermediateKeys);
  FMOE_ASSIGN_OR_RETURN(moe.intermediate, config.RequiredInteger(keys, layer, 1, kMaxSize));
  FMOE_RETURN_IF_ERROR(ReadLatent(config, spec.names, moe));
  moe.dtype = config.ComputeType();
  FMOE_RETURN_IF_ERROR(CheckSwitches(config, family));
  const ExpertNames& experts = spec.names.experts;
  const bool fused = experts.form == ExpertForm::kFused;
  const bool has_gate = !experts.gate.empty() || experts.form == ExpertForm::kPerExpertGateUp ||
                        (fused && family.activation.gated);
  FMOE_ASSIGN_OR_RETURN(moe.activation, ResolveActivation(config, family, layer, has_gate));
  moe.has_correction_bias = !spec.names.correction_bias.empty();
  moe.has_router_bias = !spec.names.router_bias.empty();
  FMOE_ASSIGN_OR_RETURN(moe.routing, ResolveRouting(config, family, layer, moe.has_correction_bias));
  // Groups compete by their two largest scores where there is a bias: one of zeros changes nothing else.
  if (family.routing.groups_by_two && moe.routing.num_groups > 1) {
    moe.has_correction_bias = true;
  }
  moe.apply_router_weight_on_input = moe.routing.method == RoutingMethod::kLlama4;
  FMOE_RETURN_IF_ERROR(CheckCounts(config, moe));
  moe.has_bias = !spec.names.output_bias.empty() || AnyBias(store, experts, moe.num_experts);
  FMOE_RETURN_IF_ERROR(CheckTensors(store, config, spec));
  FMOE_RETURN_IF_ERROR(ResolveShared(config, family, spec));
  FMOE_ASSIGN_OR_RETURN(spec.axes, ResolveAxes(store, family, spec.names, moe, expert_layout));
  return spec;
}

}  // namespace fusedmoe::checkpoint
