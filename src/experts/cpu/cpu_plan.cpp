#include "experts/cpu/cpu_plan.hpp"

#include <algorithm>

#include "core/checked_math.hpp"
#include "experts/cpu/cpu_choice.hpp"
#include "quant/activation_quantizer.hpp"
#include "weights/block_products.hpp"
#include "weights/narrow.hpp"

namespace fusedmoe::cpu {
namespace {

constexpr int64_t kFewestTokens = 64;

/// Shares of super-blocks are whole blocks of the panel as long as there are enough of them for all ranks
/// (IntermediateShare): a rank that has more than one has nothing else. Shares know the format of the layer
/// only: groups and super-blocks that are longer than its own are cut.
bool CutsBlocks(const MoeProblem& problem, const GemmShape& shape) {
  const WeightFormat& weight = problem.scheme.weight;
  if (shape.narrow && (problem.weights.down_stored.group > weight.block.col ||
                       problem.weights.down_stored.super_cols > weight.super_cols)) {
    return true;
  }
  const int64_t block = shape.panel.block, share = shape.cols;
  return shape.panel.scale == PanelScale::kI8 && (share % block != 0 || share <= block);
}

GemmShape MakeGemm(const MoeProblem& problem, Gemm gemm, std::optional<PanelFormat> narrow, TileKind tile) {
  const MoeConfig& config = problem.config;
  const bool down = gemm == kDown;
  GemmShape shape;
  shape.gemm = gemm;
  shape.panel = narrow ? *narrow : *PanelOf(problem);
  shape.narrow = narrow.has_value();
  shape.kernel = KernelFor(shape.panel);
  shape.tile = tile;
  shape.rows = down ? config.hidden : config.intermediate;
  shape.cols = down ? config.intermediate : config.hidden;
  shape.parts = !down && config.activation.gated() ? 2 : 1;
  shape.stripes = CeilDiv(shape.rows, kPanelRows);
  const WeightFormat weight = narrow
                                  ? NarrowFormat(problem.scheme.weight, down ? problem.weights.down_stored
                                                                             : problem.weights.gate_up_stored)
                                  : problem.scheme.weight;
  // Tensor parallelism cuts the intermediate, which is K of the second GEMM, maybe inside a group of scales.
  const int64_t group = weight.block.col;
  const bool cut =
      config.parallel.tp_size > 1 && group > 0 &&
      (config.intermediate % group != 0 || (shape.cols == config.intermediate && CutsBlocks(problem, shape)));
  shape.padded_cols =
      PanelColumnsBound(weight, shape.panel, shape.cols, problem.weights.has_group_index || cut);
  shape.blocks = shape.padded_cols / shape.panel.block;
  shape.stripe_bytes = shape.panel.stripe_bytes(shape.blocks);
  shape.tile_row_bytes = RoundUp(TileRowBytes(shape.kernel, tile, shape.padded_cols), 4 * kTileWords);
  return shape;
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

namespace {

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
  const int64_t in_flight = plan.matrix_unit.enabled ? 2 * kInFlightBytes : kInFlightBytes;
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

/// The GEMMs in the format of the layer; then each in the format that its matrices were stored in, where the
/// vector kernels for both take the tiles that those of the layer's format take.
void PlanGemms(const MoeProblem& problem, const Machine& machine, CpuPlan& plan) {
  const TileChoice choice = ChooseTile(problem, machine, KernelFor(*PanelOf(problem)), plan.vector_isa);
  plan.rows = choice.rows;
  plan.gate_up = MakeGemm(problem, kGateUp, std::nullopt, choice.gate_up);
  plan.down = MakeGemm(problem, kDown, std::nullopt, choice.down);
  const auto narrow = [&](const StoredIntegers& stored) {
    std::optional<PanelFormat> panel = NarrowPanelOf(problem, stored);
    return panel && *panel != plan.gate_up.panel && CutAlike(plan, problem, machine, KernelFor(*panel))
               ? panel
               : std::nullopt;
  };
  const std::optional<PanelFormat> gate_up = narrow(problem.weights.gate_up_stored),
                                   down = narrow(problem.weights.down_stored);
  plan.gate_up = MakeGemm(problem, kGateUp, gate_up, choice.gate_up);
  plan.down = MakeGemm(problem, kDown, down, choice.down);
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
  plan.matrix_unit = PlanMatrixUnit(problem, machine, plan, cost);
  plan.cost_source = cost.source;
  constexpr int64_t kLatencyTokens = 4;  // of kernels that nobody has measured
  plan.mode = ChooseMode(problem, problem.plan_tokens,
                         cost.row == nullptr ? kLatencyTokens : LatencyTokens(cost.row->vectors));
  PlanPieces(problem, plan);
  if (plan.matrix_unit.enabled) {
    PlanJobs(problem, machine, plan);
  }
  if (machine.memory_nodes.size() > 1) {
    plan.weight_nodes = machine.memory_nodes;
  }
  plan.tile_batch_bytes = std::max<int64_t>(machine.l2_bytes / 2, 64 << 10);
  return plan;
}

}  // namespace fusedmoe::cpu
