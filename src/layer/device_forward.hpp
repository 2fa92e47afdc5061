#pragma once

#include <memory>

#include <fusedmoe/layer.hpp>

#include "layer/layer_impl.hpp"

namespace fusedmoe {

/// What the layer's router brings, for the card.
Result<std::unique_ptr<cuda::DeviceRouter>> MakeDeviceRouter(const RouterWeights& router,
                                                             const MoeConfig& config, int64_t num_logits,
                                                             int64_t max_tokens);

/// What goes to the card and back when everything lies on the host: one allocation on the card holds it.
class HostTwins {
 public:
  /// Allocates, and sends what the layer reads in the order of `stream`.
  static Result<HostTwins> Send(const MoeLayer::Inputs& inputs, const MoeLayer::Outputs& outputs,
                                void* stream);
  const MoeLayer::Inputs& inputs() const { return inputs_; }
  const MoeLayer::Outputs& outputs() const { return outputs_; }
  /// Fetches the results, and waits for them.
  Status Fetch(const MoeLayer::Outputs& host, void* stream) const;

 private:
  MoeLayer::Inputs inputs_;
  MoeLayer::Outputs outputs_;
  std::shared_ptr<std::byte> memory_;
};

}  // namespace fusedmoe
