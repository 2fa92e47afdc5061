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

/// The scale column of each input channel, where they are in an order of their own: an index in order is the
/// plain grouping, which kernels like better, and comes back empty.
Result<Tensor> ReadGroupIndex(const MatrixTensors& tensors, const LinearFormat& format);

}  // namespace fusedmoe::checkpoint
