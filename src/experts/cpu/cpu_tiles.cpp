#include <algorithm>
#include <cstring>

#include "core/checked_math.hpp"
#include "experts/cpu/cpu_run.hpp"
#include "experts/cpu/row_quantizer.hpp"
#include "quant/activation_quantizer.hpp"

/// What the matrix unit multiplies and how its tokens are packed; cpu_jobs.cpp has the jobs themselves.
namespace fusedmoe::cpu {
namespace {

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
  if (tiles.codes) {
    activation_ = problem_.scheme.activation;
  }
  const GemmShape* shapes[2] = {&plan_.gate_up, &plan_.down};
  for (int i = 0; i < 2; ++i) {
    gemm_tiles_[i] = &HostTileKernels(tiles.weights[i]);
    tile_formats_[i] = gemm_tiles_[i]->formats[tiles.weights[i]][shapes[i]->kernel];
    sums_[i] = tiles.int8 && tile_formats_[i].scale_group == 0 ? kIntegerSums
               : tiles.codes && tiles.scale_group == 0         ? kScaledSums
                                                               : kPlainSums;
  }
  const TileFormat& mid = tile_formats_[1];
  const bool direct_codes =
      IsPlainNvfp4(activation_) && !NeedsDynamicTensorScale(activation_) && mid.shift == 96 && mid.permuted;
  direct_mid_ = plain_mid && mid.sum_group == 0 && (!tiles.codes || direct_codes);
  const ActivationSpec& activation = problem_.config.activation;
  if (activation.kind == ActivationKind::kSilu && !(activation.limit > 0.0F)) {
    const TileKernels& finish = *gemm_tiles_[0];
    silu_ = !direct_mid_ ? finish.silu_rows[sums_[0]] : tiles.codes ? finish.silu_nvfp4 : finish.silu;
  }
  if (tile_formats_[0].post != 1.0F || mid.post != 1.0F) {
    for (const ExpertPanels& expert : experts_) {
      for (int i = 0; i < 2; ++i) {
        const float* scales = i == 0 ? expert.gate_up_scale : expert.down_scale;
        std::transform(scales, scales + shapes[i]->parts * shapes[i]->padded_rows(),
                       std::back_inserter(tile_scales_),
                       [&](float scale) { return scale * tile_formats_[i].post; });
      }
    }
  }
  return Status::Ok();
}

/// Hidden states that visit an expert of the jobs to tokens of tiles, once each, in rows of their own; slots
/// then copy lines instead of quantizing a token again for each of its experts.
void CpuExperts::PackJobTokens(Run& run, const Crew& crew) const {
  if (!shared_rows_) {
    return;
  }
  const TilePlan& tiles = plan_.tiles;
  std::fill_n(run.token_places, run.num_tokens, -1);
  for (const TileJob* job = run.jobs; job != run.jobs + run.num_jobs; ++job) {
    NoteTokens(run, job->first_slot, job->num_tokens);
  }
  const int64_t count = NumberTokens(run);
  const int64_t tasks = std::min(kTasksPerThread * crew.threads(), count);
  crew.ForEach(run, plan_, tasks, [&](int64_t task, const TaskScratch& scratch) {
    float* buffer = scratch.rows();
    for (int64_t place = count * task / tasks; place < count * (task + 1) / tasks; ++place) {
      const int64_t row = run.slot_rows[run.place_slots[place]];
      if (!run.coded) {
        table_->to_float[run.row_type](run.rows + row * run.row_bytes, plan_.gate_up.cols, buffer);
      }
      PackTarget target{};
      target.token = reinterpret_cast<uint8_t*>(run.token_rows) + place * tiles.row_bytes[0];
      target.step_bytes = 64;
      target.scales = run.token_sides + place * tiles.sides[0];
      target.sums = target.scales + tiles.sides[0] - tiles.num_sums[0];
      target.stride = 1;
      if (run.coded) {
        target.codes = run.rows + row * run.row_bytes;
        target.code_scales = run.row_scales + row * run.row_scale_bytes;
      }
      PackForJob(run, plan_.gate_up, experts_.front().input[0], target, buffer);
    }
  });
}

/// Rows of hidden states (part 0) or intermediate values (2) into the tiles of their jobs.
void CpuExperts::PackJobs(Run& run, const Crew& crew, const JobGroup& group, int part) const {
  if (part == 2 && direct_mid_) {
    return;
  }
  const GemmShape& shape = part == 2 ? plan_.down : plan_.gate_up;
  const TileJob* jobs = run.jobs + (part == 2 ? plan_.tiles.max_jobs : 0) + group.begin;
  const auto tiles_of = [](const TileJob& of) { return CeilDiv(of.num_tokens, TileTokens(of.num_tokens)); };
  int64_t total = 0;
  for (int64_t i = 0; i < group.end - group.begin; ++i) {
    total += tiles_of(jobs[i]);
  }
  const int64_t tasks = std::min(kTasksPerThread * crew.threads(), total);
  crew.ForEach(run, plan_, tasks, [&](int64_t task, const TaskScratch& scratch) {
    int64_t tile = total * task / tasks, left = total * (task + 1) / tasks - tile;
    const TileJob* job = jobs;
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
          PackJobRow(run, shape, part, *job, token, scratch.rows());
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
    const int64_t row = run.token_places[run.slot_rows[job.first_slot + token] - run.first_token];
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

/// A row per slot where a scale over the batch reads them all. Otherwise rows are written 16 columns at a
/// time, of one token after the other, and lines apart would leave the caches in between: those of an expert
/// follow each other (FP8 in blocks, 128 tokens an expert: 3.5 % of the layer).
CpuExperts::MidRows CpuExperts::MidRowsOf(const Run& run, const TileJob& job) const {
  const int64_t stride = plan_.gate_up.row_stride();
  float* const first = run.mid + job.mid_row * stride;
  return NeedsDynamicTensorScale(activation_) ? MidRows{first, stride, kPanelRows}
                                              : MidRows{first, kPanelRows, job.rows * kPanelRows};
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
  if (part == 0 && run.coded) {
    const int64_t source = run.slot_rows[slot];
    target.codes = run.rows + source * run.row_bytes;
    target.code_scales = run.row_scales + source * run.row_scale_bytes;
  } else if (part == 2) {
    const MidRows mid = MidRowsOf(run, job);
    for (int64_t k = 0; k < shape.cols; k += kPanelRows) {
      std::memcpy(buffer + k, mid.first + token * mid.token_stride + k / kPanelRows * mid.block_stride,
                  kPanelRows * sizeof(float));
    }
  } else {
    LoadRow(run, shape, expert.input[0], slot, buffer);
  }
  PackForJob(run, shape, part == 2 ? expert.mid : expert.input[0], target, buffer);
}

/// The row as the values of its codes, apart from their scales. `values` has room for two rows, of which the
/// second holds codes on the way.
void CpuExperts::QuantizeToValues(const GemmShape& shape, const PackTarget& target, float tensor_scale,
                                  const float* row, float* values) const {
  const int64_t width = shape.padded_cols;
  if (target.codes == nullptr && CanRoundRows(activation_)) {
    QuantizeRowToBlocks(*table_, activation_, tensor_scale, row, shape.cols, values, target.scales,
                        target.stride);
  } else {
    const std::byte* stored = target.codes;
    const std::byte* stored_scales = target.code_scales;
    if (stored == nullptr) {
      auto* quantized = reinterpret_cast<std::byte*>(values + width);
      QuantizeRow(activation_, tensor_scale, row, shape.cols, quantized, quantized + width);
      stored = quantized;
      stored_scales = quantized + width;
    }
    DecodeRowToBlocks(activation_, tensor_scale, stored, stored_scales, shape.cols, values, target.scales,
                      target.stride);
  }
  const int64_t group = plan_.tiles.scale_group;
  const int64_t groups = group > 0 ? CeilDiv(width, group) : 1;
  for (int64_t g = std::max<int64_t>(ScalesPerRow(activation_, shape.cols), 1); g < groups; ++g) {
    target.scales[g * target.stride] = 1.0F;  // of padding
  }
}

/// A row in fp32 into its place. `buffer` has room for three rows, of which it is the first.
void CpuExperts::PackForJob(const Run& run, const GemmShape& shape, const InputTransform& transform,
                            const PackTarget& target, float* buffer) const {
  const TilePlan& tiles = plan_.tiles;
  const TileFormat& format = TileFormatOf(shape);
  const int64_t width = shape.padded_cols;
  if (transform.pre_quant_scale != nullptr) {  // never with codes: ExpertsTraits::takes_codes
    for (int64_t k = 0; k < shape.cols; ++k) {
      buffer[k] *= transform.pre_quant_scale[k];
    }
  }
  TilePack pack{};
  pack.count = width;
  pack.token = target.token;
  pack.step_bytes = target.step_bytes;
  pack.shift = format.shift;
  pack.permuted = format.permuted;
  float* values = buffer;
  if (tiles.codes) {
    const float tensor_scale = TensorScale(run, transform);
    if (tiles.int8 && tiles.scale_group == 0 && target.codes == nullptr && transform.columns == nullptr &&
        CanRoundRows(activation_)) {
      auto* codes = reinterpret_cast<int8_t*>(buffer + 2 * width);
      QuantizeRowToCodes(*table_, activation_, tensor_scale, buffer, shape.cols, codes, target.scales);
      std::fill(codes + shape.cols, codes + width, int8_t{0});
      tiles_->pack_codes(codes, width / kPanelUnit, target.token, target.step_bytes,
                         reinterpret_cast<int32_t*>(target.sums));
      return;
    }
    pack.values = buffer;
    if (target.codes == nullptr && transform.columns == nullptr && shape.cols == width &&
        format.sum_group == 0 && !tiles.int8 &&
        PackRoundedRow(*table_, *tiles_, activation_, pack, target.scales, target.stride)) {
      return;
    }
    values = buffer + width;
    QuantizeToValues(shape, target, tensor_scale, buffer, values);
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
    tiles_->pack_codes(codes, width / kPanelUnit, target.token, target.step_bytes,
                       reinterpret_cast<int32_t*>(target.sums));
    return;
  }
  pack.values = values;
  if (format.sum_group > 0) {
    pack.sum = target.sums;
    pack.sum_group = format.sum_group;
    pack.sum_stride = target.stride;
  }
  tiles_->pack(&pack);
}

}  // namespace fusedmoe::cpu
