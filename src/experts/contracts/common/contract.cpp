#include "experts/contracts/common/contract.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "core/names.hpp"
#include "experts/contracts/common/contract_experts.hpp"
#include "moe/cost.hpp"
#include "moe/experts.hpp"

namespace fusedmoe {
namespace {

void CommonObjections(const Contract& contract, const MoeProblem& problem, std::vector<Verdict>& verdicts) {
  const MoeConfig& config = problem.config;
  const ActivationFormatKind format = config.activation_format;
  const bool batched = format == ActivationFormatKind::kBatchedExperts;
  if (batched ? !contract.batched : !contract.standard) {
    const std::string_view other =
        FormatName(batched ? ActivationFormatKind::kStandard : ActivationFormatKind::kBatchedExperts);
    Refuse(verdicts, Reason::kActivationFormat, fmt::format("{} reads {} rows only", contract.name, other),
           FormatName(format), other);
  }
  RefuseInputWeights(verdicts, problem);
  const ActivationMode own = ContractActivation(contract, problem);
  if (problem.activation != ActivationMode::kAsCheckpoint && problem.activation != own) {
    Refuse(verdicts, Reason::kScheme, "the contract itself says how activations are treated",
           ActivationModeName(problem.activation), ActivationModeName(own));
  }
  if (problem.weights.has_group_index && !contract.activation_order) {
    Refuse(verdicts, Reason::kZeroPoint, "the layout has no place for an activation order (g_idx)",
           "activation order", "none");
  }
  if (problem.weights.has_pre_quant_scale) {
    Refuse(verdicts, Reason::kScheme,
           "the kernels multiply no smoothing factors (pre_quant_scale) into their input", "pre_quant_scale",
           "none");
  }
  if (!problem.isa.empty()) {
    Refuse(verdicts, Reason::kIsa, "the contract has one portable code path, no instruction-set levels",
           problem.isa, "none");
  }
  if (!problem.mode.empty() && problem.mode != contract.mode) {
    Refuse(verdicts, Reason::kIsa, fmt::format("{} has one mode", contract.name), problem.mode,
           contract.mode);
  }
  if (!contract.weight_only) {
    RefuseBatchScale(verdicts, problem, problem.scheme.activation);
  }
  if (problem.determinism >= Determinism::kRankInvariant && !batched) {
    Refuse(
        verdicts, Reason::kDeterminism,
        "weights and reduces by itself, in the order of experts, so sums over ranks differ from one rank's",
        DeterminismName(problem.determinism), "batch_invariant");
  }
}

}  // namespace

void RequireMultiple(std::vector<Verdict>& verdicts, Reason reason, std::string_view what, int64_t actual,
                     int64_t multiple) {
  if (actual % multiple != 0) {
    Refuse(verdicts, reason, fmt::format("{} = {} is not a multiple of {}", what, actual, multiple),
           std::to_string(actual), fmt::format("a multiple of {}", multiple));
  }
}

void RequireAtMost(std::vector<Verdict>& verdicts, Reason reason, std::string_view what, int64_t actual,
                   int64_t largest) {
  if (actual > largest) {
    Refuse(verdicts, reason, fmt::format("{} = {} exceeds {}", what, actual, largest), std::to_string(actual),
           std::to_string(largest));
  }
}

void RequireActivation(std::vector<Verdict>& verdicts, const MoeProblem& problem,
                       std::initializer_list<ActivationKind> kinds, bool fixed_parameters) {
  const ActivationSpec& activation = problem.config.activation;
  const std::string names = JoinNames(kinds, ActivationName);
  if (std::find(kinds.begin(), kinds.end(), activation.kind) == kinds.end()) {
    Refuse(verdicts, activation.gated() ? Reason::kActivation : Reason::kNotGated,
           fmt::format("the kernels know {} only", names), ActivationName(activation.kind), names);
  } else if (fixed_parameters && activation.limit > 0.0F && activation.kind == ActivationKind::kSilu) {
    Refuse(verdicts, Reason::kActivationParameters, "the kernels do not clamp gate and up of silu",
           fmt::format("limit {}", activation.limit), "none");
  }
}

void RefuseBias(std::vector<Verdict>& verdicts, const MoeProblem& problem) {
  if (problem.config.has_bias) {
    Refuse(verdicts, Reason::kBias, "the kernels add no bias", "bias", "none");
  }
}

void RefuseZeroPoints(std::vector<Verdict>& verdicts, const MoeProblem& problem) {
  if (problem.weights.has_zero_points) {
    Refuse(verdicts, Reason::kZeroPoint, "the kernels subtract no zero points", "zero points", "none");
  }
}

void RefuseScheme(std::vector<Verdict>& verdicts, const MoeProblem& problem, std::string_view required) {
  Refuse(verdicts, Reason::kScheme,
         fmt::format("{} is not among its schemes ({})", problem.scheme.name, required), problem.scheme.name,
         required);
}

bool IsNvfp4Static(const ActivationFormat& format) {
  return format.element == DType::kF4E2M1 && format.scale_dtype == DType::kF8E4M3 &&
         format.group == GroupShape{1, 16} && format.static_tensor_scale;
}
bool IsFp8TensorStatic(const ActivationFormat& format) {
  return format.element == DType::kF8E4M3 && format.group == kPerTensor && format.static_tensor_scale;
}
bool IsFp8TensorDynamic(const ActivationFormat& format) {
  return format.element == DType::kF8E4M3 && format.group == kPerTensor && !format.static_tensor_scale;
}
bool IsFp8Token(const ActivationFormat& format) {
  return format.element == DType::kF8E4M3 && format.group == kPerRow;
}
bool IsFp8Group128(const ActivationFormat& format) {
  return format.element == DType::kF8E4M3 && format.group == GroupShape{1, 128};
}

bool IsNvfp4(const WeightFormat& format) {
  return format.element == DType::kF4E2M1 && format.block_scale_dtype == DType::kF8E4M3 &&
         format.block == GroupShape{1, 16};
}
bool IsMx(const WeightFormat& format) {
  return format.block.row == 1 && format.has_block_scale() && format.block_scale_dtype == DType::kF8E8M0;
}
bool IsFp8PerTensor(const WeightFormat& format) {
  return format.element == DType::kF8E4M3 && !format.has_block_scale() && !format.has_channel_scale;
}
bool IsFp8PerChannel(const WeightFormat& format) {
  return format.element == DType::kF8E4M3 && !format.has_block_scale() && format.has_channel_scale;
}
bool IsFp8Block128(const WeightFormat& format) {
  return format.element == DType::kF8E4M3 && format.block == GroupShape{128, 128};
}

FusedShape FusedShapeOf(const MoeProblem& problem) {
  return {problem.config.hidden, problem.config.intermediate, problem.config.activation.gated(),
          problem.scheme.weight};
}

ActivationMode ContractActivation(const Contract& contract, const MoeProblem& problem) {
  if (contract.weight_only && problem.scheme.activation.quantized()) {
    return ActivationMode::kWeightOnly;
  }
  return contract.one_input_scale && problem.scheme.activation.static_tensor_scale
             ? ActivationMode::kMaxExpanded
             : ActivationMode::kAsCheckpoint;
}

std::vector<Verdict> ContractSupports(const Contract& contract, const MoeProblem& problem) {
  std::vector<Verdict> verdicts;
  CommonObjections(contract, problem, verdicts);
  contract.objections(problem, verdicts);
  return verdicts;
}

Plan ContractPlan(const Contract& contract, const MoeProblem& problem) {
  Plan plan;
  plan.backend = contract.name;
  plan.mode = contract.mode;
  plan.activation_format = problem.config.activation_format;
  plan.activation = ContractActivation(contract, problem);
  // Folded scales and the factors of Marlin depend on the values: they are added when weights are prepared.
  LayoutProblem layout;
  layout.hidden = problem.config.hidden;
  layout.intermediate = problem.config.intermediate;
  layout.gated = problem.config.activation.gated();
  layout.format = problem.scheme.weight;
  layout.has_bias = problem.config.has_bias;
  layout.has_zero_points = problem.weights.has_zero_points;
  layout.has_group_index = problem.weights.has_group_index;
  layout.has_input_scales = problem.scheme.activation.static_tensor_scale;
  layout.activation = problem.config.dtype;
  plan.recipe = contract.recipe == nullptr ? RecipeText{"canonical"} : contract.recipe(layout).ToText();
  plan.intermediate_dtype = contract.sixteen_bit
                                ? DTypeName(problem.config.dtype == DType::kF16 ? DType::kF16 : DType::kBF16)
                                : DTypeName(DType::kF32);
  DescribeCost(problem.config, ExpertBytes(problem), problem.plan_tokens, plan);
  return plan;
}

void ContractWorkspace(const Contract& contract, const MoeProblem& problem, WorkspaceBook& book) {
  ContractExperts::Slots slots;
  ContractExperts::BookWorkspace(contract, problem, book, slots);
}

Result<std::unique_ptr<Experts>> ContractCreate(const Contract& contract, const MoeProblem& problem,
                                                std::shared_ptr<const PreparedWeights> weights,
                                                WorkspaceBook& book) {
  if (weights->layout_key != contract.layout_key) {
    return Status::Unsupported(fmt::format("{} reads weights in the layout '{}', these are in '{}'",
                                           contract.name, contract.layout_key, weights->layout_key))
        .WithHint("prepare them again for this backend, or name the one that they were prepared for");
  }
  return ContractExperts::Create(contract, problem, std::move(weights), book);
}

}  // namespace fusedmoe
