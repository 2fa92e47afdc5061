#include "checkpoint/rules/rules_support.hpp"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <memory>
#include <utility>

#include <fmt/format.h>

namespace fusedmoe::checkpoint {

Status Wrong(std::string_view key, const JsonValue* value, std::string_view wanted, const std::string& path) {
  return Status::BadInput(fmt::format("'{}' is {}; {} is needed", key,
                                      value == nullptr ? "missing" : value->ToString(), wanted))
      .WithFile(path);
}

Result<int64_t> Size(const JsonValue& spec, std::string_view key, int64_t low, int64_t high,
                     std::optional<int64_t> fallback, const std::string& path) {
  const JsonValue* value = spec.Find(key);
  if (value == nullptr && fallback) {
    return *fallback;
  }
  const std::optional<int64_t> size = value == nullptr ? std::nullopt : value->integer();
  if (!size || *size < low || *size > high) {
    return Wrong(key, value, fmt::format("an integer from {} to {}", low, high), path);
  }
  return *size;
}

Result<GroupShape> BlockSizes(std::string_view key, const JsonValue& block, const std::string& path) {
  GroupShape sizes{0, 0};
  if (block.is_array() && block.items().size() == 2) {
    sizes = {block.items()[0].integer().value_or(0), block.items()[1].integer().value_or(0)};
  } else if (const std::string& text = block.string(); !text.empty()) {
    const char* end = text.data() + text.size();
    const auto [x, bad_rows] = std::from_chars(text.data(), end, sizes.row);
    const bool parted = bad_rows == std::errc() && x != end && *x == 'x';
    if (!parted || std::from_chars(x + 1, end, sizes.col).ptr != end) {
      sizes = {0, 0};
    }
  }
  if (sizes.row < 1 || sizes.col < 1 || sizes.row > kLargestGroup || sizes.col > kLargestGroup) {
    return Wrong(key, &block, fmt::format("two sizes from 1 to {}", kLargestGroup), path);
  }
  return sizes;
}

Result<bool> Flag(const JsonValue& spec, std::string_view key, bool fallback, const std::string& path) {
  const JsonValue* value = spec.Find(key);
  if (value == nullptr) {
    return fallback;
  }
  if (!value->is_bool()) {
    return Wrong(key, value, "true or false", path);
  }
  return value->boolean();
}

Result<std::string> Word(const JsonValue& spec, std::string_view key, std::string_view fallback,
                         const std::string& path) {
  const JsonValue* value = spec.Find(key);
  if (value != nullptr && !value->is_string()) {
    return Wrong(key, value, "a string", path);
  }
  return value == nullptr ? std::string(fallback) : value->string();
}

Status NotSupported(std::string_view key, const JsonValue& value, std::string_view why,
                    const std::string& path) {
  return Status::Unsupported(
             fmt::format("'{}' is {}, which is not supported: {}", key, value.ToString(), why))
      .WithFile(path);
}

bool IsE4m3(const JsonValue* name) {
  constexpr std::string_view kNames[] = {"e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn"};
  return name == nullptr ||
         std::find(std::begin(kNames), std::end(kNames), name->string()) != std::end(kNames);
}

Result<std::optional<Pattern>> RegexOf(const std::string& text, const std::string& path) {
  if (!text.starts_with("re:")) {
    return std::optional<Pattern>();
  }
  Result<Pattern> pattern = Pattern::Compile(std::string_view(text).substr(3));
  if (!pattern.ok()) {
    return std::move(pattern).status().WithFile(path);
  }
  return std::optional<Pattern>(*std::move(pattern));
}

bool IsRegexLike(const std::string& pattern) {
  return pattern.find_first_of("\\^$(|") != std::string::npos;
}

bool Listed(const std::vector<std::string>& patterns, const std::string& module) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    if (pattern.find('*') != std::string::npos && !IsRegexLike(pattern)) {
      return MatchesWildcard(pattern, module) || MatchesWildcard(pattern + ".*", module);
    }
    return HasComponents(module, pattern);
  });
}

Result<std::vector<std::string>> SkippedModules(const JsonValue& spec, const std::string& path) {
  std::vector<std::string> all;
  for (const char* key : {"modules_to_not_convert", "ignored_layers", "ignore", "modules_to_skip"}) {
    FMOE_ASSIGN_OR_RETURN(const std::vector<std::string> some, StringList(spec.Find(key), key, path));
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

Result<QuantRules> Uniform(std::string producer, LinearFormat format, std::vector<std::string> skipped) {
  auto shared = std::make_shared<std::pair<LinearFormat, std::vector<std::string>>>(std::move(format),
                                                                                    std::move(skipped));
  QuantRules rules;
  rules.producer = std::move(producer);
  rules.format_of = [shared](const std::string& module) -> Result<LinearFormat> {
    return Listed(shared->second, module) ? LinearFormat{} : shared->first;
  };
  return rules;
}

QuantRules ApartFromExperts(std::string producer, LinearFormat routed, LinearFormat rest,
                            std::vector<std::string> skipped) {
  struct Parts {
    LinearFormat routed, rest;
    std::vector<std::string> skipped;
  };
  auto parts = std::make_shared<const Parts>(Parts{std::move(routed), std::move(rest), std::move(skipped)});
  QuantRules rules;
  rules.producer = std::move(producer);
  rules.format_of = [parts](const std::string& module) -> Result<LinearFormat> {
    if (Listed(parts->skipped, module)) {
      return LinearFormat{};
    }
    return module.find(".experts.") != std::string::npos ? parts->routed : parts->rest;
  };
  return rules;
}

}  // namespace fusedmoe::checkpoint
