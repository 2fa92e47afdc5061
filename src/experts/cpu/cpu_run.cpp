#include "experts/cpu/cpu_run.hpp"

namespace fusedmoe::cpu {
namespace {

RowType RowTypeOf(DType dtype) {
  return dtype == DType::kBF16 ? kRowBf16 : dtype == DType::kF16 ? kRowF16 : kRowF32;
}

InputRows InputRowsOf(const ExpertRows& rows) {
  const int axis = rows.values.rank() - 2;
  InputRows of;
  of.values = rows.values.data();
  of.row_bytes = rows.values.stride_bytes(axis);
  of.type = RowTypeOf(rows.values.dtype());
  of.coded = rows.quantized;
  if (!rows.block_scale.empty()) {
    of.scales = rows.block_scale.data();
    of.scale_bytes = rows.block_scale.stride_bytes(axis);
  }
  of.tensor_scale = rows.quantized ? rows.tensor_scale : nullptr;
  return of;
}

void OpenTiles(const CpuPlan& plan, const CpuWorkspace& space, const Workspace& workspace,
               PieceTiles& tiles) {
  tiles.list = workspace.Get<Tile>(space.tiles);
  tiles.row_buffers = workspace.Get<float>(space.row_buffers);
  tiles.task_rows = workspace.Get<std::byte>(space.task_rows);
  for (int set = 0; set < 2; ++set) {
    const int64_t of = set < plan.input_sets ? set : 0;  // up sees what gate sees
    tiles.packed[set] =
        workspace.Get<std::byte>(space.input_tiles) + of * plan.max_tile_rows * plan.gate_up.tile_row_bytes;
    tiles.token_rows[set] =
        workspace.Get<std::byte>(space.token_tiles) + of * plan.max_tokens * plan.gate_up.tile_row_bytes;
    tiles.slot_rows[set] = workspace.Get<void*>(space.slot_tiles) + of * plan.max_slots;
  }
  tiles.packed[kMid] = workspace.Get<std::byte>(space.mid_tiles);
  tiles.slot_rows[kMid] = workspace.Get<void*>(space.slot_tiles) + plan.input_sets * plan.max_slots;
}

void OpenJobs(const CpuPlan& plan, const CpuWorkspace& space, const Workspace& workspace, PieceJobs& jobs) {
  const MatrixUnitPlan& unit = plan.matrix_unit;
  jobs.list[kGateUp] = workspace.Get<TileJob>(space.jobs);
  jobs.list[kDown] = jobs.list[kGateUp] + unit.max_jobs;
  jobs.groups = workspace.Get<JobGroup>(space.job_groups);
  jobs.tokens[kGateUp] = workspace.Get<std::byte>(space.job_tokens);
  jobs.tokens[kDown] = jobs.tokens[kGateUp] + unit.max_rows * unit.gemms[kGateUp].row_bytes;
  jobs.params[kGateUp] = workspace.Get<float>(space.job_params);
  jobs.params[kDown] = jobs.params[kGateUp] + unit.max_rows * unit.gemms[kGateUp].params();
  jobs.token_rows = workspace.Get<std::byte>(space.token_rows);
  jobs.token_params = workspace.Get<float>(space.token_params);
  jobs.scratch.count = unit.num_scratch;
  jobs.scratch.decoded = workspace.Get<uint8_t>(space.scratch);
  jobs.scratch.rows = workspace.Get<float>(space.scratch_rows);
  jobs.scratch.row_floats = 3 * plan.widest_cols();
  jobs.sums.rows = workspace.Get<float>(space.slot_sums);
  jobs.sums.ends = workspace.Get<SlotEnds>(space.slot_ends);
  jobs.sums.output_offsets = workspace.Get<int32_t>(space.output_offsets);
  jobs.sums.output_slots = workspace.Get<int32_t>(space.output_slots);
}

}  // namespace

void OpenRun(const CpuLayer& layer, const CpuWorkspace& space, const ExpertsInput& input,
             MutableTensorView output, const Workspace& workspace, Run& run) {
  run.input = InputRowsOf(input.rows);
  run.output = {output.data(), output.stride_bytes(output.rank() - 2), DTypeBits(output.dtype()) / 8,
                RowTypeOf(output.dtype())};
  run.slots.offsets = workspace.Get<int32_t>(space.offsets);
  run.slots.cursors = run.slots.offsets + layer.plan.num_local_experts + 1;
  run.slots.rows = workspace.Get<int32_t>(space.slot_rows);
  run.slots.outputs = workspace.Get<int32_t>(space.slot_outputs);
  run.slots.weights = workspace.Get<float>(space.slot_weights);
  run.numbers.numbers = workspace.Get<int32_t>(space.token_numbers);
  run.numbers.slot_of = run.numbers.numbers + layer.plan.max_tokens;
  run.mid = workspace.Get<float>(space.mid);
  run.sums = workspace.Get<float>(space.sums);
  OpenTiles(layer.plan, space, workspace, run.tiles);
  if (layer.plan.matrix_unit.enabled) {
    OpenJobs(layer.plan, space, workspace, run.jobs);
  }
}

void StoreOutput(const CpuLayer& layer, const Run& run, int64_t row, int64_t first_col, int64_t end_col) {
  const int64_t target = layer.batched ? run.slots.rows[row] : run.slots.first_output + row;
  layer.kernels->from_float[run.output.type](
      run.sums + row * layer.plan.down.row_stride() + first_col, end_col - first_col,
      run.output.values + target * run.output.row_bytes + first_col * run.output.value_bytes);
}

}  // namespace fusedmoe::cpu
