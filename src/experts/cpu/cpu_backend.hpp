#pragma once

#include "moe/backend.hpp"

namespace fusedmoe {

/// Panel-packed weights on AVX2 and AVX-512, fused gate/up, activation and requantization, every scheme whose
/// weights panels can hold.
extern const Backend kCpuFusedBackend;

}  // namespace fusedmoe
