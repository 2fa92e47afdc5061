#include "experts/contracts/vllm_cutlass/vllm_cutlass.hpp"

#include "experts/contracts/common/contract.hpp"

namespace fusedmoe {
namespace {

void Objections(const MoeProblem& problem, std::vector<Verdict>& verdicts) {
  const WeightFormat& weight = problem.scheme.weight;
  const ActivationFormat& activation = problem.scheme.activation;
  const bool nvfp4 = IsNvfp4(weight) && IsNvfp4Static(activation);
  const bool tensor =
      IsFp8PerTensor(weight) && (IsFp8TensorStatic(activation) || IsFp8TensorDynamic(activation));
  if (!nvfp4 && !tensor && !(IsFp8PerChannel(weight) && IsFp8Token(activation))) {
    RefuseScheme(verdicts, problem, "NVFP4, FP8 per tensor, FP8 channel by token");
  }
  using Kind = ActivationKind;
  if (nvfp4) {
    RequireActivation(verdicts, problem,
                      {Kind::kSilu, Kind::kGelu, Kind::kSwigluOai, Kind::kSwigluStep, Kind::kSiluNoMul,
                       Kind::kGeluNoMul, Kind::kRelu2NoMul},
                      true);
  } else {
    RequireActivation(verdicts, problem, {Kind::kSilu, Kind::kGelu, Kind::kSwigluOai}, true);
  }
  RefuseBias(verdicts, problem);
  RefuseZeroPoints(verdicts, problem);
}

constexpr Contract kContract = {.name = "VLLM_CUTLASS",
                                .layout_key = "vllm_cutlass/1",
                                .mode = "throughput",
                                .recipe = &VllmCutlassRecipe,
                                .objections = &Objections};

}  // namespace

const Backend kVllmCutlassBackend = MakeContractBackend<kContract>();

}  // namespace fusedmoe
