// ModelOpt: quant_algo names the format; excluded modules are wildcards; MIXED_PRECISION lists modules one by
// one.
#include <algorithm>
#include <iterator>
#include <map>

#include <fmt/format.h>

#include "checkpoint/formats.hpp"
#include "checkpoint/rules/modelopt_groups.hpp"
#include "checkpoint/rules/quant_rules.hpp"
#include "checkpoint/rules/rules_support.hpp"
#include "core/text.hpp"

namespace fusedmoe::checkpoint {
namespace {

// ModelOpt floors E4M3 scales of activations at the smallest subnormal.
constexpr float kSmallestE4m3 = 0x1p-9F;

constexpr int64_t kNvfp4Group = 16;

// quant_algo of 4-bit floats. `group`: as the metadata say, or what the algorithm always has.
std::optional<LinearFormat> Fp4Format(const std::string& algorithm, int64_t group) {
  LinearFormat format;
  format.weight = Nvfp4(group);
  format.second_scale = ".weight_scale_2";
  if (algorithm == "NVFP4" || algorithm == "NVFP4_AWQ") {
    format.activation = Nvfp4Input();
    format.activation.rule.scale_floor = kSmallestE4m3;
  } else if (algorithm == "W4A8_NVFP4_FP8") {
    format.activation = StaticFp8();
  } else if (algorithm == "W4A8_MXFP4_FP8") {
    format.weight = Mx(DType::kF4E2M1);
    format.second_scale = "";
    format.activation = StaticFp8();
    format.input_scale_optional = true;
  } else if (algorithm == "W4A16_NVFP4") {
    format.weight = Nvfp4(kNvfp4Group);  // each scale of a larger group is that of several
    format.stored_block_cols = group;
  } else if (algorithm == "MXFP4") {  // the file does not say whether inputs are to be quantized
    format.weight = Mx(DType::kF4E2M1);
    format.second_scale = "";
  } else {
    return std::nullopt;
  }
  return format;
}

std::optional<LinearFormat> Fp8Format(const std::string& algorithm) {
  LinearFormat format;
  format.weight = Fp8();
  if (algorithm == "FP8") {
    format.weight.has_tensor_scale = true;
    format.activation = StaticFp8();
  } else if (algorithm == "FP8_PER_CHANNEL_PER_TOKEN") {
    format.weight.has_channel_scale = true;
    format.activation = TokenFp8();
  } else if (algorithm == "FP8_PB_WO" || algorithm == "FP8_PB_REAL") {
    format.weight.block = {128, 128};
  } else if (algorithm == "FP8_BLOCK_SCALES") {  // TensorRT-LLM's name for DeepSeek's
    format.weight.block = {128, 128};
    format.bytes_are_exponents = true;
    format.activation = BlockFp8(128);
  } else if (algorithm == "MXFP8") {
    format.weight = Mx(DType::kF8E4M3);
    format.activation = MxInput(DType::kF8E4M3, MxScaleRule::kCeil);
  } else {
    return std::nullopt;
  }
  return format;
}

std::optional<LinearFormat> IntegerFormat(const std::string& algorithm, int64_t group) {
  LinearFormat format;
  if (algorithm == "W4A16_AWQ" || algorithm == "W4A8_AWQ") {
    format.weight = {.element = DType::kI4, .block = {1, group}, .block_scale_dtype = DType::kBF16};
    format.packing = Packing::kRowPairs;
    format.bits = 4;
    if (algorithm == "W4A8_AWQ") {
      format.activation = StaticFp8();
      format.idle = ".weight_scale_2";  // takes products through FP8; weight_scale is the whole scale
    }
  } else if (algorithm == "W8A16" || algorithm == "W8A8_SQ_PER_CHANNEL") {
    format.weight = {.element = DType::kI8, .has_channel_scale = true};
    format.bits = 8;
    if (algorithm == "W8A8_SQ_PER_CHANNEL") {
      format.activation = {.element = DType::kI8, .group = kPerTensor, .static_tensor_scale = true};
    }
  } else {
    return std::nullopt;
  }
  return format;
}

Result<LinearFormat> FormatOfAlgorithm(const std::string& algorithm, std::optional<int64_t> group,
                                       const std::string& path) {
  // Groups of W4A8_NVFP4_FP8 are of 32; older files say 16.
  const bool either = algorithm == "W4A8_NVFP4_FP8";
  if (algorithm.find("NVFP4") != std::string::npos) {
    const int64_t expected = either ? 32 : kNvfp4Group;
    const bool several = algorithm == "W4A16_NVFP4" && group.value_or(expected) % kNvfp4Group == 0;
    if (group && *group != expected && !several && !(either && *group == 16)) {
      return Status::BadInput(
                 fmt::format("{} has groups of {}, but 'group_size' is {}", algorithm, expected, *group))
          .WithFile(path);
    }
    group = group.value_or(expected);
  }
  std::optional<LinearFormat> format = Fp4Format(algorithm, group.value_or(16));
  if (!format) {
    format = Fp8Format(algorithm);
  }
  if (!format) {
    format = IntegerFormat(algorithm, group.value_or(128));
  }
  if (!format) {
    return Status::Unsupported(fmt::format("ModelOpt's quant_algo '{}' is not supported", algorithm))
        .WithFile(path)
        .WithHint(
            "NVFP4, W4A16_NVFP4, NVFP4_AWQ, W4A8_NVFP4_FP8, FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, "
            "FP8_BLOCK_SCALES, MXFP8, W4A8_MXFP4_FP8, MXFP4, W4A16_AWQ, W4A8_AWQ, W8A16, W8A8_SQ_PER_CHANNEL "
            "and MIXED_PRECISION are");
  }
  format->scale = ".weight_scale";
  format->pre_quant_scale = ".pre_quant_scale";
  if (format->activation.static_tensor_scale) {
    format->input_scale = ".input_scale";
  }
  return *format;
}

struct ModelOptRules {
  std::optional<LinearFormat> all;
  struct Module {
    std::string algorithm;
    Result<LinearFormat> format;
  };
  std::map<std::string, Module> by_module;
  std::vector<std::string> excluded;

  Status ReadModules(const JsonValue* layers, const std::string& path);
  Result<LinearFormat> FormatOf(const std::string& module) const;
};

// Wildcards for the whole name; without one, the name itself or whole components of it: "shared_expert"
// leaves every such module alone, but "model.layers.1" does not touch layer 10.
bool Excluded(const std::vector<std::string>& patterns, const std::string& module) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    return pattern.find_first_of("*?") != std::string::npos ? MatchesWildcard(pattern, module)
                                                            : HasComponents(module, pattern);
  });
}

// ModelOpt 0.47 renames modules behind a mark, ".\0modelopt_name_sentinel", and takes it away again; where
// the renaming reaches into it ("model." of Nemotron-H), it stays. What follows it are wildcards.
std::string WithoutMark(std::string name) {
  const size_t at = name.find(std::string_view(".\0", 2));
  if (at == std::string::npos) {
    return name;
  }
  const std::string rest = name.substr(at);
  name.resize(at);
  return name + (rest.ends_with(".*") ? ".*" : rest.ends_with('*') ? "*" : "");
}

Result<std::optional<int64_t>> GroupSize(const JsonValue& spec, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const int64_t size, Size(spec, "group_size", 1, kLargestGroup, 0, path));
  return size == 0 ? std::nullopt : std::optional(size);
}

// hf_quant_config.json nests what config.json has at the top.
const JsonValue& SettingsOf(const JsonValue& spec) {
  const JsonValue* inner = spec.Find("quantization");
  return inner != nullptr && inner->is_object() ? *inner : spec;
}

// Whether groups describe weights and no inputs.
bool SayNothingOfInputs(const JsonValue* groups) {
  return groups != nullptr && !groups->members().empty() &&
         std::all_of(groups->members().begin(), groups->members().end(), [](const auto& group) {
           return group.second.Find("weights") != nullptr &&
                  group.second.Find("input_activations") == nullptr;
         });
}

Status ModelOptRules::ReadModules(const JsonValue* layers, const std::string& path) {
  if (layers == nullptr || !layers->is_object()) {
    return Status::BadInput("MIXED_PRECISION needs 'quantized_layers'").WithFile(path);
  }
  for (const auto& [module, entry] : layers->members()) {
    const JsonValue* algorithm = entry.Find("quant_algo");
    if (algorithm == nullptr || !algorithm->is_string()) {
      return Status::BadInput(fmt::format("'quantized_layers' has no quant_algo for '{}'", module))
          .WithFile(path);
    }
    FMOE_ASSIGN_OR_RETURN(const std::optional<int64_t> group, GroupSize(entry, path));
    // What this library cannot run is an error only where a module of the experts has it.
    std::string name = UpperCase(algorithm->string());
    Result<LinearFormat> format = FormatOfAlgorithm(name, group, path);
    if (format.status().code() == StatusCode::kBadInput) {
      return format.status();
    }
    by_module.emplace(WithoutMark(module), Module{std::move(name), std::move(format)});
  }
  return Status::Ok();
}

Result<LinearFormat> ModelOptRules::FormatOf(const std::string& module) const {
  if (Excluded(excluded, module)) {
    return LinearFormat{};
  }
  if (all) {
    return *all;
  }
  // A fused module is listed by its own name, or by that of the block around it.
  for (std::string part = module; !part.empty();) {
    if (const auto it = by_module.find(part); it != by_module.end()) {
      return it->second.format;
    }
    const size_t dot = part.rfind('.');
    part.resize(dot == std::string::npos ? 0 : dot);
  }
  return LinearFormat{};
}

}  // namespace

Result<LinearFormat> ModelOptFormat(const std::string& algorithm, const std::string& path) {
  return FormatOfAlgorithm(UpperCase(algorithm), std::nullopt, path);
}

bool IsModelOpts(const JsonValue& spec) {
  const JsonValue* producer = spec.Find("producer");
  const JsonValue* name = producer == nullptr ? nullptr : producer->Find("name");
  return SettingsOf(spec).Find("quant_algo") != nullptr || (name != nullptr && name->string() == "modelopt");
}

bool LacksQuantizedLayers(const JsonValue& spec) {
  const JsonValue& source = SettingsOf(spec);
  const JsonValue* algorithm = source.Find("quant_algo");
  return algorithm != nullptr && UpperCase(algorithm->string()) == "MIXED_PRECISION" &&
         source.Find("quantized_layers") == nullptr;
}

Result<QuantRules> ReadModelOptRules(const JsonValue& spec, const std::string& path) {
  const JsonValue& source = SettingsOf(spec);
  const JsonValue* algorithm = source.Find("quant_algo");
  QuantRules result;
  result.producer = "modelopt";
  if (algorithm == nullptr && source.Find("kv_cache_quant_algo") != nullptr) {  // the cache alone
    result.format_of = [](const std::string&) -> Result<LinearFormat> { return LinearFormat{}; };
    return result;
  }
  if (algorithm == nullptr || !algorithm->is_string()) {
    return Status::BadInput("ModelOpt's 'quant_algo' is missing or no string").WithFile(path);
  }
  auto rules = std::make_shared<ModelOptRules>();
  for (const char* key : {"exclude_modules", "ignore"}) {
    FMOE_ASSIGN_OR_RETURN(std::vector<std::string> patterns, StringList(source.Find(key), key, path));
    std::transform(patterns.begin(), patterns.end(), std::back_inserter(rules->excluded), WithoutMark);
  }
  FMOE_ASSIGN_OR_RETURN(std::optional<int64_t> group, GroupSize(source, path));
  if (const JsonValue* groups = source.Find("config_groups");
      !group && groups != nullptr && groups->members().size() == 1) {
    if (const JsonValue* weights = groups->members()[0].second.Find("weights"); weights != nullptr) {
      FMOE_ASSIGN_OR_RETURN(group, GroupSize(*weights, path));
    }
  }
  const std::string name = UpperCase(algorithm->string());
  if (name == "MIXED_PRECISION") {
    FMOE_RETURN_IF_ERROR(rules->ReadModules(source.Find("quantized_layers"), path));
  } else {
    FMOE_ASSIGN_OR_RETURN(rules->all, FormatOfAlgorithm(name, group, path));
    // NVFP4 of weights alone, if the file has no scales of inputs; vLLM goes by the groups.
    rules->all->input_scale_optional = rules->all->input_scale_optional ||
                                       (name == "NVFP4" && SayNothingOfInputs(source.Find("config_groups")));
  }
  if (const JsonValue* groups = source.Find("config_groups"); groups != nullptr) {
    const auto algorithm_of = [&](const std::string& target) -> AlgorithmOf {
      if (rules->all) {
        return {name, &*rules->all};
      }
      const auto it = rules->by_module.find(WithoutMark(target));
      return it == rules->by_module.end() || !it->second.format.ok()
                 ? AlgorithmOf{}
                 : AlgorithmOf{it->second.algorithm, &*it->second.format};
    };
    FMOE_RETURN_IF_ERROR(CompareWithGroups(*groups, algorithm_of, path));
  }
  result.format_of = [rules](const std::string& module) { return rules->FormatOf(module); };
  return result;
}

}  // namespace fusedmoe::checkpoint
