#pragma once

#include "moe/backend.hpp"

namespace fusedmoe {

/// MARLIN: weight-only (W4A16, W8A16), with its own repacking of 4- and 8-bit codes and permuted scales.
/// Activations keep their precision and activation scales are ignored. Standard and BatchedExperts.
extern const Backend kMarlinBackend;

}  // namespace fusedmoe
