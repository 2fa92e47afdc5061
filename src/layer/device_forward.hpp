#pragma once

#include <memory>

#include <fusedmoe/layer.hpp>

#include "layer/layer_impl.hpp"

namespace fusedmoe {

/// What the layer's router brings, for the card.
Result<std::unique_ptr<cuda::DeviceRouter>> MakeDeviceRouter(const RouterWeights& router,
                                                             const MoeConfig& config, int64_t num_logits,
                                                             int64_t max_tokens);

/// Forward of a layer on a card with everything on the host: one allocation on the card holds what goes there
/// and back. Returns when the results are on the host.
Status ForwardThroughHost(const MoeLayer& layer, int64_t num_logits, const MoeLayer::Inputs& inputs,
                          const MoeLayer::Outputs& outputs, const Workspace& workspace,
                          const Executor& executor);

}  // namespace fusedmoe
