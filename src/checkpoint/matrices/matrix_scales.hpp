#pragma once

#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

#include "checkpoint/linear_format.hpp"
#include "checkpoint/matrices/matrix_tensors.hpp"

namespace fusedmoe::checkpoint {

/// The scale that format.scale names, of blocks, channels or the whole matrix, into `matrix`; their type
/// becomes that of matrix.format. Errors name the tensor.
Status ReadScale(const MatrixTensors& tensors, const LinearFormat& format, CanonicalMatrix* matrix);

/// The zero points that weights of code * scale + bias have, from the biases that format.zero_point names and
/// the scales that ReadScale left in `matrix`, F32: some become others (weights/super_scales.hpp).
Status ReadBiasesOfGroups(const MatrixTensors& tensors, const LinearFormat& format, CanonicalMatrix* matrix);

}  // namespace fusedmoe::checkpoint
