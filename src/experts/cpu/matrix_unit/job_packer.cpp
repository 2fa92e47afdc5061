#include "experts/cpu/matrix_unit/job_packer.hpp"

#include <algorithm>
#include <cstring>

#include "core/checked_math.hpp"
#include "experts/cpu/matrix_unit/job_row_packer.hpp"

namespace fusedmoe::cpu {
namespace {

/// Tiles of the unit that the tokens of a job stand in.
int64_t TilesOf(const TileJob& job) {
  return CeilDiv(job.num_tokens, TileTokens(job.num_tokens));
}

/// The tokens of jobs of one GEMM.
class JobPacker {
 public:
  JobPacker(const JobContext& context, Gemm gemm)
      : context_(context), run_(context.run), gemm_(gemm), rows_(context, gemm) {}

  /// Packs tiles [first, end), counted over all jobs from `job` on.
  void PackTiles(const TileJob* job, int64_t first, int64_t end, float* buffer) const {
    int64_t tile = first;
    while (tile >= TilesOf(*job)) {
      tile -= TilesOf(*job++);
    }
    for (int64_t left = end - first; left > 0; --left) {
      const int64_t tokens = TileTokens(job->num_tokens);
      PackTile(*job, tokens * tile, std::min(tokens * (tile + 1), job->num_tokens), buffer);
      if (++tile == TilesOf(*job)) {
        tile = 0;
        ++job;
      }
    }
  }

  /// A token that several experts share, at its number.
  void PackToken(int64_t number, float* buffer) const {
    const MatrixUnitGemm& gemm = context_.gemm(kGateUp);
    JobRow row{};
    row.token = reinterpret_cast<uint8_t*>(run_.jobs.token_rows) + number * gemm.row_bytes;
    row.step_bytes = 64;
    row.scales = run_.jobs.token_params + number * gemm.params();
    row.sums = row.scales + gemm.scales;
    row.stride = 1;
    PackSlot(context_.layer.expert(0).input[kGateInput], run_.numbers.slot_of[number], row, buffer);
  }

 private:
  void PackTile(const TileJob& job, int64_t first, int64_t end, float* buffer) const {
    if (gemm_ == kGateUp && context_.unit.shared_rows) {
      GatherTile(job, first, end);
      return;
    }
    for (int64_t token = first; token < end; ++token) {
      PackRow(job, token, buffer);
    }
  }

  void PackRow(const TileJob& job, int64_t token, float* buffer) const {
    JobRow row{};
    row.token = const_cast<uint8_t*>(job.tokens) +
                TileTokenOffset(context_.gemm(gemm_).row_bytes, job.num_tokens, token);
    row.step_bytes = TileStepBytes(job.num_tokens);
    row.scales = const_cast<float*>(job.scale) + (context_.plan().codes ? token : 0);
    row.sums = const_cast<float*>(job.sum) + token;
    row.stride = job.rows;
    const ExpertPanels& expert = context_.layer.expert(job.expert);
    if (gemm_ == kGateUp) {
      PackSlot(expert.input[kGateInput], job.first_slot + token, row, buffer);
    } else {
      LoadMid(job, token, buffer);
      rows_.Pack(expert.input[kMid], row, buffer);
    }
  }

  /// The hidden state of a slot.
  void PackSlot(const InputTransform& transform, int64_t slot, JobRow& row, float* buffer) const {
    const RowReader& reader = rows_.reader();
    if (reader.coded()) {
      row.codes = reader.Codes(slot);
      row.code_scales = reader.CodeScales(slot);
    } else {
      reader.Load(transform, slot, buffer);
    }
    rows_.Pack(transform, row, buffer);
  }

  void LoadMid(const TileJob& job, int64_t token, float* buffer) const {
    const MidRows mid = MidRowsOf(context_, job);
    for (int64_t k = 0; k < context_.layer.plan.down.cols; k += kPanelRows) {
      std::memcpy(buffer + k, mid.first + token * mid.token_stride + k / kPanelRows * mid.block_stride,
                  kPanelRows * sizeof(float));
    }
  }

  /// Tokens [first, end) that are packed already into a tile of each step.
  void GatherTile(const TileJob& job, int64_t first, int64_t end) const {
    const MatrixUnitGemm& gemm = context_.gemm(kGateUp);
    const uint8_t* rows[16];
    for (int64_t token = first; token < end; ++token) {
      const int64_t number = run_.numbers.Of(run_.slots, job.first_slot + token);
      rows[token - first] = reinterpret_cast<const uint8_t*>(run_.jobs.token_rows) + number * gemm.row_bytes;
      const float* params = run_.jobs.token_params + number * gemm.params();
      for (int64_t g = 0; context_.plan().codes && g < gemm.scales; ++g) {
        const_cast<float*>(job.scale)[g * job.rows + token] = params[g];
      }
      for (int64_t g = 0; g < gemm.sums; ++g) {
        const_cast<float*>(job.sum)[g * job.rows + token] = params[gemm.scales + g];
      }
    }
    uint8_t* tile = const_cast<uint8_t*>(job.tokens) + TileTokenOffset(gemm.row_bytes, job.num_tokens, first);
    context_.unit.kernels->gather(rows, end - first, gemm.row_bytes / 64, tile,
                                  TileStepBytes(job.num_tokens));
  }

  const JobContext& context_;
  const Run& run_;
  const Gemm gemm_;
  const JobRowPacker rows_;
};

}  // namespace

void PackJobTokens(const JobContext& context, const Workers& workers) {
  if (!context.unit.shared_rows) {
    return;
  }
  Run& run = context.run;
  run.numbers.Clear(run.slots);
  for (int64_t i = 0; i < run.jobs.count; ++i) {
    const TileJob& job = run.jobs.list[kGateUp][i];
    run.numbers.Note(run.slots, job.first_slot, job.num_tokens);
  }
  const int64_t count = run.numbers.Assign(run.slots);
  const int64_t tasks = std::min(kTasksPerThread * workers.threads(), count);
  const JobPacker packer(context, kGateUp);
  workers.ForEach(tasks, [&](int64_t task, const JobScratch& scratch) {
    for (int64_t number = count * task / tasks; number < count * (task + 1) / tasks; ++number) {
      packer.PackToken(number, scratch.rows());
    }
  });
}

void PackJobs(const JobContext& context, const Workers& workers, const JobGroup& group, Gemm gemm) {
  if (gemm == kDown && context.unit.direct_mid) {
    return;
  }
  const TileJob* jobs = context.run.jobs.list[gemm] + group.begin;
  int64_t tiles = 0;
  for (int64_t i = 0; i < group.count(); ++i) {
    tiles += TilesOf(jobs[i]);
  }
  const int64_t tasks = std::min(kTasksPerThread * workers.threads(), tiles);
  const JobPacker packer(context, gemm);
  workers.ForEach(tasks, [&](int64_t task, const JobScratch& scratch) {
    packer.PackTiles(jobs, tiles * task / tasks, tiles * (task + 1) / tasks, scratch.rows());
  });
}

}  // namespace fusedmoe::cpu
