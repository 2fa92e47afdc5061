#pragma once

#include <fusedmoe/workspace.hpp>

#include "experts/cpu/cpu_plan.hpp"

namespace fusedmoe::cpu {

/// Where everything lies in the workspace of a forward; OpenRun (cpu_run.hpp) makes pointers of it.
struct CpuWorkspace {
  // Slots, and tokens that are packed once.
  WorkspaceSlot offsets, slot_rows, slot_outputs, slot_weights, token_numbers;
  // Intermediate rows, and sums of outputs.
  WorkspaceSlot mid, sums;
  // vectors/.
  WorkspaceSlot tiles, row_buffers, task_rows, token_tiles, input_tiles, mid_tiles, slot_tiles;
  // matrix_unit/.
  WorkspaceSlot jobs, job_groups, job_tokens, job_params, token_rows, token_params, scratch, scratch_rows;
  WorkspaceSlot slot_sums, slot_ends, output_offsets, output_slots;
};
CpuWorkspace BookCpuWorkspace(const CpuPlan& plan, WorkspaceBook& book);

}  // namespace fusedmoe::cpu
