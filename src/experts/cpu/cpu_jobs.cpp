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
///   many threads   group: pack, gate/up, pack, down --- put into ---> rows of slots --.
///                  group: ...                                         rows of slots --+--> sums of outputs
///
/// A thread takes a group through the layer alone, so that tokens and intermediate values never leave its L2;
/// the rows of slots are then added up in the order in which one thread would have added them. Where groups
/// are too few, all threads share the pairs of stripes of one group after the other.
namespace fusedmoe::cpu {
namespace {

/// Tasks for each thread: enough to level out, few enough that each has several steps to overlap.
constexpr int64_t kTasksPerThread = 4;

TileSides SidesOf(const TileJob& job) {
  return {job.scale, reinterpret_cast<const int32_t*>(job.sum)};
}

}  // namespace

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

// ------------------------------------------------------------------------------------------ jobs and groups

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
      const std::byte* tokens = run.tokens + (i == 0 ? 0 : tiles.max_rows * tiles.row_bytes[0]);
      job.tokens = reinterpret_cast<const uint8_t*>(tokens + row * tiles.row_bytes[i]);
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

/// Whether results wait in rows of their slots.
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
    for (int64_t row = run.num_outputs * task / tasks; row < run.num_outputs * (task + 1) / tasks; ++row) {
      const int32_t begin = row == 0 ? 0 : run.output_offsets[row - 1];
      float* sums = run.sums + row * shape.row_stride();
      TileSlotSum sum{};
      sum.rows = run.slot_sums;
      sum.stride = shape.row_stride();
      sum.slots = run.output_slots + begin;
      sum.count = run.output_offsets[row] - begin;
      sum.first_slot = run.first_slot;
      sum.weights = run.slot_weights;
      sum.columns = shape.padded_rows();
      sum.sums = sums;
      sum.fresh = first;
      tiles_->add_slots(&sum);
      if (done) {
        StoreOutput(run, row, 0, shape.rows);
      }
    }
  });
}

// --------------------------------------------------------------------------------------------- the two GEMMs

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
  gemm.group_scales = GroupScalesOf(plan_.panel);
  gemm.scratch = scratch.tiles();
  tile_format_.gemm(&gemm);
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
    const int64_t stride = experts.plan_.gate_up.row_stride();
    silu.sides = sides;
    silu.gate_scale = row_scale;
    silu.up_scale = row_scale + kPanelRows;
    silu.gate_bias = biases;
    silu.up_bias = biases + kPanelRows;
    silu.k = stripe * kPanelRows;
    silu.mid = const_cast<uint8_t*>(down.tokens);
    silu.num_tokens = down.num_tokens;
    silu.row_bytes = experts.plan_.tiles.row_bytes[1];
    silu.shift = experts.tile_format_.shift;
    silu.permuted = experts.tile_format_.permuted;
    silu.tensor_scale = experts.MidTensorScale(down);
    silu.rows = run.mid + job.mid_row * stride;
    silu.row_stride = stride;
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
      to.mid_stride = experts.direct_mid_ ? kPanelRows : shape.row_stride();
    }
  }

  /// Of BeginOther.
  static void Finish(void* context, int64_t first_token, int64_t tokens, float* first, float* second) {
    auto& to = *static_cast<GateUpFinish*>(context);
    const CpuExperts& experts = to.experts;
    const GemmShape& shape = experts.plan_.gate_up;
    experts.tiles_->scale[experts.sums_](&to.sides, first_token, tokens, first, second);
    alignas(64) float values[16 * kPanelRows];
    for (int64_t i = 0; i < to.count; ++i) {
      ActivateArguments& arguments = to.arguments[i];
      arguments.gate = shape.parts == 2 ? first : nullptr;
      arguments.up = shape.parts == 2 || i == 1 ? second : first;
      arguments.tokens = static_cast<int>(tokens);
      arguments.mid = experts.direct_mid_ ? values
                                          : to.run.mid + (to.job.mid_row + first_token) * shape.row_stride() +
                                                (to.stripe + i) * kPanelRows;
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
    tiles_->pack_block(values, tokens, tile, k, tile_format_.shift, tile_format_.permuted);
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
      tiles_->pack_block(kZeros, std::min(tokens, down.num_tokens - token), tile, k, tile_format_.shift,
                         tile_format_.permuted);
    }
  }
}

/// What sums of 32 columns are added to, or the rows that they are put into.
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
    float* rows = to.experts.SlotsWait(run)
                      ? run.slot_sums + (job->first_slot - run.first_slot) * shape.row_stride()
                      : run.sums;
    to.add = {SidesOf(*job),
              to.experts.TileScales(job->expert, 1) + col,
              expert.down_bias == nullptr ? nullptr : expert.down_bias + col,
              std::min<int64_t>(2, shape.stripes - first_stripe),
              rows + col,
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
        gemm.finish = (wait ? tiles_->put : tiles_->add)[sums_];
        gemm.finish_context = &finish.add;
        gemm.finish_tokens = 1;
        RunGemm(shape, jobs, num_jobs, first, end, scratch, gemm);
      });
  StoreOutputsOf(run, group);
}

}  // namespace fusedmoe::cpu
