#include "experts/cuda/cuda_experts.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "experts/cuda/device_call.hpp"
#include "experts/cuda/operands/operand_format.hpp"
#include "experts/cuda/operands/operand_rows.hpp"

namespace fusedmoe::cuda {
Result<std::unique_ptr<Experts>> CudaExperts::Create(const MoeProblem& problem, const Machine& machine,
                                                     std::shared_ptr<const PreparedWeights> weights,
                                                     WorkspaceBook& book) {
  std::unique_ptr<CudaExperts> experts(new CudaExperts());
  experts->plan_ = MakeCudaPlan(problem, machine);
  FMOE_ASSIGN_OR_RETURN(experts->weights_, FindCudaWeights(experts->plan_, *weights));
  const bool smooths =
      experts->weights_.input_smoothing != nullptr || experts->weights_.mid_smoothing != nullptr;
  if (smooths && experts->plan_.mid == MidKind::kQuantizedByBatch) {
    return Status::Unsupported(
        "CUDA_FUSED takes one activation scale over the batch before experts smooth it; this layer smooths "
        "by expert "
        "(pre_quant_scale) and scales by batch");
  }
  if (experts->weights_.mid_smoothing != nullptr && experts->plan_.mid != MidKind::kQuantizedByBatch) {
    experts->plan_.mid = MidKind::kQuantized;  // what quantizes the intermediate smooths it too
  }
  experts->prepared_ = std::move(weights);
  experts->slots_ = BookCudaSlots(experts->plan_, experts->weights_.input_by_expert, book);
  // Plans come with words where something does not fit: made here, so that a forward neither decides nor
  // allocates.
  const int64_t most = std::min(experts->plan_.max_rows, kMostDecodeRows);
  experts->decode_plans_.resize(static_cast<size_t>(most + 1));
  for (int64_t rows = 1; rows <= most; ++rows) {
    if (ChooseKernels(experts->plan_, rows) == Kernels::kDecode) {
      experts->decode_plans_[static_cast<size_t>(rows)] =
          PlanDecode(experts->plan_.shape, rows, experts->plan_.mid, experts->plan_.limits);
    }
  }
  experts->traits_.activation_format = problem.config.activation_format;
  experts->traits_.expects_unquantized_inputs = true;
  experts->traits_.weights_own_input = !experts->plan_.shape.batched;  // batches arrive weighted
  experts->traits_.weight_and_reduce =
      experts->plan_.shape.batched ? WeightAndReduceKind::kDelegate : WeightAndReduceKind::kNoOp;
  return std::unique_ptr<Experts>(std::move(experts));
}

/// Rows that the tensor cores can take as they stand need no operand of their own. Where they begin is
/// counted in pieces of 16 bytes and 32 bits, forwards.
bool CudaExperts::NeedsOperand(TensorView values) const {
  const int64_t stride = values.stride_bytes(values.rank() - 2);
  const bool near =
      stride >= 0 && stride / 16 * values.dim(values.rank() - 2) < std::numeric_limits<int32_t>::max();
  const bool aligned = reinterpret_cast<uintptr_t>(values.data()) % 16 == 0 && stride % 16 == 0;
  const bool weighted = plan_.weights_input && !plan_.shape.batched;
  return plan_.activation.quantized() || weights_.input_smoothing != nullptr || weighted || !aligned ||
         !near || values.dtype() != plan_.element || plan_.shape.hidden % 8 != 0 ||
         weights_.input_order != nullptr;
}

ActivationRows CudaExperts::SourceRows(const ExpertsInput& input, const ExpertsCall& call) const {
  const TensorView& values = input.rows.values;
  ActivationRows rows;
  rows.values = values.data();
  rows.dtype = values.dtype();
  rows.row_stride = values.stride_bytes(values.rank() - 2) / (DTypeBits(values.dtype()) / 8);
  rows.cols = plan_.shape.hidden;
  rows.tensor_scale = weights_.input_scale;
  rows.smoothing = weights_.input_smoothing;
  rows.order = weights_.input_order;
  rows.row_weight = plan_.weights_input && !plan_.shape.batched ? call.topk_weights : nullptr;
  return rows;
}

Status CudaExperts::MakeOperand(const ExpertsInput& input, ExpertsCall& call, const Workspace& workspace,
                                const PrefillPlan& prefill, void* stream) const {
  const LayerShape& shape = plan_.shape;
  OperandRowsCall rows;
  rows.source = SourceRows(input, call);
  if (!NeedsOperand(input.rows.values)) {
    call.hidden.values = rows.source.values;
    call.hidden.row_stride = rows.source.row_stride;
    call.hidden.cols = shape.hidden;
    return Status::Ok();
  }
  const bool by_route = weights_.input_by_expert && !shape.batched;
  if (!by_route && QuantizesTokens(shape, prefill, plan_.activation, rows.source)) {
    call.tokens = rows.source;
    return Status::Ok();
  }
  rows.padded_cols = prefill.codes ? prefill.hidden_cols : shape.hidden_cols();
  rows.num_rows = call.num_tokens * (by_route ? shape.top_k : 1);
  rows.rows_per_token = by_route ? shape.top_k : 1;
  rows.element = OperandElement(shape.format, prefill.codes);
  rows.activation = plan_.activation;
  rows.topk_ids = call.topk_ids;
  rows.ids_per_row = by_route || shape.batched ? 1 : shape.top_k;
  rows.expert_map = call.expert_map;
  rows.num_experts = shape.num_experts;
  rows.num_local_experts = shape.num_local_experts;
  rows.expert_num_tokens = call.expert_num_tokens;
  rows.rows_per_expert = call.rows_per_expert;
  rows.values = Piece<std::byte>(workspace, slots_.operand);
  rows.row_scale = Piece<float>(workspace, slots_.operand_row_scale);
  rows.group_scale = Piece<float>(workspace, slots_.operand_group_scale);
  rows.amax_bits = Piece<uint32_t>(workspace, slots_.amax);
  rows.stream = stream;
  FMOE_RETURN_IF_ERROR(LaunchOperandRows(rows));
  call.hidden = {rows.values, rows.padded_cols, rows.padded_cols, by_route, rows.row_scale, rows.group_scale};
  return Status::Ok();
}

Status CudaExperts::Decode(const ExpertsInput& input, const ExpertsCall& call,
                           const DecodePlan& decode) const {
  if (!decode.makes_operands) {
    return LaunchDecode(plan_.shape, weights_.kernels, call, decode);
  }
  DecodeOperands operands;
  operands.format = plan_.activation;
  operands.tokens = SourceRows(input, call);
  operands.mid_tensor_scale = weights_.mid_scale;
  operands.mid_smoothing = weights_.mid_smoothing;
  return LaunchDecode(plan_.shape, weights_.kernels, call, decode, &operands);
}

Status CudaExperts::Prefill(const ExpertsCall& call, const PrefillPlan& prefill) const {
  if (plan_.mid == MidKind::kRounded) {
    return LaunchPrefill(plan_.shape, weights_.kernels, call, prefill);
  }
  MidOperand mid;
  mid.format = plan_.activation;
  mid.tensor_scale = weights_.mid_scale;
  mid.pre_quant_scale = weights_.mid_smoothing;
  return LaunchPrefill(plan_.shape, weights_.kernels, call, prefill, &mid);
}

Status CudaExperts::Apply(const ExpertsInput& input, MutableTensorView output, const Workspace& workspace,
                          const Executor& executor) const {
  FMOE_ASSIGN_OR_RETURN(ExpertsCall call, MakeCall(plan_, input, output, executor));
  if (call.num_tokens == 0) {
    return Status::Ok();
  }
  call.scratch = Piece<std::byte>(workspace, slots_.scratch);
  call.counters = Piece<uint32_t>(workspace, slots_.counters);
  const auto rows = static_cast<size_t>(call.num_tokens);
  const bool decodes = rows < decode_plans_.size() && decode_plans_[rows].fits;
  const PrefillPlan prefill =
      decodes ? PrefillPlan{} : PlanPrefill(plan_.shape, call.num_tokens, plan_.mid, plan_.limits);
  if (!decodes || !decode_plans_[rows].makes_operands) {
    FMOE_RETURN_IF_ERROR(MakeOperand(input, call, workspace, prefill, executor.stream));
  }
  return decodes ? Decode(input, call, decode_plans_[rows]) : Prefill(call, prefill);
}

}  // namespace fusedmoe::cuda
