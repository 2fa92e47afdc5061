#include <utility>

#include <fusedmoe/config.hpp>

#include "core/names.hpp"

namespace fusedmoe {
namespace {

constexpr std::string_view kActivationNames[] = {
#define FMOE_ACTIVATION_NAME(id, name, gated, formula) name,
    FMOE_ACTIVATION_TABLE(FMOE_ACTIVATION_NAME)
#undef FMOE_ACTIVATION_NAME
};

// "swiglu" is how config files call silu(g) * u; the un-interleaved spelling differs in layout only, which
// the loader settles.
constexpr std::pair<std::string_view, ActivationKind> kActivationAliases[] = {
    {"gelu_pytorch_tanh", ActivationKind::kGeluTanh},
    {"swigluoai_uninterleave", ActivationKind::kSwigluOai},
    {"swiglu", ActivationKind::kSilu},
    {"swish", ActivationKind::kSilu},
    {"reglu", ActivationKind::kRelu},
};

constexpr std::string_view kActivationFormatNames[] = {
#define FMOE_ACTIVATION_FORMAT_NAME(id, name, upstream, rows) name,
    FMOE_ACTIVATION_FORMAT_TABLE(FMOE_ACTIVATION_FORMAT_NAME)
#undef FMOE_ACTIVATION_FORMAT_NAME
};

constexpr std::string_view kDeterminismNames[] = {
#define FMOE_DETERMINISM_NAME(id, name, what) name,
    FMOE_DETERMINISM_TABLE(FMOE_DETERMINISM_NAME)
#undef FMOE_DETERMINISM_NAME
};

}  // namespace

std::string_view ActivationName(ActivationKind kind) {
  return kActivationNames[static_cast<size_t>(kind)];
}

std::string ActivationNames() {
  return JoinNames(kActivationNames);
}

std::optional<ActivationKind> ParseActivation(std::string_view name) {
  for (const auto& [alias, kind] : kActivationAliases) {
    if (alias == name) {
      return kind;
    }
  }
  return ParseName<ActivationKind>(kActivationNames, name);
}

std::optional<ActivationKind> WithoutMul(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::kSilu:
      return ActivationKind::kSiluNoMul;
    case ActivationKind::kGelu:
      return ActivationKind::kGeluNoMul;
    case ActivationKind::kGeluTanh:
      return ActivationKind::kGeluTanhNoMul;
    case ActivationKind::kRelu:
      return ActivationKind::kReluNoMul;
    case ActivationKind::kRelu2:
      return ActivationKind::kRelu2NoMul;
    case ActivationKind::kSwigluOai:
    case ActivationKind::kSwigluStep:
    case ActivationKind::kSitu:
      return std::nullopt;
    case ActivationKind::kSiluNoMul:
    case ActivationKind::kGeluNoMul:
    case ActivationKind::kGeluTanhNoMul:
    case ActivationKind::kReluNoMul:
    case ActivationKind::kRelu2NoMul:
      return kind;
  }
  return std::nullopt;
}

std::string_view ActivationFormatName(ActivationFormatKind format) {
  return kActivationFormatNames[static_cast<size_t>(format)];
}

std::optional<ActivationFormatKind> ParseActivationFormat(std::string_view name) {
  return ParseName<ActivationFormatKind>(kActivationFormatNames, name);
}

std::string ActivationFormatNames() {
  return JoinNames(kActivationFormatNames);
}

std::string_view DeterminismName(Determinism level) {
  return kDeterminismNames[static_cast<size_t>(level)];
}

std::optional<Determinism> ParseDeterminism(std::string_view name) {
  return ParseName<Determinism>(kDeterminismNames, name);
}

std::string DeterminismNames() {
  return JoinNames(kDeterminismNames);
}

}  // namespace fusedmoe
