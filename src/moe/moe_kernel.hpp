#pragma once

#include <memory>
#include <vector>

#include <fusedmoe/config.hpp>
#include <fusedmoe/routing.hpp>
#include <fusedmoe/tensor.hpp>
#include <fusedmoe/workspace.hpp>

#include "moe/experts.hpp"
#include "moe/latent_projections.hpp"
#include "moe/prepare_finalize.hpp"

namespace fusedmoe {

/// What one forward of the kernel reads. Modular experts need ids and weights, monolithic ones the routing
/// inputs.
struct KernelInput {
  TensorView hidden;                    ///< [M, H]
  const int32_t* topk_ids = nullptr;    ///< [M, k]
  const float* topk_weights = nullptr;  ///< [M, k], with the routed scaling in them: nobody scales again
  const RoutingInputs* routing = nullptr;
  /// [M]: summed weights of each token's identity experts, whose output is their input; null: none.
  const float* identity_weights = nullptr;
};

/// Composes prepare, experts and finalize, and owns their order:
///
///   prepare ─► experts ─► finalize ─► add the shared experts ─► round to the dtype of the output
///
/// Latent experts have a projection in front of prepare, on the tokens of this rank, and one behind finalize,
/// on their finished sums. Projecting back is linear and could be done before ranks add up; behind it, rows
/// of the latent width travel, each is projected once, and its bits do not depend on the number of ranks.
///
/// Where the finalize step is asynchronous, the shared experts run while its rows travel.
///
/// Immutable after creation; Forward may run in several threads at once, each with a workspace of its own.
class MoeKernel {
 public:
  struct Parts {
    MoeConfig config;
    std::unique_ptr<PrepareFinalize> prepare_finalize;
    std::unique_ptr<Experts> experts;
    ExpertMap expert_map;  ///< empty: all experts are local
    /// Experts that every token visits: a kernel of one expert. Null: none.
    std::unique_ptr<MoeKernel> shared;
    Tensor shared_gate;                               ///< F32 [H]; empty: the shared output is added as it is
    std::shared_ptr<const LatentProjections> latent;  ///< where config.latent > 0; else null
    /// Everything that Forward is given lies on a card, and Forward only launches, in the order of the
    /// executor's stream.
    bool on_device = false;
  };

  /// Checks that the activation formats of the parts agree and that a modular prepare step meets modular
  /// experts. Books what Forward needs beyond what the parts have booked.
  static Result<std::unique_ptr<MoeKernel>> Create(Parts parts, WorkspaceBook& book);

  /// Writes `output` [M, H], F32 or 16-bit, M <= max_tokens: rounded once. Allocates nothing.
  Status Forward(const KernelInput& input, MutableTensorView output, const Workspace& workspace,
                 const Executor& executor) const;

  /// Reports that this rank cannot begin a forward that other ranks may be in; see PrepareFinalize::Abandon.
  Status Abandon(const Status& status, const Workspace& workspace) const {
    return parts_.prepare_finalize->Abandon(status, false, workspace);
  }

  const MoeConfig& config() const { return parts_.config; }
  const Experts& experts() const { return *parts_.experts; }

 private:
  explicit MoeKernel(Parts parts) : parts_(std::move(parts)) {}
  Status RunExperts(const KernelInput& input, const PrepareOutput& prepared, MutableTensorView target,
                    const Workspace& workspace, const Executor& executor) const;
  /// The tokens as the routed experts see them.
  Result<TensorView> ExpertRows(TensorView hidden, const Workspace& workspace,
                                const Executor& executor) const;
  /// Where finalize leaves the sums of the routed experts; `output` itself, if nothing is added to them.
  MutableTensorView RoutedSums(const KernelInput& input, MutableTensorView output,
                               const Workspace& workspace) const;
  /// Brings those sums back to the hidden size, and adds what belongs to them. `shared`: empty without shared
  /// experts.
  Status Combine(const KernelInput& input, MutableTensorView routed, TensorView shared,
                 MutableTensorView output, const Workspace& workspace, const Executor& executor) const;
  Status RunShared(TensorView hidden, MutableTensorView shared_output, float* gates,
                   const Workspace& workspace, const Executor& executor) const;
  Status MoveToDevice();
  Status Add(TensorView first, TensorView second, const float* gates, MutableTensorView output,
             const Executor& executor) const;
  /// F32 rows, dense, to the dtype of `output`.
  Status Round(TensorView rows, MutableTensorView output, const Executor& executor) const;
  MutableTensorView ExpertOutput(int64_t num_tokens, const Workspace& workspace) const;

  Parts parts_;
  LatentProjections::Slots latent_;
  WorkspaceSlot expert_output_;
  WorkspaceSlot routed_;
  WorkspaceSlot shared_output_;
  WorkspaceSlot shared_gates_;
  std::vector<int32_t> shared_ids_;    // every token goes to the only shared expert ...
  std::vector<float> shared_weights_;  // ... with weight 1
  // On a card:
  std::shared_ptr<std::byte> device_shared_ids_, device_shared_weights_, device_shared_gate_;
  std::shared_ptr<std::byte> device_expert_map_;
};

}  // namespace fusedmoe
