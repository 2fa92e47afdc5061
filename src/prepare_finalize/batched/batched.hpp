#pragma once

#include <memory>

#include <fusedmoe/config.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/workspace.hpp>

#include "moe/prepare_finalize.hpp"

namespace fusedmoe {

/// Bytes of a count of rows, or of the index of one.
inline constexpr auto kRowIndexBytes = static_cast<int64_t>(sizeof(int32_t));

/// Prepare and finalize in the BatchedExperts format on one rank: each expert gets a batch [max_tokens, H]
/// whose first rows are the tokens that chose it, in token order; afterwards the weighted rows are gathered
/// back in slot order. Rows beyond the counts are never written.
Result<std::unique_ptr<PrepareFinalize>> MakeBatchedPrepareFinalize(const MoeConfig& config,
                                                                    const ActivationFormat& activation,
                                                                    const ExpertsTraits& traits,
                                                                    const ExpertMap& expert_map,
                                                                    WorkspaceBook& book);

/// The same for experts on a card that quantize for themselves.
std::unique_ptr<PrepareFinalize> MakeBatchedOnDevice(const MoeConfig& config, WorkspaceBook& book);

}  // namespace fusedmoe
