#pragma once

#include <fusedmoe/routing.hpp>

namespace fusedmoe {

/// Route, with the selected experts also in the order of their biased scores: `selection_order` [M, k], may
/// be null. Custom and simulated routing have no such order; theirs is the order of the weights.
Status RouteWithOrder(const RoutingConfig& config, const RoutingInputs& inputs, int32_t* topk_ids,
                      float* topk_weights, int32_t* selection_order, const Executor& executor);

}  // namespace fusedmoe
