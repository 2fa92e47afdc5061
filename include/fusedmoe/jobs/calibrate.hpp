#pragma once

#include <cstdint>
#include <memory>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/jobs/activation_stats.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/status.hpp>

namespace fusedmoe {

struct CalibrateOptions {
  /// Tokens of one forward; more are taken in turns.
  int64_t max_tokens = 1024;
  Executor executor;
};

/// Runs the tokens of `inputs` through a layer and notes, for each routed expert, the largest magnitude of
/// what its projections read: the hidden states that come to it (times the router weight where the model
/// weights inputs), and the activations between the two GEMMs, computed in fp32 from the weights as they
/// decode. Infinite or NaN activations are kBadInput. Deterministic; independent of threads.
Result<ActivationStats> Calibrate(const std::shared_ptr<const Checkpoint>& checkpoint, int64_t layer,
                                  const MoeLayer::Inputs& inputs, const CalibrateOptions& options = {});

}  // namespace fusedmoe
