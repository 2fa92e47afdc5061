#pragma once

#include <algorithm>

#include <fusedmoe/layer.hpp>

#include "support/random_layer.hpp"

namespace fusedmoe::testing_support {

/// Tokens and where they go, as a forward takes them; borrowed.
inline MoeLayer::Inputs InputsOf(const Tensor& hidden, const RandomRouting& routing) {
  const int64_t tokens = hidden.dim(0);
  const int64_t top_k = static_cast<int64_t>(routing.ids.size()) / std::max<int64_t>(tokens, 1);
  MoeLayer::Inputs inputs;
  inputs.hidden = hidden.view();
  inputs.topk_ids =
      TensorView(reinterpret_cast<const std::byte*>(routing.ids.data()), DType::kI32, {tokens, top_k});
  inputs.topk_weights =
      TensorView(reinterpret_cast<const std::byte*>(routing.weights.data()), DType::kF32, {tokens, top_k});
  return inputs;
}

}  // namespace fusedmoe::testing_support
