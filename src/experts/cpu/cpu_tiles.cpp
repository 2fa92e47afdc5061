#include <algorithm>
#include <cstring>
#include <thread>

#include "core/checked_math.hpp"
#include "experts/cpu/cpu_run.hpp"
#include "experts/cpu/row_quantizer.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_quantizer.hpp"

/// The experts that go to the matrix unit: those with many tokens. Each is a job, whose tokens are packed
/// once and then meet pairs of stripes: gate and up of 16 columns, or 32 columns of down.
namespace fusedmoe::cpu {
namespace {

/// Tasks for each thread: enough to level out, few enough that each has several steps to overlap.
constexpr int64_t kTasksPerThread = 4;

/// Scratch of a task while it runs. Tasks that run at the same time are at most as many as threads; where
/// these outnumber the scratches, some wait.
class Scratch {
 public:
  Scratch(uint8_t* memory, std::atomic<uint8_t>* taken, int64_t count) : taken_(taken) {
    for (;; std::this_thread::yield()) {
      for (int64_t i = 0; i < count; ++i) {
        if (taken[i].load(std::memory_order_relaxed) == 0 &&
            taken[i].exchange(1, std::memory_order_acquire) == 0) {
          index_ = i;
          data_ = memory + i * kTileScratchBytes;
          return;
        }
      }
    }
  }
  ~Scratch() { taken_[index_].store(0, std::memory_order_release); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  uint8_t* data() const { return data_; }

 private:
  std::atomic<uint8_t>* taken_;
  int64_t index_ = 0;
  uint8_t* data_ = nullptr;
};

/// NVFP4 by the default rule, for which the kernels have a quantizer of their own.
bool IsPlainNvfp4(const ActivationFormat& activation) {
  return IsTwoLevel(activation) && activation.element == DType::kF4E2M1 &&
         activation.group == GroupShape{1, 16} && activation.rule == ActivationRule{};
}

}  // namespace

/// After the weights and the activation format are known.
Status CpuExperts::ChooseTiles() {
  TilePlan& tiles = plan_.tiles;
  bool grouped_columns = true;
  bool plain_mid = true;
  shared_rows_ = plan_.top_k > 1 && problem_.config.activation_format == ActivationFormatKind::kStandard &&
                 !experts_.empty();
  for (const ExpertPanels& expert : experts_) {
    grouped_columns = grouped_columns && expert.input[0].columns == nullptr && expert.mid.columns == nullptr;
    shared_rows_ = shared_rows_ && SameInput(plan_.gate_up, expert.input[0], experts_.front().input[0]);
    plain_mid = plain_mid && expert.mid.columns == nullptr && expert.mid.pre_quant_scale == nullptr;
  }
  if (!tiles.enabled || separate_inputs_ || (tiles.scale_group > 0 && !grouped_columns)) {
    tiles.enabled = false;
    return Status::Ok();
  }
  if (!grouped_columns) {
    tiles.weight_group = 64;
  }
  tiles_ = &HostTileKernels();
  tile_format_ = FormatOf(*tiles_, plan_.kernel, tiles.int8, tiles.rounded);
  if (tiles.codes) {
    activation_ = problem_.scheme.activation;
  }
  const bool direct_codes = IsPlainNvfp4(activation_) && !NeedsDynamicTensorScale(activation_) &&
                            tile_format_.shift == 96 && tile_format_.permuted;
  direct_mid_ = plain_mid && tile_format_.sum_group == 0 && (!tiles.codes || direct_codes);
  sums_ = tiles.int8 ? kIntegerSums : tiles.codes && tiles.scale_group == 0 ? kScaledSums : kPlainSums;
  const ActivationSpec& activation = problem_.config.activation;
  if (activation.kind == ActivationKind::kSilu && !(activation.limit > 0.0F)) {
    silu_ = !direct_mid_ ? tiles_->silu_rows[sums_] : tiles.codes ? tiles_->silu_nvfp4 : tiles_->silu;
  }
  if (tile_format_.post != 1.0F) {
    const GemmShape* shapes[2] = {&plan_.gate_up, &plan_.down};
    for (const ExpertPanels& expert : experts_) {
      for (int i = 0; i < 2; ++i) {
        const float* scales = i == 0 ? expert.gate_up_scale : expert.down_scale;
        std::transform(scales, scales + shapes[i]->parts * shapes[i]->padded_rows(),
                       std::back_inserter(tile_scales_),
                       [&](float scale) { return scale * tile_format_.post; });
      }
    }
  }
  return Status::Ok();
}

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

void CpuExperts::MakeJobs(Run& run) const {
  run.num_jobs = 0;
  const TilePlan& tiles = plan_.tiles;
  if (!tiles.enabled) {
    return;
  }
  const GemmShape* shapes[2] = {&plan_.gate_up, &plan_.down};
  // Tokens of a group of jobs are packed, multiplied and become tokens of the second GEMM before the next
  // group takes their memory, which then stays in L2.
  const int64_t group_rows =
      NeedsDynamicTensorScale(activation_) ? tiles.max_rows : tiles.job_tokens * run.executor->num_threads;
  int64_t rows = 0, count = 0, group = 0;
  for (int64_t expert = 0; expert < plan_.num_local_experts; ++expert) {
    const int32_t end = run.offsets[expert + 1];
    int32_t slot = run.offsets[expert];
    if (end - slot < tiles.from_tokens) {
      continue;
    }
    const int64_t cuts = CeilDiv(end - slot, tiles.job_tokens);
    const int64_t cut_tokens = RoundUp(CeilDiv(end - slot, cuts), kTileTokens);
    while (slot < end) {
      const int64_t tokens = std::min<int64_t>(cut_tokens, end - slot);
      const int64_t job_rows = TileRows(tokens);
      if (rows > 0 && rows + job_rows > group_rows) {
        rows = 0;
        ++group;
      }
      for (int i = 0; i < 2; ++i) {
        const ExpertPanels& panels = experts_[static_cast<size_t>(expert)];
        TileJob job{};
        job.weights = i == 0 ? panels.gate_up : panels.down;
        const std::byte* region = run.tokens + (i == 0 ? 0 : tiles.max_rows * tiles.row_bytes[0]);
        job.tokens = reinterpret_cast<const uint8_t*>(region + rows * tiles.row_bytes[i]);
        float* sides = run.sides + (i == 0 ? 0 : tiles.max_rows * tiles.sides[0]) + rows * tiles.sides[i];
        const int64_t scales = tiles.scale_group > 0 ? CeilDiv(shapes[i]->padded_cols, tiles.scale_group) : 1;
        job.scale = tiles.codes ? sides : nullptr;
        job.sum = sides + scales * job_rows;
        job.num_tokens = tokens;
        job.rows = job_rows;
        job.expert = expert;
        job.first_slot = slot;
        job.index = count;
        job.group = group;
        run.jobs[i * tiles.max_jobs + count] = job;
      }
      ++count;
      rows += job_rows;
      slot += static_cast<int32_t>(tokens);
    }
  }
  run.num_jobs = count;
}

void CpuExperts::RunJobGroups(Run& run) const {
  PackJobTokens(run);
  for (run.group_begin = 0; run.group_begin < run.num_jobs; run.group_begin = run.group_end) {
    run.group_end = run.group_begin + 1;
    while (run.group_end < run.num_jobs && run.jobs[run.group_end].group == run.jobs[run.group_begin].group) {
      ++run.group_end;
    }
    PackJobs(run, plan_.gate_up, 0);
    GateUpJobs(run);
    if (NeedsDynamicTensorScale(activation_)) {
      PackTiles(run, plan_.down, 2);
    }
    PackJobs(run, plan_.down, 2);
    DownJobs(run);
  }
}

/// Hidden states to tokens of tiles once each, in rows of their own; slots then copy lines instead of
/// quantizing a token again for each of its experts.
void CpuExperts::PackJobTokens(Run& run) const {
  if (run.num_jobs == 0 || !shared_rows_) {
    return;
  }
  const TilePlan& tiles = plan_.tiles;
  const int64_t first = *std::min_element(run.slot_rows, run.slot_rows + run.num_slots);
  const int64_t last = *std::max_element(run.slot_rows, run.slot_rows + run.num_slots);
  run.first_token_row = first;
  const int64_t count = last - first + 1;
  const int64_t widest = std::max(plan_.gate_up.padded_cols, plan_.down.padded_cols);
  const int64_t tasks = std::min(kPackTasks, count);
  ParallelFor(*run.executor, tasks, [&](int64_t task) {
    float* buffer = run.job_rows + task * 3 * widest;
    for (int64_t token = count * task / tasks; token < count * (task + 1) / tasks; ++token) {
      if (!run.coded) {
        table_->to_float[run.row_type](run.rows + (first + token) * run.row_bytes, plan_.gate_up.cols,
                                       buffer);
      }
      PackTarget target{};
      target.token = reinterpret_cast<uint8_t*>(run.token_rows) + token * tiles.row_bytes[0];
      target.step_bytes = 64;
      target.scales = run.token_sides + token * tiles.sides[0];
      target.sums = target.scales + tiles.sides[0] - tiles.num_sums[0];
      target.stride = 1;
      if (run.coded) {
        target.codes = run.rows + (first + token) * run.row_bytes;
        target.code_scales = run.row_scales + (first + token) * run.row_scale_bytes;
      }
      PackForJob(run, plan_.gate_up, experts_.front().input[0], target, buffer, buffer);
    }
  });
}

/// Rows of hidden states (part 0) or intermediate values (2) into the tiles of their jobs.
void CpuExperts::PackJobs(Run& run, const GemmShape& shape, int part) const {
  if (part == 2 && direct_mid_) {
    return;
  }
  const TileJob* jobs = run.jobs + (part == 2 ? plan_.tiles.max_jobs : 0) + run.group_begin;
  int64_t total = 0;  // of tiles
  for (int64_t i = 0; i < run.group_end - run.group_begin; ++i) {
    total += CeilDiv(jobs[i].num_tokens, TileTokens(jobs[i].num_tokens));
  }
  const int64_t widest = std::max(plan_.gate_up.padded_cols, plan_.down.padded_cols);
  const int64_t tasks = std::min(kPackTasks, total);
  ParallelFor(*run.executor, tasks, [&](int64_t task) {
    float* buffer = run.job_rows + task * 3 * widest;
    int64_t tile = total * task / tasks, left = total * (task + 1) / tasks - tile;
    const TileJob* job = jobs;
    const auto tiles_of = [](const TileJob& of) { return CeilDiv(of.num_tokens, TileTokens(of.num_tokens)); };
    while (tile >= tiles_of(*job)) {
      tile -= tiles_of(*job);
      ++job;
    }
    for (; left > 0; --left) {
      const int64_t tokens = TileTokens(job->num_tokens), first = tokens * tile;
      const int64_t end = std::min(first + tokens, job->num_tokens);
      if (part == 0 && shared_rows_) {
        GatherJobTile(run, *job, first, end);
      } else {
        for (int64_t token = first; token < end; ++token) {
          PackJobRow(run, shape, part, *job, token, buffer);
        }
      }
      if (++tile == tiles_of(*job)) {
        tile = 0;
        ++job;
      }
    }
  });
}

/// Tokens that are packed already into a tile of each step.
void CpuExperts::GatherJobTile(const Run& run, const TileJob& job, int64_t first, int64_t end) const {
  const TilePlan& tiles = plan_.tiles;
  const int64_t row_bytes = tiles.row_bytes[0], num_sums = tiles.num_sums[0];
  const int64_t scales = tiles.sides[0] - num_sums;
  const uint8_t* rows[16];
  for (int64_t token = first; token < end; ++token) {
    const int64_t row = run.slot_rows[job.first_slot + token] - run.first_token_row;
    rows[token - first] = reinterpret_cast<const uint8_t*>(run.token_rows) + row * row_bytes;
    const float* sides = run.token_sides + row * tiles.sides[0];
    for (int64_t g = 0; tiles.codes && g < scales; ++g) {
      const_cast<float*>(job.scale)[g * job.rows + token] = sides[g];
    }
    for (int64_t g = 0; g < num_sums; ++g) {
      const_cast<float*>(job.sum)[g * job.rows + token] = sides[scales + g];
    }
  }
  tiles_->gather(rows, end - first, row_bytes / 64,
                 const_cast<uint8_t*>(job.tokens) + TileTokenOffset(row_bytes, job.num_tokens, first),
                 TileStepBytes(job.num_tokens));
}

void CpuExperts::PackJobRow(const Run& run, const GemmShape& shape, int part, const TileJob& job,
                            int64_t token, float* buffer) const {
  const TilePlan& tiles = plan_.tiles;
  const int i = part / 2;
  PackTarget target{};
  target.token =
      const_cast<uint8_t*>(job.tokens) + TileTokenOffset(tiles.row_bytes[i], job.num_tokens, token);
  target.step_bytes = TileStepBytes(job.num_tokens);
  target.scales = const_cast<float*>(job.scale) + (tiles.codes ? token : 0);
  target.sums = const_cast<float*>(job.sum) + token;
  target.stride = job.rows;
  const ExpertPanels& expert = experts_[static_cast<size_t>(job.expert)];
  const int64_t slot = job.first_slot + token;
  const float* row = buffer;
  if (part == 0 && run.coded) {
    const int64_t source = run.slot_rows[slot];
    target.codes = run.rows + source * run.row_bytes;
    target.code_scales = run.row_scales + source * run.row_scale_bytes;
  } else if (part == 2 && tiles.codes && expert.mid.pre_quant_scale == nullptr) {
    row = run.mid + slot * plan_.gate_up.row_stride();  // which quantizing leaves as it is
  } else {
    LoadRow(run, shape, slot, buffer);
  }
  PackForJob(run, shape, part == 2 ? expert.mid : expert.input[0], target, row, buffer);
}

/// A row in fp32 into its place. `buffer` has room for three rows, and `row` is the first of them unless it
/// is to stay as it is.
void CpuExperts::PackForJob(const Run& run, const GemmShape& shape, const InputTransform& transform,
                            const PackTarget& target, const float* row, float* buffer) const {
  const TilePlan& tiles = plan_.tiles;
  const int64_t width = shape.padded_cols;
  if (transform.pre_quant_scale != nullptr) {  // never with codes: ExpertsTraits::takes_codes
    for (int64_t k = 0; k < shape.cols; ++k) {
      buffer[k] *= transform.pre_quant_scale[k];
    }
  }
  float* scales = target.scales;
  float* values = buffer;
  if (tiles.codes) {
    const float tensor_scale = activation_.static_tensor_scale ? transform.tensor_scale : run.batch_scale;
    values = buffer + width;
    auto* quantized = reinterpret_cast<std::byte*>(buffer + 2 * width);
    if (tiles.int8 && target.codes == nullptr && transform.columns == nullptr && CanRoundRows(activation_)) {
      auto* codes = reinterpret_cast<int8_t*>(quantized);
      QuantizeRowToCodes(*table_, activation_, tensor_scale, row, shape.cols, codes, scales);
      std::fill(codes + shape.cols, codes + width, int8_t{0});
      tiles_->pack_codes(codes, width / kPanelUnit, target.token, target.step_bytes, target.sums);
      return;
    }
    if (target.codes == nullptr && CanRoundRows(activation_)) {
      QuantizeRowToBlocks(*table_, activation_, tensor_scale, row, shape.cols, values, scales, target.stride);
    } else {
      const std::byte* stored = target.codes;
      const std::byte* stored_scales = target.code_scales;
      if (stored == nullptr) {
        QuantizeRow(activation_, tensor_scale, row, shape.cols, quantized, quantized + width);
        stored = quantized;
        stored_scales = quantized + width;
      }
      DecodeRowToBlocks(activation_, tensor_scale, stored, stored_scales, shape.cols, values, scales,
                        target.stride);
    }
    const int64_t groups = tiles.scale_group > 0 ? CeilDiv(width, tiles.scale_group) : 1;
    for (int64_t g = std::max<int64_t>(ScalesPerRow(activation_, shape.cols), 1); g < groups; ++g) {
      scales[g * target.stride] = 1.0F;  // of padding
    }
  }
  if (transform.columns != nullptr) {
    float* packed = values + width;
    for (int64_t k = 0; k < width; ++k) {
      packed[k] = transform.columns[k] < 0 ? 0.0F : values[transform.columns[k]];
    }
    values = packed;
  } else {
    std::fill(values + shape.cols, values + width, 0.0F);
  }
  if (tiles.int8) {
    auto* codes = reinterpret_cast<int8_t*>(buffer);  // whose values are not needed any more
    for (int64_t k = 0; k < width; ++k) {
      codes[k] = static_cast<int8_t>(values[k]);
    }
    tiles_->pack_codes(codes, width / kPanelUnit, target.token, target.step_bytes, target.sums);
    return;
  }
  TilePack pack{};
  pack.values = values;
  pack.count = width;
  pack.token = target.token;
  pack.step_bytes = target.step_bytes;
  pack.shift = tile_format_.shift;
  pack.permuted = tile_format_.permuted;
  if (tile_format_.sum_group > 0) {
    pack.sum = target.sums;
    pack.sum_group = tile_format_.sum_group;
    pack.sum_stride = target.stride;
  }
  tiles_->pack(&pack);
}

void CpuExperts::RunJobs(Run& run, const GemmShape& shape, const TileJob* jobs, int64_t num_jobs,
                         int64_t first_pair, int64_t end_pair, TileGemm gemm) const {
  const Scratch scratch(run.scratch, run.scratch_taken, plan_.tiles.num_scratch);
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
  gemm.scratch = scratch.data();
  tile_format_.gemm(&gemm);
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
    to.sides = {job->scale, job->sum};
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
    silu.rows = run.mid + job.first_slot * stride;
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
      arguments.mid = experts.direct_mid_
                          ? values
                          : to.run.mid + (to.job.first_slot + first_token) * shape.row_stride() +
                                (to.stripe + i) * kPanelRows;
      experts.table_->activate(&arguments);
      if (experts.direct_mid_) {
        experts.StoreMid(to.down, to.stripe + i, first_token, tokens, values);
      }
    }
  }
};

void CpuExperts::GateUpJobs(Run& run) const {
  const GemmShape& shape = plan_.gate_up;
  const int64_t pairs = CeilDiv(shape.parts * shape.stripes, 2);
  const auto run_jobs = [&](const TileJob* jobs, int64_t num_jobs, int64_t first, int64_t end) {
    GateUpFinish finish{*this, run};
    TileGemm gemm{};
    gemm.begin = &GateUpFinish::Begin;
    gemm.begin_context = &finish;
    gemm.finish = silu_ != nullptr ? silu_ : &GateUpFinish::Finish;
    gemm.finish_context = silu_ != nullptr ? static_cast<void*>(&finish.silu) : &finish;
    gemm.finish_tokens = plan_.tiles.codes && direct_mid_ ? 4 : 1;  // four groups are rounded at once
    RunJobs(run, shape, jobs, num_jobs, first, end, gemm);
  };
  const TileJob* jobs = run.jobs + run.group_begin;
  const int64_t num_jobs = run.group_end - run.group_begin;
  const int64_t threads = run.executor->num_threads;
  if (threads <= 1) {
    run_jobs(jobs, num_jobs, 0, pairs);
    return;
  }
  const int64_t parts = std::clamp<int64_t>(CeilDiv(kTasksPerThread * threads, num_jobs), 1, pairs);
  ParallelFor(*run.executor, num_jobs * parts, [&](int64_t task) {
    const int64_t job = task / parts, part = task % parts;
    run_jobs(jobs + job, 1, pairs * part / parts, pairs * (part + 1) / parts);
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

/// What sums of 32 columns are added to.
struct CpuExperts::DownFinish {
  const CpuExperts& experts;
  const Run& run;
  TileAdd add{};

  static void Begin(void* context, const TileJob* job, int64_t first_stripe) {
    auto& to = *static_cast<DownFinish*>(context);
    const GemmShape& shape = to.experts.plan_.down;
    const ExpertPanels& expert = to.experts.experts_[static_cast<size_t>(job->expert)];
    const int64_t col = first_stripe * kPanelRows;
    to.add = {{job->scale, job->sum},
              to.experts.TileScales(job->expert, 1) + col,
              expert.down_bias == nullptr ? nullptr : expert.down_bias + col,
              std::min<int64_t>(2, shape.stripes - first_stripe),
              to.run.sums + col,
              shape.row_stride(),
              to.run.slot_outputs + job->first_slot,
              to.run.slot_weights + job->first_slot};
  }
};

/// Columns of the output, from zero, for the experts of the matrix unit; the others follow in DownColumns.
void CpuExperts::DownJobs(Run& run) const {
  const GemmShape& shape = plan_.down;
  const int64_t pairs = CeilDiv(shape.stripes, 2);
  const int64_t threads = run.executor->num_threads;
  const int64_t tasks = threads <= 1 ? 1 : std::min(pairs, kTasksPerThread * threads);
  ParallelFor(*run.executor, tasks, [&](int64_t task) {
    const int64_t first = pairs * task / tasks, end = pairs * (task + 1) / tasks;
    const int64_t begin = 2 * first * kPanelRows;
    const int64_t columns = std::min(2 * end, shape.stripes) * kPanelRows - begin;
    for (int64_t row = 0; run.group_begin == 0 && row < run.num_outputs; ++row) {
      std::fill_n(run.sums + row * shape.row_stride() + begin, columns, 0.0F);
    }
    DownFinish finish{*this, run};
    TileGemm gemm{};
    gemm.begin = &DownFinish::Begin;
    gemm.begin_context = &finish;
    gemm.finish = tiles_->add[sums_];
    gemm.finish_context = &finish.add;
    gemm.finish_tokens = 1;
    RunJobs(run, shape, run.jobs + plan_.tiles.max_jobs + run.group_begin, run.group_end - run.group_begin,
            first, end, gemm);
  });
}

}  // namespace fusedmoe::cpu
