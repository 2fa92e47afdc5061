#include "experts/cuda/cuda_backend.hpp"

#include <utility>

#include "experts/cuda/cuda_experts.hpp"
#include "experts/cuda/cuda_plan.hpp"
#include "experts/cuda/float32/float32_experts.hpp"
#include "experts/cuda/upload/cuda_weights.hpp"
#include "moe/cost.hpp"

namespace fusedmoe {
namespace {

Plan MakePlan(const MoeProblem& problem, const Machine& machine) {
  const cuda::CudaPlan cuda_plan = cuda::MakeCudaPlan(problem, machine);
  const MoeConfig& config = problem.config;
  Plan plan;
  plan.backend = std::string(kCudaFusedBackend.name);
  plan.isa = "sm90a";
  plan.activation_format = config.activation_format;
  plan.activation = problem.activation;
  plan.recipe = cuda::CudaRecipe(cuda_plan);
  const bool quantized = cuda_plan.mid != cuda::MidKind::kRounded;
  plan.intermediate_dtype =
      quantized || cuda_plan.float32 ? "F32" : std::string(DTypeName(cuda_plan.element));
  plan.input_dtype = quantized ? "" : cuda_plan.float32 ? "F32" : std::string(DTypeName(cuda_plan.element));
  plan.rows_dtype = cuda::MayRoundRows(cuda_plan) ? "BF16" : "F32";
  plan.layout_error = cuda::FoldedScaleError(cuda_plan, WeightsOf(problem));
  const bool codes = cuda::MayMultiplyCodes(cuda_plan);
  plan.arithmetic = cuda_plan.float32                                 ? "f32_fma"
                    : !codes                                          ? "tensor_bf16"
                    : cuda_plan.shape.format == FragmentFormat::kInt8 ? "tensor_int8"
                                                                      : "tensor_fp8";
  const int64_t local_experts = std::max<int64_t>(config.num_local_experts, 1);
  DescribeCost(config, cuda::DeviceWeightBytes(cuda_plan) / local_experts, problem.plan_tokens, plan);
  const int64_t rows = cuda_plan.shape.batched ? cuda_plan.max_rows : std::max<int64_t>(plan.tokens, 1);
  plan.mode = std::string(cuda::ModeName(cuda_plan, rows));
  return plan;
}

void BookWorkspace(const MoeProblem& problem, const Machine& machine, WorkspaceBook& book) {
  // Whether rows are quantized by expert is known only with the weights: for most layers they are not.
  (void)cuda::BookCudaSlots(cuda::MakeCudaPlan(problem, machine), false, book);
}

Result<PreparedWeights> Prepare(const MoeProblem& problem, const Machine& machine, const ExpertSource& source,
                                const Executor& executor) {
  const cuda::CudaPlan plan = cuda::MakeCudaPlan(problem, machine);
  return plan.float32 ? cuda::PrepareFloat32Weights(plan, source, executor)
                      : cuda::PrepareCudaWeights(plan, source, executor);
}

Result<std::unique_ptr<Experts>> Create(const MoeProblem& problem, const Machine& machine,
                                        std::shared_ptr<const PreparedWeights> weights, WorkspaceBook& book) {
  const cuda::CudaPlan plan = cuda::MakeCudaPlan(problem, machine);
  return plan.float32 ? cuda::CreateFloat32Experts(problem, plan, std::move(weights), book)
                      : cuda::CudaExperts::Create(problem, machine, std::move(weights), book);
}

}  // namespace

const Backend kCudaFusedBackend = {
    "CUDA_FUSED", &cuda::CudaObjections, &MakePlan, &BookWorkspace, &Prepare, &Create, "cuda"};

}  // namespace fusedmoe
