#pragma once

#include "capi/handles.hpp"

namespace fusedmoe::capi {

/// What is known of a layer before it is loaded.
fmoe_layer_info InfoOf(const MoeConfig& config, const Scheme& scheme);

}  // namespace fusedmoe::capi
