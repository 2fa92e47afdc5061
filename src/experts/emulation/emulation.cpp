#include "experts/emulation/emulation.hpp"

#include <fmt/format.h>

#include "experts/contracts/common/contract.hpp"

namespace fusedmoe {
namespace {

void Objections(const MoeProblem& problem, std::vector<Verdict>& verdicts) {
  const WeightFormat& weight = problem.scheme.weight;
  // Dequantizing knows no direction: MX blocks along the outputs are as good.
  const bool mx = weight.has_block_scale() && weight.block_scale_dtype == DType::kF8E8M0;
  if (!IsNvfp4(weight) && !mx) {
    RefuseScheme(verdicts, problem, "NVFP4 and OCP-MX weights");
  }
  const ActivationKind kind = problem.config.activation.kind;
  if (kind == ActivationKind::kRelu || kind == ActivationKind::kRelu2 || kind == ActivationKind::kSitu) {
    const std::string name(ActivationName(kind));
    Refuse(verdicts, Reason::kActivation, fmt::format("there is no gated {} in it", name), name,
           "another activation");
  }
  RefuseZeroPoints(verdicts, problem);
}

constexpr Contract kContract = {.name = "EMULATION",
                                .layout_key = "emulation/1",
                                .mode = "throughput",
                                .objections = &Objections,
                                .sixteen_bit = true};

}  // namespace

const Backend kEmulationBackend = MakeContractBackend<kContract>();

}  // namespace fusedmoe
