#include "quant/activation_rules.hpp"

#include <fmt/format.h>

#include <string>

#include "core/names.hpp"

namespace fusedmoe {

std::span<const NamedActivationRule> ActivationRuleTable() {
  static constexpr NamedActivationRule kTable[] = {
#define FMOE_ACTIVATION_RULE(name, family, what, ...) \
  {#name, ActivationFamily::family, what, ActivationRule{__VA_ARGS__}},
#include "quant/activation_rules.inc"
#undef FMOE_ACTIVATION_RULE
  };
  return kTable;
}

namespace {

Result<NamedActivationRule> FindRule(std::string_view name) {
  for (const NamedActivationRule& entry : ActivationRuleTable()) {
    if (entry.name == name) {
      return entry;
    }
  }
  return UnknownName("activation rule", name, JoinNames(ActivationRuleTable(), &NamedActivationRule::name));
}

ActivationFamily FamilyOf(const ActivationFormat& format) {
  if (format.element == DType::kI8) {
    return ActivationFamily::kInt8;
  }
  if (format.scale_dtype == DType::kF8E8M0) {
    return ActivationFamily::kMx;
  }
  return format.element == DType::kF4E2M1 ? ActivationFamily::kNvfp4 : ActivationFamily::kFp8;
}

std::string_view FamilyName(ActivationFamily family) {
  switch (family) {
    case ActivationFamily::kAny:
      return "all";
    case ActivationFamily::kInt8:
      return "INT8";
    case ActivationFamily::kFp8:
      return "FP8";
    case ActivationFamily::kMx:
      return "MX";
    case ActivationFamily::kNvfp4:
      return "NVFP4";
  }
  return "?";
}

}  // namespace

Result<ActivationRule> ActivationRuleByName(std::string_view name) {
  FMOE_ASSIGN_OR_RETURN(const NamedActivationRule entry, FindRule(name));
  return entry.rule;
}

Result<ActivationRule> ActivationRuleFor(const ActivationFormat& format, std::string_view name) {
  FMOE_ASSIGN_OR_RETURN(const NamedActivationRule entry, FindRule(name));
  const ActivationFamily family = FamilyOf(format);
  if (entry.family != ActivationFamily::kAny && entry.family != family) {
    return Status::Usage(fmt::format("the activation rule '{}' is of {} activations; these are {}", name,
                                     FamilyName(entry.family), FamilyName(family)))
        .WithHint("docs/numerics.md lists the rules of each");
  }
  return entry.rule;
}

}  // namespace fusedmoe
