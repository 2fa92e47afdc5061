#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <fusedmoe/layer.hpp>
#include <fusedmoe/weights.hpp>
#include <fusedmoe/workspace.hpp>

#include "moe/backend.hpp"
#include "moe/moe_kernel.hpp"
#include "prepare_finalize/all_to_all/all_to_all.hpp"

namespace fusedmoe {

/// A kernel that is ready to run, with the answer of the oracle that led to it.
struct BuiltKernel {
  std::unique_ptr<MoeKernel> kernel;
  Selection selection;
  uint64_t fingerprint = 0;  ///< of what must be equal on all ranks; 0 on one
  /// How rows travel: for all ranks to decide (ChooseWire) before the first forward; null on one rank.
  std::shared_ptr<WireChoice> wire;
};

/// The question that a layer of this configuration, scheme and options puts to the oracle, about its routed
/// experts (RoutedConfig). Looks at the first expert, which speaks for all (ExpertSource::alike), to learn
/// what the weights have: biases, zero points, an activation order, factors of their input, types of scales.
Result<MoeProblem> MakeProblem(const MoeConfig& config, const ExpertSource& source,
                               const LayerOptions& options);

/// The kernel of one backend over weights that were prepared for it (several kernels may share them), without
/// shared experts. Books its workspace and names the prepare step in `plan`.
Result<MoeKernel::Parts> MakeKernelParts(const MoeProblem& problem, const Backend& backend,
                                         std::shared_ptr<const PreparedWeights> weights, Plan& plan,
                                         WorkspaceBook& book);

/// Where experts are, when load balancing has moved them.
struct ExpertPlacement {
  std::vector<int32_t> physical_to_logical;  ///< empty: as they are at first
  int64_t epoch = 0;
  std::shared_ptr<std::atomic<int64_t>[]> load;  ///< [slots] counted in every forward; null: not counted
};

/// Selects a backend, prepares the weights for it, and composes the kernel; all workspace is booked in
/// `book`. `shared` (may be null) is planned on its own, through the same table; `latent` where config.latent
/// says so.
Result<BuiltKernel> BuildKernel(const MoeConfig& config, const ExpertSource& source,
                                const LayerOptions& options, const SharedExpertWeights* shared,
                                WorkspaceBook& book, const ExpertPlacement& placement = {},
                                std::shared_ptr<const LatentProjections> latent = nullptr);

}  // namespace fusedmoe
