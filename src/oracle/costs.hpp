#pragma once

#include "oracle/capability.hpp"

namespace fusedmoe {

/// The routed experts of this rank in the scheme of the checkpoint.
int64_t CanonicalBytes(const Question& question);

/// What one forward of `tokens` tokens of this rank moves and computes; the bytes of its weights, which it
/// reads, and of its workspace are taken as given.
Costs EstimateCosts(const Question& question, int64_t tokens, ActivationMode activation, int64_t weight_bytes,
                    int64_t workspace_bytes);

/// Temporary memory of a described kernel, by upstream's formulas.
std::vector<WorkspaceBook::Entry> DescribedWorkspace(const Capability& capability, const Question& question,
                                                     int64_t tokens);

}  // namespace fusedmoe
