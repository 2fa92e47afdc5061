#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <fusedmoe/config.hpp>
#include <fusedmoe/jobs/tune.hpp>
#include <fusedmoe/plan.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>

#include "experts/cpu/cpu_plan.hpp"
#include "jobs/tune/fit.hpp"

/// What the paths of a CPU take for an expert with so many tokens, measured; fit.hpp makes costs of it.
namespace fusedmoe::tune {

/// A scheme and what to do with its activations.
struct Subject {
  std::string name;
  Scheme scheme;
  ActivationMode activation = ActivationMode::kAsCheckpoint;
};
/// ":a8" behind a scheme means int8 activations. kUsage for unknown names.
Result<Subject> ParseSubject(const std::string& name);

struct ExpertSize {
  int64_t hidden = 0, intermediate = 0;
};

/// The layer that is measured: of as many experts as no cache holds, as far as the options allow.
MoeConfig LayerOf(const TuneOptions& options, const Subject& subject, const ExpertSize& size);

cpu::CpuPlan PlanOf(const Subject& subject, const MoeConfig& config, const std::string& isa);
/// Whether the level has kernels of its own for the scheme.
bool HasKernels(const Subject& subject, const MoeConfig& config, const std::string& isa);

/// Points of one path: a forced mode of an instruction set.
struct PathPoints {
  std::string isa;
  bool tiles = false;
  std::vector<Point> points;
};

/// Adds the points of one size of experts to each path; to one of tiles none where no tile kernel reads these
/// weights.
Status MeasurePaths(const TuneOptions& options, const Subject& subject, const ExpertSize& size,
                    std::vector<PathPoints>& paths);

}  // namespace fusedmoe::tune
