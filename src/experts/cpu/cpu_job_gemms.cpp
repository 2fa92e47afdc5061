#include <algorithm>

#include "core/checked_math.hpp"
#include "experts/cpu/cpu_run.hpp"
#include "quant/activation_quantizer.hpp"

/// The two GEMMs of a group of jobs on the matrix unit, and what becomes of finished sums between its
/// instructions (cpu_jobs.cpp says who works on what).
namespace fusedmoe::cpu {
namespace {

TileSides SidesOf(const TileJob& job) {
  return {job.scale, reinterpret_cast<const int32_t*>(job.sum)};
}

}  // namespace

/// Row scales of a GEMM as the sums of tiles need them. Kept ready: scaled while tiles run, sixteen loads of
/// four floats each waited for all stores before them.
const float* CpuExperts::TileScales(int64_t expert, int gemm) const {
  const ExpertPanels& panels = experts_[static_cast<size_t>(expert)];
  if (tile_scales_.empty()) {
    return gemm == 0 ? panels.gate_up_scale : panels.down_scale;
  }
  const int64_t first = plan_.gate_up.parts * plan_.gate_up.padded_rows();
  return tile_scales_.data() + expert * (first + plan_.down.padded_rows()) + gemm * first;
}

void CpuExperts::RunGemm(const GemmShape& shape, const TileJob* jobs, int64_t num_jobs, int64_t first_pair,
                         int64_t end_pair, const TaskScratch& scratch, TileGemm gemm) const {
  gemm.jobs = jobs;
  gemm.num_jobs = num_jobs;
  gemm.blocks = shape.blocks;
  gemm.stripe_bytes = shape.stripe_bytes;
  gemm.num_stripes = shape.parts * shape.stripes;
  gemm.first_pair = first_pair;
  gemm.end_pair = end_pair;
  gemm.scale_group = plan_.tiles.scale_group;
  gemm.weight_group = plan_.tiles.weight_group;
  gemm.group_scales = GroupScalesOf(shape.panel);
  gemm.scratch = scratch.tiles();
  TileFormatOf(shape).gemm(&gemm);
}

/// Runs `gemm` over the pairs of stripes of a group: all at once, or a job's in parts where several threads
/// are at work.
template <typename Gemm>
void CpuExperts::ForStripes(Run& run, const Crew& crew, const JobGroup& group, const TileJob* jobs,
                            int64_t stripes, const Gemm& gemm) const {
  const int64_t pairs = CeilDiv(stripes, 2), num_jobs = group.end - group.begin;
  jobs += group.begin;
  if (crew.threads() <= 1) {
    crew.ForEach(run, plan_, 1,
                 [&](int64_t, const TaskScratch& scratch) { gemm(jobs, num_jobs, 0, pairs, scratch); });
    return;
  }
  const int64_t parts = std::clamp<int64_t>(CeilDiv(kTasksPerThread * crew.threads(), num_jobs), 1, pairs);
  crew.ForEach(run, plan_, num_jobs * parts, [&](int64_t task, const TaskScratch& scratch) {
    const int64_t part = task % parts;
    gemm(jobs + task / parts, 1, pairs * part / parts, pairs * (part + 1) / parts, scratch);
  });
}

/// Sums of gate and up of 16 columns, or of 32 columns of up, on their way to the second GEMM. Finished a few
/// tokens at a time between tile instructions: what does not change with the token is ready.
struct CpuExperts::GateUpFinish {
  const CpuExperts& experts;
  const Run& run;
  TileJob job{}, down{};
  TileSides sides{};
  int64_t stripe = 0, count = 0;     // of columns of the intermediate
  ActivateArguments arguments[2]{};  // of each
  TileSilu silu{};

  static void Begin(void* context, const TileJob* job, int64_t first_stripe) {
    auto& to = *static_cast<GateUpFinish*>(context);
    const CpuExperts& experts = to.experts;
    const GemmShape& shape = experts.plan_.gate_up;
    const bool gated = shape.parts == 2;
    to.job = *job;
    to.down = to.run.jobs[experts.plan_.tiles.max_jobs + job->index];
    to.sides = SidesOf(*job);
    to.stripe = first_stripe / shape.parts;
    to.count = gated ? 1 : std::min<int64_t>(2, shape.stripes - first_stripe);
    if (experts.direct_mid_ && experts.plan_.tiles.codes && to.stripe == 0) {
      std::fill_n(const_cast<float*>(to.down.scale), to.down.num_tokens, experts.MidTensorScale(to.down));
    }
    if (experts.direct_mid_ && to.stripe + to.count == shape.stripes) {
      experts.ClearMidPadding(to.down);
    }
    const ExpertPanels& expert = experts.experts_[static_cast<size_t>(job->expert)];
    const float* row_scale = experts.TileScales(job->expert, 0) + first_stripe * kPanelRows;
    const float* bias =
        expert.gate_up_bias == nullptr ? nullptr : expert.gate_up_bias + first_stripe * kPanelRows;
    experts.silu_ != nullptr ? to.BeginSilu(row_scale, bias) : to.BeginOther(row_scale, bias);
  }

  void BeginSilu(const float* row_scale, const float* bias) {
    static constexpr float kZeros[2 * kPanelRows] = {};
    const float* biases = bias == nullptr ? kZeros : bias;
    const MidRows mid = experts.MidRowsOf(run, job);
    silu.sides = sides;
    silu.gate_scale = row_scale;
    silu.up_scale = row_scale + kPanelRows;
    silu.gate_bias = biases;
    silu.up_bias = biases + kPanelRows;
    silu.k = stripe * kPanelRows;
    silu.mid = const_cast<uint8_t*>(down.tokens);
    silu.num_tokens = down.num_tokens;
    silu.row_bytes = experts.plan_.tiles.row_bytes[1];
    silu.shift = experts.tile_formats_[1].shift;
    silu.permuted = experts.tile_formats_[1].permuted;
    silu.tensor_scale = experts.MidTensorScale(down);
    silu.rows = mid.first + stripe * mid.block_stride;
    silu.row_stride = mid.token_stride;
  }

  void BeginOther(const float* row_scale, const float* bias) {
    const GemmShape& shape = experts.plan_.gate_up;
    const ActivationSpec& spec = experts.problem_.config.activation;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t up = (shape.parts == 2 ? 1 : i) * kPanelRows;
      ActivateArguments& to = arguments[i];
      to.activation = static_cast<int>(spec.kind);
      to.alpha = spec.alpha;
      to.beta = spec.beta;
      to.limit = spec.limit;
      to.gate_row_scale = row_scale;
      to.gate_bias = bias;
      to.up_row_scale = row_scale + up;
      to.up_bias = bias == nullptr ? nullptr : bias + up;
      to.mid_stride = experts.direct_mid_ ? kPanelRows : experts.MidRowsOf(run, job).token_stride;
    }
  }

  /// Of BeginOther.
  static void Finish(void* context, int64_t first_token, int64_t tokens, float* first, float* second) {
    auto& to = *static_cast<GateUpFinish*>(context);
    const CpuExperts& experts = to.experts;
    const GemmShape& shape = experts.plan_.gate_up;
    const MidRows mid = experts.MidRowsOf(to.run, to.job);
    experts.tiles_->scale[experts.sums_[0]](&to.sides, first_token, tokens, first, second);
    alignas(64) float values[16 * kPanelRows];
    for (int64_t i = 0; i < to.count; ++i) {
      ActivateArguments& arguments = to.arguments[i];
      arguments.gate = shape.parts == 2 ? first : nullptr;
      arguments.up = shape.parts == 2 || i == 1 ? second : first;
      arguments.tokens = static_cast<int>(tokens);
      arguments.mid = experts.direct_mid_
                          ? values
                          : mid.first + first_token * mid.token_stride + (to.stripe + i) * mid.block_stride;
      experts.table_->activate(&arguments);
      if (experts.direct_mid_) {
        experts.StoreMid(to.down, to.stripe + i, first_token, tokens, values);
      }
    }
  }
};

void CpuExperts::GateUpJobs(Run& run, const Crew& crew, const JobGroup& group) const {
  const GemmShape& shape = plan_.gate_up;
  ForStripes(
      run, crew, group, run.jobs, shape.parts * shape.stripes,
      [&](const TileJob* jobs, int64_t num_jobs, int64_t first, int64_t end, const TaskScratch& scratch) {
        GateUpFinish finish{*this, run};
        TileGemm gemm{};
        gemm.begin = &GateUpFinish::Begin;
        gemm.begin_context = &finish;
        gemm.finish = silu_ != nullptr ? silu_ : &GateUpFinish::Finish;
        gemm.finish_context = silu_ != nullptr ? static_cast<void*>(&finish.silu) : &finish;
        gemm.finish_tokens = silu_ != nullptr || (plan_.tiles.codes && direct_mid_) ? kTickTokens : 1;
        RunGemm(shape, jobs, num_jobs, first, end, scratch, gemm);
      });
}

/// Of the tokens of the second GEMM, where they are rounded before all of a row is known.
float CpuExperts::MidTensorScale(const TileJob& down) const {
  return activation_.static_tensor_scale ? experts_[static_cast<size_t>(down.expert)].mid.tensor_scale : 1.0F;
}

/// Sixteen columns of intermediate values of up to 16 tokens, straight into the tiles of the second GEMM.
void CpuExperts::StoreMid(const TileJob& down, int64_t stripe, int64_t first_token, int64_t tokens,
                          const float* values) const {
  const int64_t k = stripe * kPanelRows;
  uint8_t* tile = const_cast<uint8_t*>(down.tokens) +
                  TileTokenOffset(plan_.tiles.row_bytes[1], down.num_tokens, first_token) +
                  k / 32 * TileStepBytes(down.num_tokens);
  if (plan_.tiles.codes) {
    tiles_->pack_nvfp4(values, MidTensorScale(down), tokens, tile, k);
  } else {
    tiles_->pack_block(values, tokens, tile, k, tile_formats_[1].shift, tile_formats_[1].permuted);
  }
}

/// Zeros in the columns of the second GEMM that no stripe of the first one computes.
void CpuExperts::ClearMidPadding(const TileJob& down) const {
  static constexpr float kZeros[16 * kPanelRows] = {};
  const int64_t tokens = TileTokens(down.num_tokens);
  for (int64_t k = plan_.gate_up.padded_rows(); k < plan_.down.padded_cols; k += kPanelRows) {
    for (int64_t token = 0; token < down.num_tokens; token += tokens) {
      uint8_t* tile = const_cast<uint8_t*>(down.tokens) +
                      TileTokenOffset(plan_.tiles.row_bytes[1], down.num_tokens, token) +
                      k / 32 * TileStepBytes(down.num_tokens);
      tiles_->pack_block(kZeros, std::min(tokens, down.num_tokens - token), tile, k, tile_formats_[1].shift,
                         tile_formats_[1].permuted);
    }
  }
}

/// What sums of 32 columns are added to, or where they wait.
struct CpuExperts::DownFinish {
  const CpuExperts& experts;
  const Run& run;
  TileAdd add{};

  static void Begin(void* context, const TileJob* job, int64_t first_stripe) {
    auto& to = *static_cast<DownFinish*>(context);
    const Run& run = to.run;
    const GemmShape& shape = to.experts.plan_.down;
    const ExpertPanels& expert = to.experts.experts_[static_cast<size_t>(job->expert)];
    const int64_t col = first_stripe * kPanelRows;
    const bool wait = to.experts.SlotsWait(run);
    const int64_t slot = job->first_slot - run.first_slot;
    to.add = {SidesOf(*job),
              to.experts.TileScales(job->expert, 1) + col,
              expert.down_bias == nullptr ? nullptr : expert.down_bias + col,
              std::min<int64_t>(2, shape.stripes - first_stripe),
              wait ? run.slot_sums + col * run.waiting_slots + slot * kPutColumns : run.sums + col,
              shape.row_stride(),
              run.slot_outputs + job->first_slot,
              run.slot_weights + job->first_slot,
              run.slot_ends + job->first_slot};
  }
};

void CpuExperts::DownJobs(Run& run, const Crew& crew, const JobGroup& group) const {
  const GemmShape& shape = plan_.down;
  const bool wait = SlotsWait(run);
  ForStripes(
      run, crew, group, run.jobs + plan_.tiles.max_jobs, shape.stripes,
      [&](const TileJob* jobs, int64_t num_jobs, int64_t first, int64_t end, const TaskScratch& scratch) {
        DownFinish finish{*this, run};
        TileGemm gemm{};
        gemm.begin = &DownFinish::Begin;
        gemm.begin_context = &finish;
        gemm.finish = (wait ? gemm_tiles_[1]->put : gemm_tiles_[1]->add)[sums_[1]];
        gemm.finish_context = &finish.add;
        gemm.finish_tokens = 1;
        RunGemm(shape, jobs, num_jobs, first, end, scratch, gemm);
      });
  StoreOutputsOf(run, group);
}

}  // namespace fusedmoe::cpu
