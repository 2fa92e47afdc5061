#pragma once

#include <vector>

#include <fusedmoe/quant.hpp>

#include "conformance/rounding_errors.hpp"

namespace fusedmoe::conformance {

/// A row as the second GEMM reads it, and by how much its values may be others.
struct ContestedRow {
  Row values;
  std::vector<double> by;
};

/// Quantizes `values`, which may be anything from `lower` to `upper`. `scales`: of the tensor, nominal, and
/// the least and the largest where it follows from such values.
ContestedRow QuantizeBetween(const ActivationFormat& format, const std::vector<float>& scales,
                             const Row& lower, const Row& values, const Row& upper);

}  // namespace fusedmoe::conformance
