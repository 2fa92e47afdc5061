#pragma once

#include "moe/backend.hpp"

namespace fusedmoe {

/// FLASHINFER_CUTLASS (throughput): up rows first, NVFP4 scales swizzled. One stored input scale, the
/// largest, serves all experts.
extern const Backend kFlashInferCutlassBackend;

}  // namespace fusedmoe
