#include "checkpoint/gguf/gguf_model.hpp"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "checkpoint/formats.hpp"
#include "checkpoint/gguf/gguf_architectures.hpp"

namespace fusedmoe::checkpoint {
namespace {

// In config.json; the third is the nature of the families that have it.
constexpr std::string_view kScoreWords[] = {"", "softmax", "sigmoid", "", "sqrtsoftplus"};

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
    {"expert_latent_length", "routed_expert_hidden_size"},
    {"attention.layer_norm_rms_epsilon", "rms_norm_eps"},
    {"activation.situ_beta", "activation_situ_beta"},
    {"activation.situ_linear_beta", "activation_situ_linear_beta"},
    {"router_logit_softcapping", "router_logit_softcapping"},
    {"swiglu_clamp_exp", "swiglu_limits"},
    {"swiglu_clamp_shexp", "swiglu_limits_shared"},
    {"hash_layer_count", "num_hash_layers"},
};

// The members of config.json that the file has under its own keys, each behind a comma.
Result<std::string> CopyKeys(const GgufHeader& header, const std::string& stem, const std::string& path) {
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
    if ((key.gguf == "moe_latent_size" || key.gguf == "expert_latent_length") && !value->is_list &&
        value->numbers.front() == 0.0) {
      continue;  // none
    }
    json += fmt::format(",\"{}\":{}", key.config, AsJson(*value));
  }
  return json;
}

Status AddScaling(const GgufHeader& header, const std::string& stem, const std::string& path,
                  std::string& json) {
  const GgufValue* scale = header.Find(stem + "expert_weights_scale");
  if (scale == nullptr) {
    return Status::Ok();
  }
  // Zero stands for "none".
  if (scale->is_list || scale->numbers.empty() || !std::isfinite(scale->numbers.front()) ||
      scale->numbers.front() < 0.0) {
    return Status::BadInput(fmt::format("'{}expert_weights_scale' is no finite number of 0 or more", stem))
        .WithFile(path);
  }
  if (scale->numbers.front() != 0.0) {
    json += fmt::format(",\"routed_scaling_factor\":{}", AsJson(*scale));
  }
  return Status::Ok();
}

// The scores of the router; 0 where the file does not say. "deepseek2" holds models of both: of those files
// that say nothing, GLM-4.7-Flash has a correction bias, which belongs to sigmoids, and DeepSeek-V2 none.
Result<int64_t> GatingFunctionOf(const GgufHeader& header, const TensorStore& store,
                                 const std::string& architecture, const std::string& path) {
  const std::string key = architecture + ".expert_gating_func";
  if (header.Find(key) != nullptr) {
    const int64_t function = header.Integer(key).value_or(-1);
    if (function < kGgufSoftmax || function > kGgufSqrtSoftplus) {
      return Status::Unsupported(fmt::format("'{}' is {}; 1 to 4 are known", key, function)).WithFile(path);
    }
    return function;
  }
  const auto is_bias = [](const TensorInfo& info) {
    return info.name.find(".exp_probs_b") != std::string::npos;
  };
  const bool biased = std::any_of(store.tensors().begin(), store.tensors().end(), is_bias);
  return architecture == "deepseek2" && biased ? kGgufSigmoid : 0;
}

}  // namespace

Result<ModelConfig> GgufConfig(const GgufHeader& header, const TensorStore& store, const std::string& path) {
  const GgufValue* named = header.Find("general.architecture");
  if (named == nullptr || named->kind != GgufValue::Kind::kString || named->text.empty()) {
    return Status::BadInput("'general.architecture' is missing or no string").WithFile(path);
  }
  std::string_view model_type = GgufModelType(named->text);
  if (model_type.empty()) {
    return Status::Unsupported(
               fmt::format("the architecture '{}' is unknown, or has no routed experts", named->text))
        .WithFile(path)
        .WithHint("docs/checkpoints.md lists those that are read");
  }
  const std::string stem = named->text + ".";
  FMOE_ASSIGN_OR_RETURN(std::string json, CopyKeys(header, stem, path));
  if (named->text == "kimi-k3") {  // no key names its activation, and those of its bounds must be there
    const std::string bound = stem + "activation.situ_beta";
    if (header.Find(bound) == nullptr) {
      return Status::BadInput(fmt::format("'{}' is missing: experts of kimi-k3 need it", bound))
          .WithFile(path);
    }
    json += ",\"hidden_act\":\"situ\"";
  }
  // Written for a bound above zero alone, and configurations of these models have one where they say nothing.
  if ((named->text == "hy_v4" || named->text == "glm5-next") &&
      header.Find(stem + "swiglu_clamp_exp") == nullptr) {
    json += ",\"swiglu_limits\":0";
  }
  FMOE_RETURN_IF_ERROR(AddScaling(header, stem, path, json));
  FMOE_ASSIGN_OR_RETURN(const int64_t scores, GatingFunctionOf(header, store, named->text, path));
  if (const std::string_view word = kScoreWords[scores]; !word.empty()) {
    json += fmt::format(",\"scoring_func\":\"{}\"", word);
  }
  if (model_type == "deepseek_v2" && scores == kGgufSigmoid) {
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

QuantRules GgufRules(std::shared_ptr<const TensorStore> store, const Family& family) {
  QuantRules rules;
  rules.producer = "gguf";
  const bool routes = family.routed_by_caller.empty();
  rules.format_of = [store = std::move(store), routes](const std::string& module) -> Result<LinearFormat> {
    LinearFormat format;
    const BlockType* type = store->BlockTypeOf(module + ".weight");
    if (type == nullptr) {
      return format;
    }
    const std::string scale = module + ".scale";
    // Gemma 4: what its router multiplies the weights of each expert with. Of NVFP4 it would be that and the
    // scale of the matrix in one.
    const bool of_router = !routes && module.ends_with(".ffn_down_exps") && store->Has(scale);
    if (of_router && type->id == kGgufNvfp4) {
      return store->Blame(
          Status::Unsupported("a scale that is the router's and that of an NVFP4 matrix is not supported"),
          scale);
    }
    if (type->id != kGgufNvfp4 && !of_router && store->Has(scale)) {
      return store->Blame(
          Status::Unsupported(fmt::format("scales beside a matrix of type {} are not supported; only NVFP4 "
                                          "has them",
                                          type->name)),
          scale);
    }
    if (type->parts.empty()) {
      return store->Blame(Status::Unsupported(fmt::format("tensors of type {} are not supported", type->name))
                              .WithHint("docs/checkpoints.md lists those that are read"),
                          module + ".weight");
    }
    if (type->integers.bits > 0) {
      format.bits = type->integers.bits;
      format.weight = IntegerWeight(format.bits, type->integers.group);
      format.negative_scales = true;  // Q4_0 uses the code -8 for the largest value, whatever its sign
      if (type->integers.zeros) {
        format.weight.zero_point_dtype = DType::kF32;
        format.zero_point = ".weight_zero";
      }
      format.stored = type->stored;
      if (type->integers.super > 0 || type->stored.super_cols > 0) {
        format.weight.super_cols = type->integers.super;
        format.super_scale = ".weight_super_scale";
        const BlockPart& last = type->parts.back();
        format.super_minimum = last.suffix == ".weight_super_minimum" ? last.suffix : "";
      }
    } else if (type->id == kGgufMxfp4) {
      format.weight = Mx(DType::kF4E2M1);
    } else if (type->id == kGgufNvfp4) {
      format.weight = Nvfp4(16);
      format.second_scale = ".scale";
    } else {
      return format;
    }
    format.scale = ".weight_scale";
    return format;
  };
  return rules;
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
  } else if (!present("ffn_up.0.weight").empty() || !present("ffn_down.0.weight").empty()) {
    // Files of before April 2024 (Mixtral, Grok): a tensor for each expert.
    experts.form = ExpertForm::kPerExpert;
    experts.up = prefix + "ffn_up.{e}";
    experts.gate = prefix + "ffn_gate.{e}";
  } else {
    return std::nullopt;
  }
  experts.down = prefix + (experts.per_expert() ? "ffn_down.{e}" : "ffn_down_exps");
  if (family.routed_by_caller.empty()) {
    names.router = present("ffn_gate_inp.weight");
    names.router_bias = present("ffn_gate_inp.bias");
    names.correction_bias = present("exp_probs_b.bias");
    if (names.correction_bias.empty()) {
      names.correction_bias = present("exp_probs_b");
    }
    names.hash_table = present("ffn_gate_tid2eid.weight");
  }
  const auto first_of = [&](std::initializer_list<const char*> suffixes) {
    for (const char* suffix : suffixes) {
      if (std::string name = present(suffix); !name.empty()) {
        return name;
      }
    }
    return std::string();
  };
  // Converters of Kimi-K3 name these in several ways; the last is Arctic's word for a norm of its own.
  names.to_latent = first_of({"ffn_latent_down.weight", "ffn_routed_down.weight"});
  names.from_latent = first_of({"ffn_latent_up.weight", "ffn_routed_up.weight"});
  if (!family.latent_norm.empty()) {
    names.latent_norm =
        first_of({"ffn_latent_norm.weight", "ffn_routed_norm.weight", "ffn_norm_exps.weight"});
  }
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

LayerNames HuggingFaceNames(const LayerSpec& spec) {
  const LayerNames& own = spec.names;
  const Family& family = *spec.family;
  const auto first_word = [](std::string_view words) { return std::string(SplitWords(words).front()); };
  LayerNames names;
  names.prefix = fmt::format("model.layers.{}.", spec.layer);
  names.block = BlockName(names.prefix, first_word(family.blocks));
  names.router = names.block + first_word(family.router);
  if (!own.router_bias.empty()) {
    names.router_bias = names.router.substr(0, names.router.rfind('.')) + ".bias";
  }
  if (!own.correction_bias.empty()) {
    names.correction_bias = names.block + first_word(family.correction_bias);
  }
  if (!own.to_latent.empty()) {
    names.to_latent = names.block + std::string(family.to_latent);
    names.from_latent = names.block + std::string(family.from_latent);
  }
  if (!own.latent_norm.empty()) {
    names.latent_norm = names.block + std::string(family.latent_norm);
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

}  // namespace fusedmoe::checkpoint
