#pragma once

#include "experts/cpu/matrix_unit/matrix_unit.hpp"

namespace fusedmoe::cpu {

/// From the results of slots to outputs. One thread adds each slot to its output as it comes, in ascending
/// order of slots. Several threads leave the results of slots side by side (they wait), and add them up by
/// output, in the same order.
bool SlotsWait(const JobContext& context);

/// One thread: sums of outputs before the first job, and outputs whose last slot is in a group, to the
/// caller's dtype.
void BeginOutputs(const JobContext& context);
void StoreOutputsOf(const JobContext& context, const JobGroup& group);

/// Several threads: the results that wait, of the slots of `jobs`. `first`, `last`: of the piece.
void AddSlotSums(const JobContext& context, const JobGroup& jobs, bool first, bool last);

}  // namespace fusedmoe::cpu
