#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// Whose activations a named rule is of.
enum class ActivationFamily : uint8_t { kAny, kInt8, kFp8, kMx, kNvfp4 };

/// A rule under the name of whoever computes so. docs/numerics.md has the formulas.
struct NamedActivationRule {
  std::string_view name;
  ActivationFamily family;
  std::string_view what;
  ActivationRule rule;
};

/// All named rules, "exact" (the default) first.
std::span<const NamedActivationRule> ActivationRuleTable();

/// The rule of that name; kUsage with the names that exist.
Result<ActivationRule> ActivationRuleByName(std::string_view name);
/// The same for activations of a format; kUsage where the rule is of others, which would have no effect here.
Result<ActivationRule> ActivationRuleFor(const ActivationFormat& format, std::string_view name);

}  // namespace fusedmoe
