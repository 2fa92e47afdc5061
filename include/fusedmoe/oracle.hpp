#pragma once

#include <optional>
#include <string>
#include <vector>

#include <fusedmoe/dtype.hpp>
#include <fusedmoe/plan.hpp>
#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// What a caller asks of a selection beyond the problem itself.
struct SelectionRequest {
  /// The only backend that may be chosen, by its name or by upstream's --moe-backend word, in any case.
  /// Empty: the first of the table that can run the problem. Naming one restricts the choice, never the list.
  std::string backend;
  /// Environment switches as "NAME=VALUE"; the library itself never reads the environment (docs/oracle.md).
  std::vector<std::string> env;
  bool lora = false;  ///< adapters will be added to the experts
  /// Whether upstream's FP8 oracle may take its CUTLASS pair; empty: as upstream does, only for weights
  /// scaled per channel with activations scaled per token.
  std::optional<bool> allow_vllm_cutlass;
  DType router_logits_dtype = DType::kF32;
};

/// Success when something was chosen; otherwise kUnsupported with one clause for every candidate and every
/// reason.
Status ToStatus(const Selection& selection);

}  // namespace fusedmoe
