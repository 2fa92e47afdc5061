// Quark: one description for the model, others for modules by wildcard; a list means two levels.
#include <memory>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "checkpoint/formats.hpp"
#include "checkpoint/rules/quant_rules.hpp"
#include "checkpoint/rules/rules_support.hpp"

namespace fusedmoe::checkpoint {
namespace {

// One level of a tensor's description.
struct Level {
  std::string dtype, qscheme, scale_format, scale_mode;
  int64_t group = 0, axis = 0;
  bool dynamic = false, symmetric = true;
};

Result<std::vector<Level>> ReadLevels(std::string_view key, const JsonValue& parent,
                                      const std::string& path) {
  std::vector<Level> levels;
  const JsonValue* spec = parent.Find(key);
  if (spec == nullptr) {
    return levels;
  }
  std::vector<const JsonValue*> objects;
  if (spec->is_array()) {
    for (const JsonValue& item : spec->items()) {
      objects.push_back(&item);
    }
  } else {
    objects.push_back(spec);
  }
  for (const JsonValue* object : objects) {
    if (!object->is_object()) {
      return Wrong(key, object, "an object", path);
    }
    const auto text = [&](const char* name) {
      const JsonValue* value = object->Find(name);
      return value == nullptr ? std::string() : value->string();
    };
    Level level;
    level.dtype = text("dtype");
    level.qscheme = text("qscheme");
    level.scale_format = text("scale_format");
    level.scale_mode = text("scale_calculation_mode");
    if (level.dtype.empty() || level.qscheme.empty()) {
      return Status::BadInput("a Quark tensor description needs 'dtype' and 'qscheme'").WithFile(path);
    }
    FMOE_ASSIGN_OR_RETURN(level.group, Size(*object, "group_size", 1, kLargestGroup, 0, path));
    FMOE_ASSIGN_OR_RETURN(level.dynamic, Flag(*object, "is_dynamic", false, path));
    FMOE_ASSIGN_OR_RETURN(level.symmetric, Flag(*object, "symmetric", true, path));
    levels.push_back(std::move(level));
  }
  return levels;
}

std::string Words(const std::vector<Level>& levels) {
  std::string out;
  for (const Level& level : levels) {
    out += fmt::format("{}{} {}{}{}", out.empty() ? "" : " + ", level.dtype, level.qscheme,
                       level.group > 0 ? fmt::format(" {}", level.group) : "",
                       level.symmetric ? "" : " (asymmetric)");
  }
  return out.empty() ? "none" : out;
}

MxScaleRule RuleOf(const Level& level) {
  return level.scale_mode == "floor"  ? MxScaleRule::kFloor
         : level.scale_mode == "ceil" ? MxScaleRule::kCeil
                                      : MxScaleRule::kEven;
}

std::optional<DType> MxElement(const Level& level) {
  if (level.scale_format != "e8m0" || level.qscheme != "per_group" || level.group != 32 || !level.symmetric) {
    return std::nullopt;
  }
  if (level.dtype == "fp4") {
    return DType::kF4E2M1;
  }
  if (level.dtype == "fp8_e4m3") {
    return DType::kF8E4M3;
  }
  if (level.dtype == "fp6_e3m2") {
    return DType::kF6E3M2;
  }
  if (level.dtype == "fp6_e2m3") {
    return DType::kF6E2M3;
  }
  return std::nullopt;
}

bool IsNvFp4(const std::vector<Level>& levels) {
  return levels.size() == 2 && levels[0].dtype == "fp4" && levels[0].group == 16 && levels[0].symmetric &&
         levels[1].dtype == "fp8_e4m3" && levels[1].symmetric;
}

// The formats of one kind of weights each, with the inputs beside them (none: weight only); nothing where
// Quark describes what is not supported.

std::optional<LinearFormat> NvFp4Format(const std::vector<Level>& input) {
  std::optional<LinearFormat> format(std::in_place);
  format->weight = Nvfp4(16);
  format->second_scale = ".weight_scale_2";
  if (input.empty()) {
    return format;
  }
  if (!IsNvFp4(input)) {
    return std::nullopt;
  }
  format->activation = Nvfp4Input();
  format->input_scale = ".input_scale_2";
  return format;
}

std::optional<LinearFormat> MxFormat(DType element, const Level* input) {
  std::optional<LinearFormat> format(std::in_place);
  format->weight = Mx(element);
  if (input == nullptr) {
    return format;
  }
  if (const std::optional<DType> input_element = MxElement(*input)) {
    format->activation = MxInput(*input_element, RuleOf(*input));
    return format;
  }
  if (input->dtype != "fp8_e4m3" || input->qscheme != "per_tensor" || !input->symmetric) {
    return std::nullopt;
  }
  format->activation = StaticFp8();
  format->activation.static_tensor_scale = !input->dynamic;
  if (!input->dynamic) {
    format->input_scale = ".input_scale";
  }
  return format;
}

// In groups codes are [in, out / 8]. By channel they are [out, in / 8], which the shapes of a square matrix
// would not tell apart: not read.
std::optional<LinearFormat> FourBitFormat(const Level& weight, const Level* input,
                                          std::optional<bool> awq_order) {
  if (input != nullptr || !awq_order) {
    return std::nullopt;
  }
  std::optional<LinearFormat> format(std::in_place);
  format->packing = Packing::kAwq;
  format->nibbles_in_order = !*awq_order;
  format->bits = 4;
  format->weight = IntegerWeight(4, weight.group);
  format->scale_is_in_out = true;
  format->whole_groups = true;
  format->twos_complement = weight.dtype == "int4";
  format->zero_point = ".weight_zero_point";
  format->zero_point_optional = weight.symmetric;
  return format;
}

std::optional<LinearFormat> EightBitFormat(const Level& weight, const Level* input) {
  std::optional<LinearFormat> format(std::in_place);
  format->weight.element = weight.dtype == "int8" ? DType::kI8 : DType::kF8E4M3;
  format->bits = weight.dtype == "int8" ? 8 : 0;
  format->weight.has_tensor_scale = weight.qscheme == "per_tensor";
  format->weight.has_channel_scale = weight.qscheme == "per_channel";
  if (!weight.symmetric || (!format->weight.has_tensor_scale && !format->weight.has_channel_scale)) {
    return std::nullopt;
  }
  if (input == nullptr) {
    return format;
  }
  if (input->dtype != weight.dtype || !input->symmetric) {
    return std::nullopt;
  }
  format->activation.element = format->weight.element;
  if (input->qscheme == "per_channel" && input->dynamic) {
    format->activation.group = kPerRow;  // one scale for each token
    return format;
  }
  if (input->qscheme != "per_tensor") {
    return std::nullopt;
  }
  format->activation.static_tensor_scale = !input->dynamic;
  if (!input->dynamic) {
    format->input_scale = ".input_scale";
  }
  return format;
}

/// `awq_order`: of integers of 4 bits; nothing: not known.
Result<LinearFormat> FormatOf(const JsonValue& spec, std::optional<bool> awq_order, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const std::vector<Level> weight, ReadLevels("weight", spec, path));
  FMOE_ASSIGN_OR_RETURN(const std::vector<Level> input, ReadLevels("input_tensors", spec, path));
  for (const char* key : {"output_tensors", "bias"}) {
    if (const JsonValue* other = spec.Find(key); other != nullptr) {
      return NotSupported(key, *other, "Quark's weights and inputs alone are quantized here", path);
    }
  }
  if (weight.empty()) {
    return LinearFormat{};
  }
  // How the scales of inputs are computed; those of weights are in the file.
  for (const Level& level : input) {
    if (const std::string& mode = level.scale_mode;
        !mode.empty() && mode != "floor" && mode != "ceil" && mode != "even") {
      return Status::Unsupported(
                 fmt::format("'scale_calculation_mode' of Quark's inputs is \"{}\", which is not "
                             "supported; floor, ceil and even are",
                             mode))
          .WithFile(path);
    }
  }
  std::optional<LinearFormat> format;
  if (IsNvFp4(weight)) {
    format = NvFp4Format(input);
  } else if (weight.size() == 1 && input.size() <= 1) {
    const Level& w = weight[0];
    const Level* const x = input.empty() ? nullptr : input.data();
    if (const std::optional<DType> element = MxElement(w)) {
      format = MxFormat(*element, x);
    } else if ((w.dtype == "int4" || w.dtype == "uint4") && w.qscheme == "per_group") {
      format = FourBitFormat(w, x, awq_order);
    } else if (w.dtype == "fp8_e4m3" || w.dtype == "int8") {
      format = EightBitFormat(w, x);
    }
  }
  if (!format) {
    return Status::Unsupported(
               fmt::format("Quark weights {} with inputs {} are not supported", Words(weight), Words(input)))
        .WithFile(path);
  }
  format->scale = ".weight_scale";
  return *std::move(format);
}

// Modules by name, with wildcards, or by a regular expression behind "re:".
class Selector {
 public:
  static Result<Selector> Make(const std::string& text, const std::string& path) {
    Selector selector;
    selector.text_ = text;
    FMOE_ASSIGN_OR_RETURN(selector.regex_, RegexOf(text, path));
    return selector;
  }
  bool Selects(const std::string& module) const {
    if (regex_) {
      return regex_->MatchesPrefix(module);
    }
    if (text_.find('*') != std::string::npos) {
      return MatchesWildcard(text_, module);
    }
    return module == text_ || module.starts_with(text_ + ".");
  }

 private:
  std::string text_;
  std::optional<Pattern> regex_;
};

struct QuarkRules {
  Result<LinearFormat> all = LinearFormat{};
  std::vector<std::pair<Selector, Result<LinearFormat>>> by_selector;
  std::vector<Selector> excluded;
};

// Algorithms that leave nothing behind but the weights that are stored. Of rotations that holds for those of
// weights alone: R4 turns the inputs of the down projection while the model runs.
Status CheckAlgorithm(const JsonValue& entry, const std::string& path) {
  if (!entry.is_object()) {
    return Wrong("algo_config", &entry, "an object, or a list of them,", path);
  }
  FMOE_ASSIGN_OR_RETURN(const std::string name, Word(entry, "name", "", path));
  if (name == "rotation" || name == "quarot") {
    FMOE_ASSIGN_OR_RETURN(const bool down, Flag(entry, "r4", true, path));
    FMOE_ASSIGN_OR_RETURN(const bool online, Flag(entry, "online_r1_rotation", false, path));
    if (down || online) {
      return NotSupported("algo_config.name", *entry.Find("name"),
                          "inputs of modules are rotated while the model runs", path);
    }
    return Status::Ok();
  }
  for (const std::string_view known :
       {"awq", "gptq", "gptaq", "qronos", "smooth", "smoothquant", "autosmoothquant"}) {
    if (name == known) {
      return Status::Ok();
    }
  }
  return NotSupported("algo_config.name", name.empty() ? entry : *entry.Find("name"),
                      "what the algorithm changes beside the weights is not known", path);
}

// What concerns all modules, whatever their descriptions.
Status CheckWhole(const JsonValue& spec, const std::string& path) {
  if (const JsonValue* algorithms = spec.Find("algo_config"); algorithms != nullptr) {
    for (const JsonValue& entry :
         algorithms->is_array() ? algorithms->items() : std::vector<JsonValue>{*algorithms}) {
      FMOE_RETURN_IF_ERROR(CheckAlgorithm(entry, path));
    }
  }
  if (const JsonValue* types = spec.Find("layer_type_quant_config"); types != nullptr) {
    if (!types->is_object()) {
      return Wrong("layer_type_quant_config", types, "an object", path);
    }
    // Experts are linear modules, or a class of the model's own.
    for (const auto& [type, own] : types->members()) {
      if (type.find("Embedding") == std::string::npos && type.find("Conv") == std::string::npos) {
        return NotSupported("layer_type_quant_config", *types,
                            "descriptions by class are read of Embedding and Conv alone", path);
      }
    }
  }
  const JsonValue* exported = spec.Find("export");
  if (exported == nullptr) {
    return Status::Ok();
  }
  if (!exported->is_object()) {
    return Wrong("export", exported, "an object", path);
  }
  if (const JsonValue* form = exported->Find("weight_format");
      form != nullptr && form->string() != "real_quantized") {
    return NotSupported("weight_format", *form, "\"real_quantized\" is", path);
  }
  return Status::Ok();
}

}  // namespace

Result<QuantRules> ReadQuarkRules(const JsonValue& spec, const std::string& path) {
  const JsonValue* global = spec.Find("global_quant_config");
  if (global == nullptr || !global->is_object()) {
    return Status::BadInput("Quark needs 'global_quant_config'").WithFile(path);
  }
  FMOE_RETURN_IF_ERROR(CheckWhole(spec, path));
  std::optional<bool> awq_order = true;
  if (const JsonValue* exported = spec.Find("export"); exported != nullptr) {
    const JsonValue* method = exported->Find("pack_method");
    if (method != nullptr && method->string() != "reorder") {
      awq_order = method->string() == "order" ? std::optional<bool>(false) : std::nullopt;
    }
  }
  auto rules = std::make_shared<QuarkRules>();
  // What this library cannot run is an error only where a module of the experts has it; malformed metadata
  // always is.
  rules->all = FormatOf(*global, awq_order, path);
  if (rules->all.status().code() == StatusCode::kBadInput) {
    return rules->all.status();
  }
  if (const JsonValue* layers = spec.Find("layer_quant_config"); layers != nullptr) {
    if (!layers->is_object()) {
      return Wrong("layer_quant_config", layers, "an object", path);
    }
    for (const auto& [name, own] : layers->members()) {
      Result<LinearFormat> format = FormatOf(own, awq_order, path);
      if (format.status().code() == StatusCode::kBadInput) {
        return format.status();
      }
      FMOE_ASSIGN_OR_RETURN(Selector selector, Selector::Make(name, path));
      rules->by_selector.emplace_back(std::move(selector), std::move(format));
    }
  }
  FMOE_ASSIGN_OR_RETURN(const auto excluded, StringList(spec.Find("exclude"), "exclude", path));
  for (const std::string& name : excluded) {
    FMOE_ASSIGN_OR_RETURN(Selector selector, Selector::Make(name, path));
    rules->excluded.push_back(std::move(selector));
  }
  QuantRules result;
  result.producer = "quark";
  result.format_of = [rules](const std::string& module) -> Result<LinearFormat> {
    for (const Selector& selector : rules->excluded) {
      if (selector.Selects(module)) {
        return LinearFormat{};
      }
    }
    for (const auto& [selector, format] : rules->by_selector) {
      if (selector.Selects(module)) {
        return format;
      }
    }
    return rules->all;
  };
  return result;
}

}  // namespace fusedmoe::checkpoint
