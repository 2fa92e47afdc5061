#include "experts/cpu/matrix_unit/matrix_unit_plan.hpp"

#include <algorithm>
#include <optional>

#include "core/checked_math.hpp"
#include "experts/cpu/cpu_plan.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::cpu {
namespace {

/// Jobs with fewer tokens would decode weights too often; where these many overflow L2, blocks of K do not.
constexpr int64_t kFewestJobTokens = 256;

/// How the unit takes the panels of a GEMM; none: it does not.
std::optional<TileWeights> WeightsOnUnit(const GemmShape& shape, const ActivationFormat& activation) {
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

/// Columns may stand in another order than in the checkpoint.
bool IsReordered(const MoeProblem& problem) {
  return problem.weights.has_group_index || problem.config.parallel.tp_size > 1;
}

/// Fills in how the unit multiplies one of the GEMMs; false: it does not.
bool PlanUnitGemm(const MoeProblem& problem, const GemmShape& shape, MatrixUnitPlan& plan) {
  const ActivationFormat activation = ActivationOf(problem);
  const std::optional<TileWeights> weights = WeightsOnUnit(shape, activation);
  const bool int8 = weights == kInt8Weights;
  if (!weights || (shape.gemm == kDown && int8 != plan.int8)) {
    return false;
  }
  plan.int8 = int8;
  const TileFormat& format = *FindTileFormat(shape.kernel, *weights);
  const GroupShape group = activation.group;
  const bool whole_rows = group == kPerTensor || group == kPerRow;
  if (plan.codes && activation.scale_dtype == DType::kF32 && !whole_rows) {
    const bool fits = format.scale_group > 0 && group.row == 1 && (group.col == 64 || group.col == 128) &&
                      group.col % format.scale_group == 0;
    if (!fits || IsReordered(problem)) {
      return false;
    }
    plan.scale_group = group.col;
  }
  const int64_t k = shape.padded_cols;
  // Products of int8 are added up in 32 bits, 2^14 each at most, until a scale takes the sum.
  constexpr int64_t kMostExact = (int64_t{1} << 17) - 1;
  if (int8 && plan.scale_group == 0 && k > kMostExact) {
    return false;
  }
  MatrixUnitGemm& gemm = plan.gemms[shape.gemm];
  gemm.weights = *weights;
  gemm.row_bytes = int8 ? k : 2 * k;
  gemm.scales = plan.scale_group > 0 ? CeilDiv(k, plan.scale_group) : 1;
  gemm.sums = int8 ? 1 : format.sum_group > 0 ? k / format.sum_group : 0;
  return true;
}

/// Slots whose results wait to be added up by token, where there are threads to do so: they should stay in
/// the last-level cache, and be enough for all threads. A scale over the batch needs all of them.
int64_t MaxSlotSums(const MoeProblem& problem, const Machine& machine, const CpuPlan& plan) {
  const MatrixUnitPlan& unit = plan.matrix_unit;
  if (unit.num_scratch <= 1) {
    return 0;
  }
  if (NeedsDynamicTensorScale(ActivationOf(problem))) {
    return plan.max_slots;
  }
  const int64_t in_cache = std::min(machine.l3_bytes, kInFlightBytes) / 2 / (plan.down.row_stride() * 4);
  const int64_t for_threads = kGroupsPerThread * unit.num_scratch * unit.job_tokens;
  return std::min(plan.max_slots, std::max(in_cache, for_threads));
}

}  // namespace

MatrixUnitPlan PlanMatrixUnit(const MoeProblem& problem, const Machine& machine, const CpuPlan& plan,
                              const CostChoice& cost) {
  MatrixUnitPlan unit;
  if (plan.isa != Isa::kAmx || problem.mode == ModeName(Mode::kLatency)) {
    return unit;
  }
  const bool forced = problem.mode == ModeName(Mode::kThroughput);
  // The number of neighbours must not choose the kernel.
  if (problem.determinism >= Determinism::kBatchInvariant && !forced) {
    return unit;
  }
  unit.codes = ActivationOf(problem).quantized();
  if (!unit.codes && !problem.scheme.weight.quantized() && problem.config.dtype != DType::kBF16) {
    return unit;  // bf16 tokens would lose bits that such a layer keeps
  }
  unit.weight_group = problem.scheme.weight.block.col % 128 == 0 && !IsReordered(problem) ? 128 : 64;
  if (!PlanUnitGemm(problem, plan.gate_up, unit) || !PlanUnitGemm(problem, plan.down, unit)) {
    return unit;
  }
  // Without figures nobody knows that the unit is faster: it takes every expert when asked to, else none.
  const int64_t crossover =
      cost.row == nullptr ? kMostCrossoverTokens + 1 : MatrixUnitCrossover(*cost.row, WorkOf(plan));
  if (!forced && crossover > kMostCrossoverTokens) {
    return unit;
  }
  unit.from_tokens = forced ? 1 : crossover;
  // A forward may come with more threads than the layer was loaded with.
  unit.num_scratch = std::clamp<int64_t>(std::max(problem.num_threads, machine.num_cores), 1, kMaxJobScratch);
  unit.enabled = true;
  return unit;
}

void PlanJobs(const MoeProblem& problem, const Machine& machine, CpuPlan& plan) {
  MatrixUnitPlan& unit = plan.matrix_unit;
  const int64_t active = std::min(plan.num_local_experts, plan.max_slots);
  const int64_t jobs = std::min(active, plan.max_slots / std::max<int64_t>(unit.from_tokens, 1));
  const int64_t packed_bytes = std::max(unit.gemms[kGateUp].row_bytes, unit.gemms[kDown].row_bytes);
  unit.job_tokens =
      std::clamp<int64_t>(machine.l2_bytes / 2 / packed_bytes, kFewestJobTokens, kMaxJobTokens) /
      kTileTokens * kTileTokens;
  unit.group_rows =
      std::max<int64_t>(machine.l2_bytes * 5 / 16 / packed_bytes / kTileTokens, 1) * kTileTokens;
  unit.max_jobs = jobs + plan.max_slots / std::min(unit.job_tokens, kFewestSharedTokens);
  unit.shared_rows = plan.max_tokens;
  unit.max_rows = plan.max_slots + (kTileTokens - 1) * unit.max_jobs;
  unit.max_slot_sums = MaxSlotSums(problem, machine, plan);
}

}  // namespace fusedmoe::cpu
