#pragma once

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

#include "checkpoint/linear_format.hpp"
#include "checkpoint/matrices/matrix_tensors.hpp"

namespace fusedmoe::checkpoint {

/// The codes of a matrix in canonical order, [rows, cols] of the format's element, however the file packs
/// them; values where nothing is quantized. Errors name the tensor.
Result<Tensor> ReadCodes(const MatrixTensors& tensors, const LinearFormat& format);

}  // namespace fusedmoe::checkpoint
