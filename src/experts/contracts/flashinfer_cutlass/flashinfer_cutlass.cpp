#include "experts/contracts/flashinfer_cutlass/flashinfer_cutlass.hpp"

#include "experts/contracts/common/contract.hpp"

namespace fusedmoe {
namespace {

void Objections(const MoeProblem& problem, std::vector<Verdict>& verdicts) {
  const WeightFormat& weight = problem.scheme.weight;
  const ActivationFormat& activation = problem.scheme.activation;
  const bool nvfp4 = IsNvfp4(weight) && IsNvfp4Static(activation);
  const bool block = IsFp8Block128(weight) && IsFp8Group128(activation);
  if (!nvfp4 && !block && !(IsFp8PerTensor(weight) && IsFp8TensorStatic(activation))) {
    RefuseScheme(verdicts, problem, "NVFP4, FP8 static per tensor, FP8 128x128");
  }
  RequireActivation(verdicts, problem,
                    {ActivationKind::kSilu, ActivationKind::kSwigluOai, ActivationKind::kRelu2NoMul}, true);
  if (!nvfp4) {
    RefuseBias(verdicts, problem);
  }
  RefuseZeroPoints(verdicts, problem);
  if (block) {
    RequireMultiple(verdicts, Reason::kIntermediateSize, "intermediate", problem.config.intermediate, 128);
    RequireMultiple(verdicts, Reason::kHiddenSize, "hidden", problem.config.hidden, 128);
  }
}

constexpr Contract kContract = {.name = "FLASHINFER_CUTLASS",
                                .layout_key = "flashinfer_cutlass/1",
                                .mode = "throughput",
                                .recipe = &FlashInferCutlassRecipe,
                                .objections = &Objections,
                                .one_input_scale = true};

}  // namespace

const Backend kFlashInferCutlassBackend = MakeContractBackend<kContract>();

}  // namespace fusedmoe
