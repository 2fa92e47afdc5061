#include <utility>

#include <fusedmoe/config.hpp>

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

constexpr std::string_view kDeterminismNames[] = {"run_to_run", "thread_invariant", "batch_invariant",
                                                  "rank_invariant"};

}  // namespace

std::string_view ActivationName(ActivationKind kind) {
  return kActivationNames[static_cast<size_t>(kind)];
}

std::string ActivationNames() {
  std::string names;
  for (const std::string_view name : kActivationNames) {
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  return names;
}

std::optional<ActivationKind> ParseActivation(std::string_view name) {
  for (size_t index = 0; index < std::size(kActivationNames); ++index) {
    if (kActivationNames[index] == name) {
      return static_cast<ActivationKind>(index);
    }
  }
  for (const auto& [alias, kind] : kActivationAliases) {
    if (alias == name) {
      return kind;
    }
  }
  return std::nullopt;
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

std::string_view DeterminismName(Determinism level) {
  return kDeterminismNames[static_cast<size_t>(level)];
}

std::optional<Determinism> ParseDeterminism(std::string_view name) {
  for (size_t index = 0; index < std::size(kDeterminismNames); ++index) {
    if (kDeterminismNames[index] == name) {
      return static_cast<Determinism>(index);
    }
  }
  return std::nullopt;
}

}  // namespace fusedmoe
