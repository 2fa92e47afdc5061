#include <algorithm>
#include <charconv>
#include <optional>

#include <fmt/format.h>

#include "weights/steps/layout_step.hpp"

/// The table of steps, and recipes as text: what plans print and prepared files keep.
namespace fusedmoe {
namespace {

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t end = text.find(separator);
    std::string_view part = text.substr(0, end);
    while (part.starts_with(' ')) {
      part.remove_prefix(1);
    }
    parts.push_back(part);
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  }
  return parts;
}

std::optional<int64_t> ParseValue(std::string_view name, std::string_view text) {
  if (name == "element") {
    const std::optional<DType> dtype = ParseDType(text);
    return dtype ? std::optional(static_cast<int64_t>(*dtype)) : std::nullopt;
  }
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size() && !text.empty();
  return whole ? std::optional(value) : std::nullopt;
}

Result<LayoutStep> ParseStep(std::string_view text) {
  const Status unreadable =
      Status::BadInput(fmt::format("'{}' is no layout step; \"name(tensor, parameter=value)\" is", text));
  const size_t open = text.find('(');
  if (open == std::string_view::npos || !text.ends_with(')')) {
    return unreadable;
  }
  const std::string_view name = text.substr(0, open);
  const auto info = std::find_if(LayoutStepTable().begin(), LayoutStepTable().end(),
                                 [&](const LayoutStepInfo& row) { return row.name == name; });
  const std::vector<std::string_view> fields = Split(text.substr(open + 1, text.size() - open - 2), ',');
  if (info == LayoutStepTable().end() || fields.empty()) {
    return unreadable;
  }
  const std::vector<std::string_view> names = Split(info->parameters, ',');
  if (fields.size() != names.size() + 1) {
    return unreadable;
  }
  LayoutStep step{info->op, std::string(fields[0]), {}};
  for (size_t index = 0; index < names.size(); ++index) {
    const std::string_view field = fields[index + 1];
    const size_t equals = field.find('=');
    if (equals == std::string_view::npos || field.substr(0, equals) != names[index]) {
      return unreadable;
    }
    const std::optional<int64_t> value = ParseValue(names[index], field.substr(equals + 1));
    if (!value) {
      return unreadable;
    }
    step.values[index] = *value;
  }
  return step;
}

}  // namespace

std::span<const LayoutStepInfo> LayoutStepTable() {
  static constexpr LayoutStepInfo kTable[] = {
#define FMOE_LAYOUT_INFO(id, name, parameters, lossless, what) \
  {LayoutOp::id, name, parameters, lossless, what},
      FMOE_LAYOUT_STEP_TABLE(FMOE_LAYOUT_INFO)
#undef FMOE_LAYOUT_INFO
  };
  return kTable;
}

const LayoutStepInfo& InfoOf(LayoutOp op) {
  return LayoutStepTable()[static_cast<size_t>(op)];
}

std::string TextOf(const LayoutStep& step) {
  const LayoutStepInfo& info = InfoOf(step.op);
  std::string text = fmt::format("{}({}", info.name, step.tensor);
  const std::vector<std::string_view> names = Split(info.parameters, ',');
  for (size_t index = 0; index < names.size(); ++index) {
    const int64_t value = step.values[index];
    text += names[index] == "element" ? fmt::format(", element={}", DTypeName(static_cast<DType>(value)))
                                      : fmt::format(", {}={}", names[index], value);
  }
  return text + ")";
}

std::vector<std::string> LayoutRecipe::ToText() const {
  std::vector<std::string> text;
  for (const LayoutStep& step : steps) {
    text.push_back(TextOf(step));
  }
  return text;
}

Result<LayoutRecipe> LayoutRecipe::Parse(std::span<const std::string> text) {
  LayoutRecipe recipe;
  for (const std::string& line : text) {
    FMOE_ASSIGN_OR_RETURN(LayoutStep step, ParseStep(line));
    recipe.steps.push_back(std::move(step));
  }
  return recipe;
}

}  // namespace fusedmoe
