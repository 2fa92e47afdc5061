#pragma once

#include "moe/backend.hpp"

namespace fusedmoe {

/// Own kernels for Hopper cards: one weight layout, a persistent decode kernel, chained prefill kernels.
extern const Backend kCudaFusedBackend;

}  // namespace fusedmoe
