#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/status.hpp>

#include "experts/cpu/cpu_plan.hpp"
#include "moe/backend.hpp"

namespace fusedmoe::cpu {

/// What an expert has beside its panels, kept until all are known.
struct ExpertExtras {
  std::vector<int32_t> columns[3];  // gate (or up), up, down; empty: identity
  std::vector<float> pre_quant_scale[3];
  float tensor_scale[3] = {1.0F, 1.0F, 1.0F};
  bool has_bias = false;
  Status status;
};

/// Where all experts go, one after the other.
struct PackTargets {
  std::byte* panels[2];  // gate_up, down
  float* row_scale[2];
  float* bias[2];
};

/// All experts, streamed: besides the result there is never more than one expert for each thread. Where there
/// are too few experts to keep the threads busy, those of one round are loaded together and packed in shares.
void PackExperts(const CpuPlan& plan, const ExpertSource& source, const Executor& executor,
                 const PackTargets& targets, std::vector<ExpertExtras>& extras);

}  // namespace fusedmoe::cpu
