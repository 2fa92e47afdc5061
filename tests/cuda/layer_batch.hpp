#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include <fusedmoe/jobs/verify.hpp>
#include <fusedmoe/layer.hpp>

#include "cuda/on_card.hpp"
#include "support/layer_inputs.hpp"
#include "support/random_layer.hpp"

namespace fusedmoe {

using testing_support::Batch;

/// F32 output of the batch, whatever device the layer is on.
inline std::vector<float> RunLayer(const MoeLayer& layer, const Batch& batch, const Workspace& workspace) {
  const int64_t tokens = batch.hidden.dim(0);
  Tensor output = *Tensor::Allocate(DType::kF32, {tokens, layer.config().hidden});
  MoeLayer::Inputs inputs = testing_support::InputsOf(batch.hidden, batch.routing);
  MoeLayer::Outputs outputs;
  outputs.output = output.mutable_view();
  const Status status = layer.ForwardFromHost(inputs, outputs, workspace);
  EXPECT_TRUE(status.ok()) << status.message();
  const auto* values = output.view().as<float>();
  return {values, values + output.view().count()};
}

inline std::vector<float> RunLayer(const MoeLayer& layer, const Batch& batch) {
  const auto workspace = layer.CreateWorkspace();
  EXPECT_TRUE(workspace.ok()) << workspace.status().message();
  return RunLayer(layer, batch, *workspace);
}

/// The bound of verify.
inline double AllowedError(const MoeLayer& layer, DType dtype, int64_t tokens) {
  const MoeConfig& config = layer.config();
  const double bound = BoundOf(layer.plan(), layer.scheme(), dtype, config.hidden, config.intermediate,
                               {.rows = tokens * config.top_k()})
                           .value();
  // Operands are BF16 or F16 whatever the hidden states are.
  return std::hypot(bound, dtype == DType::kBF16 ? 0.0 : 4 * 0x1p-9);
}

}  // namespace fusedmoe
