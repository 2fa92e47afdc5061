#include "experts/contracts/common/contract_experts.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "moe/expert_slots.hpp"
#include "moe/plain_rows.hpp"
#include "moe/rows.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_quantizer.hpp"
#include "weights/steps/marlin_ops.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kFloatBytes = static_cast<int64_t>(sizeof(float));
constexpr int64_t kIndexBytes = static_cast<int64_t>(sizeof(int32_t));

int64_t BookedRows(const MoeConfig& config) {
  return config.activation_format == ActivationFormatKind::kStandard
             ? config.max_tokens * config.top_k()
             : config.max_tokens * config.num_local_experts;
}

ActivationFormat ActivationOf(const Contract& contract, const MoeProblem& problem) {
  const bool plain = contract.weight_only || problem.activation == ActivationMode::kWeightOnly;
  return plain ? ActivationFormat{} : problem.scheme.activation;
}

int64_t CodeBytes(const ActivationFormat& format, const MoeConfig& config) {
  if (!format.quantized()) {
    return 0;
  }
  const int64_t width = std::max(config.hidden, config.intermediate);
  // Codes and, on a boundary of 8 bytes behind them, scales.
  return (CodeRowBytes(format, width) + 7) / 8 * 8 + (ScaleRowBytes(format, width) + 7) / 8 * 8;
}

// Values [E, 1, n] of a stacked tensor of scalars, column `column` of each expert.
std::vector<float> Column(const Tensor* stacked, int64_t column) {
  std::vector<float> values;
  if (stacked != nullptr) {
    const int64_t width = stacked->view().count() / stacked->dim(0);
    for (int64_t expert = 0; expert < stacked->dim(0); ++expert) {
      values.push_back(stacked->view().as<float>()[expert * width + std::min(column, width - 1)]);
    }
  }
  return values;
}

}  // namespace

void ContractExperts::BookWorkspace(const Contract& contract, const MoeProblem& problem, WorkspaceBook& book,
                                    Slots& slots) {
  const MoeConfig& config = problem.config;
  const int64_t rows = BookedRows(config);
  const ActivationFormat activation = ActivationOf(contract, problem);
  slots.lists = book.Book("contract.lists", (rows + config.num_local_experts + 1) * kIndexBytes);
  if (contract.routes_inside) {
    slots.ids = book.Book("contract.topk_ids", rows * kIndexBytes);
    slots.weights = book.Book("contract.topk_weights", rows * kFloatBytes);
  }
  slots.input = book.Book("contract.block",
                          kTokenBlock * std::max(2 * config.hidden, config.intermediate) * kFloatBytes);
  slots.codes = book.Book("contract.codes", kTokenBlock * CodeBytes(activation, config));
  slots.mid = book.Book("contract.mid", rows * config.intermediate * kFloatBytes);
  if (config.activation_format == ActivationFormatKind::kStandard) {
    slots.sums = book.Book("contract.sums", config.max_tokens * config.hidden * kFloatBytes);
  }
}

ContractExperts::ContractExperts(const Contract& contract, const MoeProblem& problem,
                                 std::shared_ptr<const PreparedWeights> weights)
    : contract_(contract),
      config_(problem.config),
      activation_(ActivationOf(contract, problem)),
      weights_(std::move(weights)),
      code_bytes_(CodeBytes(activation_, problem.config)) {
  if (contract.sixteen_bit) {
    sixteen_bit_ = config_.dtype == DType::kF16 ? DType::kF16 : DType::kBF16;
  }
  const bool standard = config_.activation_format == ActivationFormatKind::kStandard;
  traits_.activation_format = config_.activation_format;
  traits_.monolithic = contract.routes_inside;
  traits_.expects_unquantized_inputs = true;
  traits_.weight_and_reduce = standard ? WeightAndReduceKind::kNoOp : WeightAndReduceKind::kDelegate;
}

Status ContractExperts::TakeScales(const LayoutRecipe& recipe) {
  // Those that steps gave to rows are read with the rows.
  const bool by_row = std::any_of(recipe.steps.begin(), recipe.steps.end(),
                                  [](const LayoutStep& step) { return step.op == LayoutOp::kTensorRows; });
  for (int part = 0; part < 2; ++part) {
    tensor_scale_[part] = Column(by_row ? nullptr : weights_->Find("gate_up_tensor_scale"), part);
    input_scale_[part] = Column(weights_->Find("input_tensor_scale"), part);
  }
  tensor_scale_[2] = Column(by_row ? nullptr : weights_->Find("down_tensor_scale"), 0);
  input_scale_[2] = Column(weights_->Find("mid_tensor_scale"), 0);
  output_scale_[0] = Column(weights_->Find("gate_up_output_scale"), 0);
  output_scale_[1] = Column(weights_->Find("down_output_scale"), 0);
  one_input_ = input_scale_[0] == input_scale_[1];
  if (activation_.quantized() && activation_.static_tensor_scale &&
      (input_scale_[0].empty() || input_scale_[2].empty())) {
    return Status::BadInput(
               fmt::format("{} needs stored input scales; the prepared weights have none", contract_.name))
        .WithTensor("input_tensor_scale");
  }
  for (const std::vector<float>* scales : {&input_scale_[0], &input_scale_[1], &input_scale_[2]}) {
    for (const float scale : *scales) {
      if (!(std::isfinite(scale) && scale > 0.0F)) {
        return Status::BadInput(fmt::format("an input scale is {}; finite and > 0 is required", scale))
            .WithTensor("input_tensor_scale");
      }
    }
  }
  return Status::Ok();
}

Result<std::unique_ptr<Experts>> ContractExperts::Create(const Contract& contract, const MoeProblem& problem,
                                                         std::shared_ptr<const PreparedWeights> weights,
                                                         WorkspaceBook& book) {
  std::unique_ptr<ContractExperts> experts(new ContractExperts(contract, problem, std::move(weights)));
  if (problem.config.num_local_experts > 0) {
    FMOE_ASSIGN_OR_RETURN(const LayoutRecipe recipe, LayoutRecipe::Parse(experts->weights_->recipe));
    const FusedShape shape = FusedShapeOf(problem);
    FMOE_ASSIGN_OR_RETURN(experts->gate_up_,
                          WeightRows::Create(*experts->weights_, recipe, shape, "gate_up"));
    FMOE_ASSIGN_OR_RETURN(experts->down_, WeightRows::Create(*experts->weights_, recipe, shape, "down"));
    FMOE_RETURN_IF_ERROR(experts->TakeScales(recipe));
    if (experts->gate_up_.num_experts() != problem.config.num_local_experts) {
      return Status::BadInput(fmt::format("the prepared weights hold {} experts, the layer has {}",
                                          experts->gate_up_.num_experts(), problem.config.num_local_experts));
    }
    const auto is_marlin = [](const LayoutStep& step) { return step.op == LayoutOp::kMarlinNvfp4Scales; };
    if (std::any_of(recipe.steps.begin(), recipe.steps.end(), is_marlin)) {
      // The kernel's decoding of e2m1 leaves 2^-bias, which the stored tensor scales make up for.
      const int bias = MarlinE2m1Bias(problem.config.dtype);
      for (std::vector<float>& scales : experts->tensor_scale_) {
        for (float& scale : scales) {
          scale = std::ldexp(scale, -bias);
        }
      }
    }
  }
  BookWorkspace(contract, problem, book, experts->slots_);
  return std::unique_ptr<Experts>(std::move(experts));
}

Status ContractExperts::Route(const ExpertsInput& input, Batch& batch, const Workspace& workspace,
                              const Executor& executor) const {
  batch.ids = input.topk_ids;
  batch.weights = input.topk_weights;
  // Monolithic: nobody has multiplied the input, since the weights are known here first.
  batch.weight_input = contract_.routes_inside && input.router_weight_on_input;
  if (!contract_.routes_inside || input.routing == nullptr || input.routing->router_logits.empty()) {
    if (input.topk_ids == nullptr && input.num_tokens > 0) {
      return Status::Usage(
          fmt::format("{} needs router logits, or topk_ids with topk_weights", contract_.name));
    }
    if (!contract_.routes_inside && input.router_weight_on_input) {
      batch.weights = nullptr;  // the rows carry them already
    }
    return Status::Ok();
  }
  auto* ids = workspace.Get<int32_t>(slots_.ids);
  auto* weights = workspace.Get<float>(slots_.weights);
  batch.ids = ids;
  batch.weights = weights;
  return fusedmoe::Route(config_.routing, *input.routing, ids, weights, executor);
}

Status ContractExperts::FillBatch(const ExpertsInput& input, int64_t rows_per_expert, Batch& batch,
                                  const Workspace& workspace) const {
  const int64_t num_experts = config_.num_local_experts;
  batch.offsets = workspace.Get<int32_t>(slots_.lists);
  batch.rows = batch.offsets + num_experts + 1;
  batch.source = &input.rows;
  batch.num_tokens = input.num_tokens;
  if (config_.activation_format == ActivationFormatKind::kStandard) {
    batch.rows_per_token = config_.top_k();
    return SortSlotsByExpert(
        {batch.ids, input.expert_map, input.num_tokens, config_.top_k(), config_.num_experts, num_experts},
        batch.offsets, batch.rows);
  }
  batch.offsets[0] = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int32_t count = input.expert_num_tokens[expert];
    if (count < 0 || count > rows_per_expert) {
      return Status::Usage(
          fmt::format("expert {} is said to hold {} rows of a batch of {}", expert, count, rows_per_expert));
    }
    for (int32_t index = 0; index < count; ++index) {
      batch.rows[batch.offsets[expert] + index] = static_cast<int32_t>(expert * rows_per_expert + index);
    }
    batch.offsets[expert + 1] = batch.offsets[expert] + count;
  }
  return Status::Ok();
}

Status ContractExperts::Apply(const ExpertsInput& input, MutableTensorView output, const Workspace& workspace,
                              const Executor& executor) const {
  const bool standard = config_.activation_format == ActivationFormatKind::kStandard;
  Batch batch;
  if (standard) {
    FMOE_RETURN_IF_ERROR(Route(input, batch, workspace, executor));
    std::memset(workspace.Get<float>(slots_.sums), 0,
                static_cast<size_t>(input.num_tokens * config_.hidden * kFloatBytes));
  }
  FMOE_RETURN_IF_ERROR(FillBatch(input, standard ? 0 : output.dim(1), batch, workspace));
  const bool batch_scale = NeedsDynamicTensorScale(activation_);
  if (batch_scale) {
    batch.input_scale = BatchScale(batch, config_.hidden, nullptr, workspace.Get<float>(slots_.input));
  }
  for (int64_t expert = 0; expert < config_.num_local_experts; ++expert) {
    GateUp(expert, batch, workspace, executor);
  }
  if (batch_scale) {
    batch.mid_scale = BatchScale(batch, config_.intermediate, workspace.Get<float>(slots_.mid), nullptr);
  }
  for (int64_t expert = 0; expert < config_.num_local_experts; ++expert) {
    Down(expert, batch, output, workspace, executor);
  }
  if (standard) {
    const TensorView sums(workspace.Get<std::byte>(slots_.sums), DType::kF32,
                          {input.num_tokens, config_.hidden});
    ConvertRows(sums, output, executor);
  }
  return Status::Ok();
}

}  // namespace fusedmoe
