#pragma once

#include <fusedmoe/quant.hpp>
#include <fusedmoe/tensor.hpp>
#include <fusedmoe/weights.hpp>

namespace fusedmoe::jobs {

/// Whether SearchScales knows the format.
bool CanSearchScales(const WeightFormat& format);

/// Replaces block scales (and the codes below them) of `matrix` by neighbours where these leave less squared
/// error of `weights`. Tensor scales stay. Ties keep the scale that was there.
void SearchScales(TensorView weights, CanonicalMatrix& matrix);

}  // namespace fusedmoe::jobs
