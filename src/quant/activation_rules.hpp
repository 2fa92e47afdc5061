#pragma once

#include <span>
#include <string_view>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// A rule under the name of whoever computes so. docs/numerics.md has the formulas.
struct NamedActivationRule {
  std::string_view name;
  std::string_view what;
  ActivationRule rule;
};

/// All named rules, "exact" (the default) first.
std::span<const NamedActivationRule> ActivationRuleTable();

/// The rule of that name; kUsage with the names that exist.
Result<ActivationRule> ActivationRuleByName(std::string_view name);

}  // namespace fusedmoe
