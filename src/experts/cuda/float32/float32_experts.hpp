#pragma once

#include <memory>

#include "experts/cuda/cuda_plan.hpp"
#include "moe/backend.hpp"

/// Layers of F32 weights (float32.hpp): weights as they stand in the checkpoint, no layout of their own.
namespace fusedmoe::cuda {

Result<PreparedWeights> PrepareFloat32Weights(const CudaPlan& plan, const ExpertSource& source,
                                              const Executor& executor);

Result<std::unique_ptr<Experts>> CreateFloat32Experts(const MoeProblem& problem, const CudaPlan& plan,
                                                      std::shared_ptr<const PreparedWeights> weights,
                                                      WorkspaceBook& book);

}  // namespace fusedmoe::cuda
