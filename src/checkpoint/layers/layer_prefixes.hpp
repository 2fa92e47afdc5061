#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "checkpoint/files/tensor_store.hpp"

namespace fusedmoe::checkpoint {

/// The layers of a checkpoint: number -> "model.layers.N.", of the language model alone.
std::map<int64_t, std::string> FindLayerPrefixes(const TensorStore& store);

}  // namespace fusedmoe::checkpoint
