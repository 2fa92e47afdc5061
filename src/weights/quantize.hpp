#pragma once

#include <fusedmoe/weights.hpp>

#include "quant/weight_quantizer.hpp"

namespace fusedmoe {

/// QuantizeWeights as a canonical matrix.
Result<CanonicalMatrix> QuantizeMatrix(TensorView weights, const WeightFormat& format,
                                       const WeightQuantizerOptions& options = {});

/// The three projections of an expert. Gate and up share one tensor scale, as every producer of such files
/// has it; `gate` may be empty (activations without gate).
Result<CanonicalExpert> QuantizeExpert(TensorView gate, TensorView up, TensorView down,
                                       const WeightFormat& format,
                                       const WeightQuantizerOptions& options = {});

}  // namespace fusedmoe
