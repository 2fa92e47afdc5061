#pragma once

#include <cstdint>
#include <vector>

#include <fusedmoe/config.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/quant.hpp>

namespace fusedmoe {

/// The part of one rank in a layer: what it holds, and where everything else is.
struct RankPlan {
  MoeConfig config;                    ///< as this rank sees the layer
  std::vector<int64_t> local_experts;  ///< logical ids of its experts, in local order
  ExpertMap expert_map;                ///< physical expert -> local; empty: all are local
  std::vector<int32_t> owners;         ///< physical expert -> rank; empty: every rank has a slice
  std::vector<int32_t> replicas;       ///< physical experts by logical one; empty: one each
  std::vector<int32_t> replica_begin;  ///< [E + 1] into replicas
  int64_t num_physical_experts = 0;
};

/// Whether a layer of these options is spread over several ranks.
bool IsSpread(const LayerOptions& options);

/// The deployment by itself, and the communicator that joins it: kUsage for sizes and ranks that make no
/// sense, and where there is no communicator, or that of another rank or number of ranks.
Status CheckRanks(const LayerOptions& options);

/// Splits `whole` as `parallel` says. `physical_to_logical`: what each expert slot holds, with EPLB; empty:
/// as it is at first. Errors: those of DetermineExpertPlacement and IntermediateShare.
Result<RankPlan> PlanRank(const MoeConfig& whole, const Scheme& scheme, const ParallelConfig& parallel,
                          std::vector<int32_t> physical_to_logical = {});

/// One number for everything that must be equal on all ranks.
uint64_t LayerFingerprint(const MoeConfig& whole, const Scheme& scheme, const LayerOptions& options,
                          std::string_view backend);
/// The same for a layer of a checkpoint: every tensor's name, type, shape and place, the bytes of the router,
/// and of the layer's tensors all bytes of small ones, and samples from everywhere in large ones: enough to
/// tell another checkpoint or quantization, at the price of a few pages a tensor.
uint64_t CheckpointFingerprint(const Checkpoint& checkpoint, int64_t layer, const RouterWeights& router);

}  // namespace fusedmoe
