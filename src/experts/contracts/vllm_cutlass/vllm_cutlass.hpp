#pragma once

#include "moe/backend.hpp"

namespace fusedmoe {

/// VLLM_CUTLASS: canonical rows, NVFP4 scales swizzled; each expert has an input scale, the larger of gate's
/// and up's.
extern const Backend kVllmCutlassBackend;

}  // namespace fusedmoe
