#pragma once

#include <algorithm>

#include "core/checked_math.hpp"
#include "experts/cpu/matrix_unit/matrix_unit.hpp"

namespace fusedmoe::cpu {

/// The GEMMs of a group of jobs; their sums are finished between the instructions of the unit
/// (gate_up_jobs.cpp, down_jobs.cpp).
void GateUpJobs(const JobContext& context, const Workers& workers, const JobGroup& group);
void DownJobs(const JobContext& context, const Workers& workers, const JobGroup& group);

/// What the finished sums of a GEMM are given to.
struct JobFinish {
  TileBegin begin;
  void* begin_context;
  TileFinish finish;
  void* finish_context;
  int64_t tokens;  ///< TileGemm::finish_tokens
};

/// Jobs, and pairs of stripes that they meet.
struct JobStripes {
  const TileJob* jobs;
  int64_t num_jobs;
  int64_t first_pair, end_pair;
};

void MultiplyJobs(const JobContext& context, Gemm gemm, const JobStripes& stripes, const JobScratch& scratch,
                  const JobFinish& finish);

/// task(JobStripes, scratch) for all pairs of stripes of a group: all at once, or a job's in parts where
/// several threads are at work.
template <typename Task>
void ForJobStripes(const JobContext& context, const Workers& workers, const JobGroup& group, Gemm gemm,
                   const Task& task) {
  const GemmShape& shape = context.layer.plan.shape(gemm);
  const int64_t pairs = CeilDiv(shape.parts * shape.stripes, 2);
  const TileJob* jobs = context.run.jobs.list[gemm] + group.begin;
  if (workers.threads() <= 1) {
    workers.ForEach(1, [&](int64_t, const JobScratch& scratch) {
      task(JobStripes{jobs, group.count(), 0, pairs}, scratch);
    });
    return;
  }
  const int64_t most = CeilDiv(kTasksPerThread * workers.threads(), group.count());
  const int64_t parts = std::clamp<int64_t>(most, 1, pairs);
  workers.ForEach(group.count() * parts, [&](int64_t index, const JobScratch& scratch) {
    const int64_t part = index % parts;
    task(JobStripes{jobs + index / parts, 1, pairs * part / parts, pairs * (part + 1) / parts}, scratch);
  });
}

}  // namespace fusedmoe::cpu
