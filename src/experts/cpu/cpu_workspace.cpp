#include "experts/cpu/cpu_workspace.hpp"

#include <algorithm>

#include "experts/cpu/matrix_unit/jobs.hpp"
#include "experts/cpu/vectors/tiles.hpp"

namespace fusedmoe::cpu {
namespace {

void BookJobs(const CpuPlan& plan, WorkspaceBook& book, CpuWorkspace& space) {
  const MatrixUnitPlan& unit = plan.matrix_unit;
  const MatrixUnitGemm& gate_up = unit.gemms[kGateUp];
  const MatrixUnitGemm& down = unit.gemms[kDown];
  space.jobs = book.Book("jobs", kNumGemms * unit.max_jobs * static_cast<int64_t>(sizeof(TileJob)));
  space.job_groups = book.Book("job_groups", unit.max_jobs * static_cast<int64_t>(sizeof(JobGroup)));
  space.job_tokens = book.Book("job_tokens", unit.max_rows * (gate_up.row_bytes + down.row_bytes));
  space.job_params = book.Book("job_params", unit.max_rows * (gate_up.params() + down.params()) * 4);
  space.token_rows = book.Book("token_rows", unit.shared_rows * gate_up.row_bytes);
  space.token_params = book.Book("token_params", unit.shared_rows * gate_up.params() * 4);
  space.scratch = book.Book("job_scratch", unit.num_scratch * kTileScratchBytes);
  space.scratch_rows = book.Book("job_scratch_rows", unit.num_scratch * 3 * plan.widest_cols() * 4);
  space.slot_sums = book.Book("slot_sums", unit.max_slot_sums * plan.down.row_stride() * 4);
  space.slot_ends = book.Book("slot_ends", plan.max_slots * static_cast<int64_t>(sizeof(SlotEnds)));
  space.output_offsets = book.Book("output_offsets", (plan.max_rows + 1) * 4);
  space.output_slots = book.Book("output_slots", unit.max_slot_sums * 4);
}

}  // namespace

CpuWorkspace BookCpuWorkspace(const CpuPlan& plan, WorkspaceBook& book) {
  CpuWorkspace space;
  const int64_t tile_bytes = plan.gate_up.tile_row_bytes, mid_tile_bytes = plan.down.tile_row_bytes;
  const int64_t mid_rows = std::max(plan.max_slots, plan.matrix_unit.max_rows);
  const int64_t pack_tasks = std::min(kPackTasks, std::max(plan.max_tiles, plan.max_tokens));
  space.offsets = book.Book("expert_offsets", (plan.num_local_experts + 1) * 8);
  space.slot_rows = book.Book("slot_rows", plan.max_slots * 4);
  space.slot_outputs = book.Book("slot_outputs", plan.max_slots * 4);
  space.slot_weights = book.Book("slot_weights", plan.max_slots * 4);
  space.tiles = book.Book("tiles", plan.max_tiles * static_cast<int64_t>(sizeof(Tile)));
  space.row_buffers = book.Book("row_buffers", pack_tasks * 2 * plan.widest_cols() * 4);
  space.task_rows = book.Book(
      "tile_rows", pack_tasks * kHeights[plan.max_height_index] * std::max(tile_bytes, mid_tile_bytes));
  space.token_numbers = book.Book("token_places", plan.max_tokens * 8);
  space.token_tiles = book.Book("token_tiles", plan.input_sets * plan.max_tokens * tile_bytes);
  space.input_tiles = book.Book("input_tiles", plan.input_sets * plan.max_tile_rows * tile_bytes);
  space.slot_tiles = book.Book("slot_tiles", (plan.input_sets + 1) * plan.max_slots * 8);
  space.mid = book.Book("mid", mid_rows * plan.gate_up.row_stride() * 4);
  space.mid_tiles = book.Book("mid_tiles", plan.max_tile_rows * mid_tile_bytes);
  space.sums = book.Book("output_sums", plan.max_rows * plan.down.row_stride() * 4);
  if (plan.matrix_unit.enabled) {
    BookJobs(plan, book, space);
  }
  return space;
}

}  // namespace fusedmoe::cpu
