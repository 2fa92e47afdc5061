#pragma once

#include <optional>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>
#include <fusedmoe/weights.hpp>

#include "checkpoint/matrices/expert_places.hpp"

/// What a layer has beside its experts. As a rule it is not quantized; some tools quantize every linear
/// module, and what they wrote is decoded. Numbers that are not finite are refused: a NaN of a router would
/// give tokens the weight 0 without a word.
namespace fusedmoe::checkpoint {

/// Empty where the caller routes.
Result<RouterWeights> LoadRouter(const LayerContext& context);

/// The projections around the routed experts; nothing when these read the hidden states themselves.
Result<std::optional<LatentWeights>> LoadLatent(const LayerContext& context);

/// The gate of the shared expert, F32 [H]; empty: it has none.
Result<Tensor> LoadSharedGate(const LayerContext& context);

}  // namespace fusedmoe::checkpoint
