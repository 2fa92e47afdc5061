#pragma once

#include <memory>

#include "experts/cpu/cpu_layer.hpp"
#include "experts/cpu/cpu_run.hpp"
#include "experts/cpu/cpu_workspace.hpp"
#include "experts/cpu/matrix_unit/matrix_unit.hpp"
#include "moe/experts.hpp"

namespace fusedmoe::cpu {

/// The experts of a layer on panels. A forward goes piece by piece through
///
///   slots sorted by expert ─┬─► few tokens: tiles for the vector kernels (vectors/) ──┬─► weighted sums
///                           └─► many tokens: jobs for the matrix unit (matrix_unit/) ─┘
///
/// and both ways are: pack, gate and up with the activation, pack, down.
class CpuExperts final : public Experts {
 public:
  static Result<std::unique_ptr<Experts>> Create(const MoeProblem& problem, const Machine& machine,
                                                 std::shared_ptr<const PreparedWeights> weights,
                                                 WorkspaceBook& book);

  const ExpertsTraits& traits() const override { return traits_; }
  Status Apply(const ExpertsInput& input, MutableTensorView output, const Workspace& workspace,
               const Executor& executor) const override;

  /// The kernels that run, for tests: forcing an instruction set must show here.
  const KernelTable& kernels() const { return *layer_.kernels; }
  const TileKernels* matrix_unit() const { return unit_.kernels; }

 private:
  CpuExperts() = default;
  Status CheckInput(const ExpertsInput& input, const MutableTensorView& output) const;
  Status ApplyBatched(const ExpertsInput& input, Run& run) const;
  void RunPiece(Run& run) const;

  CpuLayer layer_;
  MatrixUnit unit_;
  CpuWorkspace space_;
  ExpertsTraits traits_;
};

}  // namespace fusedmoe::cpu
