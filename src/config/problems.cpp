#include <fusedmoe/problems.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/names.hpp"
#include "platform/file.hpp"

namespace fusedmoe {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kTexts[] = {
#include "problems.inc"
};

/// Takes the fields of one object out, so that what is left was not understood.
class Fields {
 public:
  explicit Fields(const Json& object) : object_(object) {}

  Status Text(const char* key, std::string& value) {
    return Take(key, "a string", [&](const Json& field) {
      if (!field.is_string()) {
        return false;
      }
      value = field.get<std::string>();
      return true;
    });
  }

  Status Integer(const char* key, int64_t& value, int64_t least, int64_t most) {
    return Take(key, fmt::format("an integer from {} to {}", least, most), [&](const Json& field) {
      if (!field.is_number_integer() ||
          (field.is_number_unsigned() && field.get<uint64_t>() > uint64_t{1} << 62)) {
        return false;
      }
      value = field.get<int64_t>();
      return value >= least && value <= most;
    });
  }

  Status Float(const char* key, float& value) {
    return Take(key, "a finite number", [&](const Json& field) {
      if (!field.is_number()) {
        return false;
      }
      value = field.get<float>();
      return std::isfinite(value);
    });
  }

  Status Flag(const char* key, bool& value) {
    return Take(key, "true or false", [&](const Json& field) {
      if (!field.is_boolean()) {
        return false;
      }
      value = field.get<bool>();
      return true;
    });
  }

  bool Has(const char* key) const { return object_.contains(key); }

  Status NothingLeft() const {
    for (const auto& [key, value] : object_.items()) {
      if (std::find(taken_.begin(), taken_.end(), key) == taken_.end()) {
        return Status::BadInput(
            fmt::format("problem has an unknown field '{}'; known: {}", key, fmt::join(taken_, ", ")));
      }
    }
    return Status::Ok();
  }

 private:
  Status Take(const char* key, const std::string& what, const std::function<bool(const Json&)>& read) {
    taken_.emplace_back(key);
    const auto found = object_.find(key);
    if (found == object_.end() || read(*found)) {
      return Status::Ok();
    }
    return Status::BadInput(fmt::format("problem field '{}' is {}; it must be {}", key,
                                        found->dump(-1, ' ', false, Json::error_handler_t::replace), what));
  }

  const Json& object_;
  std::vector<std::string> taken_;
};

template <typename Enum>
Status ParseNamed(const char* key, const std::string& text, std::string_view names,
                  std::optional<Enum> parsed, Enum& value) {
  if (!parsed) {
    return Status::BadInput(
        fmt::format("problem field '{}' is '{}'; it must be one of: {}", key, text, names));
  }
  value = *parsed;
  return Status::Ok();
}

Status ReadSizes(Fields& fields, Problem& problem) {
  MoeConfig& config = problem.config;
  for (const char* key : {"num_experts", "top_k", "hidden", "intermediate"}) {
    if (!fields.Has(key)) {
      return Status::BadInput(fmt::format("problem has no field '{}'", key));
    }
  }
  FMOE_RETURN_IF_ERROR(fields.Integer("layers", problem.num_layers, 0, 1 << 16));
  FMOE_RETURN_IF_ERROR(fields.Integer("num_experts", config.num_experts, 1, kMaxRoutedExperts));
  FMOE_RETURN_IF_ERROR(fields.Integer("top_k", config.routing.top_k, 1, config.num_experts));
  FMOE_RETURN_IF_ERROR(fields.Integer("hidden", config.hidden, 1, 1 << 16));
  FMOE_RETURN_IF_ERROR(fields.Integer("latent", config.latent, 0, 1 << 16));
  FMOE_RETURN_IF_ERROR(fields.Integer("intermediate", config.intermediate, 1, 1 << 18));
  FMOE_RETURN_IF_ERROR(fields.Integer("shared_intermediate", config.shared.intermediate, 0, 1 << 18));
  FMOE_RETURN_IF_ERROR(fields.Flag("shared_gate", config.shared.has_gate));
  FMOE_RETURN_IF_ERROR(fields.Integer("max_tokens", config.max_tokens, 1, 1 << 24));
  config.num_local_experts = config.num_experts;
  return Status::Ok();
}

Status ReadActivation(Fields& fields, MoeConfig& config) {
  std::string activation = "silu";
  FMOE_RETURN_IF_ERROR(fields.Text("activation", activation));
  ActivationKind kind = config.activation.kind;
  FMOE_RETURN_IF_ERROR(
      ParseNamed("activation", activation, ActivationNames(), ParseActivation(activation), kind));
  config.activation = CanonicalActivation(kind);
  FMOE_RETURN_IF_ERROR(fields.Float("alpha", config.activation.alpha));
  FMOE_RETURN_IF_ERROR(fields.Float("beta", config.activation.beta));
  FMOE_RETURN_IF_ERROR(fields.Float("limit", config.activation.limit));
  FMOE_RETURN_IF_ERROR(fields.Flag("bias", config.has_bias));
  std::string dtype(DTypeName(config.dtype));
  FMOE_RETURN_IF_ERROR(fields.Text("dtype", dtype));
  return ParseNamed("dtype", dtype, "BF16, F16, F32", ParseDType(dtype), config.dtype);
}

Status ReadRouting(Fields& fields, MoeConfig& config) {
  RoutingConfig& routing = config.routing;
  std::string method(RoutingMethodName(routing.method));
  FMOE_RETURN_IF_ERROR(fields.Text("routing", method));
  FMOE_RETURN_IF_ERROR(
      ParseNamed("routing", method, RoutingMethodNames(), ParseRoutingMethod(method), routing.method));
  FMOE_RETURN_IF_ERROR(fields.Flag("renormalize", routing.renormalize));
  FMOE_RETURN_IF_ERROR(fields.Integer("num_groups", routing.num_groups, 1, config.num_experts));
  FMOE_RETURN_IF_ERROR(fields.Integer("topk_groups", routing.topk_groups, kEveryGroup, routing.num_groups));
  FMOE_RETURN_IF_ERROR(fields.Float("scaling_factor", routing.scaling_factor));
  FMOE_RETURN_IF_ERROR(fields.Float("norm_epsilon", routing.norm_epsilon));
  FMOE_RETURN_IF_ERROR(fields.Flag("correction_bias", config.has_correction_bias));
  FMOE_RETURN_IF_ERROR(fields.Flag("router_bias", config.has_router_bias));
  FMOE_RETURN_IF_ERROR(fields.Flag("router_weight_on_input", config.apply_router_weight_on_input));
  // Biased selection scores experts by a sigmoid in every model that has it under these names.
  if (config.has_correction_bias) {
    routing.score = ScoreFunction::kSigmoid;
  }
  return Status::Ok();
}

// Fields that are each within their range may still not fit together. Messages about a configuration name its
// members, which are called as the fields are, except those of the routing.
Status CheckTogether(const Problem& problem) {
  if (Status status = Validate(problem.config); !status.ok()) {
    return std::move(status).WithContext("problem");
  }
  if (problem.scheme.empty()) {
    return Status::Ok();
  }
  Result<Scheme> scheme = ParseSchemeFor(problem.config, problem.scheme);
  if (!scheme.ok() && scheme.status().code() != StatusCode::kBadInput) {
    return Status::BadInput(fmt::format("problem field 'scheme': {}", scheme.status().message()));
  }
  return scheme.ok() ? Status::Ok() : std::move(scheme).status().WithContext("problem");
}

Result<Problem> ParseText(std::string_view text) {
  const Json object = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) {
    return Status::BadInput("problem is not a JSON object").WithHint("problems/README.md has an example");
  }
  Problem problem;
  Fields fields(object);
  FMOE_RETURN_IF_ERROR(fields.Text("name", problem.name));
  FMOE_RETURN_IF_ERROR(fields.Text("source", problem.source));
  FMOE_RETURN_IF_ERROR(fields.Text("scheme", problem.scheme));
  FMOE_RETURN_IF_ERROR(ReadSizes(fields, problem));
  FMOE_RETURN_IF_ERROR(ReadActivation(fields, problem.config));
  FMOE_RETURN_IF_ERROR(ReadRouting(fields, problem.config));
  FMOE_RETURN_IF_ERROR(fields.NothingLeft());
  FMOE_RETURN_IF_ERROR(CheckTogether(problem));
  return problem;
}

}  // namespace

std::span<const Problem> Problems() {
  static const std::vector<Problem> problems = [] {
    std::vector<Problem> all;
    for (const std::string_view text : kTexts) {
      if (Result<Problem> problem = ParseText(text); problem.ok()) {  // a test parses each file
        all.push_back(*std::move(problem));
      }
    }
    return all;
  }();
  return problems;
}

Result<Problem> ParseProblem(std::string_view name_or_json) {
  if (name_or_json.find('{') != std::string_view::npos) {
    return ParseText(name_or_json);
  }
  for (const Problem& problem : Problems()) {
    if (problem.name == name_or_json) {
      return problem;
    }
  }
  return UnknownName("problem", name_or_json, JoinNames(Problems(), &Problem::name));
}

Result<Problem> ReadProblem(const std::string& name_or_path) {
  constexpr int64_t kMostBytes = 1 << 20;
  std::error_code ignored;
  if (Result<Problem> named = ParseProblem(name_or_path);
      named.ok() || !std::filesystem::exists(name_or_path, ignored)) {
    return named;
  }
  FMOE_ASSIGN_OR_RETURN(const std::string text, platform::ReadTextFile(name_or_path, kMostBytes));
  Result<Problem> problem = ParseText(text);
  return problem.ok() ? std::move(problem) : std::move(problem).status().WithFile(name_or_path);
}

}  // namespace fusedmoe
