#pragma once

#include <memory>

#include <fusedmoe/config.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/workspace.hpp>

#include "moe/prepare_finalize.hpp"

namespace fusedmoe {

/// Prepare and finalize where every token stays on its rank: multiply by the router weight if that is asked
/// for, quantize by `activation` unless the experts do (`traits`), and afterwards weight and reduce if the
/// experts did not. kUnsupported when the format needs a stored input scale that the experts do not share.
Result<std::unique_ptr<PrepareFinalize>> MakeNoEpPrepareFinalize(const MoeConfig& config,
                                                                 const ActivationFormat& activation,
                                                                 const ExpertsTraits& traits,
                                                                 const ExpertMap& expert_map,
                                                                 WorkspaceBook& book);

}  // namespace fusedmoe
