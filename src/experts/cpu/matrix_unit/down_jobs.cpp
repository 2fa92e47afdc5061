#include <algorithm>

#include "experts/cpu/matrix_unit/job_gemm.hpp"
#include "experts/cpu/matrix_unit/slot_sums.hpp"

namespace fusedmoe::cpu {
namespace {

/// What sums of 32 columns are added to, or where they wait.
struct DownFinish {
  const JobContext& context;
  bool waits = SlotsWait(context);
  TileAdd add{};

  static void Begin(void* self, const TileJob* job, int64_t first_stripe) {
    auto& to = *static_cast<DownFinish*>(self);
    const JobContext& context = to.context;
    const Run& run = context.run;
    const SlotSumRows& sums = run.jobs.sums;
    const GemmShape& shape = context.layer.plan.down;
    const MatrixPanels& matrix = context.layer.expert(job->expert).down;
    const int64_t col = first_stripe * kPanelRows;
    const int64_t slot = job->first_slot - sums.first_slot;
    to.add = {TileParams{job->scale, reinterpret_cast<const int32_t*>(job->sum)},
              context.unit.RowScales(context.layer, job->expert, kDown) + col,
              matrix.bias == nullptr ? nullptr : matrix.bias + col,
              std::min<int64_t>(2, shape.stripes - first_stripe),
              to.waits ? sums.rows + col * sums.num_slots + slot * kPutColumns : run.sums + col,
              shape.row_stride(),
              to.waits ? nullptr : run.slots.outputs + job->first_slot,
              run.slots.weights + job->first_slot,
              sums.ends + job->first_slot};
  }
};

}  // namespace

void DownJobs(const JobContext& context, const Workers& workers, const JobGroup& group) {
  const MatrixUnit::Kernels& down = context.unit.gemms[kDown];
  const TileFinish finish = SlotsWait(context) ? down.table->put[down.sums] : down.table->add[down.sums];
  ForJobStripes(context, workers, group, kDown, [&](const JobStripes& stripes, const JobScratch& scratch) {
    DownFinish of{context};
    MultiplyJobs(context, kDown, stripes, scratch, {&DownFinish::Begin, &of, finish, &of.add, 1});
  });
}

}  // namespace fusedmoe::cpu
