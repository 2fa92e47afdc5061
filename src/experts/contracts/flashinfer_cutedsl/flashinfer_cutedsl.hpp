#pragma once

#include "moe/backend.hpp"

namespace fusedmoe {

/// FLASHINFER_CUTEDSL (masked_gemm): BatchedExperts, rows beyond an expert's count are never read; canonical
/// rows, swizzled scales. One stored input scale, the largest, serves all experts.
extern const Backend kFlashInferCuteDslBackend;

}  // namespace fusedmoe
