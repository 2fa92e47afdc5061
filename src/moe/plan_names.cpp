#include <fusedmoe/plan.hpp>

#include "moe/experts.hpp"

namespace fusedmoe {

std::string_view FormatName(ActivationFormatKind format) {
  return format == ActivationFormatKind::kStandard ? "Standard" : "BatchedExperts";
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
