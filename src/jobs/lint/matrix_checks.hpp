#pragma once

#include <optional>
#include <string>

#include "checkpoint/matrices/expert_places.hpp"
#include "jobs/lint/findings.hpp"
#include "jobs/lint/statistics.hpp"

/// What one expert's own tensors show.
namespace fusedmoe::lint {

/// What is kept of a matrix for the checks that compare matrices.
struct MatrixNote {
  bool loaded = false;
  std::string base;
  std::optional<float> tensor_scale, input_scale;
  MatrixStatistics statistics;
};

struct ExpertNote {
  MatrixNote gate, up, down;
};

/// Reads the matrices of an expert: scales, weights and codes of each, gate against up.
ExpertNote LintExpert(const checkpoint::LayerContext& context, int64_t expert, Findings& findings);

}  // namespace fusedmoe::lint
