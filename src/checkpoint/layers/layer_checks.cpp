// What a layer must not be, and what it must have: switches that nothing here computes, and tensors without
// which a layer would compute something else and not fail.
#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "checkpoint/layers/layer_spec.hpp"
#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe::checkpoint {
namespace {

constexpr int64_t kMaxHashLayers = int64_t{1} << 20;

// GPTQModel 7 cuts the fused gate_up_proj of every family into halves, and joins what they give before the
// activation. Where rows alternate (gpt-oss), each half has gates and ups, under names that say otherwise.
Status CheckHalves(const TensorStore& store, const ModelConfig& config, const LayerSpec& spec) {
  const JsonValue* writer = config.Find("quantization_config.meta.quantizer");
  if (writer == nullptr || !spec.family->interleaved() || spec.names.experts.form != ExpertForm::kPerExpert) {
    return Status::Ok();
  }
  const std::string& name =
      writer->is_array() && !writer->items().empty() ? writer->items().front().string() : writer->string();
  if (!name.starts_with("gptqmodel")) {
    return Status::Ok();
  }
  return store.Blame(
      Status::Unsupported(fmt::format("{} stores the halves of {}'s gate_up_proj as gate_proj and "
                                      "up_proj; rows of gate and up alternate in both",
                                      name, spec.family->name)),
      spec.names.experts.Up(0) + ".qweight");
}

// Keys that say whether routers have a correction bias. Ernie's and K2's own are apart: there the model has
// the tensor, and uses it, whatever they say.
constexpr std::string_view kCorrectionKeys =
    "use_expert_bias use_routing_bias moe_router_enable_expert_bias moe_router_use_expert_bias "
    "use_moe_router_bias router_enable_expert_bias";
constexpr std::string_view kLooseCorrectionKeys = "moe_use_aux_free moe_gate_bias";

// A correction bias that the configuration denies is either left over or switched off by mistake.
Status CheckNoCorrection(const TensorStore& store, const ModelConfig& config, const LayerNames& names) {
  std::string_view key;
  const JsonValue* used = config.Find(kCorrectionKeys, &key);
  if (used == nullptr || used->boolean() || names.correction_bias.empty()) {
    return Status::Ok();
  }
  return store.Blame(Status::BadInput(fmt::format("the router has this correction bias, but '{}' is {} in {}",
                                                  key, used->ToString(), config.path()))
                         .WithHint("say true there, or leave the tensor away"),
                     names.correction_bias);
}

// Whether the configuration takes away the correction bias that layers of the family have.
Result<bool> HasNoCorrection(const ModelConfig& config, const FamilyRouting& row) {
  FMOE_ASSIGN_OR_RETURN(const std::optional<std::string> method, config.Text("topk_method"));
  FMOE_ASSIGN_OR_RETURN(const std::optional<bool> used,
                        config.Boolean(fmt::format("{} {}", kCorrectionKeys, kLooseCorrectionKeys)));
  const bool said = method == "noaux_tc" || !row.corrected_when_said;
  return (method && method != "noaux_tc") || !used.value_or(said);
}

// DeepSeek-V4: the first layers look their experts up by token ids.
Result<bool> HashesTokens(const ModelConfig& config, int64_t layer) {
  FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> first,
                        config.Integer("num_hash_layers", -1, 0, kMaxHashLayers));
  const JsonValue* types = config.Find("mlp_layer_types");
  const auto at = static_cast<size_t>(layer);
  const bool listed = types != nullptr && types->is_array() && at < types->items().size() &&
                      types->items()[at].is_string() && types->items()[at].string() == "hash_moe";
  return listed || layer < first.value_or(0);
}

// Latent experts: the configuration has a size, the layer two projections; each needs the other. Kimi-K3 says
// whether there is a norm.
Status CheckLatent(const TensorStore& store, const ModelConfig& config, const LayerSpec& spec) {
  const int64_t latent = spec.config.latent;
  const LayerNames& names = spec.names;
  const Family& family = *spec.family;
  const auto expected = [&](std::string_view gguf, std::string_view own) {
    return names.block + std::string(store.is_gguf() ? gguf : own);
  };
  const auto missing = [&](const std::string& name) {
    return store.Blame(
        Status::BadInput(fmt::format(
            "the tensor is missing; the latent size is {}: it stands between hidden states and experts",
            latent)),
        name);
  };
  for (const auto& [name, wanted] :
       {std::pair(&names.to_latent, expected("ffn_latent_down.weight", family.to_latent)),
        std::pair(&names.from_latent, expected("ffn_latent_up.weight", family.from_latent))}) {
    if (latent > 0 && name->empty()) {
      return missing(wanted);
    }
    if (latent == 0 && !name->empty()) {
      return store.Blame(
          Status::BadInput("the layer projects the rows of its experts, but no latent size is given"), *name);
    }
  }
  FMOE_ASSIGN_OR_RETURN(const std::optional<bool> normalized, config.Boolean("latent_moe_use_norm"));
  if (latent > 0 && normalized.value_or(false) && names.latent_norm.empty()) {
    return missing(names.block + std::string(family.latent_norm));
  }
  if (!names.latent_norm.empty() && (latent == 0 || !normalized.value_or(true))) {
    return store.Blame(Status::BadInput(fmt::format(
                           "the layer has a norm behind its experts, but {}",
                           latent == 0 ? "no latent size is given" : "'latent_moe_use_norm' is false")),
                       names.latent_norm);
  }
  return Status::Ok();
}

// Nemotron-H: everything but the routed experts has biases, or nothing has.
Status CheckMlpBiases(const TensorStore& store, const ModelConfig& config, const LayerSpec& spec) {
  FMOE_ASSIGN_OR_RETURN(const std::optional<bool> biased, config.Boolean("mlp_bias"));
  if (spec.family->name != "nemotron_h" || !biased.value_or(false)) {
    return Status::Ok();
  }
  const auto module_of = [](const std::string& weight) { return weight.substr(0, weight.rfind('.')); };
  const LayerNames& names = spec.names;
  for (const std::string& module :
       {names.shared_up, names.shared_down, module_of(names.to_latent), module_of(names.from_latent)}) {
    if (!module.empty() && !store.Has(module + ".bias")) {
      return store.Blame(Status::BadInput("the tensor is missing; 'mlp_bias' is true"), module + ".bias");
    }
  }
  return Status::Ok();
}

// DeepSeek-V2 with 'n_shared_experts' 0 and 'mlp_bias': shared experts of no width, whose down_proj still
// adds its bias to each token.
Status CheckWidthless(const TensorStore& store, const LayerNames& names) {
  const std::string bias = names.widthless + ".bias";
  if (names.widthless.empty() || !store.Has(bias)) {
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(const Tensor stored, store.Load(bias));
  std::vector<float> values(IsFloat(stored.dtype()) ? static_cast<size_t>(stored.shape().count()) : 0);
  DecodeRow(stored.dtype(), stored.view().data(), 0, static_cast<int64_t>(values.size()), values.data());
  if (!values.empty() && std::all_of(values.begin(), values.end(), [](float value) { return value == 0; })) {
    return Status::Ok();
  }
  return store.Blame(Status::Unsupported("the model adds this bias of shared experts without rows to each "
                                         "token; a layer without shared experts has no place for it")
                         .WithHint("where it is to count for nothing, fill it with zeros or leave the tensor "
                                   "away"),
                     bias);
}

// Tensors without which a layer would compute something else and not fail.
Status CheckWhole(const TensorStore& store, const ModelConfig& config, const LayerSpec& spec) {
  const LayerNames& names = spec.names;
  const Family& family = *spec.family;
  const auto missing = [&](const std::string& name, std::string_view why) {
    return store.Blame(Status::BadInput(fmt::format("the tensor is missing; {}", why)), name);
  };
  const auto first = [&](std::string_view words) {
    return names.block + std::string(SplitWords(words).front());
  };
  if (names.router.empty() && family.routed_by_caller.empty()) {
    return store.Blame(Status::BadInput("the router's weight is missing"), first(family.router));
  }
  FMOE_ASSIGN_OR_RETURN(const bool hashes, HashesTokens(config, spec.layer));
  if (hashes && names.hash_table.empty()) {
    return missing(names.block + (store.is_gguf() ? "ffn_gate_tid2eid.weight" : "gate.tid2eid"),
                   "the layer chooses experts by token ids");
  }
  FMOE_RETURN_IF_ERROR(CheckLatent(store, config, spec));
  if (store.is_gguf()) {
    return Status::Ok();
  }
  FMOE_RETURN_IF_ERROR(CheckMlpBiases(store, config, spec));
  FMOE_RETURN_IF_ERROR(CheckWidthless(store, names));
  if (!names.missing.empty()) {
    return missing(names.missing, "the layer has shared experts that need it");
  }
  if (family.has_router_bias && names.router_bias.empty()) {
    return missing(names.router.substr(0, names.router.rfind('.')) + ".bias",
                   fmt::format("routers of {} have one", family.name));
  }
  if (!family.output_bias.empty() && names.output_bias.empty()) {
    return missing(first(family.output_bias), fmt::format("layers of {} have one", family.name));
  }
  FMOE_RETURN_IF_ERROR(CheckNoCorrection(store, config, names));
  FMOE_ASSIGN_OR_RETURN(const bool no_correction, HasNoCorrection(config, family.routing));
  if (family.routing.corrected && names.correction_bias.empty() && !no_correction &&
      (family.routing.corrected_when_said || spec.config.routing.score == family.routing.score)) {
    return missing(first(family.correction_bias),
                   fmt::format("routers of {} choose experts by scores plus this bias", family.name));
  }
  return Status::Ok();
}

}  // namespace

// Switches that change what a layer computes, in ways that no part of this library does.
Status CheckSwitches(const ModelConfig& config, const Family& family) {
  const auto refuse = [&](std::string_view key, std::string_view why) {
    return Status::Unsupported(fmt::format("'{}' is {}: {}", key, config.Find(key)->ToString(), why))
        .WithFile(config.path());
  };
  if (const JsonValue* value = config.Find("router_n_groups");
      value != nullptr && value->number() > 1.0 && !family.routing.every_group) {
    return refuse(
        "router_n_groups",
        fmt::format("how routers of {} take as many experts from every group is not known", family.name));
  }
  if (const JsonValue* value = config.Find("moe_apply_router_weight_on_input");
      value != nullptr && value->boolean()) {
    return refuse("moe_apply_router_weight_on_input", "only Llama-4 weighs the input of its experts");
  }
  if (const JsonValue* value = config.Find("moe_router_use_sigmoid"); value != nullptr && !value->boolean()) {
    return refuse("moe_router_use_sigmoid",
                  fmt::format("what else routers of {} would score by is not known", family.name));
  }
  const JsonValue* norm = config.Find("ffn_config.moe_normalize_expert_weights");
  if (norm != nullptr && (!norm->is_number() || norm->number() != 1.0)) {
    return refuse("ffn_config.moe_normalize_expert_weights",
                  "router weights are normalized to a sum of 1, or not at all");
  }
  const JsonValue* zero = config.Find("zero_expert_type");
  if (zero != nullptr && zero->string() != "identity") {
    return refuse("zero_expert_type", "experts without weights add their weighted input (\"identity\")");
  }
  return Status::Ok();
}

Status CheckTensors(const TensorStore& store, const ModelConfig& config, const LayerSpec& spec) {
  FMOE_RETURN_IF_ERROR(CheckHalves(store, config, spec));
  // DeepSeek-V4 with a vision tower; hidden states do not say what they are of.
  for (const char* name : {"gate.bias_vl", "exp_probs_b_vl.bias", "exp_probs_b_vl"}) {  // safetensors, GGUF
    if (const std::string bias = spec.names.block + name; store.Has(bias)) {
      return store.Blame(Status::Unsupported("image tokens choose their experts by this bias, text tokens by "
                                             "another; layers that tell them apart are not supported"),
                         bias);
    }
  }
  return CheckWhole(store, config, spec);
}

}  // namespace fusedmoe::checkpoint
