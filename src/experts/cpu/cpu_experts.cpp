#include "experts/cpu/cpu_experts.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/checked_math.hpp"
#include "experts/cpu/cpu_run.hpp"
#include "numerics/element_types.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::cpu {
namespace {

// The kernels know activations by these numbers.
static_assert(kActSilu == static_cast<int>(ActivationKind::kSilu) &&
              kActSwigluStep == static_cast<int>(ActivationKind::kSwigluStep) &&
              kActSitu == static_cast<int>(ActivationKind::kSitu) &&
              kActRelu2NoMul == static_cast<int>(ActivationKind::kRelu2NoMul));

RowType RowTypeOf(DType dtype) {
  return dtype == DType::kBF16 ? kRowBf16 : dtype == DType::kF16 ? kRowF16 : kRowF32;
}

template <typename T>
bool SameValues(const T* a, const T* b, int64_t count) {
  return a == b || std::equal(a, a + count, b);
}

}  // namespace

bool SameInput(const GemmShape& shape, const InputTransform& a, const InputTransform& b) {
  return a.tensor_scale == b.tensor_scale && SameValues(a.columns, b.columns, shape.padded_cols) &&
         SameValues(a.pre_quant_scale, b.pre_quant_scale, shape.cols);
}

Result<std::unique_ptr<Experts>> CpuExperts::Create(const MoeProblem& problem, const Machine& machine,
                                                    std::shared_ptr<const PreparedWeights> weights,
                                                    WorkspaceBook& book) {
  std::unique_ptr<CpuExperts> experts(new CpuExperts);
  experts->problem_ = problem;
  experts->plan_ = MakeCpuPlan(problem, machine);
  experts->table_ = FindKernelTable(experts->plan_.vector_isa);
  FMOE_ASSIGN_OR_RETURN(experts->experts_, ViewCpuWeights(experts->plan_, *weights));
  experts->weights_ = std::move(weights);
  if (experts->plan_.rows != RowRule::kAsTheyAre) {
    experts->activation_ = problem.scheme.activation;
  }
  const bool quantized = experts->plan_.rows != RowRule::kAsTheyAre || experts->plan_.tiles.codes;
  if (!quantized || !problem.scheme.activation.static_tensor_scale) {
    // Inputs differ by scales that are used alone: others would cost tiles, and tokens that are packed once.
    for (ExpertPanels& expert : experts->experts_) {
      expert.input[0].tensor_scale = expert.input[1].tensor_scale = expert.mid.tensor_scale = 1.0F;
    }
  }
  for (const ExpertPanels& expert : experts->experts_) {
    experts->separate_inputs_ =
        experts->separate_inputs_ || !SameInput(experts->plan_.gate_up, expert.input[0], expert.input[1]);
    for (int part = 0; part < 2; ++part) {
      experts->shared_inputs_[part] =
          experts->shared_inputs_[part] &&
          SameInput(experts->plan_.gate_up, expert.input[part], experts->experts_[0].input[part]);
    }
    if (experts->plan_.gate_up.tile == kTileA4 &&
        (expert.input[0].columns != nullptr || expert.mid.columns != nullptr)) {
      return Status::Unsupported("the scale groups of a slice start inside groups of its activations")
          .WithHint("slice at multiples of the group, or choose the REFERENCE backend");
    }
  }
  experts->plan_.input_sets = experts->separate_inputs_ ? 2 : 1;
  FMOE_RETURN_IF_ERROR(experts->ChooseTiles());
  experts->slots_ = BookCpuSlots(experts->plan_, book);
  const bool batched = problem.config.activation_format == ActivationFormatKind::kBatchedExperts;
  experts->traits_.activation_format = problem.config.activation_format;
  experts->traits_.expects_unquantized_inputs = true;
  experts->traits_.takes_codes = experts->activation_.quantized();
  for (const ExpertPanels& expert : experts->experts_) {
    for (const InputTransform& input : expert.input) {
      experts->traits_.takes_codes = experts->traits_.takes_codes && input.pre_quant_scale == nullptr &&
                                     input.tensor_scale == experts->experts_.front().input[0].tensor_scale;
    }
  }
  if (experts->traits_.takes_codes && experts->activation_.static_tensor_scale &&
      !experts->experts_.empty()) {
    experts->traits_.input_tensor_scale = experts->experts_.front().input[0].tensor_scale;
  }
  experts->traits_.weight_and_reduce = batched                      ? WeightAndReduceKind::kNaiveBatched
                                       : experts->plan_.slots_apart ? WeightAndReduceKind::kContiguous
                                                                    : WeightAndReduceKind::kNoOp;
  return std::unique_ptr<Experts>(std::move(experts));
}

Status CpuExperts::CheckInput(const ExpertsInput& input, const MutableTensorView& output) const {
  const TensorView& rows = input.rows.values;
  if (input.rows.quantized && !traits_.takes_codes) {
    return Status::Usage("these experts quantize for themselves and take plain rows");
  }
  if ((!input.rows.quantized && !IsPlainFloat(rows.dtype())) || !IsPlainFloat(output.dtype())) {
    return Status::Usage(fmt::format("rows are {} and output is {}; F32, BF16 or F16 is required",
                                     DTypeName(rows.dtype()), DTypeName(output.dtype())));
  }
  const bool batched = traits_.activation_format == ActivationFormatKind::kBatchedExperts;
  const int rank = batched ? 3 : 2;
  const int64_t hidden = problem_.config.hidden;
  const Shape wanted =
      plan_.slots_apart && rows.rank() == 2 ? Shape{rows.dim(0), plan_.top_k, hidden} : rows.shape();
  if (rows.rank() != rank || rows.dim(rank - 1) != hidden || !(output.shape() == wanted)) {
    return Status::Usage(fmt::format("rows are {} and output {}; both must be [{}{}]",
                                     rows.shape().ToString(), output.shape().ToString(),
                                     batched ? "experts, rows, " : "tokens, ", hidden));
  }
  if (batched && (rows.dim(0) != plan_.num_local_experts || input.expert_num_tokens == nullptr)) {
    return Status::Usage(fmt::format("batched rows need {} experts with their counts, got {}",
                                     plan_.num_local_experts, rows.dim(0)));
  }
  if (!batched && rows.dim(0) != input.num_tokens) {
    return Status::Usage(fmt::format("{} rows for {} tokens", rows.dim(0), input.num_tokens));
  }
  const auto one_behind_the_other = [](const TensorView& view) {
    return view.empty() || view.dim(0) <= 1 || view.stride_bytes(0) == view.dim(1) * view.stride_bytes(1);
  };
  if (batched && !(one_behind_the_other(rows) && one_behind_the_other(output) &&
                   one_behind_the_other(input.rows.block_scale))) {
    return Status::Usage("batched rows of an expert must begin where those of the expert before end")
        .WithHint("pass a tensor [experts, rows, hidden] without gaps between experts");
  }
  return Status::Ok();
}

/// What stands still during one Apply: rows, outputs, and where everything lies in the workspace.
void CpuExperts::OpenRun(const ExpertsInput& input, MutableTensorView output, const Workspace& workspace,
                         const Executor& executor, Run& run) const {
  run.input = &input;
  run.output = output;
  run.executor = &executor;
  const int row_axis = input.rows.values.rank() - 2;
  run.rows = input.rows.values.data();
  run.row_bytes = input.rows.values.stride_bytes(row_axis);
  run.row_type = RowTypeOf(input.rows.values.dtype());
  run.coded = input.rows.quantized;
  if (!input.rows.block_scale.empty()) {
    run.row_scales = input.rows.block_scale.data();
    run.row_scale_bytes = input.rows.block_scale.stride_bytes(row_axis);
  }
  run.output_row_bytes = output.stride_bytes(output.rank() - 2);
  run.output_type = RowTypeOf(output.dtype());
  run.batched = traits_.activation_format == ActivationFormatKind::kBatchedExperts;
  run.offsets = workspace.Get<int32_t>(slots_.offsets);
  run.cursors = run.offsets + plan_.num_local_experts + 1;
  run.slot_rows = workspace.Get<int32_t>(slots_.slot_rows);
  run.slot_outputs = workspace.Get<int32_t>(slots_.slot_outputs);
  run.slot_weights = workspace.Get<float>(slots_.slot_weights);
  run.tiles = workspace.Get<Tile>(slots_.tiles);
  run.row_buffers = workspace.Get<float>(slots_.row_buffers);
  run.tile_rows = workspace.Get<std::byte>(slots_.tile_rows);
  run.token_places = workspace.Get<int32_t>(slots_.token_places);
  run.place_slots = run.token_places + plan_.max_tokens;
  run.token_tiles = workspace.Get<std::byte>(slots_.token_tiles);
  run.input_tiles = workspace.Get<std::byte>(slots_.input_tiles);
  run.slot_tiles = workspace.Get<void*>(slots_.slot_tiles);
  run.mid = workspace.Get<float>(slots_.mid);
  run.mid_tiles = workspace.Get<std::byte>(slots_.mid_tiles);
  run.sums = workspace.Get<float>(slots_.output);
  if (plan_.tiles.enabled) {
    run.jobs = workspace.Get<TileJob>(slots_.jobs);
    run.groups = workspace.Get<JobGroup>(slots_.job_groups);
    run.tokens = workspace.Get<std::byte>(slots_.tokens);
    run.sides = workspace.Get<float>(slots_.sides);
    run.token_rows = workspace.Get<std::byte>(slots_.token_rows);
    run.token_sides = workspace.Get<float>(slots_.token_sides);
    run.scratch = workspace.Get<uint8_t>(slots_.scratch);
    run.scratch_rows = workspace.Get<float>(slots_.scratch_rows);
    run.slot_sums = workspace.Get<float>(slots_.slot_sums);
    run.slot_ends = workspace.Get<SlotEnds>(slots_.slot_ends);
    run.output_offsets = workspace.Get<int32_t>(slots_.output_offsets);
    run.output_slots = workspace.Get<int32_t>(slots_.output_slots);
  }
}

Status CpuExperts::Apply(const ExpertsInput& input, MutableTensorView output, const Workspace& workspace,
                         const Executor& executor) const {
  FMOE_RETURN_IF_ERROR(CheckInput(input, output));
  Run run{};
  OpenRun(input, output, workspace, executor, run);
  if (run.batched) {
    return ApplyBatched(input, run);
  }
  // Equal pieces: the last one should not be short of tokens per expert.
  const int64_t outputs_per_token = plan_.slots_apart ? plan_.top_k : 1;
  const int64_t pieces = CeilDiv(input.num_tokens, std::max<int64_t>(plan_.max_rows / outputs_per_token, 1));
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t first = input.num_tokens * piece / pieces;
    const int64_t end = input.num_tokens * (piece + 1) / pieces;
    FMOE_RETURN_IF_ERROR(SortTokens(input, first, end - first, run));
    RunPiece(run);
  }
  return Status::Ok();
}

Status CpuExperts::ApplyBatched(const ExpertsInput& input, Run& run) const {
  for (int64_t expert = 0; expert < plan_.num_local_experts; ++expert) {
    const int32_t count = input.expert_num_tokens[expert];
    if (count < 0 || count > input.rows.values.dim(1)) {
      return Status::Usage(fmt::format("expert {} has a count of {}; its slab holds 0..{} rows", expert,
                                       count, input.rows.values.dim(1)));
    }
  }
  int64_t expert = 0, row = 0;
  while (true) {
    TakeBatchedRows(input, expert, row, run);
    if (run.num_slots == 0) {
      return Status::Ok();
    }
    RunPiece(run);
  }
}

/// Counting sort of the piece's (token, position) slots by local expert; within an expert tokens ascend.
Status CpuExperts::SortTokens(const ExpertsInput& input, int64_t first_token, int64_t count, Run& run) const {
  const int64_t top_k = plan_.top_k;
  const int32_t* ids = input.topk_ids + first_token * top_k;
  const float* weights = input.topk_weights + first_token * top_k;
  const int64_t limit = input.expert_map != nullptr ? problem_.config.num_experts : plan_.num_local_experts;
  const auto local = [&](int64_t slot) -> int32_t {
    const int32_t id = ids[slot];
    return id < 0 || input.expert_map == nullptr ? id : input.expert_map[id];
  };
  std::fill_n(run.offsets, plan_.num_local_experts + 1, 0);
  for (int64_t slot = 0; slot < count * top_k; ++slot) {
    if (ids[slot] < -1 || ids[slot] >= limit) {
      return Status::Usage(fmt::format("expert id {} of token {} is outside -1..{}", ids[slot],
                                       first_token + slot / top_k, limit - 1));
    }
    const int32_t expert = local(slot);
    if (expert >= plan_.num_local_experts) {
      return Status::Usage(fmt::format("the expert map sends id {} to local expert {} of {}", ids[slot],
                                       expert, plan_.num_local_experts));
    }
    if (expert >= 0) {
      ++run.offsets[expert + 1];
    }
  }
  for (int64_t expert = 0; expert < plan_.num_local_experts; ++expert) {
    run.cursors[expert] = run.offsets[expert];
    run.offsets[expert + 1] += run.offsets[expert];
  }
  for (int64_t slot = 0; slot < count * top_k; ++slot) {
    const int32_t expert = local(slot);
    if (expert < 0) {
      continue;
    }
    const int32_t at = run.cursors[expert]++;
    run.slot_rows[at] = static_cast<int32_t>(first_token + slot / top_k);
    run.slot_outputs[at] = static_cast<int32_t>(plan_.slots_apart ? slot : slot / top_k);
    run.slot_weights[at] = plan_.slots_apart || input.router_weight_on_input ? 1.0F : weights[slot];
  }
  run.num_slots = run.offsets[plan_.num_local_experts];
  run.first_token = first_token;
  run.num_tokens = count;
  const int64_t outputs_per_token = plan_.slots_apart ? top_k : 1;
  run.first_output = first_token * outputs_per_token;
  run.num_outputs = count * outputs_per_token;
  return Status::Ok();
}

/// The next rows of a batched input that fit a piece, continuing at (expert, row).
void CpuExperts::TakeBatchedRows(const ExpertsInput& input, int64_t& expert, int64_t& row, Run& run) const {
  const int64_t slab = input.rows.values.dim(1);
  std::fill_n(run.offsets, plan_.num_local_experts + 1, 0);
  int64_t taken = 0;
  while (expert < plan_.num_local_experts && taken < plan_.max_slots) {
    const int64_t count = std::min(input.expert_num_tokens[expert] - row, plan_.max_slots - taken);
    for (int64_t i = 0; i < count; ++i) {
      run.slot_rows[taken + i] = static_cast<int32_t>(expert * slab + row + i);
      run.slot_outputs[taken + i] = static_cast<int32_t>(taken + i);
      run.slot_weights[taken + i] = 1.0F;
    }
    taken += count;
    row += count;
    run.offsets[expert + 1] = static_cast<int32_t>(count);
    if (row == input.expert_num_tokens[expert]) {
      ++expert;
      row = 0;
    }
  }
  for (int64_t e = 0; e < plan_.num_local_experts; ++e) {
    run.offsets[e + 1] += run.offsets[e];
  }
  run.num_slots = taken;
  run.num_outputs = taken;
}

void CpuExperts::MakeTiles(Run& run) const {
  int64_t count = 0, rows = 0;
  run.tiled_experts = run.tiled_slots = 0;
  for (int64_t expert = 0; expert < plan_.num_local_experts; ++expert) {
    int32_t slot = run.offsets[expert];
    const int32_t end = run.offsets[expert + 1];
    if (plan_.tiles.enabled && end - slot >= plan_.tiles.from_tokens) {
      continue;  // a job for the matrix unit
    }
    run.tiled_slots += end - slot;
    run.tiled_experts += end > slot ? 1 : 0;
    while (slot < end) {
      const TileCut cut = NextTile(end - slot, plan_.max_height_index, plan_.tall);
      run.tiles[count] = {static_cast<int32_t>(expert), slot, cut.tokens, cut.height_index, rows};
      rows += TileRows(plan_, run.tiles[count++]);
      slot += cut.tokens;
    }
  }
  run.num_tiles = count;
}

void CpuExperts::RunPiece(Run& run) const {
  MakeTiles(run);
  MakeJobs(run);
  for (int part = 0; part < plan_.input_sets; ++part) {
    PackTiles(run, plan_.gate_up, part);
  }
  GateUp(run);
  // A scale over the batch waits for the intermediate values of all experts.
  if (run.num_jobs == 0 || !NeedsDynamicTensorScale(activation_)) {
    PackTiles(run, plan_.down, 2);
  }
  RunJobs(run);
  if (run.num_tiles > 0 || run.num_jobs == 0) {
    Down(run);
  }
}

}  // namespace fusedmoe::cpu
