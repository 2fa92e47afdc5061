#include <algorithm>
#include <thread>

#include "core/checked_math.hpp"
#include "experts/cpu/cpu_run.hpp"
#include "quant/activation_quantizer.hpp"

/// Experts with many tokens on the matrix unit. An expert's tokens, cut into pieces that fit L2, are jobs:
/// packed once, then multiplied with pairs of stripes: gate and up of 16 columns, later 32 columns of down.
///
///   one thread     group: pack, gate/up, pack, down --- added to ---> sums of outputs ---> outputs, after
///                                                                     the last of their slots
///   many threads   group: pack, gate/up, pack, down --- put into ---> sums of slots --.
///                  group: ...                                         sums of slots --+--> sums of outputs
///
/// A thread takes a group through the layer alone, so that tokens and intermediate values never leave its L2;
/// the sums of slots are then added up in the order in which one thread would have added them. Where groups
/// are too few, all threads share the pairs of stripes of one group after the other.
namespace fusedmoe::cpu {
CpuExperts::TaskScratch::TaskScratch(Run& run, const CpuPlan& plan) {
  for (;; std::this_thread::yield()) {
    for (int64_t i = 0; i < plan.tiles.num_scratch; ++i) {
      if (run.scratch_taken[i].load(std::memory_order_relaxed) == 0 &&
          run.scratch_taken[i].exchange(1, std::memory_order_acquire) == 0) {
        taken_ = run.scratch_taken + i;
        index_ = i;
        tiles_ = run.scratch + i * kTileScratchBytes;
        rows_ = run.scratch_rows + i * 3 * std::max(plan.gate_up.padded_cols, plan.down.padded_cols);
        return;
      }
    }
  }
}

void CpuExperts::MakeJobs(Run& run) const {
  run.num_jobs = run.num_groups = 0;
  const TilePlan& tiles = plan_.tiles;
  if (!tiles.enabled) {
    return;
  }
  const int64_t threads = tiles.max_slot_sums > 0 ? run.executor->num_threads : 1;
  const auto tokens_of = [&](int64_t expert) -> int64_t {
    const int64_t tokens = run.offsets[expert + 1] - run.offsets[expert];
    return tokens < tiles.from_tokens ? 0 : tokens;
  };
  int64_t job_tokens = tiles.job_tokens, group_rows = tiles.group_rows;
  if (threads > 1) {
    int64_t slots = 0;
    for (int64_t expert = 0; expert < plan_.num_local_experts; ++expert) {
      slots += tokens_of(expert);
    }
    const int64_t fair = CeilDiv(std::min(slots, tiles.max_slot_sums), kTasksPerThread * threads);
    const int64_t fair_rows = RoundUp(fair, kTileTokens);
    group_rows = std::min(group_rows, fair_rows);
    job_tokens = std::min(job_tokens, std::max(fair_rows, kFewestSharedTokens));
  }
  if (NeedsDynamicTensorScale(activation_)) {
    group_rows = tiles.max_rows;  // a scale over the batch waits for all intermediate values
  }
  JobGroup* group = nullptr;
  int64_t first_slot = 0;
  for (int64_t expert = 0; expert < plan_.num_local_experts; ++expert) {
    const ExpertPanels& panels = experts_[static_cast<size_t>(expert)];
    const int64_t cuts = CeilDiv(tokens_of(expert), job_tokens);
    const int64_t cut_tokens = cuts == 0 ? 0 : RoundUp(CeilDiv(tokens_of(expert), cuts), kTileTokens);
    int64_t slot = run.offsets[expert];
    for (int64_t left = tokens_of(expert), tokens = 0; left > 0; left -= tokens, slot += tokens) {
      tokens = std::min(cut_tokens, left);
      const int64_t rows = TileRows(tokens);
      if (group == nullptr || group->rows + rows > group_rows ||
          (threads > 1 && slot + tokens - first_slot > tiles.max_slot_sums)) {
        const int64_t first_row = group == nullptr ? 0 : group->first_row + group->rows;
        group = run.groups + run.num_groups++;
        *group = {run.num_jobs, run.num_jobs, 0, first_row};
        first_slot = slot;
      }
      for (int i = 0; i < 2; ++i) {
        TileJob& job = run.jobs[i * tiles.max_jobs + run.num_jobs];
        job = {};
        job.weights = i == 0 ? panels.gate_up : panels.down;
        job.num_tokens = tokens;
        job.rows = rows;
        job.expert = expert;
        job.first_slot = slot;
        job.index = run.num_jobs;
      }
      group->rows += rows;
      group->end = ++run.num_jobs;
    }
  }
}

/// Gives the jobs of a group their memory, from row `row` on.
void CpuExperts::PlaceJobs(Run& run, const JobGroup& group, int64_t row) const {
  const TilePlan& tiles = plan_.tiles;
  const GemmShape* shapes[2] = {&plan_.gate_up, &plan_.down};
  for (int64_t index = group.begin; index < group.end; ++index) {
    for (int i = 0; i < 2; ++i) {
      TileJob& job = run.jobs[i * tiles.max_jobs + index];
      // Behind rows in fp32 the tokens of the first GEMM have done their work when those of the second come:
      // in their place these find lines that are in L2.
      const bool reuses = i == 1 && !direct_mid_ && tiles.row_bytes[1] <= tiles.row_bytes[0];
      const int64_t place = i == 0 || reuses ? row * tiles.row_bytes[0]
                                             : tiles.max_rows * tiles.row_bytes[0] + row * tiles.row_bytes[1];
      job.tokens = reinterpret_cast<const uint8_t*>(run.tokens + place);
      const float* sides = run.sides + (i == 0 ? 0 : tiles.max_rows * tiles.sides[0]) + row * tiles.sides[i];
      const int64_t scales = tiles.scale_group > 0 ? CeilDiv(shapes[i]->padded_cols, tiles.scale_group) : 1;
      job.scale = tiles.codes ? sides : nullptr;
      job.sum = sides + scales * job.rows;
      // Rows that a group before wrote are still in L2.
      job.mid_row = NeedsDynamicTensorScale(activation_) ? job.first_slot : row;
    }
    row += run.jobs[index].rows;
  }
}

void CpuExperts::RunJobs(Run& run) const {
  if (run.num_jobs == 0) {
    return;
  }
  const Crew all{*run.executor};
  if (run.executor->num_threads <= 1 || plan_.tiles.max_slot_sums == 0) {
    TaskScratch own(run, plan_);
    const Crew one{*run.executor, &own};
    PackJobTokens(run, one);
    BeginOutputs(run);
    for (int64_t i = 0; i < run.num_groups; ++i) {
      RunGroup(run, one, run.groups[i], 0);
    }
    return;
  }
  PackJobTokens(run, all);
  for (int64_t begin = 0, end = 0; begin < run.num_groups; begin = end) {
    // As many groups as have room for the results of their slots.
    run.first_slot = run.jobs[run.groups[begin].begin].first_slot;
    const auto end_slot = [&](const JobGroup& group) {
      const TileJob& last = run.jobs[group.end - 1];
      return last.first_slot + last.num_tokens;
    };
    for (end = begin + 1;
         end < run.num_groups && end_slot(run.groups[end]) - run.first_slot <= plan_.tiles.max_slot_sums;) {
      ++end;
    }
    run.waiting_slots = end_slot(run.groups[end - 1]) - run.first_slot;
    const JobGroup jobs{run.groups[begin].begin, run.groups[end - 1].end};
    if (end - begin >= kGroupsPerThread * run.executor->num_threads) {
      RunGroupsApart(run, run.groups + begin, end - begin);
    } else {
      RunGroup(run, all, jobs, run.groups[begin].first_row);
    }
    AddSlotSums(run, jobs, begin == 0, end == run.num_groups);
  }
}

/// Every group by one thread, large ones first, so that the last ones are short.
void CpuExperts::RunGroupsApart(Run& run, JobGroup* groups, int64_t count) const {
  std::sort(groups, groups + count, [](const JobGroup& a, const JobGroup& b) {
    return a.rows != b.rows ? a.rows > b.rows : a.begin < b.begin;
  });
  const int64_t threads = std::min<int64_t>(run.executor->num_threads, plan_.tiles.num_scratch);
  // A thread's groups take the same memory one after the other, which then stays in its L2.
  const bool reused = plan_.tiles.num_scratch * groups[0].rows <= plan_.tiles.max_rows;
  std::atomic<int64_t> next{0};
  ParallelFor(*run.executor, threads, [&](int64_t) {
    TaskScratch own(run, plan_);
    for (int64_t i = 0; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      RunGroup(run, {*run.executor, &own}, groups[i],
               reused ? own.index() * groups[0].rows : groups[i].first_row);
    }
  });
}

void CpuExperts::RunGroup(Run& run, const Crew& crew, const JobGroup& group, int64_t row) const {
  PlaceJobs(run, group, row);
  PackJobs(run, crew, group, 0);
  GateUpJobs(run, crew, group);
  if (NeedsDynamicTensorScale(activation_)) {
    PackTiles(run, plan_.down, 2);
  }
  PackJobs(run, crew, group, 2);
  DownJobs(run, crew, group);
}

/// Sums of outputs from zero to the caller's dtype, one thread. Where vectors add nothing, a row begins with
/// its first slot and is stored behind the group of its last one, while it is in L2.
void CpuExperts::BeginOutputs(Run& run) const {
  const int64_t stride = plan_.down.row_stride();
  if (run.num_tiles > 0) {
    std::fill_n(run.sums, run.num_outputs * stride, 0.0F);
    std::fill_n(run.slot_ends, run.num_slots, SlotEnds{});
    return;
  }
  constexpr int32_t kNone = -1;
  int32_t* last = run.output_offsets;
  std::fill_n(last, run.num_outputs, kNone);
  for (int32_t slot = 0; slot < run.num_slots; ++slot) {
    int32_t& of = last[run.slot_outputs[slot]];
    run.slot_ends[slot] = {of == kNone, false};
    of = slot;
  }
  for (int64_t row = 0; row < run.num_outputs; ++row) {
    if (last[row] != kNone) {
      run.slot_ends[last[row]].last = true;
    } else {
      std::fill_n(run.sums + row * stride, stride, 0.0F);
      StoreOutput(run, row, 0, plan_.down.rows);
    }
  }
}

/// Rows whose last slot is in a group that one thread adds up alone, to the caller's dtype.
void CpuExperts::StoreOutputsOf(Run& run, const JobGroup& group) const {
  if (run.num_tiles > 0 || SlotsWait(run)) {
    return;
  }
  for (const TileJob* job = run.jobs + group.begin; job != run.jobs + group.end; ++job) {
    for (int64_t slot = job->first_slot; slot < job->first_slot + job->num_tokens; ++slot) {
      if (run.slot_ends[slot].last) {
        StoreOutput(run, run.slot_outputs[slot], 0, plan_.down.rows);
      }
    }
  }
}

/// Whether the sums of slots wait for those of the others of their output.
bool CpuExperts::SlotsWait(const Run& run) const {
  return run.executor->num_threads > 1 && plan_.tiles.max_slot_sums > 0;
}

/// Results of the slots of some jobs to the sums of their outputs, in ascending order of slots, which is that
/// in which one thread adds them.
void CpuExperts::AddSlotSums(Run& run, const JobGroup& jobs, bool first, bool last) const {
  const GemmShape& shape = plan_.down;
  std::fill_n(run.output_offsets, run.num_outputs + 1, 0);
  const auto for_each_slot = [&](const auto& visit) {
    for (const TileJob* job = run.jobs + jobs.begin; job != run.jobs + jobs.end; ++job) {
      for (int64_t slot = job->first_slot; slot < job->first_slot + job->num_tokens; ++slot) {
        visit(static_cast<int32_t>(slot), run.slot_outputs[slot]);
      }
    }
  };
  for_each_slot([&](int32_t, int32_t output) { ++run.output_offsets[output + 1]; });
  for (int64_t output = 0; output < run.num_outputs; ++output) {
    run.output_offsets[output + 1] += run.output_offsets[output];
  }
  // Filling moves each beginning to its end, where the next one begins.
  for_each_slot([&](int32_t slot, int32_t output) { run.output_slots[run.output_offsets[output]++] = slot; });
  const bool done = last && run.num_tiles == 0;
  const int64_t tasks = std::min(kTasksPerThread * run.executor->num_threads, run.num_outputs);
  ParallelFor(*run.executor, tasks, [&](int64_t task) {
    const int64_t first_row = run.num_outputs * task / tasks, end_row = run.num_outputs * (task + 1) / tasks;
    TileSlotSum sum{};
    sum.rows = run.slot_sums;
    sum.block_slots = run.waiting_slots;
    sum.first_slot = run.first_slot;
    sum.slots = run.output_slots;
    sum.ends = run.output_offsets + first_row;
    sum.begin = first_row == 0 ? 0 : run.output_offsets[first_row - 1];
    sum.weights = run.slot_weights;
    sum.outputs = end_row - first_row;
    sum.columns = shape.padded_rows();
    sum.sums = run.sums + first_row * shape.row_stride();
    sum.stride = shape.row_stride();
    sum.fresh = first;
    tiles_->add_slots(&sum);
    for (int64_t row = first_row; done && row < end_row; ++row) {
      StoreOutput(run, row, 0, shape.rows);
    }
  });
}

}  // namespace fusedmoe::cpu
