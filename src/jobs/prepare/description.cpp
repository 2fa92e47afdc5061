#include "jobs/prepare/description.hpp"

#include <algorithm>
#include <cmath>
#include <concepts>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace fusedmoe::prepared {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kLargestSize = int64_t{1} << 31;

// Names of enumerations that have none elsewhere, by value.
constexpr std::string_view kMxRules[] = {"even",     "floor", "ceil", "no_element_max", "floor_of_quotient",
                                         "even_e2m1"};
constexpr std::string_view kIntRoundings[] = {"half_even", "half_away", "truncate"};

/// Two archives with the same members, so that one function `Fields` of each type says what its object has,
/// in which order and within which limits: `FieldWriter` puts the values into an object, `FieldReader` takes
/// them out of one.
class FieldWriter {
 public:
  template <std::integral Value>
  void Integer(const char* name, Value& value, int64_t /*low*/, int64_t /*high*/) {
    json_[name] = value;
  }
  /// A size that most do not have: 0 is not written.
  void IntegerIfAny(const char* name, int64_t& value, int64_t /*high*/) {
    if (value > 0) {
      json_[name] = value;
    }
  }
  void Number(const char* name, float& value) { json_[name] = value; }
  void NumberIfAny(const char* name, float& value) {
    if (value > 0.0F) {
      json_[name] = value;
    }
  }
  void Flag(const char* name, bool& value) { json_[name] = value; }
  void Text(const char* name, std::string& value) { json_[name] = value; }
  template <typename Value, typename Name, typename Parse>
  void Named(const char* name, Value& value, Name name_of, Parse /*parse*/) {
    json_[name] = std::string(name_of(value));
  }
  /// A type that is nearly always `usual`, which is not written.
  void TypeUnless(const char* name, DType& value, DType usual) {
    if (value != usual) {
      Named(name, value, DTypeName, ParseDType);
    }
  }
  template <typename Value>
  void Listed(const char* name, Value& value, std::span<const std::string_view> names) {
    json_[name] = std::string(names[static_cast<size_t>(value)]);
  }
  void ElementOrNull(const char* name, std::optional<DType>& value) {
    json_[name] = value ? Json(std::string(DTypeName(*value))) : Json(nullptr);
  }
  void Group(const char* name, GroupShape& value) { json_[name] = Json::array({value.row, value.col}); }
  template <typename Value>
  void Object(const char* name, Value& value) {
    FieldWriter inner;
    Fields(inner, value);
    json_[name] = std::move(inner.json_);
  }
  template <typename Value>
  void ObjectIfAny(const char* name, std::optional<Value>& value) {
    if (value) {
      Object(name, *value);
    }
  }
  template <typename Condition>
  void Require(const char* /*name*/, Condition /*holds*/, const char* /*required*/) {}
  template <typename Check>
  void Accept(Check /*check*/) {}

  std::string Dump() const { return json_.dump(); }

 private:
  Json json_ = Json::object();
};

/// The first mistake stands in `status`; from then on values mean nothing.
class FieldReader {
 public:
  FieldReader(const Json& json, std::string path) : json_(json), path_(std::move(path)) {
    if (!json.is_object()) {
      Fail("", "an object");
    }
  }

  template <std::integral Value>
  void Integer(const char* name, Value& value, int64_t low, int64_t high) {
    value = static_cast<Value>(IntegerOf(name, low, high));
  }
  void IntegerIfAny(const char* name, int64_t& value, int64_t high) {
    value = Has(name) ? IntegerOf(name, 1, high) : 0;
  }
  void Number(const char* name, float& value);
  void NumberIfAny(const char* name, float& value) {
    value = 0.0F;
    if (Has(name)) {
      Number(name, value);
    }
  }
  void Flag(const char* name, bool& value);
  void Text(const char* name, std::string& value);
  template <typename Value, typename Name, typename Parse>
  void Named(const char* name, Value& value, Name /*name_of*/, Parse parse) {
    std::string text;
    Text(name, text);
    Take(name, value, std::optional<Value>(parse(text)), "a name that this version knows");
  }
  void TypeUnless(const char* name, DType& value, DType usual) {
    value = usual;
    if (Has(name)) {
      Named(name, value, DTypeName, ParseDType);
    }
  }
  template <typename Value>
  void Listed(const char* name, Value& value, std::span<const std::string_view> names) {
    std::string text;
    Text(name, text);
    const auto at = std::find(names.begin(), names.end(), text);
    Take(name, value,
         at == names.end() ? std::nullopt : std::optional(static_cast<Value>(at - names.begin())),
         fmt::format("one of {}", fmt::join(names, ", ")));
  }
  void ElementOrNull(const char* name, std::optional<DType>& value) {
    value.reset();
    if (!Has(name) || !json_[name].is_null()) {
      Named(name, value.emplace(), DTypeName, ParseDType);
    }
  }
  void Group(const char* name, GroupShape& value);
  template <typename Value>
  void Object(const char* name, Value& value) {
    FieldReader inner(Member(name), PathOf(name));
    Fields(inner, value);
    Keep(inner.status_);
  }
  template <typename Value>
  void ObjectIfAny(const char* name, std::optional<Value>& value) {
    value.reset();
    if (Has(name)) {
      Object(name, value.emplace());
    }
  }
  /// A condition on the values read so far: unless it `holds()`, the field is refused.
  template <typename Condition>
  void Require(const char* name, Condition holds, const char* required) {
    if (status_.ok() && !holds()) {
      Fail(name, required);
    }
  }
  /// The same by a function whose Status says what is wrong.
  template <typename Check>
  void Accept(Check check) {
    if (const Status checked = status_.ok() ? check() : Status::Ok(); !checked.ok()) {
      Keep(Status::BadInput(fmt::format("{}: {}", path_, checked.message())));
    }
  }

  const Status& status() const { return status_; }

 private:
  bool Has(const char* name) const { return json_.is_object() && json_.contains(name); }
  std::string PathOf(const char* name) const { return path_.empty() ? name : path_ + "." + name; }
  void Fail(const char* name, const std::string& required);
  void Keep(const Status& status) { status_ = status_.ok() ? status : status_; }
  /// The member; null (a JSON one) when it is missing.
  const Json& Member(const char* name);
  int64_t IntegerOf(const char* name, int64_t low, int64_t high);
  template <typename Value>
  void Take(const char* name, Value& value, std::optional<Value> parsed, const std::string& required) {
    if (!parsed && status_.ok()) {
      Fail(name, required);
    }
    value = parsed.value_or(Value{});
  }

  const Json& json_;
  std::string path_;
  Status status_;
};

void FieldReader::Fail(const char* name, const std::string& required) {
  if (status_.ok()) {
    const Json* member = Has(name) ? &json_[name] : nullptr;
    std::string actual =
        member == nullptr ? "missing" : member->dump(-1, ' ', true, Json::error_handler_t::replace);
    actual = actual.size() > 60 ? actual.substr(0, 57) + "..." : actual;
    status_ = Status::BadInput(
        fmt::format("the metadata field {} is {}; {} is required", PathOf(name), actual, required));
  }
}

const Json& FieldReader::Member(const char* name) {
  static const Json kNull;
  if (!Has(name)) {
    Fail(name, "a value");
    return kNull;
  }
  return json_[name];
}

int64_t FieldReader::IntegerOf(const char* name, int64_t low, int64_t high) {
  const Json& json = Member(name);
  const bool small = json.is_number_integer() &&
                     !(json.is_number_unsigned() && json.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX));
  if (!small || json.get<int64_t>() < low || json.get<int64_t>() > high) {
    Fail(name, fmt::format("an integer of {}..{}", low, high));
    return low;
  }
  return json.get<int64_t>();
}

void FieldReader::Number(const char* name, float& value) {
  const Json& json = Member(name);
  value = json.is_number() ? static_cast<float>(json.get<double>()) : std::nanf("");
  if (!std::isfinite(value)) {
    Fail(name, "a finite number");
  }
}

void FieldReader::Flag(const char* name, bool& value) {
  const Json& json = Member(name);
  value = json.is_boolean() && json.get<bool>();
  if (!json.is_boolean()) {
    Fail(name, "true or false");
  }
}

void FieldReader::Text(const char* name, std::string& value) {
  const Json& json = Member(name);
  value = json.is_string() ? json.get<std::string>() : std::string();
  if (!json.is_string()) {
    Fail(name, "a string");
  }
}

void FieldReader::Group(const char* name, GroupShape& value) {
  const Json& json = Member(name);
  const auto fits = [](const Json& size) {
    return size.is_number_integer() &&
           (size.get<int64_t>() == -1 || (size.get<int64_t>() >= 1 && size.get<int64_t>() <= kLargestSize));
  };
  if (!json.is_array() || json.size() != 2 || !fits(json[0]) || !fits(json[1])) {
    Fail(name, "[rows, columns], each -1 or at least 1");
    return;
  }
  value = {json[0].get<int64_t>(), json[1].get<int64_t>()};
}

template <typename Archive>
void Fields(Archive& archive, ActivationSpec& spec) {
  archive.Named("kind", spec.kind, ActivationName, ParseActivation);
  archive.Number("alpha", spec.alpha);
  archive.Number("beta", spec.beta);
  archive.Number("limit", spec.limit);
}

template <typename Archive>
void Fields(Archive& archive, RoutingConfig& routing) {
  archive.Named("method", routing.method, RoutingMethodName, ParseRoutingMethod);
  archive.Named("score", routing.score, ScoreFunctionName, ParseScoreFunction);
  archive.Flag("renormalize", routing.renormalize);
  archive.Integer("num_groups", routing.num_groups, 1, kLargestSize);
  archive.Integer("topk_groups", routing.topk_groups, kEveryGroup, kLargestSize);
  archive.Number("scaling_factor", routing.scaling_factor);
  archive.Number("norm_epsilon", routing.norm_epsilon);
  archive.Number("logit_softcap", routing.logit_softcap);
  archive.Flag("select_on_logits", routing.select_on_logits);
  archive.Number("jitter", routing.jitter);
  archive.Integer("num_zero_experts", routing.num_zero_experts, 0, kMaxRoutedExperts);
  archive.Text("simulation", routing.simulation);
  archive.Integer("simulation_seed", routing.simulation_seed, 0, INT64_MAX);
  archive.Require(
      "method", [&] { return routing.method != RoutingMethod::kCustom || !routing.custom; },
      "a method that needs no callback");
}

template <typename Archive>
void Fields(Archive& archive, SharedExpertConfig& shared) {
  archive.Integer("intermediate", shared.intermediate, 0, kLargestSize);
  archive.Flag("has_gate", shared.has_gate);
  archive.Flag("has_bias", shared.has_bias);
  archive.Number("weight", shared.weight);
  archive.ObjectIfAny("activation", shared.activation);
}

template <typename Archive>
void Fields(Archive& archive, MoeConfig& config) {
  archive.Integer("num_experts", config.num_experts, 1, kMaxRoutedExperts);
  archive.Integer("num_local_experts", config.num_local_experts, 1, kMaxRoutedExperts);
  archive.Integer("hidden", config.hidden, 1, kLargestSize);
  archive.IntegerIfAny("latent", config.latent, kLargestSize);
  archive.NumberIfAny("latent_norm_epsilon", config.latent_norm_epsilon);
  archive.Integer("intermediate", config.intermediate, 1, kLargestSize);
  archive.Integer("top_k", config.routing.top_k, 1, kMaxRoutedExperts);
  archive.Object("activation", config.activation);
  archive.Flag("has_bias", config.has_bias);
  archive.Named("dtype", config.dtype, DTypeName, ParseDType);
  archive.Object("routing", config.routing);
  archive.Flag("has_correction_bias", config.has_correction_bias);
  archive.Flag("has_router_bias", config.has_router_bias);
  archive.Flag("apply_router_weight_on_input", config.apply_router_weight_on_input);
  archive.Object("shared", config.shared);
  archive.Named("activation_format", config.activation_format, ActivationFormatName, ParseActivationFormat);
  archive.Require(
      "num_local_experts", [&] { return config.num_local_experts == config.num_experts; },
      "all experts of the layer");
}

template <typename Archive>
void Fields(Archive& archive, ActivationRule& rule) {
  archive.Number("amax_divisor", rule.amax_divisor);
  archive.Number("scale_floor", rule.scale_floor);
  archive.Flag("multiply_by_reciprocal", rule.multiply_by_reciprocal);
  archive.Flag("multiply_by_divisor_over_amax", rule.multiply_by_divisor_over_amax);
  archive.Listed("mx_scale", rule.mx_scale, kMxRules);
  archive.Listed("int_rounding", rule.int_rounding, kIntRoundings);
  archive.Flag("round_to_bf16_first", rule.round_to_bf16_first);
  archive.Flag("power_of_two_scale", rule.power_of_two_scale);
  archive.Number("amax_upper_bound", rule.amax_upper_bound);
  archive.Number("zero_scale", rule.zero_scale);
  archive.Flag("ties_toward_zero", rule.ties_toward_zero);
}

template <typename Archive>
void Fields(Archive& archive, ActivationFormat& format) {
  archive.ElementOrNull("element", format.element);
  archive.Group("group", format.group);
  archive.Named("scale_dtype", format.scale_dtype, DTypeName, ParseDType);
  archive.Flag("static_tensor_scale", format.static_tensor_scale);
  archive.Object("rule", format.rule);
}

template <typename Archive>
void Fields(Archive& archive, WeightFormat& format) {
  archive.Named("element", format.element, DTypeName, ParseDType);
  archive.Group("block", format.block);
  archive.Named("block_scale_dtype", format.block_scale_dtype, DTypeName, ParseDType);
  archive.Flag("has_channel_scale", format.has_channel_scale);
  archive.Flag("has_tensor_scale", format.has_tensor_scale);
  archive.Flag("may_have_zero_point", format.may_have_zero_point);
  archive.TypeUnless("zero_point_dtype", format.zero_point_dtype, DType::kU8);
  archive.Require(
      "zero_point_dtype",
      [&] { return format.zero_point_dtype == DType::kU8 || format.zero_point_dtype == DType::kF32; },
      "U8 or F32");
  archive.IntegerIfAny("super_cols", format.super_cols, kLargestSize);
}

/// What the schemes of this library are made of; anything else would reach decoders that do not know it.
template <typename Archive>
void Fields(Archive& archive, Scheme& scheme) {
  archive.Text("name", scheme.name);
  archive.Object("weight", scheme.weight);
  archive.Object("activation", scheme.activation);
  archive.Accept([&] { return SchemeNameFor(scheme.weight, scheme.activation).status(); });
}

template <typename Archive>
void Fields(Archive& archive, LayerDescription& description) {
  archive.Integer("layer", description.layer, 0, kLargestSize);
  archive.Text("family", description.family);
  archive.Text("producer", description.producer);
}

template <typename Archive>
void Fields(Archive& archive, SharedDescription& shared) {
  archive.Object("scheme", shared.scheme);
  archive.Flag("gated", shared.gated);
  if (shared.gated) {
    archive.Object("gate", shared.gate);
  }
  archive.Object("up", shared.up);
  archive.Object("down", shared.down);
}

template <typename Value>
std::string ToText(Value value) {
  FieldWriter writer;
  Fields(writer, value);
  return writer.Dump();
}

/// Into `value`; its members that are no fields of the object stay.
template <typename Value>
Status FromText(const std::string& text, const char* key, Value& value) {
  const Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) {
    return Status::BadInput(fmt::format("'{}' of the metadata is no JSON", key));
  }
  FieldReader reader(json, key);
  Fields(reader, value);
  return reader.status();
}

}  // namespace

std::string ConfigText(const MoeConfig& config) {
  return ToText(config);
}

Result<MoeConfig> ParseConfig(const std::string& text) {
  MoeConfig config;
  FMOE_RETURN_IF_ERROR(FromText(text, "config", config));
  FMOE_RETURN_IF_ERROR(Validate(config));
  return config;
}

std::string SchemeText(const Scheme& scheme) {
  return ToText(scheme);
}

Result<Scheme> ParseSchemeText(const std::string& text) {
  Scheme scheme;
  FMOE_RETURN_IF_ERROR(FromText(text, "quant_config", scheme));
  return scheme;
}

std::string SourceText(const LayerDescription& description) {
  return ToText(description);
}

Status ParseSource(const std::string& text, LayerDescription& description) {
  return FromText(text, "source", description);
}

std::string SharedText(const SharedDescription& shared) {
  return ToText(shared);
}

Result<SharedDescription> ParseSharedText(const std::string& text) {
  SharedDescription shared;
  FMOE_RETURN_IF_ERROR(FromText(text, "shared", shared));
  return shared;
}

}  // namespace fusedmoe::prepared
