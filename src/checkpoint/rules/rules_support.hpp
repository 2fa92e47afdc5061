#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/status.hpp>

#include "checkpoint/files/json.hpp"
#include "checkpoint/linear_format.hpp"
#include "checkpoint/rules/pattern.hpp"
#include "checkpoint/rules/quant_rules.hpp"

/// What the readers of the producers' metadata have in common. `path` is the file, for errors.
namespace fusedmoe::checkpoint {

/// Of the sizes of groups and blocks that are taken from metadata.
inline constexpr int64_t kLargestGroup = 65536;

/// kBadInput: '<key>' is <value>; <wanted> is needed.
Status Wrong(std::string_view key, const JsonValue* value, std::string_view wanted, const std::string& path);

/// An integer from `low` to `high`; without a fallback it must be there.
Result<int64_t> Size(const JsonValue& spec, std::string_view key, int64_t low, int64_t high,
                     std::optional<int64_t> fallback, const std::string& path);

/// Rows and columns of a block: [128, 128], or "128x128", as early compressed-tensors wrote it.
Result<GroupShape> BlockSizes(std::string_view key, const JsonValue& block, const std::string& path);

Result<bool> Flag(const JsonValue& spec, std::string_view key, bool fallback, const std::string& path);

/// A string, `fallback` where the key is missing; kBadInput otherwise.
Result<std::string> Word(const JsonValue& spec, std::string_view key, std::string_view fallback,
                         const std::string& path);

/// kUnsupported: '<key>' is <value>, which is not supported; `why` says what is, or what it would mean.
Status NotSupported(std::string_view key, const JsonValue& value, std::string_view why,
                    const std::string& path);

/// Whether a float of 8 bits is e4m3, by any of its names; nothing is said: it is.
bool IsE4m3(const JsonValue* name);

/// The regular expression behind "re:"; nothing where a module is named otherwise.
Result<std::optional<Pattern>> RegexOf(const std::string& text, const std::string& path);

bool IsRegexLike(const std::string& pattern);

/// True when a list of modules to leave alone names this one. It holds full names, last components
/// ("lm_head", "gate"), and wildcards.
bool Listed(const std::vector<std::string>& patterns, const std::string& module);

/// The modules that `spec` leaves alone, under any of the keys that tools have for them.
Result<std::vector<std::string>> SkippedModules(const JsonValue& spec, const std::string& path);

/// One format for all modules that are not skipped.
Result<QuantRules> Uniform(std::string producer, LinearFormat format, std::vector<std::string> skipped);

/// One for the routed experts, by their names, and one for the others.
QuantRules ApartFromExperts(std::string producer, LinearFormat routed, LinearFormat rest,
                            std::vector<std::string> skipped);

}  // namespace fusedmoe::checkpoint
