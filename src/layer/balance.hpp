#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <fusedmoe/layer.hpp>
#include <fusedmoe/weights.hpp>

#include "layer/kernel_builder.hpp"
#include "parallel/eplb.hpp"

namespace fusedmoe {

/// What a layer needs to place its experts anew: what it was made from, what was measured, and which version
/// of the placement is in force.
struct LayerBalance {
  MoeConfig whole;
  LayerOptions options;
  ExpertSource source;  ///< of the experts that this rank has now
  std::optional<SharedExpertWeights> shared;
  std::shared_ptr<const LatentProjections> latent;  ///< null: none
  /// Opens the experts of other logical ids where they are stored; null: what other ranks have sent is kept.
  std::function<Result<ExpertSource>(const std::vector<int64_t>& local_experts)> reload;
  uint64_t fingerprint = 0;

  EplbState state;
  int64_t epoch = 0;
  std::shared_ptr<std::atomic<int64_t>[]> load;  ///< [slots], since the placement came into force
  std::vector<int64_t> recorded;                 ///< of it, up to the last step
  std::atomic<int64_t> forwards{0};              ///< under way

  explicit LayerBalance(EplbState balance) : state(std::move(balance)) {}

  const std::vector<int32_t>& physical_to_logical() const { return state.maps(0).physical_to_logical; }
  ExpertPlacement Placement() const { return {physical_to_logical(), epoch, load}; }
  void ResetLoad();
  /// Adds the counts of the last step to the window; true: a plan is due.
  Result<bool> RecordStep();
};

/// Load balancing of a layer, from the start. Errors: those of EplbState::Create.
Result<std::unique_ptr<LayerBalance>> MakeBalance(const MoeConfig& whole, const ExpertSource& source,
                                                  const LayerOptions& options,
                                                  const SharedExpertWeights* shared);

}  // namespace fusedmoe
