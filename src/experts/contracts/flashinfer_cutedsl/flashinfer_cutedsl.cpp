#include "experts/contracts/flashinfer_cutedsl/flashinfer_cutedsl.hpp"

#include "experts/contracts/common/contract.hpp"

namespace fusedmoe {
namespace {

LayoutRecipe Recipe(const LayoutProblem& problem) {
  return FlashInferCuteDslRecipe(problem, /*batched=*/true);
}

void Objections(const MoeProblem& problem, std::vector<Verdict>& verdicts) {
  if (!IsNvfp4(problem.scheme.weight) || !IsNvfp4Static(problem.scheme.activation)) {
    RefuseScheme(verdicts, problem, "NVFP4");
  }
  RequireActivation(verdicts, problem, {ActivationKind::kSilu}, true);
  RefuseBias(verdicts, problem);
  RefuseZeroPoints(verdicts, problem);
}

constexpr Contract kContract = {.name = "FLASHINFER_CUTEDSL",
                                .layout_key = "flashinfer_cutedsl/1",
                                .mode = "masked",
                                .recipe = &Recipe,
                                .objections = &Objections,
                                .standard = false,
                                .batched = true,
                                .one_input_scale = true};

}  // namespace

const Backend kFlashInferCuteDslBackend = MakeContractBackend<kContract>();

}  // namespace fusedmoe
