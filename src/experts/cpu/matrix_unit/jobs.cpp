#include "experts/cpu/matrix_unit/jobs.hpp"

#include <algorithm>

#include "core/checked_math.hpp"
#include "experts/cpu/matrix_unit/matrix_unit.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::cpu {
namespace {

/// Threads that share the jobs of a piece.
int64_t SharingThreads(const JobContext& context) {
  return context.plan().max_slot_sums > 0 ? context.run.executor->num_threads : 1;
}

/// Tokens of an expert for the unit.
int64_t TokensOf(const JobContext& context, int64_t expert) {
  const int32_t* offsets = context.run.slots.offsets;
  const int64_t tokens = offsets[expert + 1] - offsets[expert];
  return tokens < context.plan().from_tokens ? 0 : tokens;
}

/// At most, of a job and a group: those of the plan, or fewer where threads would go without.
struct JobLimits {
  int64_t job_tokens, group_rows;
};
JobLimits LimitsOf(const JobContext& context) {
  const MatrixUnitPlan& plan = context.plan();
  const int64_t threads = SharingThreads(context);
  JobLimits limits{plan.job_tokens, plan.group_rows};
  if (threads > 1) {
    int64_t slots = 0;
    for (int64_t expert = 0; expert < context.layer.plan.num_local_experts; ++expert) {
      slots += TokensOf(context, expert);
    }
    const int64_t fair = CeilDiv(std::min(slots, plan.max_slot_sums), kTasksPerThread * threads);
    const int64_t fair_rows = RoundUp(fair, kTileTokens);
    limits.group_rows = std::min(limits.group_rows, fair_rows);
    limits.job_tokens = std::min(limits.job_tokens, std::max(fair_rows, kFewestSharedTokens));
  }
  if (NeedsDynamicTensorScale(context.layer.activation)) {
    limits.group_rows = plan.max_rows;  // a scale over the batch waits for all intermediate values
  }
  return limits;
}

/// The same tokens of an expert for both GEMMs.
void AddJob(const JobContext& context, int64_t expert, int64_t first_slot, int64_t tokens) {
  PieceJobs& jobs = context.run.jobs;
  for (const Gemm gemm : {kGateUp, kDown}) {
    TileJob& job = jobs.list[gemm][jobs.count];
    job = {};
    job.weights = context.layer.expert(expert).matrix(gemm).stripes;
    job.num_tokens = tokens;
    job.rows = TileRows(tokens);
    job.expert = expert;
    job.first_slot = first_slot;
    job.index = jobs.count;
  }
  ++jobs.count;
}

}  // namespace

void CutJobs(const JobContext& context) {
  PieceJobs& jobs = context.run.jobs;
  jobs.count = jobs.num_groups = 0;
  if (!context.plan().enabled) {
    return;
  }
  const JobLimits limits = LimitsOf(context);
  const bool share_sums = SharingThreads(context) > 1;
  JobGroup* group = nullptr;
  int64_t first_slot = 0;  // of the group
  for (int64_t expert = 0; expert < context.layer.plan.num_local_experts; ++expert) {
    const int64_t all = TokensOf(context, expert);
    const int64_t cuts = CeilDiv(all, limits.job_tokens);
    const int64_t cut_tokens = cuts == 0 ? 0 : RoundUp(CeilDiv(all, cuts), kTileTokens);
    int64_t slot = context.run.slots.offsets[expert];
    for (int64_t left = all, tokens = 0; left > 0; left -= tokens, slot += tokens) {
      tokens = std::min(cut_tokens, left);
      const int64_t rows = TileRows(tokens);
      if (group == nullptr || group->rows + rows > limits.group_rows ||
          (share_sums && slot + tokens - first_slot > context.plan().max_slot_sums)) {
        const int64_t first_row = group == nullptr ? 0 : group->first_row + group->rows;
        group = jobs.groups + jobs.num_groups++;
        *group = {jobs.count, jobs.count, 0, first_row};
        first_slot = slot;
      }
      AddJob(context, expert, slot, tokens);
      group->rows += rows;
      group->end = jobs.count;
    }
  }
}

void PlaceJobs(const JobContext& context, const JobGroup& group, int64_t row) {
  const PieceJobs& jobs = context.run.jobs;
  // If the intermediate is stored as fp32 rows, the packed input of GEMM 1 is dead once GEMM 2 is packed:
  // reuse its memory, which is still in L2.
  const int64_t first_bytes = context.gemm(kGateUp).row_bytes, second_bytes = context.gemm(kDown).row_bytes;
  const bool reuse = !context.unit.direct_mid && second_bytes <= first_bytes;
  for (int64_t index = group.begin; index < group.end; ++index) {
    const std::byte* first = jobs.tokens[kGateUp] + row * first_bytes;
    const std::byte* second = reuse ? first : jobs.tokens[kDown] + row * second_bytes;
    for (const Gemm gemm : {kGateUp, kDown}) {
      TileJob& job = jobs.list[gemm][index];
      job.tokens = reinterpret_cast<const uint8_t*>(gemm == kDown ? second : first);
      const float* params = jobs.params[gemm] + row * context.gemm(gemm).params();
      job.scale = context.plan().codes ? params : nullptr;
      job.sum = params + context.gemm(gemm).scales * job.rows;
      // Rows that a group before wrote are still in L2.
      job.mid_row = NeedsDynamicTensorScale(context.layer.activation) ? job.first_slot : row;
    }
    row += jobs.list[kGateUp][index].rows;
  }
}

/// A row per slot where a scale over the batch reads them all. Otherwise rows are written 16 columns at a
/// time, of one token after the other, and lines apart would leave the caches in between: those of an expert
/// follow each other (FP8 in blocks, 128 tokens an expert: 3.5 % of the layer).
MidRows MidRowsOf(const JobContext& context, const TileJob& job) {
  const int64_t stride = context.layer.plan.gate_up.row_stride();
  float* const first = context.run.mid + job.mid_row * stride;
  return NeedsDynamicTensorScale(context.layer.activation)
             ? MidRows{first, stride, kPanelRows}
             : MidRows{first, kPanelRows, job.rows * kPanelRows};
}

}  // namespace fusedmoe::cpu
