#pragma once

#include <cstdint>

#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

#include "checkpoint/linear_format.hpp"
#include "checkpoint/matrices/matrix_tensors.hpp"

namespace fusedmoe::checkpoint {

/// Reads one matrix [rows, cols] into canonical form and checks it, scales included; errors name the tensor.
/// `joined`: what the other matrix of the same expert in the same tensors has left, and what this one leaves.
Result<CanonicalMatrix> ReadMatrix(const TensorStore& store, const LinearFormat& format,
                                   const MatrixPlace& place, int64_t rows, int64_t cols,
                                   JoinedTensors* joined = nullptr);

}  // namespace fusedmoe::checkpoint
