#include "oracle/switches.hpp"

#include <algorithm>
#include <cctype>
#include <numeric>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/text.hpp"

namespace fusedmoe {
namespace {

enum class SwitchKind : uint8_t { kFlag, kText };

struct SwitchRow {
  SwitchInfo info;
  SwitchKind kind;
};

constexpr SwitchRow kSwitches[] = {
#define FMOE_SWITCH(name, kind, default_value, families, what) \
  {{name, default_value, families, what}, SwitchKind::kind},
#include "oracle/switches.inc"
#undef FMOE_SWITCH
};

const SwitchRow* FindRow(std::string_view name) {
  const auto* found = std::find_if(std::begin(kSwitches), std::end(kSwitches),
                                   [name](const SwitchRow& row) { return row.info.name == name; });
  return found == std::end(kSwitches) ? nullptr : found;
}

/// Letters to insert, remove or replace to make one word of the other.
size_t Distance(std::string_view from, std::string_view to) {
  std::vector<size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= from.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= to.size(); ++j) {
      const size_t replaced = diagonal + (from[i - 1] == to[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({replaced, row[j] + 1, row[j - 1] + 1}));
    }
  }
  return row.back();
}

/// The three names that take the fewest letters to write.
std::vector<std::string_view> NearestSwitches(std::string_view name) {
  std::vector<std::pair<size_t, std::string_view>> names;
  for (const SwitchRow& row : kSwitches) {
    names.emplace_back(Distance(name.substr(0, 100), row.info.name), row.info.name);
  }
  std::stable_sort(names.begin(), names.end(),
                   [](const auto& one, const auto& other) { return one.first < other.first; });
  std::vector<std::string_view> nearest;
  for (size_t at = 0; at < 3; ++at) {
    nearest.push_back(names[at].second);
  }
  return nearest;
}

/// Upstream reads int(value); the ROCm flags take "true" too. Both spellings are taken everywhere.
std::optional<bool> ParseFlag(std::string_view value) {
  const std::string lower = LowerCase(value);
  if (lower == "true" || lower == "false") {
    return lower == "true";
  }
  std::string_view digits = lower;
  if (!digits.empty() && (digits.front() == '-' || digits.front() == '+')) {
    digits.remove_prefix(1);
  }
  if (digits.empty() || digits.size() > 9 ||
      !std::all_of(digits.begin(), digits.end(),
                   [](unsigned char letter) { return std::isdigit(letter) != 0; })) {
    return std::nullopt;
  }
  return digits.find_first_not_of('0') != std::string_view::npos;
}

}  // namespace

std::span<const SwitchInfo> SwitchTable() {
  static const std::vector<SwitchInfo> table = [] {
    std::vector<SwitchInfo> infos;
    for (const SwitchRow& row : kSwitches) {
      infos.push_back(row.info);
    }
    return infos;
  }();
  return table;
}

const SwitchInfo* FindSwitch(std::string_view name) {
  const SwitchRow* row = FindRow(name);
  return row == nullptr ? nullptr : &row->info;
}

bool Concerns(const SwitchInfo& info, SchemeFamily family) {
  if (info.families == "*") {
    return true;
  }
  std::string_view rest = info.families;
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    if (rest.substr(0, comma) == Name(family)) {
      return true;
    }
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
  }
  return false;
}

Result<Switches> Switches::Parse(std::span<const std::string> env) {
  Switches switches;
  for (const std::string& text : env) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0) {
      return Status::Usage(fmt::format("switch '{}' is not of the form NAME=VALUE", text));
    }
    const std::string name = text.substr(0, equals);
    const std::string value = text.substr(equals + 1);
    const SwitchRow* row = FindRow(name);
    if (row == nullptr) {  // misspelt, it would leave the question as it was
      return Status::Usage(fmt::format("'{}' is no switch that is known; nearest are {}", name,
                                       fmt::join(NearestSwitches(name), ", ")))
          .WithHint("fusedmoe explain --help lists them all");
    }
    if (row->kind == SwitchKind::kFlag && !ParseFlag(value)) {
      return Status::Usage(fmt::format("{} is '{}'; it takes 0 or 1", name, value));
    }
    const auto same = [&name](const Given& given) { return given.name == name; };
    switches.given_.erase(std::remove_if(switches.given_.begin(), switches.given_.end(), same),
                          switches.given_.end());
    switches.given_.push_back({name, value});
  }
  return switches;
}

bool Switches::IsSet(std::string_view name) const {
  return std::any_of(given_.begin(), given_.end(), [name](const Given& given) { return given.name == name; });
}

std::string_view Switches::Value(std::string_view name) const {
  for (const Given& given : given_) {
    if (given.name == name) {
      return given.value;
    }
  }
  return {};
}

bool Switches::IsTrue(std::string_view name) const {
  const SwitchInfo* info = FindSwitch(name);
  const std::string_view text = IsSet(name)       ? Value(name)
                                : info == nullptr ? std::string_view{}
                                                  : info->default_value;
  return ParseFlag(text).value_or(false);
}

Switches Switches::Without(std::string_view name) const {
  Switches rest;
  for (const Given& given : given_) {
    if (given.name != name) {
      rest.given_.push_back(given);
    }
  }
  return rest;
}

}  // namespace fusedmoe
