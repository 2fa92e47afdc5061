#include "experts/cpu/cpu_experts.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/checked_math.hpp"
#include "experts/cpu/cpu_run.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::cpu {
namespace {

// The kernels know activations by these numbers.
static_assert(kActSilu == static_cast<int>(ActivationKind::kSilu) &&
              kActSwigluStep == static_cast<int>(ActivationKind::kSwigluStep) &&
              kActRelu2NoMul == static_cast<int>(ActivationKind::kRelu2NoMul));

/// More tasks than threads, so that a thread that lost its core for a while does not hold up the others.
constexpr int64_t kTasksPerThread = 4;
/// Experts with so many tokens on average or fewer are read, not computed.
constexpr int64_t kStreamTokens = 4;
/// Where experts are read, a thread's share of one is not cut into shorter pieces than that: hardware reads
/// some 8 KB beyond the end of each. Qwen3-30B-A3B, NVFP4, one token, two threads: pieces of 110 KB read 6 %
/// slower than such of 440 KB, of 220 KB 3 %.
constexpr int64_t kLeastStretch = 512 << 10;
/// Columns (in units of 16) of a short tile that are computed in one call, of gate and up each or of down;
/// and the sums of a call: those, or those of a batch of tall tiles.
constexpr int64_t kShortTileStripes = 4;
constexpr int64_t kMostSums = kBatchTiles * kBatchStripes * kMaxHeight * kPanelRows;
static_assert(2 * kShortTileStripes * kHeights[1] <= kBatchStripes * kMaxHeight);

RowType RowTypeOf(DType dtype) {
  return dtype == DType::kBF16 ? kRowBf16 : dtype == DType::kF16 ? kRowF16 : kRowF32;
}

bool IsRowType(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32;
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
  if ((!input.rows.quantized && !IsRowType(rows.dtype())) || !IsRowType(output.dtype())) {
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
  return Status::Ok();
}

Status CpuExperts::Apply(const ExpertsInput& input, MutableTensorView output, const Workspace& workspace,
                         const Executor& executor) const {
  FMOE_RETURN_IF_ERROR(CheckInput(input, output));
  Run run{};
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
  if (run.batched) {
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

/// Tiles from `begin` on that meet a stripe one after the other: of one expert, and small enough to stay in
/// L2 until the next stripe comes.
int64_t CpuExperts::EndOfBatch(const Run& run, const GemmShape& shape, int64_t begin) const {
  const Tile& first = run.tiles[begin];
  int64_t end = begin + 1;
  while (end < run.num_tiles && run.tiles[end].expert == first.expert &&
         (run.tiles[end].first_row + TileRows(plan_, run.tiles[end]) - first.first_row) *
                 shape.tile_row_bytes <=
             plan_.tile_batch_bytes) {
    ++end;
  }
  return end;
}

/// Scales and biases of the rows of stripes that come next: a line each, far apart from the stripes, which
/// cost 2 to 4 % of decode when they were waited for (NVFP4, Qwen3-30B-A3B, one token).
void CpuExperts::PrefetchSides(const float* scales, const float* biases, int64_t stripe,
                               int64_t count) const {
  for (int64_t i = stripe; i < stripe + count; ++i) {
    __builtin_prefetch(scales + i * kPanelRows, 0, 3);
    if (biases != nullptr) {
      __builtin_prefetch(biases + i * kPanelRows, 0, 3);
    }
  }
}

/// Where a tile of a part stands.
void CpuExperts::View(const Run& run, const GemmShape& shape, int part, const Tile& tile,
                      const Stretch& stretch, TileView& view) const {
  view.rows = run.SlotTiles(plan_, part) + tile.first_slot;
  void* memory = ReadsTokensApart(plan_, tile)
                     ? view.rows[0]
                     : run.Tiles(plan_, part) + tile.first_row * shape.tile_row_bytes;
  PlaceTile(&view, memory, plan_.kernel, shape.tile, shape.padded_cols, kHeights[tile.height_index]);
  view.tokens = tile.count;
  view.turn = nullptr;
  view.group_scales = GroupScalesOf(plan_.panel);
  view.decode_once = plan_.decode_once;
  view.prefetch_near = plan_.prefetch_near[std::min(tile.height_index, 1)];
  view.prefetch_far = plan_.prefetch_far;
  view.stretch_end = stretch.end;
  view.stretch_jump = stretch.next == nullptr ? 0 : stretch.next - stretch.end;
}

/// Into how many ranges of pairs of stripes the second GEMM is divided: tall tiles take as long for one
/// stripe as for two.
int64_t CpuExperts::DownRanges(const Run& run) const {
  const int64_t threads = run.executor->num_threads;
  if (threads <= 1) {
    return 1;
  }
  const bool read = run.num_tiles > 0 && run.tiled_slots <= kStreamTokens * run.tiled_experts;
  const int64_t pieces = plan_.down.expert_bytes() / threads / kLeastStretch;
  return std::min(CeilDiv(plan_.down.stripes, 2),
                  threads * (read ? std::clamp<int64_t>(pieces, 1, kTasksPerThread) : kTasksPerThread));
}

/// Into how many tasks gate and up are divided: batches of tiles (EndOfBatch) times ranges of stripes.
///
///   ranges as few as leave no task more than its part of a thread's work, a long one included where many
///   tokens choose one expert; or up to twice as many, where they fill the last round of all threads better.
///
/// Few, because a range costs as much as another pair of stripes: hardware reads some 8 KB beyond its end,
/// and with its first stripes the tokens come into L1 and L2.
CpuExperts::Division CpuExperts::GateUpDivision(const Run& run) const {
  const GemmShape& shape = plan_.gate_up;
  Division division{0, 1};
  int64_t largest = 0;
  for (int64_t tile = 0, end = 0; tile < run.num_tiles; tile = end) {
    end = EndOfBatch(run, shape, tile);
    largest = std::max(largest, end - tile);
    ++division.batches;
  }
  const int64_t threads = run.executor->num_threads;
  if (threads <= 1) {
    return division;
  }
  const int64_t least = CeilDiv(kTasksPerThread * threads * largest, run.num_tiles);
  const auto cost = [&](int64_t ranges) {
    return CeilDiv(division.batches * ranges, threads) * (CeilDiv(shape.stripes, ranges) + 1);
  };
  division.ranges = std::min(least, shape.stripes);
  for (int64_t ranges = division.ranges + 1; ranges <= std::min(2 * least, shape.stripes); ++ranges) {
    division.ranges = cost(ranges) < cost(division.ranges) ? ranges : division.ranges;
  }
  return division;
}

void CpuExperts::GateUp(Run& run) const {
  if (run.num_tiles == 0) {
    return;
  }
  const GemmShape& shape = plan_.gate_up;
  const int64_t position_bytes = shape.parts * shape.stripe_bytes;
  const Division division = GateUpDivision(run);
  // Tasks of one range follow each other, so that a thread reads on where its last task ended.
  ParallelFor(*run.executor, division.batches * division.ranges, [&](int64_t task) {
    const int64_t range = task / division.batches;
    const int64_t first = shape.stripes * range / division.ranges;
    const int64_t end = shape.stripes * (range + 1) / division.ranges;
    int64_t tile = 0;
    for (int64_t batch = task % division.batches; batch > 0; --batch) {
      tile = EndOfBatch(run, shape, tile);
    }
    const int64_t tile_end = EndOfBatch(run, shape, tile);
    const ExpertPanels& expert = experts_[static_cast<size_t>(run.tiles[tile].expert)];
    const ExpertPanels* next =
        tile_end < run.num_tiles ? &experts_[static_cast<size_t>(run.tiles[tile_end].expert)] : nullptr;
    const Stretch stretch{expert.gate_up + end * position_bytes,
                          next == nullptr ? nullptr : next->gate_up + first * position_bytes};
    const int64_t step = ColumnsAtOnce(run, shape, tile, tile_end);
    for (int64_t stripe = first; stripe < end; stripe += step) {
      if (stripe + step >= end && next != nullptr) {
        PrefetchSides(next->gate_up_scale, next->gate_up_bias, first * shape.parts, step * shape.parts);
      }
      GateUpStripes(run, tile, tile_end, stripe, std::min(step, end - stripe), stretch);
    }
  });
}

/// Output columns that a micro-kernel computes before its sums are worked on: two stripes, for one short
/// tile, whose sums wait for the last products of their stripe, several.
int64_t CpuExperts::ColumnsAtOnce(const Run& run, const GemmShape& shape, int64_t tile_begin,
                                  int64_t tile_end) const {
  const bool is_short = tile_end - tile_begin == 1 && run.tiles[tile_begin].height_index <= 1;
  const bool apart = separate_inputs_ && shape.parts == 2;  // two stripes of each part
  return is_short ? kShortTileStripes : apart ? kBatchStripes / 2 : 2 / shape.parts;
}

/// Whether a tile is for the batch kernels.
bool CpuExperts::IsTall(const GemmShape& shape, const Tile& tile) const {
  return table_->batch[plan_.kernel][shape.tile] != nullptr && kHeights[tile.height_index] == kMaxHeight;
}

/// Tiles from `begin` on that meet the weights together: tall ones of one height, or one.
int64_t CpuExperts::TilesAtOnce(const Run& run, const GemmShape& shape, int64_t begin, int64_t end) const {
  if (!IsTall(shape, run.tiles[begin])) {
    return 1;
  }
  int64_t tall = 1;
  while (begin + tall < end && run.tiles[begin + tall].height_index == run.tiles[begin].height_index) {
    ++tall;
  }
  return CeilDiv(tall, CeilDiv(tall, kBatchTiles));  // batches of equal size
}

/// What tall tiles that meet stripes up to `end` ask for meanwhile, `bytes` of the next ones in equal shares.
CpuExperts::Ahead CpuExperts::AheadOf(const Run& run, const GemmShape& shape, int64_t tile_begin,
                                      int64_t tile_end, const uint8_t* end, int64_t bytes,
                                      const Stretch& stretch) const {
  const uint8_t* next = end < stretch.end ? end : stretch.next;
  const Tile* tiles = run.tiles + tile_begin;
  const int64_t tall = std::count_if(tiles, tiles + (tile_end - tile_begin),
                                     [&](const Tile& tile) { return IsTall(shape, tile); });
  return {tiles, tall, next, next == nullptr ? 0 : bytes};
}

/// sums[tile][stripe][token][16] of stripes and `count` tiles of TilesAtOnce, of a part (Run::Tiles). One
/// short tile meets stripes that follow each other: those of gate and up in turns, each the tile of its
/// input.
void CpuExperts::Multiply(const Run& run, const GemmShape& shape, int part, const Tile* first, int64_t count,
                          const Stripes& stripes, float* sums) const {
  if (!IsTall(shape, *first)) {
    TileView views[2];
    View(run, shape, part, *first, stripes.stretch, views[0]);
    if (part == 0 && separate_inputs_ && shape.parts == 2) {
      View(run, shape, 1, *first, stripes.stretch, views[1]);
      views[0].turn = &views[1];
      views[1].turn = &views[0];
    }
    table_->dot[plan_.kernel][shape.tile][first->height_index](stripes.first, stripes.count, shape.blocks,
                                                               views, sums);
    return;
  }
  const Ahead& ahead = stripes.ahead;
  const auto share = [&](int64_t tile) { return ahead.bytes * tile / ahead.num_tiles / 64 * 64; };
  TileView views[kBatchTiles];
  for (int64_t i = 0; i < count; ++i) {
    const int64_t tile = first + i - ahead.tiles;
    View(run, shape, part, first[i], stripes.stretch, views[i]);
    views[i].next = ahead.next + share(tile);
    views[i].next_bytes = share(tile + 1) - share(tile);
  }
  table_->batch[plan_.kernel][shape.tile](stripes.first, stripes.count, stripes.stride, shape.blocks, views,
                                          count, sums);
}

/// Gate and up of 16 * num_stripes columns for all tokens of an expert, and the activation.
void CpuExperts::GateUpStripes(Run& run, int64_t tile_begin, int64_t tile_end, int64_t stripe,
                               int64_t num_stripes, const Stretch& stretch) const {
  const GemmShape& shape = plan_.gate_up;
  const ExpertPanels& expert = experts_[static_cast<size_t>(run.tiles[tile_begin].expert)];
  const ActivationSpec& spec = problem_.config.activation;
  const bool gated = shape.parts == 2;
  const uint8_t* weights = expert.gate_up + stripe * shape.parts * shape.stripe_bytes;
  alignas(64) float dots[kMostSums];
  ActivateArguments arguments{};
  arguments.activation = static_cast<int>(spec.kind);
  arguments.alpha = spec.alpha;
  arguments.beta = spec.beta;
  arguments.limit = spec.limit;
  arguments.mid_stride = shape.row_stride();
  PrefetchSides(expert.gate_up_scale, expert.gate_up_bias, (stripe + num_stripes) * shape.parts,
                num_stripes * shape.parts);
  const int64_t bytes = num_stripes * shape.parts * shape.stripe_bytes;
  const Ahead ahead = AheadOf(run, shape, tile_begin, tile_end, weights + bytes, bytes, stretch);
  for (int64_t index = tile_begin, count = 0; index < tile_end; index += count) {
    count = TilesAtOnce(run, shape, index, tile_end);
    const Tile* tiles = run.tiles + index;
    const int64_t stripe_sums = kHeights[tiles->height_index] * kPanelRows;
    int64_t up_sums = stripe_sums, column_sums = stripe_sums * shape.parts;
    if (!separate_inputs_ || !IsTall(shape, *tiles)) {
      Multiply(run, shape, 0, tiles, count,
               {weights, num_stripes * shape.parts, shape.stripe_bytes, stretch, ahead}, dots);
    } else {
      column_sums = stripe_sums;
      up_sums = count * num_stripes * stripe_sums;
      for (int part = 0; part < shape.parts; ++part) {
        Multiply(run, shape, part, tiles, count,
                 {weights + part * shape.stripe_bytes, num_stripes, shape.parts * shape.stripe_bytes, stretch,
                  ahead},
                 dots + part * up_sums);
      }
    }
    for (int64_t i = 0; i < count * num_stripes; ++i) {
      const Tile& tile = tiles[i / num_stripes];
      const int64_t column = stripe + i % num_stripes, side = column * shape.parts * kPanelRows;
      const float* sums = dots + i * column_sums;
      arguments.tokens = tile.count;
      arguments.gate = gated ? sums : nullptr;
      arguments.up = gated ? sums + up_sums : sums;
      arguments.gate_row_scale = expert.gate_up_scale + side;
      arguments.up_row_scale = arguments.gate_row_scale + (gated ? kPanelRows : 0);
      if (expert.gate_up_bias != nullptr) {
        arguments.gate_bias = expert.gate_up_bias + side;
        arguments.up_bias = arguments.gate_bias + (gated ? kPanelRows : 0);
      }
      arguments.mid = run.mid + tile.first_slot * shape.row_stride() + column * kPanelRows;
      table_->activate(&arguments);
    }
  }
}

void CpuExperts::Down(Run& run) const {
  const GemmShape& shape = plan_.down;
  const int64_t tasks = DownRanges(run);
  ParallelFor(*run.executor, tasks, [&](int64_t task) {
    const int64_t pairs = CeilDiv(shape.stripes, 2);
    DownColumns(run, 2 * (pairs * task / tasks), std::min(2 * (pairs * (task + 1) / tasks), shape.stripes));
  });
}

/// Columns of the output for all experts, from zero to the caller's dtype.
void CpuExperts::DownColumns(Run& run, int64_t first_stripe, int64_t end_stripe) const {
  const GemmShape& shape = plan_.down;
  const int64_t row_floats = shape.row_stride();
  const int64_t first_col = first_stripe * kPanelRows;
  for (int64_t row = 0; run.num_jobs == 0 && row < run.num_outputs; ++row) {  // jobs started the sums
    std::fill_n(run.sums + row * row_floats + first_col, (end_stripe - first_stripe) * kPanelRows, 0.0F);
  }
  alignas(64) float dots[kMostSums];
  float* rows[kMaxHeight];
  AccumulateArguments arguments{};
  arguments.rows = rows;
  for (int64_t begin = 0, end = 0; begin < run.num_tiles; begin = end) {
    end = EndOfBatch(run, shape, begin);
    const ExpertPanels& expert = experts_[static_cast<size_t>(run.tiles[begin].expert)];
    const ExpertPanels* next =
        end < run.num_tiles ? &experts_[static_cast<size_t>(run.tiles[end].expert)] : nullptr;
    const Stretch stretch{expert.down + end_stripe * shape.stripe_bytes,
                          next == nullptr ? nullptr : next->down + first_stripe * shape.stripe_bytes};
    const int64_t step = ColumnsAtOnce(run, shape, begin, end);
    for (int64_t stripe = first_stripe; stripe < end_stripe; stripe += step) {
      const int64_t count = std::min(step, end_stripe - stripe);
      if (stripe + step >= end_stripe && next != nullptr) {
        PrefetchSides(next->down_scale, next->down_bias, first_stripe, step);
      }
      PrefetchSides(expert.down_scale, expert.down_bias, stripe + step, step);
      const uint8_t* weights = expert.down + stripe * shape.stripe_bytes;
      const int64_t bytes = count * shape.stripe_bytes;
      const Ahead ahead = AheadOf(run, shape, begin, end, weights + bytes, bytes, stretch);
      for (int64_t index = begin, taken = 0; index < end; index += taken) {
        taken = TilesAtOnce(run, shape, index, end);
        const Tile* tiles = run.tiles + index;
        Multiply(run, shape, 2, tiles, taken, {weights, count, shape.stripe_bytes, stretch, ahead}, dots);
        for (int64_t i = 0; i < taken * count; ++i) {
          const Tile& tile = tiles[i / count];
          const int64_t col = (stripe + i % count) * kPanelRows;
          for (int token = 0; token < tile.count; ++token) {
            rows[token] = run.sums + run.slot_outputs[tile.first_slot + token] * row_floats + col;
          }
          arguments.dot = dots + i * kHeights[tile.height_index] * kPanelRows;
          arguments.row_scale = expert.down_scale + col;
          arguments.bias = expert.down_bias == nullptr ? nullptr : expert.down_bias + col;
          arguments.tokens = tile.count;
          arguments.weights = run.slot_weights + tile.first_slot;
          table_->accumulate(&arguments);
        }
      }
    }
  }
  for (int64_t row = 0; row < run.num_outputs; ++row) {
    StoreOutput(run, row, first_col, std::min(end_stripe * kPanelRows, shape.rows));
  }
}

/// Columns of a row of sums to the caller's dtype.
void CpuExperts::StoreOutput(const Run& run, int64_t row, int64_t first_col, int64_t end_col) const {
  const int64_t value_bytes = DTypeBits(run.output.dtype()) / 8;
  const int64_t target = run.batched ? run.slot_rows[row] : run.first_output + row;
  table_->from_float[run.output_type](
      run.sums + row * plan_.down.row_stride() + first_col, end_col - first_col,
      run.output.data() + target * run.output_row_bytes + first_col * value_bytes);
}

}  // namespace fusedmoe::cpu
