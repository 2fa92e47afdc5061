#pragma once

#include <memory>
#include <vector>

#include "experts/cpu/cpu_plan.hpp"
#include "experts/cpu/cpu_weights.hpp"
#include "moe/backend.hpp"

namespace fusedmoe::cpu {

/// What never changes between the forwards of a layer, and every part of one reads.
struct CpuLayer {
  MoeConfig config;
  CpuPlan plan;
  const KernelTable* kernels = nullptr;
  std::shared_ptr<const PreparedWeights> weights;  ///< owns what `experts` point into
  std::vector<ExpertPanels> experts;
  ActivationFormat activation;  ///< what rows are rounded to; not quantized: they stay
  bool batched = false;         ///< rows come by expert, each expert's in a slab of its own
  /// Gate and up see different inputs in some expert: each has tiles of its own.
  bool separate_inputs = false;
  /// All experts see the same input of gate, and of up: a token is packed once, not once an expert.
  bool shared_inputs[2] = {true, true};

  const ExpertPanels& expert(int64_t index) const { return experts[static_cast<size_t>(index)]; }
};

/// What kernels are told of the activation, whatever they are called with. In place: stores do not forward to
/// the wider loads of a struct that is returned and copied.
inline void SetActivation(const CpuLayer& layer, ActivateArguments& arguments) {
  const ActivationSpec& spec = layer.config.activation;
  arguments.activation = static_cast<int>(spec.kind);
  arguments.alpha = spec.alpha;
  arguments.beta = spec.beta;
  arguments.limit = spec.limit;
}

/// The plan, with what only the weights tell.
Result<CpuLayer> MakeCpuLayer(const MoeProblem& problem, const Machine& machine,
                              std::shared_ptr<const PreparedWeights> weights);

}  // namespace fusedmoe::cpu
