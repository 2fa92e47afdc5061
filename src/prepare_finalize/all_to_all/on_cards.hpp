#pragma once

#include <memory>

#include "prepare_finalize/all_to_all/all_to_all.hpp"

namespace fusedmoe {

/// The gather protocol for ranks that own a card each: rows stay on the cards, headers travel between hosts.
///
///     host   agree on counts ──┐ (nobody enqueues unless all are content)
///     card                     gather rows, ids, weights ─► experts ─► partial rows home ─► add by rank
///
/// Where all ranks hold the same tokens (tensor parallelism alone) there is nothing to gather. Rows travel
/// plain, since experts on cards quantize for themselves; partial sums return in fp32.
///
/// Everything of a forward is enqueued in the executor's stream. The agreement is made when Prepare is
/// called: a CUDA graph keeps the counts of its capture, on all ranks. One forward at a time.
Result<std::unique_ptr<PrepareFinalize>> MakeGatherOnCards(AllToAllParts parts, WorkspaceBook& book);

}  // namespace fusedmoe
