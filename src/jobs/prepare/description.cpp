#include "jobs/prepare/description.hpp"

#include <cmath>
#include <optional>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace fusedmoe::prepared {
namespace {

using Json = nlohmann::ordered_json;

/// Reads an object field by field, and checks each. The first mistake stands in `status`; from then on values
/// mean nothing.
class Fields {
 public:
  Fields(const Json& json, std::string path) : json_(json), path_(std::move(path)) {
    if (!json.is_object()) {
      Fail("", "an object");
    }
  }

  int64_t Integer(const char* name, int64_t low, int64_t high);
  float Number(const char* name);
  bool Flag(const char* name);
  std::string Text(const char* name);
  /// A name that `parse` knows.
  template <typename Value, typename Parse>
  Value Name(const char* name, Parse parse) {
    const auto value = parse(Text(name));
    if (!value && status_.ok()) {
      Fail(name, "a name of its table");
    }
    return value.value_or(Value{});
  }
  /// The member; null (a JSON one) when it is missing.
  const Json& Member(const char* name);
  bool Has(const char* name) const { return json_.is_object() && json_.contains(name); }
  std::string PathOf(const char* name) const { return path_.empty() ? name : path_ + "." + name; }
  void Fail(const char* name, const std::string& required);
  const Status& status() const { return status_; }

 private:
  const Json& json_;
  std::string path_;
  Status status_;
};

constexpr int64_t kLargestSize = int64_t{1} << 31;

constexpr std::string_view kMxRules[] = {"even",     "floor", "ceil", "no_element_max", "floor_of_quotient",
                                         "even_e2m1"};
constexpr std::string_view kIntRoundings[] = {"half_even", "half_away", "truncate"};
constexpr std::string_view kFormats[] = {"standard", "batched"};

template <typename Enum, size_t count>
auto ParserOf(const std::string_view (&names)[count]) {
  return [&names](const std::string& name) -> std::optional<Enum> {
    for (size_t index = 0; index < count; ++index) {
      if (names[index] == name) {
        return static_cast<Enum>(index);
      }
    }
    return std::nullopt;
  };
}

template <typename Enum, size_t count>
std::string NameOf(const std::string_view (&names)[count], Enum value) {
  return std::string(names[static_cast<size_t>(value)]);
}

Json ToJson(const GroupShape& shape) {
  return Json::array({shape.row, shape.col});
}

GroupShape ParseGroup(Fields& fields, const char* name) {
  const Json& json = fields.Member(name);
  const auto fits = [](const Json& size) {
    return size.is_number_integer() &&
           (size.get<int64_t>() == -1 || (size.get<int64_t>() >= 1 && size.get<int64_t>() <= kLargestSize));
  };
  if (!json.is_array() || json.size() != 2 || !fits(json[0]) || !fits(json[1])) {
    fields.Fail(name, "[rows, columns], each -1 or at least 1");
    return {};
  }
  return {json[0].get<int64_t>(), json[1].get<int64_t>()};
}

Json ToJson(const ActivationSpec& activation) {
  return {{"kind", std::string(ActivationName(activation.kind))},
          {"alpha", activation.alpha},
          {"beta", activation.beta},
          {"limit", activation.limit}};
}

ActivationSpec ParseActivationSpec(Fields fields, Status& status) {
  ActivationSpec spec;
  spec.kind =
      fields.Name<ActivationKind>("kind", [](const std::string& name) { return ParseActivation(name); });
  spec.alpha = fields.Number("alpha");
  spec.beta = fields.Number("beta");
  spec.limit = fields.Number("limit");
  status = status.ok() ? fields.status() : status;
  return spec;
}

Json ToJson(const RoutingConfig& routing) {
  return {{"method", std::string(RoutingMethodName(routing.method))},
          {"score", std::string(ScoreFunctionName(routing.score))},
          {"renormalize", routing.renormalize},
          {"num_groups", routing.num_groups},
          {"topk_groups", routing.topk_groups},
          {"scaling_factor", routing.scaling_factor},
          {"norm_epsilon", routing.norm_epsilon},
          {"logit_softcap", routing.logit_softcap},
          {"select_on_logits", routing.select_on_logits},
          {"jitter", routing.jitter},
          {"num_zero_experts", routing.num_zero_experts},
          {"simulation", routing.simulation},
          {"simulation_seed", routing.simulation_seed}};
}

RoutingConfig ParseRouting(Fields fields, int64_t top_k, Status& status) {
  RoutingConfig routing;
  routing.top_k = top_k;
  routing.method =
      fields.Name<RoutingMethod>("method", [](const std::string& name) { return ParseRoutingMethod(name); });
  routing.score =
      fields.Name<ScoreFunction>("score", [](const std::string& name) { return ParseScoreFunction(name); });
  routing.renormalize = fields.Flag("renormalize");
  routing.num_groups = fields.Integer("num_groups", 1, kLargestSize);
  routing.topk_groups = fields.Integer("topk_groups", 1, kLargestSize);
  routing.scaling_factor = fields.Number("scaling_factor");
  routing.norm_epsilon = fields.Number("norm_epsilon");
  routing.logit_softcap = fields.Number("logit_softcap");
  routing.select_on_logits = fields.Flag("select_on_logits");
  routing.jitter = fields.Number("jitter");
  routing.num_zero_experts = fields.Integer("num_zero_experts", 0, kMaxRoutedExperts);
  routing.simulation = fields.Text("simulation");
  routing.simulation_seed = static_cast<uint64_t>(fields.Integer("simulation_seed", 0, INT64_MAX));
  if (routing.method == RoutingMethod::kCustom) {
    fields.Fail("method", "a method that needs no callback");
  }
  status = status.ok() ? fields.status() : status;
  return routing;
}

Json ToJson(const SharedExpertConfig& shared) {
  Json json = {{"intermediate", shared.intermediate},
               {"has_gate", shared.has_gate},
               {"has_bias", shared.has_bias},
               {"weight", shared.weight}};
  if (shared.activation) {
    json["activation"] = ToJson(*shared.activation);
  }
  return json;
}

SharedExpertConfig ParseShared(Fields fields, Status& status) {
  SharedExpertConfig shared;
  shared.intermediate = fields.Integer("intermediate", 0, kLargestSize);
  shared.has_gate = fields.Flag("has_gate");
  shared.has_bias = fields.Flag("has_bias");
  shared.weight = fields.Number("weight");
  if (fields.Has("activation")) {
    shared.activation =
        ParseActivationSpec(Fields(fields.Member("activation"), fields.PathOf("activation")), status);
  }
  status = status.ok() ? fields.status() : status;
  return shared;
}

Json ToJson(const ActivationRule& rule) {
  return {{"amax_divisor", rule.amax_divisor},
          {"scale_floor", rule.scale_floor},
          {"multiply_by_reciprocal", rule.multiply_by_reciprocal},
          {"multiply_by_divisor_over_amax", rule.multiply_by_divisor_over_amax},
          {"mx_scale", NameOf(kMxRules, rule.mx_scale)},
          {"int_rounding", NameOf(kIntRoundings, rule.int_rounding)},
          {"round_to_bf16_first", rule.round_to_bf16_first},
          {"power_of_two_scale", rule.power_of_two_scale},
          {"amax_upper_bound", rule.amax_upper_bound},
          {"zero_scale", rule.zero_scale},
          {"ties_toward_zero", rule.ties_toward_zero}};
}

ActivationRule ParseRule(Fields fields, Status& status) {
  ActivationRule rule;
  rule.amax_divisor = fields.Number("amax_divisor");
  rule.scale_floor = fields.Number("scale_floor");
  rule.multiply_by_reciprocal = fields.Flag("multiply_by_reciprocal");
  rule.multiply_by_divisor_over_amax = fields.Flag("multiply_by_divisor_over_amax");
  rule.mx_scale = fields.Name<MxScaleRule>("mx_scale", ParserOf<MxScaleRule>(kMxRules));
  rule.int_rounding = fields.Name<IntRounding>("int_rounding", ParserOf<IntRounding>(kIntRoundings));
  rule.round_to_bf16_first = fields.Flag("round_to_bf16_first");
  rule.power_of_two_scale = fields.Flag("power_of_two_scale");
  rule.amax_upper_bound = fields.Number("amax_upper_bound");
  rule.zero_scale = fields.Number("zero_scale");
  rule.ties_toward_zero = fields.Flag("ties_toward_zero");
  status = status.ok() ? fields.status() : status;
  return rule;
}

Json ToJson(const ActivationFormat& format) {
  Json json = {{"element", nullptr}};
  if (format.element) {
    json["element"] = std::string(DTypeName(*format.element));
  }
  json["group"] = ToJson(format.group);
  json["scale_dtype"] = std::string(DTypeName(format.scale_dtype));
  json["static_tensor_scale"] = format.static_tensor_scale;
  json["rule"] = ToJson(format.rule);
  return json;
}

std::optional<DType> DTypeOf(const std::string& name) {
  return ParseDType(name);
}

ActivationFormat ParseActivationFormat(Fields fields, Status& status) {
  ActivationFormat format;
  if (!fields.Has("element") || !fields.Member("element").is_null()) {
    format.element = fields.Name<DType>("element", DTypeOf);
  }
  format.group = ParseGroup(fields, "group");
  format.scale_dtype = fields.Name<DType>("scale_dtype", DTypeOf);
  format.static_tensor_scale = fields.Flag("static_tensor_scale");
  format.rule = ParseRule(Fields(fields.Member("rule"), fields.PathOf("rule")), status);
  status = status.ok() ? fields.status() : status;
  return format;
}

Result<Json> ParseJson(const std::string& text, const char* what) {
  Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) {
    return Status::BadInput(fmt::format("'{}' of the metadata is no JSON", what));
  }
  return json;
}

/// What the schemes of this library are made of; anything else would reach decoders that do not know it.
Status CheckScheme(const Scheme& scheme, const std::string& path) {
  const auto known = SchemeNameFor(scheme.weight, scheme.activation);
  return known.ok() ? Status::Ok()
                    : Status::BadInput(fmt::format("{}: {}", path.empty() ? "quant_config" : path,
                                                   known.status().message()));
}

void Fields::Fail(const char* name, const std::string& required) {
  if (status_.ok()) {
    const Json* member = json_.is_object() && json_.contains(name) ? &json_[name] : nullptr;
    std::string actual =
        member == nullptr ? "missing" : member->dump(-1, ' ', true, Json::error_handler_t::replace);
    actual = actual.size() > 60 ? actual.substr(0, 57) + "..." : actual;
    status_ = Status::BadInput(
        fmt::format("the metadata field {} is {}; {} is required", PathOf(name), actual, required));
  }
}

const Json& Fields::Member(const char* name) {
  static const Json kNull;
  if (!Has(name)) {
    Fail(name, "a value");
    return kNull;
  }
  return json_[name];
}

int64_t Fields::Integer(const char* name, int64_t low, int64_t high) {
  const Json& json = Member(name);
  const bool small = json.is_number_integer() &&
                     !(json.is_number_unsigned() && json.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX));
  if (!small || json.get<int64_t>() < low || json.get<int64_t>() > high) {
    Fail(name, fmt::format("an integer of {}..{}", low, high));
    return low;
  }
  return json.get<int64_t>();
}

float Fields::Number(const char* name) {
  const Json& json = Member(name);
  const auto value = json.is_number() ? json.get<double>() : std::nan("");
  if (!std::isfinite(static_cast<float>(value))) {
    Fail(name, "a finite number");
    return 0.0F;
  }
  return static_cast<float>(value);
}

bool Fields::Flag(const char* name) {
  const Json& json = Member(name);
  if (!json.is_boolean()) {
    Fail(name, "true or false");
    return false;
  }
  return json.get<bool>();
}

std::string Fields::Text(const char* name) {
  const Json& json = Member(name);
  if (!json.is_string()) {
    Fail(name, "a string");
    return {};
  }
  return json.get<std::string>();
}

Json ToJson(const WeightFormat& format) {
  return {{"element", std::string(DTypeName(format.element))},
          {"block", ToJson(format.block)},
          {"block_scale_dtype", std::string(DTypeName(format.block_scale_dtype))},
          {"has_channel_scale", format.has_channel_scale},
          {"has_tensor_scale", format.has_tensor_scale},
          {"may_have_zero_point", format.may_have_zero_point}};
}

Result<WeightFormat> ParseWeightFormat(const Json& json, const std::string& path) {
  Fields fields(json, path);
  WeightFormat format;
  format.element = fields.Name<DType>("element", DTypeOf);
  format.block = ParseGroup(fields, "block");
  format.block_scale_dtype = fields.Name<DType>("block_scale_dtype", DTypeOf);
  format.has_channel_scale = fields.Flag("has_channel_scale");
  format.has_tensor_scale = fields.Flag("has_tensor_scale");
  format.may_have_zero_point = fields.Flag("may_have_zero_point");
  FMOE_RETURN_IF_ERROR(fields.status());
  return format;
}

Json ToJson(const Scheme& scheme) {
  return {
      {"name", scheme.name}, {"weight", ToJson(scheme.weight)}, {"activation", ToJson(scheme.activation)}};
}

Result<Scheme> ParseSchemeJson(const Json& json, const std::string& path) {
  Fields fields(json, path);
  Status status;
  Scheme scheme;
  scheme.name = fields.Text("name");
  FMOE_ASSIGN_OR_RETURN(scheme.weight, ParseWeightFormat(fields.Member("weight"), fields.PathOf("weight")));
  scheme.activation =
      ParseActivationFormat(Fields(fields.Member("activation"), fields.PathOf("activation")), status);
  FMOE_RETURN_IF_ERROR(fields.status());
  FMOE_RETURN_IF_ERROR(status);
  FMOE_RETURN_IF_ERROR(CheckScheme(scheme, path));
  return scheme;
}

}  // namespace

std::string ConfigText(const MoeConfig& config) {
  const Json json = {{"num_experts", config.num_experts},
                     {"num_local_experts", config.num_local_experts},
                     {"hidden", config.hidden},
                     {"intermediate", config.intermediate},
                     {"top_k", config.top_k()},
                     {"activation", ToJson(config.activation)},
                     {"has_bias", config.has_bias},
                     {"dtype", std::string(DTypeName(config.dtype))},
                     {"routing", ToJson(config.routing)},
                     {"has_correction_bias", config.has_correction_bias},
                     {"has_router_bias", config.has_router_bias},
                     {"apply_router_weight_on_input", config.apply_router_weight_on_input},
                     {"shared", ToJson(config.shared)},
                     {"activation_format", NameOf(kFormats, config.activation_format)}};
  return json.dump();
}

Result<MoeConfig> ParseConfig(const std::string& text) {
  FMOE_ASSIGN_OR_RETURN(const Json json, ParseJson(text, "config"));
  Fields fields(json, "config");
  Status status;
  MoeConfig config;
  config.num_experts = fields.Integer("num_experts", 1, kMaxRoutedExperts);
  config.num_local_experts = fields.Integer("num_local_experts", 1, kMaxRoutedExperts);
  config.hidden = fields.Integer("hidden", 1, kLargestSize);
  config.intermediate = fields.Integer("intermediate", 1, kLargestSize);
  const int64_t top_k = fields.Integer("top_k", 1, kMaxRoutedExperts);
  config.activation =
      ParseActivationSpec(Fields(fields.Member("activation"), fields.PathOf("activation")), status);
  config.has_bias = fields.Flag("has_bias");
  config.dtype = fields.Name<DType>("dtype", DTypeOf);
  config.routing = ParseRouting(Fields(fields.Member("routing"), fields.PathOf("routing")), top_k, status);
  config.has_correction_bias = fields.Flag("has_correction_bias");
  config.has_router_bias = fields.Flag("has_router_bias");
  config.apply_router_weight_on_input = fields.Flag("apply_router_weight_on_input");
  config.shared = ParseShared(Fields(fields.Member("shared"), fields.PathOf("shared")), status);
  config.activation_format =
      fields.Name<ActivationFormatKind>("activation_format", ParserOf<ActivationFormatKind>(kFormats));
  if (config.num_local_experts != config.num_experts) {
    fields.Fail("num_local_experts", "all experts of the layer");
  }
  FMOE_RETURN_IF_ERROR(fields.status());
  FMOE_RETURN_IF_ERROR(status);
  FMOE_RETURN_IF_ERROR(Validate(config));
  const Status routing =
      ValidateRouting(config.routing, config.num_experts + config.routing.num_zero_experts);
  if (!routing.ok()) {
    return Status::BadInput("config.routing: " + routing.message());
  }
  return config;
}

std::string SchemeText(const Scheme& scheme) {
  return ToJson(scheme).dump();
}

Result<Scheme> ParseSchemeText(const std::string& text) {
  FMOE_ASSIGN_OR_RETURN(const Json json, ParseJson(text, "quant_config"));
  return ParseSchemeJson(json, "quant_config");
}

std::string SourceText(const LayerDescription& description) {
  const Json json = {
      {"layer", description.layer}, {"family", description.family}, {"producer", description.producer}};
  return json.dump();
}

Status ParseSource(const std::string& text, LayerDescription& description) {
  FMOE_ASSIGN_OR_RETURN(const Json json, ParseJson(text, "source"));
  Fields fields(json, "source");
  description.layer = fields.Integer("layer", 0, kLargestSize);
  description.family = fields.Text("family");
  description.producer = fields.Text("producer");
  return fields.status();
}

std::string SharedText(const SharedDescription& shared) {
  Json json = {{"scheme", ToJson(shared.scheme)}, {"gated", shared.gated}};
  if (shared.gated) {
    json["gate"] = ToJson(shared.gate);
  }
  json["up"] = ToJson(shared.up);
  json["down"] = ToJson(shared.down);
  return json.dump();
}

Result<SharedDescription> ParseSharedText(const std::string& text) {
  FMOE_ASSIGN_OR_RETURN(const Json json, ParseJson(text, "shared"));
  Fields fields(json, "shared");
  SharedDescription shared;
  FMOE_ASSIGN_OR_RETURN(shared.scheme, ParseSchemeJson(fields.Member("scheme"), "shared.scheme"));
  shared.gated = fields.Flag("gated");
  for (const auto& [name, format] :
       {std::pair("gate", &shared.gate), std::pair("up", &shared.up), std::pair("down", &shared.down)}) {
    if (format != &shared.gate || shared.gated) {
      FMOE_ASSIGN_OR_RETURN(*format, ParseWeightFormat(fields.Member(name), fields.PathOf(name)));
    }
  }
  FMOE_RETURN_IF_ERROR(fields.status());
  return shared;
}

}  // namespace fusedmoe::prepared
