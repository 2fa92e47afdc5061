#pragma once

#include <memory>
#include <optional>

#include <fusedmoe/layer.hpp>

#include "layer/balance.hpp"
#include "layer/kernel_builder.hpp"
#include "moe/moe_kernel.hpp"
#include "routing/cuda/device_router.hpp"

namespace fusedmoe {

/// The lock of a forward on the communicator of its layer; a layer on one rank needs none. A forward that
/// does not get it must not tell the other ranks: it would use the communicator of the one that holds it.
class CommunicatorLock {
 public:
  explicit CommunicatorLock(Communicator* ranks)
      : ranks_(ranks), locked_(ranks == nullptr || ranks->TryLock()) {}
  ~CommunicatorLock() {
    if (ranks_ != nullptr && locked_) {
      ranks_->Unlock();
    }
  }
  CommunicatorLock(const CommunicatorLock&) = delete;
  CommunicatorLock& operator=(const CommunicatorLock&) = delete;
  /// kUsage where another thread holds it.
  Status status() const;

 private:
  Communicator* ranks_;
  bool locked_;
};

/// What a layer holds once it is loaded; only EndStep changes any of it afterwards.
struct MoeLayer::Impl {
  MoeConfig config;
  Scheme scheme;
  std::optional<Scheme> shared_scheme;  // where the layer runs shared experts
  Selection selection;
  RouterWeights router;
  std::shared_ptr<const Checkpoint> checkpoint;  // keeps mapped weights alive
  std::unique_ptr<MoeKernel> kernel;
  std::shared_ptr<WireChoice> wire;                   // null on one rank
  std::unique_ptr<LayerBalance> balance;              // null: experts stay where they are
  std::unique_ptr<cuda::DeviceRouter> device_router;  // of a layer on a card; null on the CPU
  std::shared_ptr<Communicator> communicator;         // of ranks on cards; null elsewhere
  std::shared_ptr<Communicator> ranks;                // that the layer is spread over; null on one rank
  int64_t workspace_bytes = 0;
  uint64_t fingerprint = 0;  // of what must be equal on all ranks
  WorkspaceSlot logits, ids, weights;
  WorkspaceSlot real_ids, identity_weights;  // only with identity experts

  int64_t num_logits() const { return config.num_experts + config.routing.num_zero_experts; }
  /// What was built, with all that `book` has in the end.
  void Take(BuiltKernel built, const WorkspaceBook& book);
  /// Books what the layer itself needs: the same slots each time.
  void Book(WorkspaceBook& book);
  Status CheckInputs(const Inputs& inputs, const Outputs& outputs) const;
  /// Forward, once `ranks` are locked.
  Status Run(const Inputs& inputs, const Outputs& outputs, const Workspace& workspace,
             const Executor& executor) const;
  /// Fills `input` with ids and weights, those of the caller or by routing, which are results too. `routing`
  /// keeps what experts on the CPU need that route for themselves; empty where the caller brings ids.
  Status Choose(const Inputs& inputs, const Outputs& outputs, const Workspace& workspace,
                const Executor& executor, RoutingInputs& routing, KernelInput& input) const;

 private:
  Status CheckChoice(const Inputs& inputs) const;
  Status ChooseOnHost(const Inputs& inputs, const Outputs& outputs, int32_t* chosen_ids,
                      float* chosen_weights, const Workspace& workspace, const Executor& executor,
                      RoutingInputs& routing) const;
  Status ChooseOnDevice(const Inputs& inputs, const Outputs& outputs, int32_t* chosen_ids,
                        float* chosen_weights, const Workspace& workspace, void* stream) const;
  TensorView LogitsView(const float* own_logits, int64_t num_tokens) const;
  /// Identity experts have ids behind the real ones: experts skip their slots, and their weights are summed.
  Status SplitIdentityExperts(const Workspace& workspace, const Executor& executor, KernelInput& input) const;
};

}  // namespace fusedmoe
