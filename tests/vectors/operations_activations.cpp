#include <fusedmoe/config.hpp>

#include "moe/activation.hpp"
#include "support/golden.hpp"

namespace fusedmoe::golden {
namespace {

float NumberOr(const nlohmann::json& parameters, const char* name, float fallback) {
  const auto found = parameters.find(name);
  return found != parameters.end() && found->is_number() ? found->get<float>() : fallback;
}

/// The activation that a case name begins with; the vectors name some by the function that computed them.
std::optional<ActivationKind> KindOf(const std::string& name) {
  static constexpr std::pair<std::string_view, ActivationKind> kPrefixes[] = {
      {"silu_clamped", ActivationKind::kSilu},
      {"swiglu_limit_func", ActivationKind::kSilu},
      {"swiglu_halves", ActivationKind::kSwigluOai},
  };
  for (const auto& [prefix, kind] : kPrefixes) {
    if (name.starts_with(prefix)) {
      return kind;
    }
  }
  // The longest name of the table wins: "silu_no_mul" before "silu".
  std::optional<ActivationKind> best;
#define FMOE_MATCH(id, kind_name, gated, formula)                                     \
  if (name.starts_with(kind_name) &&                                                  \
      (!best || std::string_view(kind_name).size() > ActivationName(*best).size())) { \
    best = ActivationKind::id;                                                        \
  }
  FMOE_ACTIVATION_TABLE(FMOE_MATCH)
#undef FMOE_MATCH
  return best;
}

Outcome RunNames(const nlohmann::json& table) {
  for (const auto& row : table.at("rows")) {
    const std::string name = row.at(0);
    const auto kind = ParseActivation(name);
    if (!kind || ActivationName(*kind) != name) {
      return "no activation is called '" + name + "'";
    }
    if (IsGated(*kind) != row.at(1).get<bool>()) {
      return name + ": gated differs";
    }
    // Where there is no ungated member the table repeats the name.
    const std::string_view without = ActivationName(WithoutMul(*kind).value_or(*kind));
    if (without != row.at(2).get<std::string>()) {
      return name + ": without_mul is " + std::string(without);
    }
  }
  for (const auto& [alias, name] : table.at("aliases").items()) {
    const auto kind = ParseActivation(alias);
    if (!kind || ActivationName(*kind) != name.get<std::string>()) {
      return "alias '" + alias + "' is not " + name.get<std::string>();
    }
  }
  return std::nullopt;
}

}  // namespace

Outcome RunActivations(const GoldenCase& golden_case) {
  if (golden_case.is_table()) {
    return golden_case.name() == "names" ? RunNames(golden_case.manifest())
                                         : Outcome("unknown table '" + golden_case.name() + "'");
  }
  const auto kind = KindOf(golden_case.name());
  if (!kind) {
    return "unknown activation '" + golden_case.name() + "'";
  }
  const auto& parameters = golden_case.parameters();
  ActivationSpec spec;
  spec.kind = *kind;
  spec.limit = NumberOr(parameters, "limit", 0.0F);
  spec.alpha = NumberOr(parameters, "alpha", 1.0F);
  spec.beta = NumberOr(parameters, "beta", 0.0F);

  const auto& x_manifest = golden_case.manifest().at("tensors").at("x");
  const bool alternate = x_manifest.value("layout", "").find("alternate") != std::string::npos;
  const std::vector<float> x = golden_case.Floats("x");
  const std::vector<double> input(x.begin(), x.end());
  const TensorView view = golden_case.Input("x");
  const int64_t columns = view.dim(view.rank() - 1);
  const int64_t width = spec.gated() ? columns / 2 : columns;
  const int64_t rows = view.count() / columns;
  std::vector<double> output(static_cast<size_t>(rows * width));
  for (int64_t row = 0; row < rows; ++row) {
    ActivateRow(spec, input.data() + row * columns, width,
                alternate ? GateUpLayout::kInterleaved : GateUpLayout::kHalves, output.data() + row * width);
  }
  return golden_case.CompareFloats("y", std::vector<float>(output.begin(), output.end()));
}

}  // namespace fusedmoe::golden
