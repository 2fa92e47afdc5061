#pragma once

#include "capi/handles.hpp"

namespace fusedmoe::capi {

/// What is known of a layer before it is loaded.
fmoe_layer_info InfoOf(const MoeConfig& config, const Scheme& scheme);

/// As much of `info` as the caller's struct holds.
Status Show(const fmoe_layer_info& info, fmoe_layer_info& out);

}  // namespace fusedmoe::capi
