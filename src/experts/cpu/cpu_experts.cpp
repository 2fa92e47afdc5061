#include "experts/cpu/cpu_experts.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/checked_math.hpp"
#include "experts/cpu/cpu_rows.hpp"
#include "experts/cpu/vectors/vector_path.hpp"
#include "numerics/element_types.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::cpu {
namespace {

// The kernels know activations by these numbers.
static_assert(kActSilu == static_cast<int>(ActivationKind::kSilu) &&
              kActSwigluStep == static_cast<int>(ActivationKind::kSwigluStep) &&
              kActRelu == static_cast<int>(ActivationKind::kRelu) &&
              kActSitu == static_cast<int>(ActivationKind::kSitu) &&
              kActRelu2NoMul == static_cast<int>(ActivationKind::kRelu2NoMul));

ExpertsTraits TraitsOf(const CpuLayer& layer) {
  ExpertsTraits traits;
  traits.activation_format = layer.config.activation_format;
  traits.expects_unquantized_inputs = true;
  traits.weight_and_reduce = layer.batched            ? WeightAndReduceKind::kNaiveBatched
                             : layer.plan.slots_apart ? WeightAndReduceKind::kContiguous
                                                      : WeightAndReduceKind::kNoOp;
  // Codes serve all experts where these see the same: no factors of columns, one tensor scale.
  traits.takes_codes = layer.activation.quantized();
  for (const ExpertPanels& expert : layer.experts) {
    for (const Operand operand : {kGateInput, kUpInput}) {
      const InputTransform& input = expert.input[operand];
      traits.takes_codes = traits.takes_codes && input.pre_quant_scale == nullptr &&
                           input.tensor_scale == layer.expert(0).input[kGateInput].tensor_scale;
    }
  }
  if (traits.takes_codes && layer.activation.static_tensor_scale && !layer.experts.empty()) {
    traits.input_tensor_scale = layer.expert(0).input[kGateInput].tensor_scale;
  }
  return traits;
}

}  // namespace

Result<std::unique_ptr<Experts>> CpuExperts::Create(const MoeProblem& problem, const Machine& machine,
                                                    std::shared_ptr<const PreparedWeights> weights,
                                                    WorkspaceBook& book) {
  std::unique_ptr<CpuExperts> experts(new CpuExperts);
  FMOE_ASSIGN_OR_RETURN(experts->layer_, MakeCpuLayer(problem, machine, std::move(weights)));
  experts->unit_ = MakeMatrixUnit(experts->layer_);
  experts->space_ = BookCpuWorkspace(experts->layer_.plan, book);
  experts->traits_ = TraitsOf(experts->layer_);
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
  const bool batched = layer_.batched;
  const int rank = batched ? 3 : 2;
  const int64_t hidden = layer_.config.hidden;
  const Shape wanted = layer_.plan.slots_apart && rows.rank() == 2
                           ? Shape{rows.dim(0), layer_.plan.top_k, hidden}
                           : rows.shape();
  if (rows.rank() != rank || rows.dim(rank - 1) != hidden || !(output.shape() == wanted)) {
    return Status::Usage(fmt::format("rows are {} and output {}; both must be [{}{}]",
                                     rows.shape().ToString(), output.shape().ToString(),
                                     batched ? "experts, rows, " : "tokens, ", hidden));
  }
  if (batched && (rows.dim(0) != layer_.plan.num_local_experts || input.expert_num_tokens == nullptr)) {
    return Status::Usage(fmt::format("batched rows need {} experts with their counts, got {}",
                                     layer_.plan.num_local_experts, rows.dim(0)));
  }
  if (!batched && rows.dim(0) != input.num_tokens) {
    return Status::Usage(
        fmt::format("rows has {} rows, num_tokens is {}; they must be equal", rows.dim(0), input.num_tokens));
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

Status CpuExperts::Apply(const ExpertsInput& input, MutableTensorView output, const Workspace& workspace,
                         const Executor& executor) const {
  FMOE_RETURN_IF_ERROR(CheckInput(input, output));
  Run run;
  run.executor = &executor;
  OpenRun(layer_, space_, input, output, workspace, run);
  if (layer_.batched) {
    return ApplyBatched(input, run);
  }
  // Equal pieces: the last one should not be short of tokens per expert.
  const int64_t outputs_per_token = layer_.plan.slots_apart ? layer_.plan.top_k : 1;
  const int64_t most_tokens = std::max<int64_t>(layer_.plan.max_rows / outputs_per_token, 1);
  const int64_t pieces = CeilDiv(input.num_tokens, most_tokens);
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t first = input.num_tokens * piece / pieces;
    const int64_t end = input.num_tokens * (piece + 1) / pieces;
    FMOE_RETURN_IF_ERROR(SortSlots(layer_, input, first, end - first, run.slots));
    RunPiece(run);
  }
  return Status::Ok();
}

Status CpuExperts::ApplyBatched(const ExpertsInput& input, Run& run) const {
  for (int64_t expert = 0; expert < layer_.plan.num_local_experts; ++expert) {
    const int32_t count = input.expert_num_tokens[expert];
    if (count < 0 || count > input.rows.values.dim(1)) {
      return Status::Usage(fmt::format("expert {} has a count of {}; its slab holds 0..{} rows", expert,
                                       count, input.rows.values.dim(1)));
    }
  }
  BatchedPosition at;
  while (true) {
    TakeBatchedRows(layer_, input, at, run.slots);
    if (run.slots.count == 0) {
      return Status::Ok();
    }
    RunPiece(run);
  }
}

/// Sorted slots to outputs: those of experts with few tokens on vectors, then the others on the matrix unit.
/// Down of the vectors comes last: it stores the sums to which jobs have added.
void CpuExperts::RunPiece(Run& run) const {
  const JobContext context{layer_, unit_, run};
  CutTiles(layer_, run.slots, run.tiles);
  CutJobs(context);
  const bool has_jobs = run.jobs.count > 0;

  SetBatchScale(layer_, kGateUp, run);
  PackTiles(layer_, kGateInput, run);
  if (layer_.separate_inputs) {
    PackTiles(layer_, kUpInput, run);
  }
  GateUpOfTiles(layer_, run);
  // A scale over the batch waits for the intermediate values of all experts: then jobs set it.
  const bool jobs_first = has_jobs && NeedsDynamicTensorScale(layer_.activation);
  if (!jobs_first) {
    SetBatchScale(layer_, kDown, run);
    PackTiles(layer_, kMid, run);
  }
  RunJobs(context);
  if (jobs_first) {
    PackTiles(layer_, kMid, run);
  }
  if (run.tiles.count > 0 || !has_jobs) {
    DownOfTiles(layer_, run);
  }
}

}  // namespace fusedmoe::cpu
