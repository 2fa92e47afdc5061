#include "experts/cpu/matrix_unit/slot_sums.hpp"

#include <algorithm>

namespace fusedmoe::cpu {
namespace {

/// visit(slot) for the slots of some jobs, in ascending order.
template <typename Visit>
void ForSlots(const Run& run, const JobGroup& jobs, const Visit& visit) {
  for (int64_t index = jobs.begin; index < jobs.end; ++index) {
    const TileJob& job = run.jobs.list[kGateUp][index];
    for (int64_t slot = job.first_slot; slot < job.first_slot + job.num_tokens; ++slot) {
      visit(static_cast<int32_t>(slot));
    }
  }
}

/// The slots of each output, one output behind the other; output_offsets: where those of each end.
void ListSlotsByOutput(const Run& run, const JobGroup& jobs) {
  const SlotSumRows& sums = run.jobs.sums;
  std::fill_n(sums.output_offsets, run.slots.num_outputs + 1, 0);
  ForSlots(run, jobs, [&](int32_t slot) { ++sums.output_offsets[run.slots.outputs[slot] + 1]; });
  for (int64_t output = 0; output < run.slots.num_outputs; ++output) {
    sums.output_offsets[output + 1] += sums.output_offsets[output];
  }
  // Filling moves each beginning to its end, where the next one begins.
  ForSlots(run, jobs,
           [&](int32_t slot) { sums.output_slots[sums.output_offsets[run.slots.outputs[slot]]++] = slot; });
}

}  // namespace

bool SlotsWait(const JobContext& context) {
  return context.run.executor->num_threads > 1 && context.plan().max_slot_sums > 0;
}

/// From zero, or, where vectors add nothing, from the first slot of each: then a row is stored behind the
/// group of its last slot, while it is in L2.
void BeginOutputs(const JobContext& context) {
  const Run& run = context.run;
  const SlotSumRows& sums = run.jobs.sums;
  const GemmShape& down = context.layer.plan.down;
  if (run.tiles.count > 0) {
    std::fill_n(run.sums, run.slots.num_outputs * down.row_stride(), 0.0F);
    std::fill_n(sums.ends, run.slots.count, SlotEnds{});
    return;
  }
  constexpr int32_t kNone = -1;
  int32_t* last = sums.output_offsets;
  std::fill_n(last, run.slots.num_outputs, kNone);
  for (int32_t slot = 0; slot < run.slots.count; ++slot) {
    int32_t& of = last[run.slots.outputs[slot]];
    sums.ends[slot] = {of == kNone, false};
    of = slot;
  }
  for (int64_t row = 0; row < run.slots.num_outputs; ++row) {
    if (last[row] != kNone) {
      sums.ends[last[row]].last = true;
    } else {
      std::fill_n(run.sums + row * down.row_stride(), down.row_stride(), 0.0F);
      StoreOutput(context.layer, run, row, 0, down.rows);
    }
  }
}

void StoreOutputsOf(const JobContext& context, const JobGroup& group) {
  const Run& run = context.run;
  if (run.tiles.count > 0 || SlotsWait(context)) {
    return;
  }
  ForSlots(run, group, [&](int32_t slot) {
    if (run.jobs.sums.ends[slot].last) {
      StoreOutput(context.layer, run, run.slots.outputs[slot], 0, context.layer.plan.down.rows);
    }
  });
}

void AddSlotSums(const JobContext& context, const JobGroup& jobs, bool first, bool last) {
  const Run& run = context.run;
  const SlotSumRows& sums = run.jobs.sums;
  const GemmShape& shape = context.layer.plan.down;
  ListSlotsByOutput(run, jobs);
  const bool done = last && run.tiles.count == 0;
  const int64_t outputs = run.slots.num_outputs;
  const int64_t tasks = std::min(kTasksPerThread * run.executor->num_threads, outputs);
  ParallelFor(*run.executor, tasks, [&](int64_t task) {
    const int64_t first_row = outputs * task / tasks, end_row = outputs * (task + 1) / tasks;
    TileSlotSum sum{};
    sum.rows = sums.rows;
    sum.block_slots = sums.num_slots;
    sum.first_slot = sums.first_slot;
    sum.slots = sums.output_slots;
    sum.ends = sums.output_offsets + first_row;
    sum.begin = first_row == 0 ? 0 : sums.output_offsets[first_row - 1];
    sum.weights = run.slots.weights;
    sum.outputs = end_row - first_row;
    sum.columns = shape.padded_rows();
    sum.sums = run.sums + first_row * shape.row_stride();
    sum.stride = shape.row_stride();
    sum.fresh = first;
    context.unit.kernels->add_slots(&sum);
    for (int64_t row = first_row; done && row < end_row; ++row) {
      StoreOutput(context.layer, run, row, 0, shape.rows);
    }
  });
}

}  // namespace fusedmoe::cpu
