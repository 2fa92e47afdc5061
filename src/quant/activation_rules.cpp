#include "quant/activation_rules.hpp"

#include <fmt/format.h>

#include <string>

namespace fusedmoe {

std::span<const NamedActivationRule> ActivationRuleTable() {
  static constexpr NamedActivationRule kTable[] = {
#define FMOE_ACTIVATION_RULE(name, what, ...) {#name, what, ActivationRule{__VA_ARGS__}},
#include "quant/activation_rules.inc"
#undef FMOE_ACTIVATION_RULE
  };
  return kTable;
}

Result<ActivationRule> ActivationRuleByName(std::string_view name) {
  std::string names;
  for (const NamedActivationRule& entry : ActivationRuleTable()) {
    if (entry.name == name) {
      return entry.rule;
    }
    names += fmt::format("{}{}", names.empty() ? "" : ", ", entry.name);
  }
  return Status::Usage(fmt::format("unknown activation rule '{}'", name)).WithHint("known are " + names);
}

}  // namespace fusedmoe
