#pragma once

#include "oracle/capability.hpp"

namespace fusedmoe {

/// What one forward of `tokens` tokens of this rank moves and computes; `workspace_bytes` is taken as given.
Costs EstimateCosts(const Question& question, int64_t tokens, ActivationMode activation,
                    int64_t workspace_bytes);

/// Temporary memory of a described kernel, by upstream's formulas.
std::vector<WorkspaceBook::Entry> DescribedWorkspace(const Capability& capability, const Question& question,
                                                     int64_t tokens);

}  // namespace fusedmoe
