#pragma once

#include <memory>
#include <vector>

#include "experts/cuda/cuda_plan.hpp"
#include "experts/cuda/upload/cuda_weights.hpp"
#include "moe/backend.hpp"

namespace fusedmoe::cuda {

/// The experts of a layer on the card. Everything that Apply is given lies on the card: rows, ids, weights,
/// counts, output, workspace. Apply only launches, in the order of executor.stream.
class CudaExperts final : public Experts {
 public:
  static Result<std::unique_ptr<Experts>> Create(const MoeProblem& problem, const Machine& machine,
                                                 std::shared_ptr<const PreparedWeights> weights,
                                                 WorkspaceBook& book);

  const ExpertsTraits& traits() const override { return traits_; }
  Status Apply(const ExpertsInput& input, MutableTensorView output, const Workspace& workspace,
               const Executor& executor) const override;

 private:
  CudaExperts() = default;
  bool NeedsOperand(TensorView values) const;
  /// `prefill`: the plan of a call that those kernels take.
  Status MakeOperand(const ExpertsInput& input, ExpertsCall& call, const Workspace& workspace,
                     const PrefillPlan& prefill, void* stream) const;
  /// The rows of the input with what experts make of them.
  ActivationRows SourceRows(const ExpertsInput& input, const ExpertsCall& call) const;
  Status Decode(const ExpertsInput& input, const ExpertsCall& call, const DecodePlan& decode) const;
  Status Prefill(const ExpertsCall& call, const PrefillPlan& prefill) const;

  CudaPlan plan_;
  std::shared_ptr<const PreparedWeights> prepared_;
  CudaWeights weights_;
  CudaSlots slots_;
  ExpertsTraits traits_;
  std::vector<DecodePlan> decode_plans_;  // by rows of a call; those that prefill takes do not fit
};

}  // namespace fusedmoe::cuda
