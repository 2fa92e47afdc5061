#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include <fusedmoe/jobs/bench.hpp>
#include <fusedmoe/tensor.hpp>

#include "jobs/bench/ceilings.hpp"
#include "jobs/bench/layer_rotation.hpp"
#include "jobs/bench/reference_rows.hpp"
#include "jobs/bench/routings.hpp"

namespace fusedmoe::bench {

inline constexpr int64_t kCheckedTokens = 16;

/// Checks and times the kernels of one problem in one scheme.
class Measurement {
 public:
  Measurement(const MoeConfig& config, const Scheme& scheme, const BenchOptions& options,
              CeilingSampler& ceilings)
      : config_(config), scheme_(scheme), options_(options), ceilings_(ceilings) {}

  /// Fills everything of `row` behind its plan.
  Status Run(const LayerRotation& rotation, BenchRow& row);

 private:
  Status DrawInputs();
  Status Check(const LayerRotation& rotation, const Routing& routing, BenchRow& row);
  Status Time(const LayerRotation& rotation, const std::vector<Routing>& routings, BenchRow& row);
  Status TimeOnCard(const LayerRotation& rotation, const std::vector<Routing>& routings, BenchRow& row);
  Status MoveToCard(const std::vector<Routing>& routings);
  Status ForwardOnCard(const LayerRotation& rotation, int64_t layer, int64_t num_tokens, int64_t routing,
                       void* stream);
  Status Forward(const LayerRotation& rotation, int64_t layer, int64_t num_tokens, TensorView hidden,
                 const Routing& routing);

  MoeConfig config_;
  Scheme scheme_;
  const BenchOptions& options_;
  CeilingSampler& ceilings_;
  Tensor hidden_, output_;
  std::map<ActivationMode, ReferenceRows> references_;
  std::shared_ptr<std::byte> card_hidden_, card_output_;
  std::vector<std::shared_ptr<std::byte>> card_ids_, card_weights_;  // by routing
};

}  // namespace fusedmoe::bench
