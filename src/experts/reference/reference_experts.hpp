#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <fusedmoe/weights.hpp>
#include <fusedmoe/workspace.hpp>

#include "moe/backend.hpp"
#include "moe/experts.hpp"

namespace fusedmoe {

/// The reference as an Experts implementation. Output: [M, k, H] F32 unweighted rows (kContiguous), or
/// [E_local, rows, H] (kDelegate, BatchedExperts); each slot is computed alone, so that the result of a token
/// depends neither on its neighbours (except for per-tensor dynamic scales, which are defined over the batch)
/// nor on ranks.
class ReferenceExperts final : public Experts {
 public:
  static void BookWorkspace(const MoeProblem& problem, WorkspaceBook& book, WorkspaceSlot* input_rows,
                            WorkspaceSlot* mid_rows, WorkspaceSlot* lists);
  ReferenceExperts(const MoeProblem& problem, std::shared_ptr<const PreparedWeights> weights,
                   WorkspaceBook& book);

  const ExpertsTraits& traits() const override { return traits_; }
  Status Apply(const ExpertsInput& input, MutableTensorView output, const Workspace& workspace,
               const Executor& executor) const override;

  /// The rows between the GEMMs of the last Apply with this workspace, before they were requantized: F32
  /// [rows, I], row = token * k + slot (Standard) or expert * rows + row (BatchedExperts).
  MutableTensorView MidRows(int64_t rows, const Workspace& workspace) const;

 private:
  struct Slots;  // which rows of the batch each local expert computes

  void GateUp(int64_t expert, const ExpertsInput& input, const Slots& slots, const Workspace& workspace,
              const Executor& executor) const;
  void Down(int64_t expert, const Slots& slots, MutableTensorView output, const Workspace& workspace,
            const Executor& executor) const;

  MoeConfig config_;
  ActivationFormat activation_format_;
  struct ColumnOrders {
    std::vector<int32_t> gate, up, down;
  };
  std::vector<ColumnOrders> orders_;  ///< of the experts' columns under a8; empty: as they stand
  std::shared_ptr<const PreparedWeights> weights_;
  ExpertsTraits traits_;
  WorkspaceSlot input_rows_;
  WorkspaceSlot mid_rows_;
  WorkspaceSlot lists_;
};

}  // namespace fusedmoe
