#include "experts/cpu/matrix_unit/job_gemm.hpp"

namespace fusedmoe::cpu {

void MultiplyJobs(const JobContext& context, Gemm gemm, const JobStripes& stripes, const JobScratch& scratch,
                  const JobFinish& finish) {
  const GemmShape& shape = context.layer.plan.shape(gemm);
  TileGemm call{};
  call.jobs = stripes.jobs;
  call.num_jobs = stripes.num_jobs;
  call.blocks = shape.blocks;
  call.stripe_bytes = shape.stripe_bytes;
  call.num_stripes = shape.parts * shape.stripes;
  call.first_pair = stripes.first_pair;
  call.end_pair = stripes.end_pair;
  call.scale_group = context.plan().scale_group;
  call.weight_group = context.plan().weight_group;
  call.group_scales = GroupScalesOf(shape.panel);
  call.scratch = scratch.decoded();
  call.begin = finish.begin;
  call.finish = finish.finish;
  call.begin_context = finish.begin_context;
  call.finish_context = finish.finish_context;
  call.finish_tokens = finish.tokens;
  context.unit.gemms[gemm].format.gemm(&call);
}

}  // namespace fusedmoe::cpu
