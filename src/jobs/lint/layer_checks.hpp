#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fusedmoe/checkpoint.hpp>

#include "jobs/lint/matrix_checks.hpp"

/// What the tensors of a layer show beside each other.
namespace fusedmoe::lint {

/// Calibration leaves every expert a scale of its own; equal ones are borrowed from somewhere.
void LintInputScales(const std::vector<ExpertNote>& notes, MatrixNote ExpertNote::*which, Findings& findings);

/// Input scales that the configuration promises, of a layer that runs without.
void LintIgnoredInputs(const checkpoint::LayerContext& context, const Scheme& scheme, Findings& findings);

/// Sizes that ranks cannot share evenly. `noted`: intermediate and scheme of layers that were told before.
void LintShards(const checkpoint::LayerContext& context, const Scheme& scheme,
                std::set<std::pair<int64_t, std::string>>& noted, Findings& findings);

void LintShared(const Checkpoint& checkpoint, const checkpoint::LayerContext& context, int64_t layer,
                Findings& findings);

/// Tensors below the experts that belong to no projection, or have a suffix that the format does not know,
/// and those of the block that nothing reads.
void LintUnused(const checkpoint::LayerContext& context, Findings& findings);

}  // namespace fusedmoe::lint
