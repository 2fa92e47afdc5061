#include "experts/cuda/cuda_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/checked_math.hpp"
#include "experts/cuda/device_call.hpp"
#include "experts/cuda/float32/float32.hpp"
#include "experts/cuda/operands/operand_format.hpp"
#include "experts/cuda/prefill/prefill.hpp"
#include "numerics/element_types.hpp"
#include "quant/activation_quantizer.hpp"
#include "weights/fragment_offsets.hpp"
#include "weights/narrow.hpp"

namespace fusedmoe::cuda {
namespace {

DeviceLimits LimitsOf(const Machine& machine) {
  DeviceLimits limits;
  if (machine.cuda && machine.cuda->num_multiprocessors > 0) {
    limits.num_sms = machine.cuda->num_multiprocessors;
  }
  if (machine.cuda && machine.cuda->shared_bytes_per_block > 0) {
    limits.shared_memory_per_block = machine.cuda->shared_bytes_per_block;
  }
  return limits;
}

int64_t VectorBytes(const CudaPlan& plan, const FragmentSizes& sizes) {
  const int64_t rows = sizes.parts * sizes.gate_up_rows + sizes.down_rows;
  const int64_t vectors = (plan.spec.row_scale ? 1 : 0) + (plan.has_bias ? 1 : 0);
  return 4 * (rows * vectors + sizes.parts + 1 + (plan.reordered ? plan.shape.hidden : 0));
}

FragmentSizes SizesOf(const CudaPlan& plan) {
  return FragmentSizesOf(plan.spec, plan.shape.hidden, plan.shape.intermediate, plan.shape.gated());
}

/// The layout of the weights of a GEMM that were stored as such, if that has fewer bits than `wide`.
std::optional<FragmentSpec> StoredLayout(const MoeProblem& problem, const StoredIntegers& of_gemm,
                                         const FragmentSpec& wide) {
  const StoredIntegers stored = WithoutLevels(of_gemm);
  if (stored.bits == 0 || ActivationOf(problem).quantized() || problem.weights.has_pre_quant_scale ||
      problem.weights.has_group_index) {
    return std::nullopt;
  }
  const Result<FragmentSpec> spec =
      ChooseFragmentSpec(NarrowFormat(WeightsOf(problem), stored), stored.zero_points);
  const bool fewer =
      spec.ok() && FragmentTraitsOf(spec->format).code_bits < FragmentTraitsOf(wide.format).code_bits;
  return fewer ? std::optional(*spec) : std::nullopt;
}

/// Whether decode can multiply e4m3 codes as they lie, 2^120 too small: quantized tokens are multiplied by
/// 2^118 and sums by 4 instead (Fragments::kMayBeRaw), which only codes of 448 at most have room for. False:
/// all calls take prefill. Of the known schemes none is.
bool TokensCarryFactor(const CudaPlan& plan) {
  const bool raw =
      plan.shape.format == FragmentFormat::kFp8 || plan.shape.format == FragmentFormat::kFp8Block;
  return !raw || plan.mid == MidKind::kRounded ||
         (plan.activation.quantized() && ScalesActOnSums(plan.activation) &&
          *plan.activation.element != DType::kF8E5M2);
}

}  // namespace

Result<CudaLayout> LayoutOf(const MoeProblem& problem) {
  CudaLayout layout;
  FMOE_ASSIGN_OR_RETURN(layout.spec, ChooseFragmentSpec(WeightsOf(problem), problem.weights.has_zero_points));
  const std::optional<FragmentSpec> gate_up =
                                        StoredLayout(problem, problem.weights.gate_up_stored, layout.spec),
                                    down = StoredLayout(problem, problem.weights.down_stored, layout.spec);
  if (gate_up && down && *gate_up == *down) {
    return CudaLayout{*down, true, true};
  }
  if (gate_up && down && IsFragmentPair(gate_up->format, down->format)) {
    layout = {*down, true, true};
    layout.spec.own_gate_up = gate_up->format;
  } else if (gate_up && IsFragmentPair(gate_up->format, layout.spec.format)) {
    layout.narrow_gate_up = true;
    layout.spec.own_gate_up = gate_up->format;
  }
  return layout;
}

bool IsFloat32(const MoeProblem& problem) {
  const WeightFormat weight = WeightsOf(problem);
  if (!weight.quantized()) {
    return weight.element == DType::kF32;
  }
  return IsIntegerCode(weight.element) && !LayoutOf(problem).ok() && !ActivationOf(problem).quantized() &&
         !problem.weights.has_pre_quant_scale;
}

CudaPlan MakeCudaPlan(const MoeProblem& problem, const Machine& machine) {
  const MoeConfig& config = problem.config;
  CudaPlan plan;
  if (const Result<CudaLayout> layout = LayoutOf(problem); layout.ok()) {
    plan.spec = layout->spec;
    plan.narrow_gate_up = layout->narrow_gate_up;
    plan.narrow_down = layout->narrow_down;
  }
  plan.float32 = IsFloat32(problem);
  plan.decoded = plan.float32 && problem.scheme.weight.quantized();
  plan.limits = LimitsOf(machine);
  plan.activation = ActivationOf(problem);
  plan.shape.hidden = config.hidden;
  plan.shape.intermediate = config.intermediate;
  plan.shape.num_local_experts = config.num_local_experts;
  plan.shape.num_experts = config.num_experts;
  plan.shape.top_k = config.top_k();
  plan.shape.activation = config.activation;
  plan.shape.format = plan.spec.format;
  plan.shape.own_gate_up = plan.spec.own_gate_up;
  plan.shape.batched = config.activation_format == ActivationFormatKind::kBatchedExperts;
  plan.shape.group_scales = plan.activation.quantized() && HasGroupScale(plan.activation);
  plan.shape.code_tokens = IsCodeOperand(plan.spec.format, plan.activation);
  plan.element = OperandElement(plan.spec.format, false);
  plan.mid = MidKindOf(plan.activation);
  plan.shape.batch_invariant = problem.determinism >= Determinism::kBatchInvariant;
  if (plan.shape.batch_invariant) {
    plan.forced =
        Kernels::kPrefill;  // sums over all of K in one order; decode cuts K by what else it computes
  } else if (problem.mode == "latency") {
    plan.forced = Kernels::kDecode;
  } else if (problem.mode == "throughput") {
    plan.forced = Kernels::kPrefill;
  }
  plan.has_bias = config.has_bias;
  plan.reordered = problem.weights.has_group_index && !plan.float32;
  plan.short_scales = FragmentTraitsOf(plan.spec.format).scale == FragmentScale::kF32Zero &&
                      WeightsOf(problem).block_scale_dtype == DType::kF32;
  plan.weights_input = config.apply_router_weight_on_input;
  const int64_t tokens = std::max<int64_t>(config.max_tokens, 1);
  plan.rows_per_expert = plan.shape.batched ? tokens : 0;
  plan.max_rows = plan.shape.batched ? tokens * config.num_local_experts : tokens;
  return plan;
}

Kernels ChooseKernels(const CudaPlan& plan, int64_t num_rows) {
  if (plan.float32 || num_rows > kMostDecodeRows || plan.forced == Kernels::kPrefill ||
      !TokensCarryFactor(plan)) {
    return Kernels::kPrefill;
  }
  if (!PlanDecode(plan.shape, num_rows, plan.mid, plan.limits).fits) {
    return Kernels::kPrefill;
  }
  if (plan.forced == Kernels::kDecode) {
    return Kernels::kDecode;
  }
  return ChooseMode(plan.shape, num_rows, plan.mid, plan.limits) == ExecutionMode::kDecode
             ? Kernels::kDecode
             : Kernels::kPrefill;
}

bool MayMultiplyCodes(const CudaPlan& plan) {
  return !plan.float32 && ChooseKernels(plan, plan.max_rows) == Kernels::kPrefill &&
         PlanPrefill(plan.shape, plan.max_rows, plan.mid, plan.limits).codes;
}

bool MayRoundRows(const CudaPlan& plan) {
  return !plan.float32 && ChooseKernels(plan, plan.max_rows) == Kernels::kPrefill &&
         !PlanPrefill(plan.shape, plan.max_rows, plan.mid, plan.limits).rows_f32;
}

namespace {

/// Relative error of a weight that is rounded to BF16 with its scale, which is rounded before if it has to
/// be.
double RoundedScaleError(const WeightFormat& weight) {
  const bool exact_scale =
      weight.block_scale_dtype == DType::kBF16 || weight.block_scale_dtype == DType::kF8E4M3;
  return exact_scale ? 0x1p-9 : std::sqrt(2.0) * 0x1p-9;
}

}  // namespace

double FoldedScaleError(const CudaPlan& plan, const WeightFormat& weight) {
  const FragmentScale scale = FragmentTraitsOf(plan.shape.format).scale;
  if (!plan.float32 && (scale == FragmentScale::kOffset ||
                        FragmentTraitsOf(plan.shape.gate_up_format()).scale == FragmentScale::kOffset)) {
    return kOffsetError;
  }
  if (!plan.float32 && scale == FragmentScale::kBf16) {
    return RoundedScaleError(weight);
  }
  // Beside weights whose sums have no scales of groups, scales of groups of tokens are multiplied into BF16:
  // powers of two without a rounding.
  if (plan.shape.group_scales && !PromotesGroups(plan.shape.format) &&
      !plan.activation.rule.power_of_two_scale) {
    return 0x1p-9;
  }
  const bool real =
      scale == FragmentScale::kHalf || scale == FragmentScale::kF32Zero || scale == FragmentScale::kF32Halves;
  const bool on_sums = plan.mid != MidKind::kRounded && PromotesGroups(plan.shape.format);
  if (plan.float32 || !real || on_sums || ChooseKernels(plan, plan.max_rows) != Kernels::kPrefill) {
    return 0.0;
  }
  return RoundedScaleError(weight);
}

int64_t DeviceWeightBytes(const CudaPlan& plan) {
  if (plan.float32) {
    const int64_t rows = plan.shape.parts() * plan.shape.intermediate + plan.shape.hidden;
    const int64_t weights = (plan.shape.parts() + 1) * plan.shape.intermediate * plan.shape.hidden;
    return plan.shape.num_local_experts * 4 * (weights + (plan.has_bias ? rows : 0));
  }
  const FragmentSizes sizes = SizesOf(plan);
  return plan.shape.num_local_experts * (sizes.gate_up_bytes + sizes.down_bytes + VectorBytes(plan, sizes));
}

CudaSlots BookCudaSlots(const CudaPlan& plan, bool input_by_route, WorkspaceBook& book) {
  const auto aligned = [&book](std::string_view name, int64_t bytes) {
    return book.Book(name, bytes == 0 ? 0 : bytes + kPieceAlignment);
  };
  CudaSlots slots;
  const LayerShape& shape = plan.shape;
  if (plan.float32) {
    slots.scratch_bytes = PlanFloat32(shape, plan.max_rows).scratch_bytes;
    slots.scratch = aligned("scratch", slots.scratch_bytes);
    return slots;
  }
  const int64_t routes_per_row = shape.batched ? 1 : shape.top_k;
  const int64_t rows = plan.max_rows * (input_by_route ? routes_per_row : 1);
  const bool row_scale = plan.activation.quantized() && HasRowScale(plan.activation);
  slots.operand = aligned("input_operand", rows * shape.hidden_cols() * 2);
  slots.operand_row_scale = aligned("input_row_scale", row_scale ? rows * 4 : 0);
  slots.operand_group_scale =
      aligned("input_group_scale", shape.group_scales ? rows * ScaleGroups(shape.hidden_cols()) * 4 : 0);

  int64_t counter_bytes = kCounterBytes;
  const auto count_prefill = [&](int64_t count) {
    slots.scratch_bytes =
        std::max(slots.scratch_bytes, PlanPrefill(shape, count, plan.mid, plan.limits).scratch_bytes);
  };
  for (int64_t count = 1; count <= std::min(plan.max_rows, kMostDecodeRows); ++count) {
    if (ChooseKernels(plan, count) == Kernels::kPrefill) {
      count_prefill(count);
      continue;
    }
    const DecodePlan decode = PlanDecode(shape, count, plan.mid, plan.limits);
    slots.scratch_bytes = std::max(slots.scratch_bytes, decode.scratch_bytes);
    counter_bytes = std::max(counter_bytes, decode.counter_bytes);
  }
  for (int64_t count = kMostDecodeRows; count < plan.max_rows;) {  // scratch never shrinks in between
    count = std::min(count * 2, plan.max_rows);
    count_prefill(count);
  }
  slots.amax = aligned("amax", 4);
  slots.counters = aligned("counters", counter_bytes);
  slots.scratch = aligned("scratch", slots.scratch_bytes);
  return slots;
}

RecipeText CudaRecipe(const CudaPlan& plan) {
  RecipeText recipe;
  if (plan.spec.products) {
    recipe.push_back("multiply_block_scales(BF16)");
  }
  recipe.push_back(plan.decoded ? "decoded(F32)" : plan.float32 ? "as_stored(F32)" : plan.spec.ToString());
  return recipe;
}

std::string_view ModeName(const CudaPlan& plan, int64_t num_rows) {
  if (plan.shape.batched) {
    return "masked";
  }
  return ChooseKernels(plan, num_rows) == Kernels::kDecode ? "latency" : "throughput";
}

}  // namespace fusedmoe::cuda
