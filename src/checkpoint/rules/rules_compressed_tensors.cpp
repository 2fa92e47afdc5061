// compressed-tensors: groups of modules by class name, exact name or regular expression, each with a
// description of weights and input activations; a list of modules to ignore.
#include <algorithm>
#include <tuple>

#include <fmt/format.h>

#include "checkpoint/formats.hpp"
#include "checkpoint/rules/quant_rules.hpp"
#include "checkpoint/rules/rules_support.hpp"

namespace fusedmoe::checkpoint {
namespace {

// What a scheme object ("weights", "input_activations") says.
struct Args {
  std::string type;  // "float", "int"
  int64_t bits = 0;
  std::string strategy;
  int64_t group = 0;
  GroupShape block{0, 0};
  bool symmetric = true;
  bool dynamic = false;
  bool static_global = false;  // dynamic: "local": dynamic groups below a stored scale
  bool e8m0 = false;
};

class Target {
 public:
  static Result<Target> Make(const std::string& text, const std::string& path) {
    Target target;
    target.text_ = text;
    FMOE_ASSIGN_OR_RETURN(target.pattern_, RegexOf(text, path));
    return target;
  }
  bool Matches(const std::string& module) const {
    if (pattern_) {
      return pattern_->MatchesPrefix(module);
    }
    // Class names: experts and shared experts are all linear modules.
    return text_ == module || text_ == "Linear";
  }
  bool is_class() const { return text_ == "Linear"; }
  /// The library's order of targets that match one module: names, then patterns by their text, then classes.
  bool ComesBefore(const Target& other) const {
    const auto key = [](const Target& target) {
      return std::make_tuple(target.is_class(), target.text_.find("re:") != std::string::npos,
                             std::string_view(target.text_));
    };
    return key(*this) < key(other);
  }

 private:
  std::string text_;
  std::optional<Pattern> pattern_;
};

// A target of a group, and that group.
struct GroupTarget {
  Target target;
  size_t group = 0;
};

// A rotation of a module's input or output while the model runs (QuIP, SpinQuant).
struct OnlineTransform {
  std::string name, location;
  std::vector<Target> targets, ignored;
};

struct CtRules {
  std::vector<Result<LinearFormat>> formats;  // of the groups
  std::vector<GroupTarget> targets;           // of all groups, the first that matches decides
  std::vector<Target> ignored;
  std::vector<OnlineTransform> transforms;
};

Result<Args> ReadArgs(const JsonValue& spec, const std::string& path) {
  Args args;
  const auto wrong = [&](std::string_view key, std::string_view wanted) {
    const JsonValue* value = spec.Find(key);
    return Status::BadInput(fmt::format("'{}' is {}; {} is needed", key,
                                        value == nullptr ? "missing" : value->ToString(), wanted))
        .WithFile(path);
  };
  if (!spec.is_object()) {
    return Status::BadInput("a quantization scheme must be an object").WithFile(path);
  }
  const JsonValue* bits = spec.Find("num_bits");
  if (bits == nullptr || !bits->integer() || *bits->integer() < 1 || *bits->integer() > 16) {
    return wrong("num_bits", "1 to 16");
  }
  args.bits = *bits->integer();
  const JsonValue* type = spec.Find("type");
  args.type = type == nullptr ? "int" : type->string();
  if (args.type != "int" && args.type != "float") {
    return wrong("type", "\"int\" or \"float\"");
  }
  if (const JsonValue* symmetric = spec.Find("symmetric"); symmetric != nullptr) {
    if (!symmetric->is_bool()) {
      return wrong("symmetric", "true or false");
    }
    args.symmetric = symmetric->boolean();
  }
  if (const JsonValue* group = spec.Find("group_size"); group != nullptr) {
    if (!group->integer() || *group->integer() < -1 || *group->integer() == 0 || *group->integer() > 65536) {
      return wrong("group_size", "-1 or 1 to 65536");
    }
    args.group = *group->integer();
  }
  if (const JsonValue* strategy = spec.Find("strategy"); strategy != nullptr) {
    if (!strategy->is_string()) {
      return wrong("strategy", "a string");
    }
    args.strategy = strategy->string();
  } else {
    args.strategy = args.group > 0 ? "group" : args.group == -1 ? "channel" : "tensor";
  }
  if (const JsonValue* block = spec.Find("block_structure"); block != nullptr) {
    FMOE_ASSIGN_OR_RETURN(args.block, BlockSizes("block_structure", *block, path));
  }
  if (const JsonValue* dynamic = spec.Find("dynamic"); dynamic != nullptr) {
    args.static_global = dynamic->is_string() && dynamic->string() == "local";
    if (!dynamic->is_bool() && !args.static_global) {
      return wrong("dynamic", "true, false or \"local\"");
    }
    args.dynamic = args.static_global || dynamic->boolean();
  }
  if (const JsonValue* scale = spec.Find("scale_dtype"); scale != nullptr) {
    args.e8m0 = scale->string() == "torch.uint8";
  }
  return args;
}

std::string Words(const Args& args) {
  return fmt::format("{} of {} bits, strategy {}{}", args.type, args.bits, args.strategy,
                     args.group > 0 ? fmt::format(" {}", args.group) : "");
}

Result<ActivationFormat> InputFormat(const Args& args, const LinearFormat& weights, const std::string& path) {
  const bool is_float = args.type == "float";
  const auto refuse = [&] {
    return Status::Unsupported(fmt::format("input activations as {} are not supported", Words(args)))
        .WithFile(path);
  };
  if (!args.symmetric) {
    return refuse();
  }
  if (is_float && args.bits == 4 && args.strategy == "tensor_group" && args.group == 16) {
    ActivationFormat format = Nvfp4Input();
    // A zero scale becomes 0.125 there: an all-zero group, whose codes are zero either way.
    return format;
  }
  if (is_float && args.strategy == "group" && args.group == 32 &&
      (args.bits == 4 || args.bits == 6 || (args.bits == 8 && args.e8m0))) {
    return args.bits == 4   ? MxInput(DType::kF4E2M1, MxScaleRule::kEven)
           : args.bits == 6 ? MxInput(DType::kF6E2M3, MxScaleRule::kEven)
                            : MxInput(DType::kF8E4M3, MxScaleRule::kEvenE2m1);
  }
  if (args.bits != 8) {
    return refuse();
  }
  ActivationFormat format;
  format.element = is_float ? DType::kF8E4M3 : DType::kI8;
  // The range is taken as 255 steps wide there, so that 8-bit integers divide by 127.5.
  if (!is_float) {
    format.rule.amax_divisor = 127.5F;
  }
  if (!args.dynamic) {
    if (args.strategy != "tensor") {
      return refuse();
    }
    format.static_tensor_scale = true;
  } else if (args.strategy == "token") {
    format.group = kPerRow;
  } else if (args.strategy == "group" && args.group > 0) {
    format.group = {1, args.group};
  } else if (args.strategy == "block") {
    format.group = {1, weights.weight.block.col};
  } else if (args.strategy != "tensor") {
    return refuse();
  }
  return format;
}

// What a format says of weights. False where it and its arguments do not agree.

// Codes in words of their own ("*-pack-quantized").
bool SetPacked(std::string_view name, const Args& args, LinearFormat& format) {
  const auto floats_of = [&](int64_t bits) { return args.type == "float" && args.bits == bits; };
  const bool groups = args.strategy == "group";
  format.codes = ".weight_packed";
  if (name == "nvfp4-pack-quantized" && floats_of(4) && (args.group == 16 || args.group == 0)) {
    format.weight = Nvfp4(16);
    format.second_scale = ".weight_global_scale";
    format.input_scale = ".input_global_scale";
    format.reciprocal = true;
  } else if (name == "mxfp4-pack-quantized" && floats_of(4) && args.group == 32) {
    format.weight = Mx(DType::kF4E2M1);
  } else if (name == "mxfp6-pack-quantized" && floats_of(6) && args.group == 32) {
    format.weight = Mx(DType::kF6E2M3);
  } else if (name == "pack-quantized" && args.type == "int" && args.bits >= 2 && args.bits <= 8 &&
             (groups || args.strategy == "channel")) {
    format.packing = Packing::kBits;
    format.bits = static_cast<int>(args.bits);
    format.weight = IntegerWeight(format.bits, groups ? args.group : -1);
    format.shape = ".weight_shape";
    format.group_index = ".weight_g_idx";
    format.zero_point = args.symmetric ? "" : ".weight_zero_point";
  } else {
    return false;
  }
  return true;
}

// One code an element, in a type that safetensors has.
bool SetPlain(const Args& args, LinearFormat& format) {
  const bool is_float = args.type == "float";
  if (!args.symmetric || (is_float ? args.bits != 8 : args.bits > 8)) {
    return false;
  }
  format.weight.element = is_float ? DType::kF8E4M3 : args.bits > 4 ? DType::kI8 : DType::kI4;
  if (!is_float) {
    format.bits = static_cast<int>(args.bits);
  }
  format.input_scale = ".input_scale";
  if (args.strategy == "tensor") {
    format.weight.has_tensor_scale = true;
  } else if (args.strategy == "channel") {
    format.weight.has_channel_scale = true;
  } else if (args.strategy == "block" && args.block.row > 0) {
    format.weight.block = args.block;
  } else if (args.strategy == "group" && args.group > 0) {
    format.weight.block = {1, args.group};
    format.weight.block_scale_dtype = DType::kBF16;
  } else {
    return false;
  }
  return true;
}

bool SetMxfp8(const Args& args, LinearFormat& format) {
  if (args.type != "float" || args.bits != 8 || args.group != 32) {
    return false;
  }
  format.weight = Mx(DType::kF8E4M3);
  return true;
}

bool SetWeights(std::string_view name, const Args& args, LinearFormat& format) {
  if (name.ends_with("pack-quantized")) {
    return SetPacked(name, args, format);
  }
  if (name == "mxfp8-quantized" || (name == "float-quantized" && args.e8m0)) {
    return SetMxfp8(args, format);
  }
  if (name == "float-quantized" || name == "naive-quantized" || name == "int-quantized") {
    return SetPlain(args, format);
  }
  return false;
}

Result<LinearFormat> FormatOfGroup(const JsonValue& group, std::string_view outer_format,
                                   const std::string& path) {
  const JsonValue* weights_spec = group.Find("weights");
  if (weights_spec == nullptr) {
    return LinearFormat{};
  }
  FMOE_ASSIGN_OR_RETURN(const Args weights, ReadArgs(*weights_spec, path));
  const JsonValue* own = group.Find("format");
  const std::string name(own != nullptr && own->is_string() ? std::string_view(own->string()) : outer_format);
  if (name == "dense") {
    return LinearFormat{};
  }
  LinearFormat format;
  if (!SetWeights(name, weights, format)) {
    return Status::Unsupported(
               fmt::format("weights as {} in format '{}' are not supported", Words(weights), name))
        .WithFile(path);
  }
  format.scale = ".weight_scale";
  if (const JsonValue* input_spec = group.Find("input_activations"); input_spec != nullptr) {
    FMOE_ASSIGN_OR_RETURN(const Args input, ReadArgs(*input_spec, path));
    FMOE_ASSIGN_OR_RETURN(format.activation, InputFormat(input, format, path));
  }
  if (!format.activation.static_tensor_scale) {
    format.input_scale = "";
  }
  return format;
}

Result<std::vector<Target>> Targets(const JsonValue* list, std::string_view key, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const std::vector<std::string> words, StringList(list, key, path));
  std::vector<Target> targets;
  for (const std::string& word : words) {
    FMOE_ASSIGN_OR_RETURN(Target target, Target::Make(word, path));
    targets.push_back(std::move(target));
  }
  return targets;
}

bool AnyMatches(const std::vector<Target>& targets, const std::string& module) {
  return std::any_of(targets.begin(), targets.end(),
                     [&](const Target& target) { return target.Matches(module); });
}

// Those of weights (`weight_input`, `weight_output`) are in the stored numbers already; those of attention
// (`k_cache`, `q_attn`) concern no expert.
Result<std::vector<OnlineTransform>> OnlineTransforms(const JsonValue& spec, const std::string& path) {
  std::vector<OnlineTransform> found;
  const JsonValue* config = spec.Find("transform_config");
  const JsonValue* groups = config == nullptr ? nullptr : config->Find("config_groups");
  if (groups == nullptr || !groups->is_object()) {
    return found;
  }
  for (const auto& [name, group] : groups->members()) {
    const JsonValue* applications = group.Find("apply");
    if (applications == nullptr || !applications->is_array()) {
      return Status::BadInput(fmt::format("transform '{}' needs a list 'apply'", name)).WithFile(path);
    }
    for (const JsonValue& application : applications->items()) {
      const JsonValue* location = application.Find("location");
      if (location == nullptr || (location->string() != "input" && location->string() != "output")) {
        continue;
      }
      OnlineTransform transform{.name = name, .location = std::string(location->string())};
      FMOE_ASSIGN_OR_RETURN(transform.targets, Targets(application.Find("targets"), "targets", path));
      FMOE_ASSIGN_OR_RETURN(transform.ignored, Targets(application.Find("ignore"), "ignore", path));
      found.push_back(std::move(transform));
    }
  }
  return found;
}

}  // namespace

Result<QuantRules> ReadCompressedTensorsRules(const JsonValue& spec, const std::string& path) {
  const JsonValue* format = spec.Find("format");
  const std::string outer = format != nullptr ? format->string() : "dense";
  const JsonValue* groups = spec.Find("config_groups");
  if (groups == nullptr || !groups->is_object() || groups->members().empty()) {
    return Status::BadInput("compressed-tensors needs 'config_groups'").WithFile(path);
  }
  if (const JsonValue* sparsity = spec.Find("sparsity_config"); sparsity != nullptr) {
    const JsonValue* kind = sparsity->Find("format");
    if (kind != nullptr && kind->string() != "dense") {
      return Status::Unsupported(fmt::format("sparsity of format '{}' is not supported", kind->string()))
          .WithFile(path);
    }
  }
  auto rules = std::make_shared<CtRules>();
  FMOE_ASSIGN_OR_RETURN(rules->ignored, Targets(spec.Find("ignore"), "ignore", path));
  FMOE_ASSIGN_OR_RETURN(rules->transforms, OnlineTransforms(spec, path));
  for (const auto& [name, group] : groups->members()) {
    FMOE_ASSIGN_OR_RETURN(std::vector<Target> targets, Targets(group.Find("targets"), "targets", path));
    for (Target& target : targets) {
      rules->targets.push_back({std::move(target), rules->formats.size()});
    }
    // A group that this library cannot run matters only when a module of the experts is in it; malformed ones
    // always do.
    rules->formats.push_back(FormatOfGroup(group, outer, path));
    // The library writes its version; auto-round, whose scales may be negative, writes none.
    if (Result<LinearFormat>& added = rules->formats.back(); added.ok() && spec.Find("version") == nullptr) {
      added->negative_scales = added->weight.may_have_zero_point;
    }
    if (rules->formats.back().status().code() == StatusCode::kBadInput) {
      return rules->formats.back().status();
    }
  }
  // Of one target in two groups the later group counts.
  std::reverse(rules->targets.begin(), rules->targets.end());
  std::stable_sort(rules->targets.begin(), rules->targets.end(),
                   [](const GroupTarget& a, const GroupTarget& b) { return a.target.ComesBefore(b.target); });
  QuantRules result;
  result.producer = "compressed-tensors";
  result.format_of = [rules, path](const std::string& module) -> Result<LinearFormat> {
    for (const OnlineTransform& transform : rules->transforms) {
      if (AnyMatches(transform.targets, module) && !AnyMatches(transform.ignored, module)) {
        return Status::Unsupported(
                   fmt::format("the {} of this module passes the transform '{}' of 'transform_config' while "
                               "the model runs, which is not supported",
                               transform.location, transform.name))
            .WithFile(path)
            .WithTensor(module);
      }
    }
    if (AnyMatches(rules->ignored, module)) {
      return LinearFormat{};
    }
    for (const GroupTarget& target : rules->targets) {
      if (target.target.Matches(module)) {
        return rules->formats[target.group];
      }
    }
    return LinearFormat{};
  };
  return result;
}

}  // namespace fusedmoe::checkpoint
