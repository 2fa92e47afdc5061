#pragma once

#include <memory>

#include <fusedmoe/layer.hpp>

#include "layer/balance.hpp"
#include "moe/moe_kernel.hpp"
#include "routing/cuda/device_router.hpp"

namespace fusedmoe {

/// What a layer holds once it is loaded; only EndStep changes any of it afterwards.
struct MoeLayer::Impl {
  MoeConfig config;
  Scheme scheme;
  Selection selection;
  RouterWeights router;
  std::shared_ptr<const Checkpoint> checkpoint;  // keeps mapped weights alive
  std::unique_ptr<MoeKernel> kernel;
  std::shared_ptr<WireChoice> wire;                   // null on one rank
  std::unique_ptr<LayerBalance> balance;              // null: experts stay where they are
  std::unique_ptr<cuda::DeviceRouter> device_router;  // of a layer on a card; null on the CPU
  std::shared_ptr<Communicator> communicator;         // of ranks on cards; null elsewhere
  int64_t workspace_bytes = 0;
  uint64_t fingerprint = 0;  // of what must be equal on all ranks
  WorkspaceSlot logits, ids, weights;
  WorkspaceSlot real_ids, identity_weights;  // only with identity experts

  int64_t num_logits() const { return config.num_experts + config.routing.num_zero_experts; }
  /// Books what the layer itself needs: the same slots each time.
  void Book(WorkspaceBook& book);
  Status CheckInputs(const Inputs& inputs, const Outputs& outputs) const;
  /// `routing` keeps what experts need that route for themselves; empty where the caller brings ids.
  Status Choose(const Inputs& inputs, const Workspace& workspace, const Executor& executor,
                RoutingInputs& routing) const;
  Status ChooseOnDevice(const Inputs& inputs, const Outputs& outputs, const Workspace& workspace,
                        void* stream) const;
  void SplitIdentityExperts(int64_t num_tokens, const Workspace& workspace, KernelInput& input) const;
};

/// kUsage where an id (I32 or I64 [M, k], on the host) is neither an expert nor -1.
Status CheckIds(TensorView ids, int64_t num_experts);

}  // namespace fusedmoe
