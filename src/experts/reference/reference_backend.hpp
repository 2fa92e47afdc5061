#pragma once

#include "moe/backend.hpp"

namespace fusedmoe {

/// REFERENCE: the definition of every scheme, executed literally. Weights are decoded exactly, activations
/// are quantized and dequantized as the scheme says, products are added in fp64, values between the GEMMs are
/// fp32. Any shape, any activation, Standard and BatchedExperts. Everything else in the library is held
/// against it.
extern const Backend kReferenceBackend;

}  // namespace fusedmoe
