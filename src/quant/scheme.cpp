#include <fmt/format.h>

#include <array>
#include <charconv>
#include <optional>
#include <vector>

#include "core/names.hpp"
#include "quant/scheme_formats.hpp"
#include "quant/scheme_table.hpp"

namespace fusedmoe {
namespace {

using namespace scheme_formats;  // NOLINT: the rows below are written in its words

constexpr SchemeRow kSchemes[] = {
#define FMOE_SCHEME(name, granularities, weight, activation, what) \
  {{name, granularities, what}, weight, activation},
#include "quant/schemes.inc"
#undef FMOE_SCHEME
};

constexpr auto kSchemeInfos = [] {
  std::array<SchemeInfo, std::size(kSchemes)> infos{};
  for (size_t i = 0; i < infos.size(); ++i) {
    infos[i] = kSchemes[i].info;
  }
  return infos;
}();

std::vector<std::string_view> Split(std::string_view list) {
  std::vector<std::string_view> words;
  while (!list.empty()) {
    const size_t comma = list.find(',');
    words.push_back(list.substr(0, comma));
    list = comma == std::string_view::npos ? std::string_view() : list.substr(comma + 1);
  }
  return words;
}

/// All of `text` as a size between 1 and 65536.
std::optional<int64_t> ParseSize(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool all = error == std::errc() && end == text.data() + text.size();
  return all && value >= 1 && value <= 65536 ? std::optional(value) : std::nullopt;
}

/// What the weight part of a granularity word says; {-1,-1} is "tensor".
std::optional<GroupShape> ParseWeightWord(std::string_view word) {
  if (word == "tensor") {
    return kPerTensor;
  }
  if (word == "channel") {
    return kPerRow;
  }
  if (word.starts_with("block")) {
    word.remove_prefix(5);
    const size_t x = word.find('x');
    const auto rows = ParseSize(word.substr(0, x));
    const auto cols = x == std::string_view::npos ? rows : ParseSize(word.substr(x + 1));
    return rows && cols ? std::optional(GroupShape{*rows, *cols}) : std::nullopt;
  }
  if (word.starts_with("out")) {
    const auto rows = ParseSize(word.substr(3));
    return rows ? std::optional(GroupShape{*rows, 1}) : std::nullopt;
  }
  if (word.starts_with("g")) {
    const auto size = ParseSize(word.substr(1));
    return size ? std::optional(GroupShape{1, *size}) : std::nullopt;
  }
  return std::nullopt;
}

/// N of "groupN", which says nothing about weights.
std::optional<int64_t> ParseActivationGroup(std::string_view word) {
  constexpr std::string_view kGroup = "group";
  return word.starts_with(kGroup) ? ParseSize(word.substr(kGroup.size())) : std::nullopt;
}

std::string WeightWord(GroupShape shape) {
  if (shape == kPerTensor) {
    return "tensor";
  }
  if (shape == kPerRow) {
    return "channel";
  }
  if (shape.row == 1) {
    return fmt::format("g{}", shape.col);
  }
  if (shape.col == 1) {
    return fmt::format("out{}", shape.row);
  }
  return shape.row == shape.col ? fmt::format("block{}", shape.row)
                                : fmt::format("block{}x{}", shape.row, shape.col);
}

bool Accepts(std::string_view granularities, std::string_view word) {
  const auto shape = ParseWeightWord(word);
  for (const std::string_view listed : Split(granularities)) {
    if (listed == word) {
      return true;
    }
    const auto listed_shape = ParseWeightWord(listed);
    if (ParseActivationGroup(word) && ParseActivationGroup(listed)) {
      return true;
    }
    const bool both_sized = shape && listed_shape && shape->col > 0 && listed_shape->col > 0;
    if (both_sized && (shape->row == 1) == (listed_shape->row == 1) && word[0] == listed[0]) {
      return true;
    }
  }
  return false;
}

/// The listed words, and that Accepts takes groups and blocks of other sizes too.
std::string GranularitiesText(std::string_view granularities) {
  std::string text(granularities.empty() ? "none" : granularities);
  const std::pair<std::string_view, std::string_view> sized[] = {
      {"g64", "gSIZE"}, {"block64", "blockROWSxCOLUMNS"}, {"group64", "groupSIZE"}};
  for (const auto& [word, pattern] : sized) {
    text += Accepts(granularities, word) ? fmt::format(", {} of any size", pattern) : "";
  }
  return text;
}

void SetWeightGranularity(GroupShape shape, WeightFormat& weight) {
  if (shape == kPerTensor) {
    weight.has_tensor_scale = true;
  } else if (shape == kPerRow && !weight.may_have_zero_point) {
    weight.has_channel_scale = true;
  } else {
    weight.block = shape;  // integer weights keep channel scales here: their zero points have the same shape
  }
}

void SetActivationGranularity(GroupShape weight_shape, ActivationFormat& activation) {
  const bool own_groups = activation.scale_dtype == DType::kF8E8M0;  // MX: 32, however the weights lie
  if (!activation.quantized() || activation.static_tensor_scale || own_groups) {
    return;
  }
  const bool blocks = weight_shape.row > 1;
  activation.group = weight_shape == kPerTensor ? kPerTensor
                     : blocks                   ? GroupShape{1, weight_shape.col}
                                                : kPerRow;
}

/// Builds the scheme of one row at one granularity; nothing when the word has no meaning.
std::optional<Scheme> Build(const SchemeRow& row, std::string_view word) {
  Scheme scheme{std::string(row.info.name), row.weight, row.activation};
  if (word.empty()) {
    return scheme;
  }
  if (const auto group = ParseActivationGroup(word)) {
    scheme.activation.static_tensor_scale = false;
    scheme.activation.group = {1, *group};
    if (scheme.weight.block_scale_dtype == DType::kF8E8M0) {
      scheme.activation.scale_dtype = DType::kF8E8M0;
      scheme.activation.rule.mx_scale = MxScaleRule::kCeil;
    }
    return scheme;
  }
  std::string_view weight_word = word;
  std::string_view activation_word;
  if (const size_t underscore = word.find('_'); underscore != std::string_view::npos) {
    weight_word = word.substr(0, underscore);
    activation_word = word.substr(underscore + 1);
  } else if (word == "static" || word == "dynamic") {
    weight_word = {};
    activation_word = word;
  }
  if (!weight_word.empty()) {
    const auto shape = ParseWeightWord(weight_word);
    if (!shape) {
      return std::nullopt;
    }
    SetWeightGranularity(*shape, scheme.weight);
    SetActivationGranularity(*shape, scheme.activation);
  }
  if (!activation_word.empty()) {
    scheme.activation.static_tensor_scale = activation_word == "static";
    scheme.activation.group = activation_word == "token" ? kPerRow : kPerTensor;
  }
  return scheme;
}

std::string KnownNames(std::span<const SchemeRow> table) {
  return JoinNames(table, [](const SchemeRow& row) { return row.info.name; });
}

bool SameKind(DType a, DType b) {
  const auto kind = [](DType dtype) {
    switch (dtype) {
      case DType::kF32:
      case DType::kF16:
      case DType::kBF16:
        return 1;
      case DType::kU4:
      case DType::kI4:
        return 2;
      case DType::kU8:
      case DType::kI8:
        return 3;
      default:
        return 100 + static_cast<int>(dtype);
    }
  };
  return kind(a) == kind(b);
}

/// Where the scales lie, with the two spellings of "one scale a row" made one.
struct ScaleLevels {
  GroupShape block;
  bool channel, tensor;
  bool operator==(const ScaleLevels&) const = default;
};

ScaleLevels LevelsOf(const WeightFormat& format) {
  ScaleLevels levels{format.block, format.has_channel_scale, format.has_tensor_scale};
  if (format.block == kPerRow) {
    levels.block = kPerTensor;
    levels.channel = true;
  }
  // The channel level of two-level int4 may be folded into 16-bit group scales without another meaning.
  if (format.element == DType::kI4 && levels.block != kPerTensor) {
    levels.channel = false;
  }
  return levels;
}

bool Describes(const Scheme& scheme, const WeightFormat& weight, const ActivationFormat& activation) {
  const ActivationFormat& input = scheme.activation;
  const bool small_floats = weight.block_scale_dtype == DType::kF8E4M3 || weight.element == DType::kF4E2M1;
  if (small_floats && weight.element != DType::kI4 &&
      scheme.weight.block_scale_dtype != weight.block_scale_dtype) {
    return false;  // NVFP4 and MXFP4 differ in nothing but this
  }
  return SameKind(scheme.weight.element, weight.element) && LevelsOf(scheme.weight) == LevelsOf(weight) &&
         input.element == activation.element && input.group == activation.group &&
         input.static_tensor_scale == activation.static_tensor_scale;
}

}  // namespace

Result<Scheme> ParseSchemeIn(std::span<const SchemeRow> table, std::string_view name) {
  const size_t colon = name.find(':');
  const std::string_view base = name.substr(0, colon);
  for (const SchemeRow& row : table) {
    if (row.info.name != base) {
      continue;
    }
    std::string_view word = Split(row.info.granularities).empty() ? "" : Split(row.info.granularities)[0];
    if (colon != std::string_view::npos) {
      word = name.substr(colon + 1);
      word = word == "token" ? "channel" : word == "block" ? "block128" : word;
      if (!Accepts(row.info.granularities, word)) {
        return Status::Usage(fmt::format("scheme '{}' has no granularity '{}', it has: {}", base, word,
                                         GranularitiesText(row.info.granularities)));
      }
    }
    auto scheme = Build(row, word);
    if (!scheme) {
      return Status::Usage(fmt::format("granularity '{}' cannot be built for scheme '{}'; use one of: {}",
                                       word, base, GranularitiesText(row.info.granularities)));
    }
    if (colon != std::string_view::npos) {
      scheme->name = fmt::format("{}:{}", base, word);
    }
    return *std::move(scheme);
  }
  return (base.empty() ? Status::Usage(fmt::format("no scheme is named; known: {}", KnownNames(table)))
                       : UnknownName("scheme", base, KnownNames(table)))
      .WithHint("a granularity stands behind a colon, as in int4_w4a16:g128");
}

Result<std::string> SchemeNameIn(std::span<const SchemeRow> table, const WeightFormat& weight,
                                 const ActivationFormat& activation) {
  const ScaleLevels levels = LevelsOf(weight);
  const GroupShape shape = levels.block != kPerTensor ? levels.block : levels.channel ? kPerRow : kPerTensor;
  const std::string weight_word = WeightWord(shape);
  const std::string candidates[] = {weight_word,
                                    weight_word + "_tensor",
                                    weight_word + "_static",
                                    weight_word + "_token",
                                    "static",
                                    "dynamic",
                                    fmt::format("group{}", activation.group.col)};
  for (const SchemeRow& row : table) {
    const auto words = Split(row.info.granularities);
    if (words.empty()) {
      if (Describes(*Build(row, ""), weight, activation)) {
        return std::string(row.info.name);
      }
      continue;
    }
    for (const std::string& word : candidates) {
      const auto scheme = Accepts(row.info.granularities, word) ? Build(row, word) : std::nullopt;
      if (scheme && Describes(*scheme, weight, activation)) {
        return word == words[0] ? std::string(row.info.name) : fmt::format("{}:{}", row.info.name, word);
      }
    }
  }
  return Status::Unsupported(fmt::format("no scheme has weights of {} with activations of {}",
                                         Describe(weight), Describe(activation)));
}

std::span<const SchemeInfo> SchemeTable() {
  return kSchemeInfos;
}

std::vector<std::string> SchemeNames() {
  std::vector<std::string> names;
  for (const SchemeInfo& info : SchemeTable()) {
    std::string_view rest = info.granularities;
    if (rest.empty()) {
      names.emplace_back(info.name);
    }
    while (!rest.empty()) {
      const size_t comma = std::min(rest.find(','), rest.size());
      names.push_back(fmt::format("{}:{}", info.name, rest.substr(0, comma)));
      rest.remove_prefix(std::min(comma + 1, rest.size()));
    }
  }
  return names;
}

Result<Scheme> ParseScheme(std::string_view name) {
  return ParseSchemeIn(kSchemes, name);
}

Result<Scheme> ParseScheme(std::string_view name, std::span<const int64_t> reduction_sizes) {
  FMOE_ASSIGN_OR_RETURN(Scheme scheme, ParseScheme(name));
  const bool integer4 = scheme.weight.element == DType::kU4 || scheme.weight.element == DType::kI4;
  const bool bare = name.find(':') == std::string_view::npos;
  if (!bare || !integer4 || scheme.weight.block_scale_dtype == DType::kF8E4M3) {
    return scheme;
  }
  for (const char* word : {"g128", "g64", "g32", "channel"}) {
    FMOE_ASSIGN_OR_RETURN(Scheme candidate, ParseScheme(fmt::format("{}:{}", name, word)));
    bool divides = true;
    for (const int64_t size : reduction_sizes) {
      divides = divides && (candidate.weight.block.col <= 0 || size % candidate.weight.block.col == 0);
    }
    if (divides) {
      return std::string_view(word) == "g128" ? scheme : candidate;
    }
  }
  return scheme;
}

Result<std::string> SchemeNameFor(const WeightFormat& weight, const ActivationFormat& activation) {
  return SchemeNameIn(kSchemes, weight, activation);
}

namespace {

std::string Extent(GroupShape shape) {
  const auto side = [](int64_t size) { return size < 0 ? std::string("all") : fmt::format("{}", size); };
  return shape == kPerTensor ? "tensor" : fmt::format("{}x{}", side(shape.row), side(shape.col));
}

}  // namespace

std::string Describe(const WeightFormat& format) {
  std::string text(DTypeName(format.element));
  if (format.has_block_scale()) {
    text += fmt::format(", {} scale per {}", DTypeName(format.block_scale_dtype), Extent(format.block));
  }
  text += format.has_channel_scale ? ", F32 scale per row" : "";
  text += format.has_tensor_scale ? ", F32 scale per matrix" : "";
  return text;
}

std::string Describe(const ActivationFormat& format) {
  if (!format.quantized()) {
    return "16 bits and more";
  }
  std::string text =
      fmt::format("{}, {} scale per {}", DTypeName(*format.element), DTypeName(format.scale_dtype),
                  format.group == kPerRow ? "token" : Extent(format.group));
  if (format.static_tensor_scale) {
    text += format.group == kPerTensor ? ", stored" : ", stored F32 scale above";
  }
  return text;
}

}  // namespace fusedmoe
