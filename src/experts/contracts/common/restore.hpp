#pragma once

#include "moe/backend.hpp"
#include "weights/steps/fused_expert.hpp"

namespace fusedmoe {

/// The canonical expert that was prepared, bit for bit: the recipe backwards, and what lossy steps kept.
Result<CanonicalExpert> RestoreExpert(const PreparedWeights& weights, const FusedShape& shape,
                                      int64_t expert);

}  // namespace fusedmoe
