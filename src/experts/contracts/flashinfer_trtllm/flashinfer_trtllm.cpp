#include "experts/contracts/flashinfer_trtllm/flashinfer_trtllm.hpp"

#include "experts/contracts/common/contract.hpp"

namespace fusedmoe {
namespace {

constexpr RoutingMethod kRouting[] = {RoutingMethod::kDeepSeekV3, RoutingMethod::kRenormalize,
                                      RoutingMethod::kRenormalizeNaive, RoutingMethod::kLlama4};

void Objections(const MoeProblem& problem, std::vector<Verdict>& verdicts) {
  const WeightFormat& weight = problem.scheme.weight;
  const ActivationFormat& activation = problem.scheme.activation;
  const MoeConfig& config = problem.config;
  const bool block = IsFp8Block128(weight) && IsFp8Group128(activation);
  const bool mxfp8 =
      IsMx(weight) && weight.element == DType::kF8E4M3 && activation.scale_dtype == DType::kF8E8M0;
  if (!block && !mxfp8 && !(IsNvfp4(weight) && IsNvfp4Static(activation)) &&
      !(IsFp8PerTensor(weight) && IsFp8TensorStatic(activation))) {
    RefuseScheme(verdicts, problem, "NVFP4, FP8 static per tensor, FP8 128x128, MXFP8");
  }
  RequireActivation(verdicts, problem, {ActivationKind::kSilu, ActivationKind::kRelu2NoMul}, true);
  RefuseBias(verdicts, problem);
  RefuseZeroPoints(verdicts, problem);
  bool routes = false;
  for (const RoutingMethod method : kRouting) {
    routes = routes || method == config.routing.method;
  }
  if (!routes) {
    Refuse(verdicts, Reason::kRouting,
           "the kernels route by DeepSeekV3, Renormalize, RenormalizeNaive, Llama4",
           RoutingMethodName(config.routing.method), "one of these");
  }
  if (config.routing.num_zero_experts > 0) {
    Refuse(verdicts, Reason::kRouting, "the kernels know no identity experts",
           std::to_string(config.routing.num_zero_experts), "0");
  }
  if (block) {
    RequireMultiple(verdicts, Reason::kIntermediateSize, "intermediate", config.intermediate, 128);
    RequireMultiple(verdicts, Reason::kHiddenSize, "hidden", config.hidden, 128);
    RequireAtMost(verdicts, Reason::kTopK, "top_k", config.top_k(), 10);
    RequireMultiple(verdicts, Reason::kNumExperts, "num_experts", config.num_experts, 4);
    RequireAtMost(verdicts, Reason::kNumExperts, "num_experts", config.num_experts, 512);
  }
}

constexpr Contract kContract = {.name = "FLASHINFER_TRTLLM",
                                .layout_key = "flashinfer_trtllm/1",
                                .mode = "latency",
                                .recipe = &FlashInferTrtllmRecipe,
                                .objections = &Objections,
                                .routes_inside = true,
                                .one_input_scale = true};

}  // namespace

const Backend kFlashInferTrtllmBackend = MakeContractBackend<kContract>();

}  // namespace fusedmoe
