#include "experts/cpu/cpu_plan.hpp"

#include <algorithm>

#include "core/checked_math.hpp"
#include "experts/cpu/cpu_choice.hpp"
#include "quant/activation_quantizer.hpp"
#include "weights/block_products.hpp"
#include "weights/narrow.hpp"

namespace fusedmoe::cpu {
namespace {

/// Bytes of activations that may be in flight. Below it a piece has enough tokens per expert to be bound by
/// arithmetic with the largest layers in use (DeepSeek-V3 at 1024 tokens: 240 MB); far above it pieces only
/// cost memory.
constexpr int64_t kInFlightBytes = int64_t{256} << 20;
constexpr int64_t kFewestTokens = 64;
/// Jobs with fewer tokens would decode weights too often; where these many overflow L2, blocks of K do not.
constexpr int64_t kFewestJobTokens = 256;

/// Shares of super-blocks are whole blocks of the panel as long as these go round (IntermediateShare): a rank
/// that has more than one has nothing else. Shares know the format of the layer only: groups and super-blocks
/// that are longer than its own are cut.
bool CutsBlocks(const MoeProblem& problem, const GemmShape& shape) {
  const WeightFormat& weight = problem.scheme.weight;
  if (shape.narrow &&
      (problem.down_stored.group > weight.block.col || problem.down_stored.super_cols > weight.super_cols)) {
    return true;
  }
  const int64_t block = shape.panel.block, share = shape.cols;
  return shape.panel.scale == PanelScale::kI8 && (share % block != 0 || share <= block);
}

GemmShape MakeGemm(const MoeProblem& problem, std::optional<PanelFormat> narrow, TileKind tile, bool down) {
  const MoeConfig& config = problem.config;
  GemmShape shape;
  shape.panel = narrow ? *narrow : *PanelOf(problem);
  shape.narrow = narrow.has_value();
  shape.kernel = KernelFor(shape.panel);
  shape.tile = tile;
  shape.rows = down ? config.hidden : config.intermediate;
  shape.cols = down ? config.intermediate : config.hidden;
  shape.parts = !down && config.activation.gated() ? 2 : 1;
  shape.stripes = CeilDiv(shape.rows, kPanelRows);
  const WeightFormat weight =
      narrow ? NarrowFormat(problem.scheme.weight, down ? problem.down_stored : problem.gate_up_stored)
             : problem.scheme.weight;
  // Tensor parallelism cuts the intermediate, which is K of the second GEMM, maybe inside a group of scales.
  const int64_t group = weight.block.col;
  const bool cut =
      config.parallel.tp_size > 1 && group > 0 &&
      (config.intermediate % group != 0 || (shape.cols == config.intermediate && CutsBlocks(problem, shape)));
  shape.padded_cols =
      PanelColumnsBound(weight, shape.panel, shape.cols, problem.weights_have_group_index || cut);
  shape.blocks = shape.padded_cols / shape.panel.block;
  shape.stripe_bytes = shape.panel.stripe_bytes(shape.blocks);
  shape.tile_row_bytes = RoundUp(TileRowBytes(shape.kernel, tile, shape.padded_cols), 4 * kTileWords);
  return shape;
}

/// How tiles take the panels of a GEMM; none: they do not.
std::optional<TileWeights> TileWeightsOf(const GemmShape& shape, const ActivationFormat& activation) {
  const auto has = [&](TileWeights weights) { return FindTileFormat(shape.kernel, weights) != nullptr; };
  const PanelFormat& panel = shape.panel;
  const bool numbers = panel.zeros == PanelZero::kFloats;  // which take fp32
  if (!activation.quantized()) {
    // Where activations are rounded to bf16 anyhow, so are weights whose scales do not fit in it. Bytes in
    // groups of 32 and more are exact as long as their zero points are codes: their sums are scaled.
    for (const TileWeights weights : {kRoundedInF16, kExactWeights, kRoundedInF32}) {
      if (has(weights) && (!numbers || weights == kRoundedInF32)) {
        return weights;
      }
    }
    return std::nullopt;
  }
  // Bytes take four bits without their zero points, and eight where zero is in the middle.
  if (activation.element == DType::kI8 && has(kInt8Weights) && !numbers &&
      !(panel.code == DType::kU8 && panel.has_zero_points())) {
    return kInt8Weights;
  }
  return has(kExactWeights) && !numbers ? std::optional(kExactWeights) : std::nullopt;
}

/// Whether and how the matrix unit multiplies experts with many tokens.
TilePlan PlanTiles(const MoeProblem& problem, const Machine& machine, const CpuPlan& plan,
                   const CostChoice& cost) {
  TilePlan tiles;
  if (plan.isa != Isa::kAmx || problem.mode == ModeName(Mode::kLatency)) {
    return tiles;
  }
  const bool forced = problem.mode == ModeName(Mode::kThroughput);
  // The number of neighbours must not choose the kernel.
  if (problem.determinism >= Determinism::kBatchInvariant && !forced) {
    return tiles;
  }
  const ActivationFormat activation = ActivationOf(problem);
  const bool reordered = problem.weights_have_group_index || problem.config.parallel.tp_size > 1;
  const GroupShape group = activation.group;
  const bool whole_rows = group == kPerTensor || group == kPerRow;
  tiles.codes = activation.quantized();
  if (!tiles.codes && !problem.scheme.weight.quantized() && problem.config.dtype != DType::kBF16) {
    return tiles;  // bf16 tokens would lose bits that such a layer keeps
  }
  tiles.weight_group = problem.scheme.weight.block.col % 128 == 0 && !reordered ? 128 : 64;
  const GemmShape* shapes[2] = {&plan.gate_up, &plan.down};
  for (int i = 0; i < 2; ++i) {
    const std::optional<TileWeights> weights = TileWeightsOf(*shapes[i], activation);
    if (!weights || (i == 1 && (*weights == kInt8Weights) != tiles.int8)) {
      return tiles;
    }
    tiles.weights[i] = *weights;
    tiles.int8 = *weights == kInt8Weights;
    const TileFormat& format = *FindTileFormat(shapes[i]->kernel, *weights);
    if (tiles.codes && activation.scale_dtype == DType::kF32 && !whole_rows) {
      const bool fits = format.scale_group > 0 && group.row == 1 && (group.col == 64 || group.col == 128) &&
                        group.col % format.scale_group == 0;
      if (!fits || reordered) {
        return tiles;
      }
      tiles.scale_group = group.col;
    }
    const int64_t k = shapes[i]->padded_cols;
    tiles.row_bytes[i] = tiles.int8 ? k : 2 * k;
    const int64_t scales = tiles.scale_group > 0 ? CeilDiv(k, tiles.scale_group) : 1;
    const int64_t sums = tiles.int8 ? 1 : format.sum_group > 0 ? k / format.sum_group : 0;
    tiles.sides[i] = scales + sums;
    tiles.num_sums[i] = sums;
  }
  // Without figures nobody knows that tiles are faster: they take every expert when asked to, else none.
  const int64_t crossover =
      cost.row == nullptr ? kMostCrossoverTokens + 1 : TileCrossover(*cost.row, WorkOf(plan));
  if (!forced && crossover > kMostCrossoverTokens) {
    return tiles;
  }
  tiles.from_tokens = forced ? 1 : crossover;
  // A forward may come with more threads than the layer was loaded with.
  tiles.num_scratch =
      std::clamp<int64_t>(std::max(problem.num_threads, machine.num_cores), 1, kMaxTileScratch);
  tiles.enabled = true;
  return tiles;
}

}  // namespace

ExpertWork WorkOf(const CpuPlan& plan) {
  const GemmShape& gate_up = plan.gate_up;
  const GemmShape& down = plan.down;
  ExpertWork work;
  work.blocks =
      (gate_up.parts * gate_up.stripes * gate_up.padded_cols + down.stripes * down.padded_cols) / kPanelUnit;
  work.max_height = kHeights[plan.max_height_index];
  if (IsPairTile(gate_up.tile)) {
    work.max_height *= plan.batch_tiles;
  }
  work.padded = !plan.tall;
  return work;
}

std::string_view ModeName(Mode mode) {
  constexpr std::string_view kNames[] = {"latency", "throughput", "masked"};
  return kNames[static_cast<int>(mode)];
}

Mode ChooseMode(const MoeProblem& problem, int64_t num_tokens, int64_t latency_tokens) {
  if (problem.config.activation_format == ActivationFormatKind::kBatchedExperts) {
    return Mode::kMasked;
  }
  if (problem.mode == ModeName(Mode::kLatency)) {
    return Mode::kLatency;
  }
  if (problem.mode == ModeName(Mode::kThroughput)) {
    return Mode::kThroughput;
  }
  const int64_t experts = std::max<int64_t>(problem.config.num_experts, 1);
  return num_tokens * problem.config.top_k() <= latency_tokens * experts ? Mode::kLatency : Mode::kThroughput;
}

TileCut NextTile(int64_t left, int max_height_index, bool tall) {
  if (tall && left > 2) {
    return {static_cast<int32_t>(std::min<int64_t>(left, kMaxHeight)), kNumHeights - 1};
  }
  // A pass over a stripe costs about as much as two tokens (decoding), so padding by one or two is cheaper
  // than another tile: the last tile of 3 has height 4, of 6 and 7 height 8; 5 is 4 + 1.
  int index = max_height_index;
  while (index > 0 && kHeights[index - 1] >= left) {
    --index;
  }
  if (kHeights[index] - left > 2) {
    --index;
  }
  return {static_cast<int32_t>(std::min<int64_t>(left, kHeights[index])), index};
}

namespace {

/// Slots whose results wait to be added up by token, where there are threads to do so: they should stay in
/// the last-level cache, and be enough for all threads. A scale over the batch needs all of them.
int64_t SlotSums(const MoeProblem& problem, const Machine& machine, const CpuPlan& plan) {
  if (plan.tiles.num_scratch <= 1) {
    return 0;
  }
  if (NeedsDynamicTensorScale(ActivationOf(problem))) {
    return plan.max_slots;
  }
  const int64_t in_cache = std::min(machine.l3_bytes, kInFlightBytes) / 2 / (plan.down.row_stride() * 4);
  const int64_t for_threads = kGroupsPerThread * plan.tiles.num_scratch * plan.tiles.job_tokens;
  return std::min(plan.max_slots, std::max(in_cache, for_threads));
}

/// Cuts a call into pieces of so many tokens that what is in flight stays within bounds.
void PlanPieces(const MoeProblem& problem, CpuPlan& plan) {
  const MoeConfig& config = problem.config;
  const bool batched = config.activation_format == ActivationFormatKind::kBatchedExperts;
  plan.slots_apart = !batched && problem.determinism >= Determinism::kRankInvariant;
  const bool output_by_slot = batched || plan.slots_apart;
  const int64_t most_tokens = std::max<int64_t>(config.max_tokens, 1);
  const int64_t slots_per_token = batched ? plan.num_local_experts : plan.top_k;
  const int64_t slot_bytes = plan.gate_up.tile_row_bytes + plan.down.tile_row_bytes +
                             plan.gate_up.row_stride() * 4 +
                             (output_by_slot ? plan.down.row_stride() * 4 : 0);
  const int64_t token_bytes = std::max<int64_t>(1, slots_per_token * slot_bytes);
  const int64_t in_flight = plan.tiles.enabled ? 2 * kInFlightBytes : kInFlightBytes;
  const int64_t tokens = std::clamp(in_flight / token_bytes, kFewestTokens,
                                    most_tokens < kFewestTokens ? kFewestTokens : most_tokens);
  // A scale over the batch needs all of it at once.
  const int64_t piece =
      NeedsDynamicTensorScale(ActivationOf(problem)) ? most_tokens : std::min(tokens, most_tokens);
  plan.max_slots = piece * slots_per_token;
  plan.max_tokens = batched ? 0 : piece;
  plan.max_rows = output_by_slot ? plan.max_slots : piece;
  const int64_t active = std::min(plan.num_local_experts, plan.max_slots);
  // NextTile ends an expert with at most two tiles that are not full, and pads by at most two tokens; tall
  // tiles have no padding.
  plan.max_tiles = plan.max_slots / kHeights[plan.max_height_index] + 2 * active;
  plan.max_tile_rows = plan.max_slots + (plan.tall ? 0 : 2) * active;
}

/// The work of the matrix unit on a piece.
void PlanJobs(const MoeProblem& problem, const Machine& machine, CpuPlan& plan) {
  TilePlan& tiles = plan.tiles;
  const int64_t active = std::min(plan.num_local_experts, plan.max_slots);
  const int64_t jobs = std::min(active, plan.max_slots / std::max<int64_t>(tiles.from_tokens, 1));
  const int64_t packed_bytes = std::max(tiles.row_bytes[0], tiles.row_bytes[1]);
  tiles.job_tokens =
      std::clamp<int64_t>(machine.l2_bytes / 2 / packed_bytes, kFewestJobTokens, kMaxJobTokens) /
      kTileTokens * kTileTokens;
  tiles.group_rows =
      std::max<int64_t>(machine.l2_bytes * 5 / 16 / packed_bytes / kTileTokens, 1) * kTileTokens;
  tiles.max_jobs = jobs + plan.max_slots / std::min(tiles.job_tokens, kFewestSharedTokens);
  tiles.shared_rows = plan.max_tokens;
  tiles.max_rows = plan.max_slots + (kTileTokens - 1) * tiles.max_jobs;
  tiles.max_slot_sums = SlotSums(problem, machine, plan);
}

/// The GEMMs in the format of the layer; then each in the format that its matrices were stored in, where the
/// vector kernels for both take the tiles that those of the layer's format take.
void PlanGemms(const MoeProblem& problem, const Machine& machine, CpuPlan& plan) {
  const TileChoice choice = ChooseTile(problem, KernelFor(*PanelOf(problem)), plan.vector_isa);
  plan.rows = choice.rows;
  plan.gate_up = MakeGemm(problem, std::nullopt, choice.gate_up, /*down=*/false);
  plan.down = MakeGemm(problem, std::nullopt, choice.down, /*down=*/true);
  const auto narrow = [&](const StoredIntegers& stored) {
    std::optional<PanelFormat> panel = NarrowPanelOf(problem, stored);
    return panel && *panel != plan.gate_up.panel && CutAlike(plan, problem, KernelFor(*panel)) ? panel
                                                                                               : std::nullopt;
  };
  const std::optional<PanelFormat> gate_up = narrow(problem.gate_up_stored),
                                   down = narrow(problem.down_stored);
  plan.gate_up = MakeGemm(problem, gate_up, choice.gate_up, /*down=*/false);
  plan.down = MakeGemm(problem, down, choice.down, /*down=*/true);
  FitVectorKernels(machine, plan);
}

}  // namespace

CpuPlan MakeCpuPlan(const MoeProblem& problem, const Machine& machine) {
  const MoeConfig& config = problem.config;
  CpuPlan plan;
  plan.isa = IsaOf(problem, machine);
  plan.vector_isa = VectorIsa(plan.isa, machine);
  plan.products = BecomesProducts(problem.scheme.weight);
  plan.num_local_experts = config.num_local_experts;
  plan.top_k = config.top_k();
  PlanGemms(problem, machine, plan);

  const CostChoice cost = FindCost(problem.cpu_costs.get(), machine, IsaOfKernel(plan.isa, plan.gate_up.tile),
                                   plan.gate_up.kernel, plan.gate_up.tile, ActivationOf(problem).quantized());
  plan.tiles = PlanTiles(problem, machine, plan, cost);
  plan.cost_source = cost.source;
  constexpr int64_t kLatencyTokens = 4;  // of kernels that nobody has measured
  plan.mode = ChooseMode(problem, problem.plan_tokens,
                         cost.row == nullptr ? kLatencyTokens : LatencyTokens(cost.row->vectors));
  PlanPieces(problem, plan);
  if (plan.tiles.enabled) {
    PlanJobs(problem, machine, plan);
  }
  plan.weight_nodes = std::clamp(machine.num_numa_nodes, 1, kMostMemoryNodes);
  plan.tile_batch_bytes = std::max<int64_t>(machine.l2_bytes / 2, 64 << 10);
  return plan;
}

CpuSlots BookCpuSlots(const CpuPlan& plan, WorkspaceBook& book) {
  CpuSlots slots;
  const int64_t widest = std::max(plan.gate_up.padded_cols, plan.down.padded_cols);
  slots.offsets = book.Book("expert_offsets", (plan.num_local_experts + 1) * 8);
  slots.slot_rows = book.Book("slot_rows", plan.max_slots * 4);
  slots.slot_outputs = book.Book("slot_outputs", plan.max_slots * 4);
  slots.slot_weights = book.Book("slot_weights", plan.max_slots * 4);
  slots.tiles = book.Book("tiles", plan.max_tiles * static_cast<int64_t>(sizeof(Tile)));
  const int64_t pack_tasks = std::min(kPackTasks, std::max(plan.max_tiles, plan.max_tokens));
  slots.row_buffers = book.Book("row_buffers", pack_tasks * 2 * widest * 4);
  slots.tile_rows =
      book.Book("tile_rows", pack_tasks * kHeights[plan.max_height_index] *
                                 std::max(plan.gate_up.tile_row_bytes, plan.down.tile_row_bytes));
  slots.token_places = book.Book("token_places", plan.max_tokens * 8);
  slots.token_tiles =
      book.Book("token_tiles", plan.input_sets * plan.max_tokens * plan.gate_up.tile_row_bytes);
  slots.input_tiles =
      book.Book("input_tiles", plan.input_sets * plan.max_tile_rows * plan.gate_up.tile_row_bytes);
  slots.slot_tiles = book.Book("slot_tiles", (plan.input_sets + 1) * plan.max_slots * 8);
  slots.mid = book.Book("mid", std::max(plan.max_slots, plan.tiles.max_rows) * plan.gate_up.row_stride() * 4);
  slots.mid_tiles = book.Book("mid_tiles", plan.max_tile_rows * plan.down.tile_row_bytes);
  slots.output = book.Book("output_sums", plan.max_rows * plan.down.row_stride() * 4);
  const TilePlan& tiles = plan.tiles;
  if (tiles.enabled) {
    slots.jobs = book.Book("tile_jobs", 2 * tiles.max_jobs * static_cast<int64_t>(sizeof(TileJob)));
    slots.job_groups = book.Book("tile_groups", tiles.max_jobs * static_cast<int64_t>(sizeof(JobGroup)));
    slots.tokens = book.Book("tile_tokens", tiles.max_rows * (tiles.row_bytes[0] + tiles.row_bytes[1]));
    slots.sides = book.Book("tile_sides", tiles.max_rows * (tiles.sides[0] + tiles.sides[1]) * 4);
    slots.token_rows = book.Book("token_rows", tiles.shared_rows * tiles.row_bytes[0]);
    slots.token_sides = book.Book("token_sides", tiles.shared_rows * tiles.sides[0] * 4);
    slots.scratch = book.Book("tile_scratch", tiles.num_scratch * kTileScratchBytes);
    slots.scratch_rows = book.Book("tile_scratch_rows", tiles.num_scratch * 3 * widest * 4);
    slots.slot_sums = book.Book("slot_sums", tiles.max_slot_sums * plan.down.row_stride() * 4);
    slots.slot_ends = book.Book("slot_ends", plan.max_slots * static_cast<int64_t>(sizeof(SlotEnds)));
    slots.output_offsets = book.Book("output_offsets", (plan.max_rows + 1) * 4);
    slots.output_slots = book.Book("output_slots", tiles.max_slot_sums * 4);
  }
  return slots;
}

}  // namespace fusedmoe::cpu
