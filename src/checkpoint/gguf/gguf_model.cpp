#include "checkpoint/gguf/gguf_model.hpp"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "checkpoint/formats.hpp"

namespace fusedmoe::checkpoint {
namespace {

struct Architecture {
  std::string_view name;        ///< general.architecture
  std::string_view model_type;  ///< of the family table
};
constexpr Architecture kArchitectures[] = {
    {"llama", "mixtral"},
    {"llama4", "llama4_text"},
    {"grok", "grok"},
    {"qwen2moe", "qwen2_moe"},
    {"qwen3moe", "qwen3_moe"},
    {"qwen3vlmoe", "qwen3_vl_moe_text"},
    {"qwen3next", "qwen3_next"},
    {"qwen35moe", "qwen3_5_moe_text"},
    {"qwen4exp", "qwen4_exp_text"},
    {"phimoe", "phimoe"},
    {"jamba", "jamba"},
    {"dbrx", "dbrx"},
    {"olmoe", "olmoe"},
    {"arctic", "arctic"},
    {"deepseek", "deepseek_v2"},
    {"deepseek2", "deepseek_v2"},  // deepseek_v3 where scores are sigmoids
    {"deepseek2-ocr", "deepseek_ocr2"},
    {"deepseek32", "deepseek_v32"},
    {"deepseek4", "deepseek_v4"},
    {"glm4moe", "glm4_moe"},
    {"glm-dsa", "glm_moe_dsa"},
    {"glm5-next", "glm5_next_text"},
    {"ernie4_5-moe", "ernie4_5_moe"},
    {"nemotron_h_moe", "nemotron_h"},
    {"exaone-moe", "exaone_moe"},
    {"granitemoe", "granitemoe"},
    {"granitehybrid", "granitemoehybrid"},
    {"granite_swa", "granitemoe_swa"},
    {"bailingmoe", "bailing_moe"},
    {"bailingmoe2", "bailing_moe_v2"},
    {"bailingmoe3", "bailing_hybrid"},
    {"dots1", "dots1"},
    {"dots3note", "dots3_note_text"},
    {"afmoe", "afmoe"},
    {"hunyuan-moe", "hunyuan_v1_moe"},
    {"hy_v3", "hy_v3"},
    {"hy_v4", "hy_v4"},
    {"laguna", "laguna"},
    {"mellum", "mellum"},
    {"cohere2moe", "cohere2_moe"},
    {"gpt-oss", "gpt_oss"},
    {"lfm2moe", "lfm2_moe"},
    {"minimax-01", "minimax_text_01"},
    {"minimax-m2", "minimax_m2"},
    {"minimax-m3", "minimax_m3_vl_text"},
    {"mistral4", "mistral4"},
    {"mimo2", "mimo_v2_flash"},
    {"step35", "step3p5"},
    {"kimi-linear", "kimi_linear"},
    {"llada-moe", "llada_moe"},
    {"maple", "maple"},
    {"mistral3", "mixtral"},
    {"rnd1", "qwen3_moe"},
    // Refused, with the family's reason.
    {"gemma4", "gemma4"},
    {"grovemoe", "grove_moe"},
    {"kimi-k3", "kimi_k3"},
    {"smallthinker", "smallthinker"},
};

// expert_gating_func.
constexpr int64_t kSoftmaxScores = 1, kSigmoidScores = 2, kSoftmaxOfChosen = 3, kSqrtSoftplusScores = 4;
// In config.json; the third is the nature of the families that have it.
constexpr std::string_view kScoreWords[] = {"", "softmax", "sigmoid", "", "sqrtsoftplus"};

int64_t GatingFunction(ScoreFunction score) {
  return score == ScoreFunction::kSigmoid        ? kSigmoidScores
         : score == ScoreFunction::kSqrtSoftplus ? kSqrtSoftplusScores
                                                 : kSoftmaxScores;
}

std::string AsJson(const GgufValue& value) {
  const auto number = [&](double x) {
    return value.kind == GgufValue::Kind::kBool      ? std::string(x != 0 ? "true" : "false")
           : value.kind == GgufValue::Kind::kInteger ? fmt::format("{:.0f}", x)
                                                     : fmt::format("{:.9g}", x);
  };
  if (!value.is_list) {
    return number(value.numbers.front());
  }
  std::string list;
  for (const double x : value.numbers) {
    list += fmt::format("{}{}", list.empty() ? "" : ",", number(x));
  }
  return "[" + list + "]";
}

struct Key {
  std::string_view gguf;    ///< behind "<architecture>."
  std::string_view config;  ///< in config.json
};
constexpr Key kKeys[] = {
    {"block_count", "num_hidden_layers"},
    {"embedding_length", "hidden_size"},
    {"feed_forward_length", "intermediate_size"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_count", "num_experts"},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_group_count", "n_group"},
    {"expert_group_used_count", "topk_group"},
    {"expert_weights_norm", "norm_topk_prob"},
    {"moe_latent_size", "moe_latent_size"},
    {"router_logit_softcapping", "router_logit_softcapping"},
    {"swiglu_clamp_exp", "swiglu_limits"},
    {"swiglu_clamp_shexp", "swiglu_limits_shared"},
    {"hash_layer_count", "num_hash_layers"},
};

// The scores of the router; 0 where the file does not say. "deepseek2" holds models of both: of those files
// that say nothing, GLM-4.7-Flash has a correction bias, which belongs to sigmoids, and DeepSeek-V2 none.
Result<int64_t> GatingFunctionOf(const GgufHeader& header, const TensorStore& store,
                                 const std::string& architecture, const std::string& path) {
  const std::string key = architecture + ".expert_gating_func";
  if (header.Find(key) != nullptr) {
    const int64_t function = header.Integer(key).value_or(-1);
    if (function < kSoftmaxScores || function > kSqrtSoftplusScores) {
      return Status::Unsupported(fmt::format("'{}' is {}; 1 to 4 are known", key, function)).WithFile(path);
    }
    return function;
  }
  const auto is_bias = [](const TensorInfo& info) {
    return info.name.find(".exp_probs_b") != std::string::npos;
  };
  const bool biased = std::any_of(store.tensors().begin(), store.tensors().end(), is_bias);
  return architecture == "deepseek2" && biased ? kSigmoidScores : 0;
}

}  // namespace

Result<ModelConfig> GgufConfig(const GgufHeader& header, const TensorStore& store, const std::string& path) {
  const GgufValue* named = header.Find("general.architecture");
  if (named == nullptr || named->kind != GgufValue::Kind::kString || named->text.empty()) {
    return Status::BadInput("'general.architecture' is missing or no string").WithFile(path);
  }
  const auto* known = std::find_if(std::begin(kArchitectures), std::end(kArchitectures),
                                   [&](const Architecture& row) { return row.name == named->text; });
  if (known == std::end(kArchitectures)) {
    return Status::Unsupported(
               fmt::format("the architecture '{}' is unknown, or has no routed experts", named->text))
        .WithFile(path)
        .WithHint("docs/checkpoints.md lists those that are read");
  }
  std::string_view model_type = known->model_type;
  const std::string stem = named->text + ".";
  std::string json;
  for (const Key& key : kKeys) {
    const GgufValue* value = header.Find(stem + std::string(key.gguf));
    if (value == nullptr) {
      continue;
    }
    const bool numbers =
        value->kind != GgufValue::Kind::kString && !value->numbers.empty() &&
        std::all_of(value->numbers.begin(), value->numbers.end(), [](double x) { return std::isfinite(x); });
    if (!numbers) {
      return Status::BadInput(fmt::format("'{}{}' is no finite number or short list of such", stem, key.gguf))
          .WithFile(path);
    }
    json += fmt::format(",\"{}\":{}", key.config, AsJson(*value));
  }
  if (const GgufValue* scale = header.Find(stem + "expert_weights_scale"); scale != nullptr) {
    // Zero stands for "none".
    if (scale->is_list || scale->numbers.empty() || !std::isfinite(scale->numbers.front())) {
      return Status::BadInput(fmt::format("'{}expert_weights_scale' is no finite number", stem))
          .WithFile(path);
    }
    if (scale->numbers.front() != 0.0) {
      json += fmt::format(",\"routed_scaling_factor\":{}", AsJson(*scale));
    }
  }
  FMOE_ASSIGN_OR_RETURN(const int64_t scores, GatingFunctionOf(header, store, named->text, path));
  if (const std::string_view word = kScoreWords[scores]; !word.empty()) {
    json += fmt::format(",\"scoring_func\":\"{}\"", word);
  }
  if (model_type == "deepseek_v2" && scores == kSigmoidScores) {
    model_type = "deepseek_v3";
  }
  // Files leave it out where it is the model's nature.
  if (header.Find(stem + "expert_weights_norm") == nullptr) {
    if (named->text == "qwen3moe" || named->text == "rnd1") {
      json += ",\"norm_topk_prob\":true";
    }
    if (named->text == "deepseek2") {
      json += ",\"norm_topk_prob\":false";
    }
  }
  return ModelConfig::Parse(fmt::format("{{\"model_type\":\"{}\"{}}}", model_type, json), path);
}

QuantRules GgufRules(std::shared_ptr<const TensorStore> store) {
  QuantRules rules;
  rules.producer = "gguf";
  rules.format_of = [store = std::move(store)](const std::string& module) -> Result<LinearFormat> {
    LinearFormat format;
    const BlockType* type = store->BlockTypeOf(module + ".weight");
    if (type == nullptr) {
      return format;
    }
    if (const std::string scale = module + ".scale"; type->id != kGgufNvfp4 && store->Has(scale)) {
      return store->Blame(
          Status::Unsupported(fmt::format("scales beside a matrix of type {} are not supported; only NVFP4 "
                                          "has them",
                                          type->name)),
          scale);
    }
    if (type->parts.empty()) {
      return store->Blame(
          Status::Unsupported(fmt::format("tensors of type {} are not supported", type->name))
              .WithHint(
                  "F32, F16, BF16, Q4_0, Q8_0, MXFP4 and NVFP4 are read as they are; Q4_1, Q5_0, Q5_1, Q2_K "
                  "to Q6_K, IQ4_NL and IQ4_XS are decoded to F32"),
          module + ".weight");
    }
    switch (type->id) {
      case kGgufQ4_0:
      case kGgufQ8_0:
        format.bits = type->id == kGgufQ4_0 ? 4 : 8;
        format.weight = IntegerWeight(format.bits, type->elements);
        format.negative_scales = true;  // Q4_0 uses the code -8 for the largest value, whatever its sign
        break;
      case kGgufMxfp4:
        format.weight = Mx(DType::kF4E2M1);
        break;
      case kGgufNvfp4:
        format.weight = Nvfp4(16);
        format.second_scale = ".scale";
        break;
      default:
        return format;
    }
    format.scale = ".weight_scale";
    return format;
  };
  return rules;
}

std::string_view GgufArchitectureOf(const Family& family) {
  if (family.name == "deepseek_v3") {
    return "deepseek2";
  }
  for (const Architecture& row : kArchitectures) {
    // "deepseek" holds the first generation alone.
    if (row.name != "deepseek" && FindFamily(row.model_type) == &family) {
      return row.name;
    }
  }
  return "";
}

Result<std::vector<GgufEntry>> GgufMetadata(const Family& family, const ModelConfig& config,
                                            int64_t num_layers, std::span<const GgufLayer> layers) {
  const std::string_view architecture = GgufArchitectureOf(family);
  if (architecture.empty()) {
    return Status::Unsupported(
               fmt::format("no architecture of GGUF holds models of the family {}", family.name))
        .WithFile(config.path());
  }
  const MoeConfig& first = layers.front().config;
  const RoutingConfig& routing = first.routing;
  std::vector<GgufEntry> entries = {{"general.architecture", std::string(architecture)},
                                    {"general.type", std::string("model")},
                                    {"general.quantization_version", uint32_t{2}}};
  const auto add = [&](std::string_view key, auto value) {
    entries.push_back({fmt::format("{}.{}", architecture, key), value});
  };
  const auto integer = [&](std::string_view key, int64_t value) { add(key, static_cast<uint32_t>(value)); };
  integer("block_count", num_layers);
  integer("embedding_length", first.hidden);
  FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> dense,
                        config.Integer("intermediate_size", -1, 0, int64_t{1} << 31));
  if (dense && *dense > 0) {
    integer("feed_forward_length", *dense);
  }
  integer("expert_feed_forward_length", first.intermediate);
  integer("expert_count", first.num_experts);
  integer("expert_used_count", routing.top_k);
  if (first.shared.intermediate > 0) {
    integer("expert_shared_feed_forward_length", first.shared.intermediate);
    integer("expert_shared_count", std::max<int64_t>(1, first.shared.intermediate / first.intermediate));
  }
  if (routing.num_groups > 1) {
    integer("expert_group_count", routing.num_groups);
    integer("expert_group_used_count", routing.topk_groups);
  }
  // Where routed and shared experts are averaged, the reader halves the factor again.
  if (const float scale = routing.scaling_factor / first.shared.weight; scale != 1.0F) {
    add("expert_weights_scale", scale);
  }
  add("expert_weights_norm", routing.renormalize);
  integer("expert_gating_func", family.name == "gpt_oss" ? kSoftmaxOfChosen : GatingFunction(routing.score));
  if (routing.logit_softcap != 0.0F) {
    add("router_logit_softcapping", routing.logit_softcap);
  }
  // swigluoai's limit has no key: readers know it.
  if (family.activation.has_limit && family.activation.kind != ActivationKind::kSwigluOai) {
    std::vector<float> routed(static_cast<size_t>(num_layers)), shared(routed.size());
    for (const GgufLayer& layer : layers) {
      const ActivationSpec& own = layer.config.activation;
      routed[static_cast<size_t>(layer.layer)] = own.limit;
      shared[static_cast<size_t>(layer.layer)] = layer.config.shared.activation.value_or(own).limit;
    }
    add("swiglu_clamp_exp", std::move(routed));
    add("swiglu_clamp_shexp", std::move(shared));
  }
  return entries;
}

LayerNames HuggingFaceNames(const LayerSpec& spec) {
  const LayerNames& own = spec.names;
  const Family& family = *spec.family;
  const auto first_word = [](std::string_view words) { return std::string(SplitWords(words).front()); };
  LayerNames names;
  names.prefix = fmt::format("model.layers.{}.", spec.layer);
  names.block = names.prefix + first_word(family.blocks) + ".";
  names.router = names.block + first_word(family.router);
  if (!own.router_bias.empty()) {
    names.router_bias = names.router.substr(0, names.router.rfind('.')) + ".bias";
  }
  if (!own.correction_bias.empty()) {
    names.correction_bias = names.block + first_word(family.correction_bias);
  }
  const std::string stem = names.block + "experts.{e}.";
  const bool gated = !own.experts.gate.empty() || own.experts.form == ExpertForm::kFused;
  if (gated) {
    names.experts.gate = stem + "gate_proj";
  }
  names.experts.up = stem + "up_proj";
  names.experts.down = stem + "down_proj";
  if (!own.shared_up.empty()) {
    // A gate of its own goes with the singular.
    const std::string shared =
        names.block +
        (family.shared_gate.starts_with("shared_expert_gate") ? "shared_expert" : first_word(family.shared)) +
        ".";
    if (!own.shared_gate_proj.empty()) {
      names.shared_gate_proj = shared + "gate_proj";
    }
    names.shared_up = shared + "up_proj";
    names.shared_down = shared + "down_proj";
    if (!own.shared_gate.empty()) {
      names.shared_gate = names.block + first_word(family.shared_gate);
    }
  }
  return names;
}

std::optional<LayerNames> FindGgufLayerNames(const TensorStore& store, const Family& family,
                                             const std::string& prefix) {
  const auto present = [&](std::string_view name) {
    std::string full = prefix + std::string(name);
    return store.Has(full) ? full : std::string();
  };
  LayerNames names;
  names.prefix = names.block = prefix;
  ExpertNames& experts = names.experts;
  if (!present("ffn_gate_up_exps.weight").empty()) {
    experts.form = ExpertForm::kFused;
    experts.up = prefix + "ffn_gate_up_exps";
  } else if (!present("ffn_up_exps.weight").empty()) {
    experts.form = ExpertForm::kStacked;
    experts.up = prefix + "ffn_up_exps";
    if (!present("ffn_gate_exps.weight").empty()) {
      experts.gate = prefix + "ffn_gate_exps";
    }
  } else {
    return std::nullopt;
  }
  experts.down = prefix + "ffn_down_exps";
  names.router = present("ffn_gate_inp.weight");
  names.router_bias = present("ffn_gate_inp.bias");
  names.correction_bias = present("exp_probs_b.bias");
  if (names.correction_bias.empty()) {
    names.correction_bias = present("exp_probs_b");
  }
  names.hash_table = present("ffn_gate_tid2eid.weight");
  if (!present("ffn_up_shexp.weight").empty()) {
    names.shared_up = prefix + "ffn_up_shexp";
    names.shared_down = prefix + "ffn_down_shexp";
    if (!present("ffn_gate_shexp.weight").empty()) {
      names.shared_gate_proj = prefix + "ffn_gate_shexp";
    } else {
      names.shared_fused = family.activation.gated;
    }
    names.shared_gate = present("ffn_gate_inp_shexp.weight");
  }
  return names;
}

}  // namespace fusedmoe::checkpoint
