#pragma once

#include "moe/backend.hpp"

namespace fusedmoe {

/// FLASHINFER_TRTLLM (latency): up rows first, interleaved and shuffled, scales swizzled; block FP8 with
/// blocks of K first. Routes inside; multiplies the router weight into its input where asked to, before it
/// quantizes. One stored input scale, the largest, serves all experts.
extern const Backend kFlashInferTrtllmBackend;

}  // namespace fusedmoe
