#include <algorithm>

#include "experts/cpu/cpu_rows.hpp"
#include "experts/cpu/matrix_unit/job_gemm.hpp"
#include "experts/cpu/matrix_unit/job_packer.hpp"
#include "experts/cpu/matrix_unit/slot_sums.hpp"

/// Who works on which jobs: the picture is in matrix_unit.hpp.
namespace fusedmoe::cpu {
namespace {

/// A group from hidden states to results. Its packed tokens stand from row `row` on.
void RunGroup(const JobContext& context, const Workers& workers, const JobGroup& group, int64_t row) {
  PlaceJobs(context, group, row);
  PackJobs(context, workers, group, kGateUp);
  GateUpJobs(context, workers, group);
  SetBatchScale(context.layer, kDown, context.run);  // where there is one, all jobs are in one group
  PackJobs(context, workers, group, kDown);
  DownJobs(context, workers, group);
  StoreOutputsOf(context, group);
}

/// One group after the other by one thread, in the same memory.
void RunAlone(const JobContext& context) {
  PieceJobs& jobs = context.run.jobs;
  const JobScratch own(jobs.scratch);
  const Workers one(*context.run.executor, jobs.scratch, own);
  PackJobTokens(context, one);
  BeginOutputs(context);
  for (int64_t i = 0; i < jobs.num_groups; ++i) {
    RunGroup(context, one, jobs.groups[i], 0);
  }
}

/// Every group by one thread, large ones first, so that the last ones are short.
void RunGroupsApart(const JobContext& context, JobGroup* groups, int64_t count) {
  std::sort(groups, groups + count, [](const JobGroup& a, const JobGroup& b) {
    return a.rows != b.rows ? a.rows > b.rows : a.begin < b.begin;
  });
  const Executor& executor = *context.run.executor;
  ScratchPool& pool = context.run.jobs.scratch;
  // A thread's groups take the same memory one after the other, which then stays in its L2.
  const bool reused = pool.count * groups[0].rows <= context.plan().max_rows;
  std::atomic<int64_t> next{0};
  ParallelFor(executor, std::min<int64_t>(executor.num_threads, pool.count), [&](int64_t) {
    const JobScratch own(pool);
    for (int64_t i = 0; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      const int64_t row = reused ? own.index() * groups[0].rows : groups[i].first_row;
      RunGroup(context, Workers(executor, pool, own), groups[i], row);
    }
  });
}

/// Gives the groups from `begin` on memory for the results of their slots: as many as have room together.
/// Where these end.
int64_t PlaceSlotSums(const JobContext& context, int64_t begin) {
  const PieceJobs& jobs = context.run.jobs;
  SlotSumRows& sums = context.run.jobs.sums;
  const auto end_slot = [&](const JobGroup& group) {
    const TileJob& last = jobs.list[kGateUp][group.end - 1];
    return last.first_slot + last.num_tokens;
  };
  sums.first_slot = jobs.list[kGateUp][jobs.groups[begin].begin].first_slot;
  int64_t end = begin + 1;
  while (end < jobs.num_groups &&
         end_slot(jobs.groups[end]) - sums.first_slot <= context.plan().max_slot_sums) {
    ++end;
  }
  sums.num_slots = end_slot(jobs.groups[end - 1]) - sums.first_slot;
  return end;
}

}  // namespace

void RunJobs(const JobContext& context) {
  PieceJobs& jobs = context.run.jobs;
  if (jobs.count == 0) {
    return;
  }
  if (!SlotsWait(context)) {
    RunAlone(context);
    return;
  }
  const int64_t threads = context.run.executor->num_threads;
  const Workers all(*context.run.executor, jobs.scratch);
  PackJobTokens(context, all);
  for (int64_t begin = 0, end = 0; begin < jobs.num_groups; begin = end) {
    end = PlaceSlotSums(context, begin);
    const JobGroup together{jobs.groups[begin].begin, jobs.groups[end - 1].end, 0, 0};
    if (end - begin >= kGroupsPerThread * threads) {
      RunGroupsApart(context, jobs.groups + begin, end - begin);
    } else {
      RunGroup(context, all, together, jobs.groups[begin].first_row);
    }
    AddSlotSums(context, together, begin == 0, end == jobs.num_groups);
  }
}

}  // namespace fusedmoe::cpu
