// compressed-tensors: groups of modules by class name, exact name or regular expression, each with a scheme
// (compressed_tensors_scheme.hpp); a list of modules to ignore.
#include <algorithm>
#include <tuple>

#include <fmt/format.h>

#include "checkpoint/rules/compressed_tensors_scheme.hpp"
#include "checkpoint/rules/quant_rules.hpp"
#include "checkpoint/rules/rules_support.hpp"

namespace fusedmoe::checkpoint {
namespace {

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
  if (config != nullptr && !config->is_object()) {
    return Wrong("transform_config", config, "an object", path);
  }
  const JsonValue* groups = config == nullptr ? nullptr : config->Find("config_groups");
  if (groups != nullptr && !groups->is_object()) {
    return Wrong("transform_config.config_groups", groups, "an object", path);
  }
  if (groups == nullptr) {
    return found;
  }
  for (const auto& [name, group] : groups->members()) {
    const JsonValue* applications = group.Find("apply");
    if (applications == nullptr || !applications->is_array()) {
      return Status::BadInput(fmt::format("transform '{}' needs a list 'apply'", name)).WithFile(path);
    }
    for (const JsonValue& application : applications->items()) {
      const JsonValue* location = application.Find("location");
      if (location == nullptr || !location->is_string()) {
        return Wrong("location", location, "a string", path);
      }
      if (location->string() != "input" && location->string() != "output") {
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

struct CompressedTensorsRules {
  std::string path;                           // of the file
  std::vector<Result<LinearFormat>> formats;  // of the groups
  std::vector<GroupTarget> targets;           // of all groups, the first that matches decides
  std::vector<Target> ignored;
  std::vector<OnlineTransform> transforms;

  Status ReadGroups(const JsonValue& groups, const JsonValue& spec);
  Result<LinearFormat> FormatOf(const std::string& module) const;
};

Status CompressedTensorsRules::ReadGroups(const JsonValue& groups, const JsonValue& spec) {
  FMOE_ASSIGN_OR_RETURN(const std::string outer, Word(spec, "format", "dense", path));
  for (const auto& [name, group] : groups.members()) {
    if (!group.is_object()) {
      return Wrong(fmt::format("config_groups.{}", name), &group, "an object", path);
    }
    FMOE_ASSIGN_OR_RETURN(std::vector<Target> found, Targets(group.Find("targets"), "targets", path));
    for (Target& target : found) {
      targets.push_back({std::move(target), formats.size()});
    }
    // A group that this library cannot run matters only when a module of the experts is in it; malformed ones
    // always do.
    formats.push_back(CompressedTensorsFormat(group, outer, path));
    // The library writes its version; auto-round, whose scales may be negative, writes none.
    if (Result<LinearFormat>& added = formats.back(); added.ok() && spec.Find("version") == nullptr) {
      added->negative_scales = added->weight.may_have_zero_point || added->weight.element == DType::kI8;
    }
    if (formats.back().status().code() == StatusCode::kBadInput) {
      return formats.back().status();
    }
  }
  // Of one target in two groups the later group counts.
  std::reverse(targets.begin(), targets.end());
  std::stable_sort(targets.begin(), targets.end(),
                   [](const GroupTarget& a, const GroupTarget& b) { return a.target.ComesBefore(b.target); });
  return Status::Ok();
}

Result<LinearFormat> CompressedTensorsRules::FormatOf(const std::string& module) const {
  for (const OnlineTransform& transform : transforms) {
    if (AnyMatches(transform.targets, module) && !AnyMatches(transform.ignored, module)) {
      return Status::Unsupported(
                 fmt::format("the {} of this module passes the transform '{}' of 'transform_config' while "
                             "the model runs, which is not supported",
                             transform.location, transform.name))
          .WithFile(path)
          .WithTensor(module);
    }
  }
  if (AnyMatches(ignored, module)) {
    return LinearFormat{};
  }
  for (const GroupTarget& target : targets) {
    if (target.target.Matches(module)) {
      return formats[target.group];
    }
  }
  return LinearFormat{};
}

}  // namespace

Result<QuantRules> ReadCompressedTensorsRules(const JsonValue& spec, const std::string& path) {
  const JsonValue* groups = spec.Find("config_groups");
  if (groups == nullptr || !groups->is_object() || groups->members().empty()) {
    return Wrong("config_groups", groups, "an object of groups", path);
  }
  for (const char* key : {"sparsity_config", "moe_sparsity_config"}) {
    const JsonValue* sparsity = spec.Find(key);
    if (sparsity == nullptr) {
      continue;
    }
    if (!sparsity->is_object()) {
      return Wrong(key, sparsity, "an object", path);
    }
    FMOE_ASSIGN_OR_RETURN(const std::string kind, Word(*sparsity, "format", "dense", path));
    if (kind != "dense") {
      return Status::Unsupported(fmt::format("sparsity of format '{}' is not supported", kind))
          .WithFile(path);
    }
  }
  auto rules = std::make_shared<CompressedTensorsRules>();
  rules->path = path;
  FMOE_ASSIGN_OR_RETURN(rules->ignored, Targets(spec.Find("ignore"), "ignore", path));
  FMOE_ASSIGN_OR_RETURN(rules->transforms, OnlineTransforms(spec, path));
  FMOE_RETURN_IF_ERROR(rules->ReadGroups(*groups, spec));
  QuantRules result;
  result.producer = "compressed-tensors";
  result.format_of = [rules](const std::string& module) { return rules->FormatOf(module); };
  return result;
}

}  // namespace fusedmoe::checkpoint
