#include <fusedmoe/plan.hpp>

#include "moe/experts.hpp"

namespace fusedmoe {

std::string_view FormatName(ActivationFormatKind format) {
  constexpr std::string_view kNames[] = {
#define FMOE_UPSTREAM_NAME(id, name, upstream, rows) upstream,
      FMOE_ACTIVATION_FORMAT_TABLE(FMOE_UPSTREAM_NAME)
#undef FMOE_UPSTREAM_NAME
  };
  return kNames[static_cast<size_t>(format)];
}

std::string_view ActivationModeName(ActivationMode mode) {
  switch (mode) {
    case ActivationMode::kAsCheckpoint:
      return "as_checkpoint";
    case ActivationMode::kWeightOnly:
      return "weight_only";
    case ActivationMode::kMaxExpanded:
      return "max_expanded";
    case ActivationMode::kMaxGateUp:
      return "max_gate_up";
    case ActivationMode::kA8:
      return "a8";
  }
  return "?";
}

}  // namespace fusedmoe
